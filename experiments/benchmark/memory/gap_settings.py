"""The common settings of all models of recall over a gap, and the stages of their training."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxblt.validation import check_bounds, check_fields

if TYPE_CHECKING:
    from jaxblt.data.tasks import GapRecall

STEPS_A_CALL = 50
"""Steps between two looks at the accuracy."""
MODELS = ("mac", "mag", "mal", "slots", "window", "hyena", "delta", "engine", "levels", "attention", "sparse")
MEMORIES = ("mac", "mag", "mal", "slots")


@dataclass(frozen=True)
class Settings:
    """The settings that all models of a measurement share.

    Gaps are in multiples of what a stack of windows reaches, layers * (window - 1).

    Attributes:
      symbols: keys, and as many values.
      fillers: different symbols of a gap.
      pairs: of key and value in a row.
      dim, layers, heads: of the models.
      window: steps that attention sees; MAG's sees at least a chunk.
      block, top_k: tokens in a block of sparse attention, and blocks that a token chooses.
      predictor: hidden width of the networks that choose them, which learn from dense attention; None for pooled keys.
      chunk: tokens from one update of a memory to the next.
      shortest: fillers of the shortest gap of training; None for one that windows do not reach over: models that may
        answer short gaps by attention learn that, and leave their memory alone. A memory holds nothing of a chunk that
        has not ended, so chunks of different lengths compare at gaps beyond the longest of them.
      trained: longest gap of each stage of training; all stages have as many steps.
      tested: gaps that are tested.
      tokens: of a batch.
      steps: of training.
      learning_rate: the peak, after a tenth of the steps.
      attention_learning_rate: that of full and of sparse attention, which do not come to recall at the others' rate.
      test_rows: rows for each tested gap.
      dtype: of the computation.
    """

    symbols: int = 32
    fillers: int = 16
    pairs: int = 8
    dim: int = 64
    layers: int = 2
    heads: int = 1
    window: int = 16
    chunk: int = 16
    block: int = 16
    top_k: int = 4
    predictor: int | None = None
    shortest: int | None = None
    trained: tuple[int, ...] = (4, 16)
    tested: tuple[int, ...] = (4, 16, 64)
    tokens: int = 16_384
    steps: int = 1600
    learning_rate: float = 5e-3
    attention_learning_rate: float = 2e-3
    test_rows: int = 256
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "symbols", "fillers", "window", least=2)
        sizes = ("pairs", "dim", "layers", "heads", "chunk", "block", "top_k", "tokens", "test_rows")
        check_bounds(self, *sizes, least=1)
        check_bounds(self, "shortest", "predictor", least=1)
        check_bounds(self, "learning_rate", "attention_learning_rate", above=0)
        if not self.trained or not self.tested or min(self.trained + self.tested) < 1:
            raise ValueError(
                f"trained and tested must be multiples of the reach from 1, got {self.trained} and {self.tested}"
            )
        if self.least_gap > min(self.trained) * self.reach:
            raise ValueError(
                f"shortest must be at most {min(self.trained)} x {self.reach}, the longest gap of a stage, got "
                f"{self.least_gap}"
            )
        count = len(self.trained)
        calls, rest = divmod(self.steps, STEPS_A_CALL * count)
        if rest or not calls:
            raise ValueError(
                f"steps must be a multiple of {STEPS_A_CALL} for each of {count} stages, got {self.steps}"
            )

    @property
    def reach(self) -> int:
        """Positions that a stack of windows sees back."""
        return self.layers * (self.window - 1)

    def rate_of(self, name: str) -> float:
        """Return the learning rate of that model."""
        return self.attention_learning_rate if name in ("attention", "sparse") else self.learning_rate

    @property
    def least_gap(self) -> int:
        """Fillers of the shortest gap of training."""
        return self.reach + 1 if self.shortest is None else self.shortest

    @property
    def task(self) -> "GapRecall":
        """The symbols and the pairs, at the longest gap of training."""
        from jaxblt.data.tasks import GapRecall

        gap = max(self.trained) * self.reach
        return GapRecall(symbols=self.symbols, fillers=self.fillers, pairs=self.pairs, gap=gap)

    def length(self, multiple: int) -> int:
        """Return positions of a row with room for that gap, in whole chunks."""
        return -(-(3 * self.pairs + multiple * self.reach) // self.chunk) * self.chunk
