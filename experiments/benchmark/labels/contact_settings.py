"""The settings of predictions of contacts: pairs of bins, the chromosome's model, and its training."""

from dataclasses import dataclass

from jaxblt.validation import check_bounds, check_fields


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all seeds share.

    Attributes:
      bin_size: bases of a bin of the map.
      window: bases of a window of a chromosome; it divides the bin.
      nearest, farthest: bins from one of a pair to the other.
      word: letters of a word.
      held: chromosomes for test, and as many for validation.
      dim, layers: of the stack over windows.
      reach: windows that its filters see to either side.
      dropout: on its residual branches.
      steps: of training, each on all chromosomes of the training part.
      looks: how often validation may pick the parameters.
      learning_rate, weight_decay: of AdamW.
    """

    bin_size: int = 10_000
    window: int = 2_000
    nearest: int = 5
    farthest: int = 50
    word: int = 4
    held: int = 3
    dim: int = 64
    layers: int = 3
    reach: int = 512
    dropout: float = 0.2
    steps: int = 400
    looks: int = 20
    learning_rate: float = 2e-3
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = ("bin_size", "window", "nearest", "word", "held", "dim", "layers", "reach", "looks")
        check_bounds(self, *sizes, least=1)
        check_bounds(self, "farthest", least=self.nearest)
        check_bounds(self, "steps", least=self.looks)
        check_bounds(self, "dropout", least=0, below=1)
        check_bounds(self, "learning_rate", above=0)
        check_bounds(self, "weight_decay", least=0)
        if self.bin_size % self.window:
            raise ValueError(
                f"window must divide bin_size = {self.bin_size}, got {self.window}: use a divisor"
            )

    @property
    def windows(self) -> int:
        """Windows of a bin."""
        return self.bin_size // self.window
