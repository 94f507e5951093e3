"""Bits a byte after training in fp32, bf16 and fp16: python -m experiments.benchmark half_precision --out FILE."""

from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from jaxblt.validation import check_bounds, check_fields

if TYPE_CHECKING:
    from jaxblt.training.recipe import Recipe

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that all runs share; the defaults take half a minute of one CPU core a run.

    Attributes:
      steps: of training.
      dim: width of a byte model of attention.
      num_layers: its blocks.
      seq_len: bytes of a row of the embedded book.
      batch_size: rows of a step.
      learning_rate: the peak.
      eval_batches: of the validation split, which are scored after the last step.
      scale_every: good steps after which the loss scale of fp16 doubles.
    """

    steps: int = 200
    dim: int = 48
    num_layers: int = 2
    seq_len: int = 128
    batch_size: int = 16
    learning_rate: float = 4e-3
    eval_batches: int = 16
    scale_every: int = 20

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "steps", "dim", "num_layers", "seq_len", "batch_size", least=1)
        check_bounds(self, "eval_batches", "scale_every", least=1)
        check_bounds(self, "learning_rate", above=0)

    def recipe(self, dtype: Dtype, seed: int) -> "Recipe":
        """Return a run in that dtype, scored after its last step."""
        from jaxblt.data import DataConfig
        from jaxblt.mixers import AttentionConfig
        from jaxblt.models import ByteLMConfig, StackConfig
        from jaxblt.precision import LossScaleConfig
        from jaxblt.training import Recipe, TrainConfig
        from jaxblt.training.optimisers.adamw import AdamWConfig

        attention = AttentionConfig(dim=self.dim, num_heads=1)
        stack = StackConfig(dim=self.dim, num_layers=self.num_layers, pattern="A", mixers={"A": attention})
        return Recipe(
            name="half_precision",
            model=ByteLMConfig(stack),
            data=DataConfig(
                sample="book", seq_len=self.seq_len, batch_size=self.batch_size, partial="drop", seed=seed
            ),
            optimizer=AdamWConfig(learning_rate=self.learning_rate, warmup_steps=max(self.steps // 10, 1)),
            train=TrainConfig(
                steps=self.steps,
                seed=seed,
                dtype=dtype,
                loss_scale=LossScaleConfig(every=self.scale_every)
                if dtype == "float16"
                else LossScaleConfig(),
                trackers=(),
                eval_every=self.steps,
                eval_batches=self.eval_batches,
                checkpoint_every=self.steps,
            ),
        )


def half_precision(
    out: str,
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16", "float16"),
    seeds: int = 3,
    settings: Settings = Settings(),
) -> dict[str, Any]:
    """Train a small model in several dtypes from the same parameters on the same rows, and score held-out bytes.

    The gap is bits a byte of a dtype less those of the first one, by seed. In fp16 the loss scale starts at 2^15. It
    halves after a step that overflows, which is skipped, and doubles after some good ones.

    Args:
      out: JSON file to write, anew after each seed.
      dtypes: of the computation; the first is what others are compared with.
      seeds: runs of each dtype, with seeds 0, 1, ...
      settings: of all of them.

    Raises:
      ValueError: there are fewer than two dtypes, or no seeds.
    """
    from experiments.benchmark.figures.over_seeds import over_seeds
    from experiments.benchmark.figures.saved import save

    if len(dtypes) < 2 or seeds < 1:
        raise ValueError(
            f"half_precision compares two dtypes or more, and takes seeds, got {dtypes} and {seeds}"
        )
    runs: list[dict[str, Any]] = []
    figures: dict[str, Any] = {"settings": asdict(settings), "runs": runs}
    with TemporaryDirectory() as folder:
        for seed in range(seeds):
            found = {dtype: train(settings.recipe(dtype, seed), Path(folder)) for dtype in dtypes}
            runs.append({"seed": seed, **found})
            bits = {dtype: [run[dtype]["bits_per_byte"] for run in runs] for dtype in dtypes}
            figures["bits_per_byte"] = {dtype: over_seeds(values) for dtype, values in bits.items()}
            figures["gap"] = {
                dtype: over_seeds([b - a for a, b in zip(bits[dtypes[0]], bits[dtype], strict=True)])
                for dtype in dtypes[1:]
            }
            save("half_precision", out, figures)
    return figures


def train(recipe: "Recipe", folder: Path) -> dict[str, float]:
    """Train in the folder, and return bits a byte, skipped steps and the last loss scale if there is one."""
    from jaxblt.precision.scaling import LOSS
    from jaxblt.training.loop import fit

    fitted = fit(recipe, folder / f"{recipe.train.dtype}_{recipe.train.seed}")
    found = {"bits_per_byte": fitted.validation["bits_per_byte"], "skipped": int(fitted.state.skipped)}
    if fitted.state.scaling is not None:
        found["last_loss_scale"] = float(fitted.state.scaling[LOSS]["scale"])
    return found
