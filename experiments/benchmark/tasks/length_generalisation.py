"""Tasks learned on short rows and asked on longer ones: python -m experiments.benchmark length_generalisation."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from experiments.benchmark.tasks.training_budget import CHUNK, Budget
from jaxblt.validation import check_bounds

if TYPE_CHECKING:
    from experiments.benchmark.tasks.small_models import Rows
    from jaxblt.data.examples import TaskSource
    from jaxblt.models import StackConfig

Name = Literal["copy", "parity"]


@dataclass(frozen=True, kw_only=True)
class Settings(Budget):
    """The settings that all models of a measurement share. Weights do not decay: addresses and gates are to grow sharp.

    Attributes:
      rows: of a batch of training.
      dim, layers: of the models.
      symbols: the longest copies of training; four times as many are tested.
      bits: the longest parities of training.
      long_bits: those that are tested.
      gated: of the delta rule: forget by a gate. What fades within 256 bits is not seen to in training up to 40.
      test_rows: of each length.
    """

    rows: int = 64
    dim: int = 64
    layers: int = 1
    steps: int = 2000
    learning_rate: float = 3e-3
    weight_decay: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    symbols: int = 10
    bits: int = 40
    long_bits: int = 256
    gated: bool = False
    test_rows: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "rows", "dim", "layers", "symbols", "bits", "test_rows", least=1)
        check_bounds(self, "long_bits", least=self.bits, why=": longer than those of training")

    def tasks(self, name: Name) -> tuple["TaskSource", "TaskSource"]:
        """Return what is trained, and what is tested."""
        from jaxblt.data.tasks import Copy, Parity

        if name == "copy":
            most = 4 * self.symbols
            return Copy(max_symbols=self.symbols), Copy(min_symbols=most, max_symbols=most)
        longer = Parity(min_bits=self.long_bits, max_bits=self.long_bits, prefixes=True)
        return Parity(min_bits=1, max_bits=self.bits, prefixes=True), longer

    def stack(self, name: Name) -> "StackConfig":
        """Return Neural Turing machines for copies; for parities the delta rule with factors of -1..1."""
        from jaxblt.mixers import GatedDeltaNetConfig, NTMConfig
        from jaxblt.models import StackConfig

        mixers: dict[str, Any] = {
            "ntm": NTMConfig(dim=self.dim, num_heads=1, slots=5 * self.symbols, width=32)
        }
        if name == "parity":
            options: Any = {"allow_negative_eigenvalues": True, "gated": self.gated}
            mixers = {"gated_delta_net": GatedDeltaNetConfig(dim=self.dim, num_heads=2, **options)}
        (pattern,) = mixers
        return StackConfig(dim=self.dim, num_layers=self.layers, pattern=pattern, mixers=mixers, scan=False)


def length_generalisation(
    out: str,
    tasks: tuple[Name, ...] = ("copy", "parity"),
    seeds: int = 3,
    settings: Settings = Settings(),
) -> dict[str, Any]:
    """Train small models on short rows of a task, and score each also on rows four or six times as long.

    A neural Turing machine copies symbols (1410.5401, sec. 4.1); the delta rule, whose transitions may turn a sign,
    keeps the parity of all bits so far (2411.12537).

    Args:
      out: file for the figures as JSON, written anew after each model.
      tasks: of copy and parity.
      seeds: models of each, with seeds 0, 1, ...
      settings: of all of them.

    Raises:
      ValueError: there is no model to train, or a task is another.
    """
    from experiments.benchmark.figures.saved import save

    if not tasks or not set(tasks) <= set(get_args(Name)):
        raise ValueError(f"--tasks must name copy, parity or both, got {tasks}")
    if seeds < 1:
        raise ValueError(
            f"--seeds must be at least 1, got {seeds}: it is how many models of each are trained"
        )
    figures: dict[str, Any] = {"settings": asdict(settings), "runs": []}
    for name in tasks:
        for seed in range(seeds):
            figures["runs"].append({"task": name, "seed": seed, **train(name, settings, seed)})
            save("length_generalisation", out, figures)
    return figures


def train(name: Name, settings: Settings, seed: int) -> dict[str, Any]:
    """Train, and return right answers and rows without a wrong one, at both lengths, and how training went."""
    import jax

    from experiments.benchmark.tasks.small_models import fit, scores_on
    from jaxblt.models import ByteLMConfig

    trained, tested = settings.tasks(name)
    model = ByteLMConfig(stack=settings.stack(name), vocab_size=trained.vocab_size)
    chunks = chunks_of(trained, settings, seed)
    fitted = fit(model, trained.length, settings, jax.random.key(seed), chunks, lambda rows: rows)
    score = jax.jit(partial(scores_on, fitted.module))
    found = {}
    for where, task in (("trained", trained), ("longer", tested)):
        rows = draw(task, settings.test_rows, split="test")
        accuracy, exact = map(float, score(fitted.params, rows))
        found[where] = {"positions": task.length, "accuracy": accuracy, "exact": exact}
    return {**fitted.figures, "lengths": found}


def chunks_of(task: "TaskSource", settings: Settings, seed: int) -> Iterator["Rows"]:
    """Return rows [CHUNK, rows, T] of each call of training."""
    import jax

    for first in range(0, settings.steps - CHUNK + 1, CHUNK):
        rows = draw(task, CHUNK * settings.rows, first=first * settings.rows, seed=seed)
        yield jax.tree.map(lambda x: x.reshape(CHUNK, settings.rows, -1), rows)


def draw(
    task: "TaskSource",
    count: int,
    *,
    first: int = 0,
    seed: int = 0,
    split: Literal["train", "test"] = "train",
) -> "Rows":
    """Draw so many examples of a split, one a row, with zeros behind."""
    import jax.numpy as jnp
    import numpy as np

    from experiments.benchmark.tasks.small_models import Rows

    rows = [np.zeros((count, task.length), dtype) for dtype in (np.int32, np.int32, np.bool_)]
    examples = task.open(split, seed=seed)
    for row in range(count):
        for field, values in zip(rows, examples.example(first + row), strict=True):
            field[row, : len(values)] = values
    return Rows(*map(jnp.asarray, rows))
