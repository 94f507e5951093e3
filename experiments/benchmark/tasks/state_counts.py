"""Slots that hard and easy rows use: python -m experiments.benchmark state_counts --out FILE."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from experiments.benchmark.tasks.training_budget import CHUNK, Budget
from jaxblt.validation import check_bounds

if TYPE_CHECKING:
    from experiments.benchmark.tasks.small_models import Rows
    from jaxblt.models import ByteLMConfig

TEST_ROWS = 1024
Paid = Literal["whole", "answered", "full"]
"""What a row pays of the price of its slots: a share as large as the probability that all its targets are right, as
large as that of one target in the geometric mean, or all.
"""


@dataclass(frozen=True, kw_only=True)
class Settings(Budget):
    """The settings that all models of a measurement share; the defaults take a minute of one CPU core a model.

    Attributes:
      symbols: half of them keys, the others values.
      pairs: of key and value in a row, shown and then asked for in another order.
      dim: width.
      heads: of the engine.
      slots: of each head.
      rows: of a batch; in half of them all pairs are the same one.
      count_weight: the price of slots.
    """

    steps: int = 2500
    learning_rate: float = 3e-3
    dtype: Literal["float32", "bfloat16"] = "float32"
    symbols: int = 16
    pairs: int = 4
    dim: int = 64
    heads: int = 4
    slots: int = 24
    rows: int = 64
    count_weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "symbols", "pairs", "rows", least=2)
        check_bounds(self, "slots", least=5)
        check_bounds(self, "dim", "heads", least=1)

    def model(self) -> "ByteLMConfig":
        """Return a short convolution and an engine with an adaptive count, without MLPs."""
        from jaxblt.data.vocab import VOCAB_SIZE
        from jaxblt.mixers import StateEngineConfig
        from jaxblt.models import ByteLMConfig, StackConfig

        engine = StateEngineConfig(dim=self.dim, num_heads=self.heads, num_slots=self.slots, packed=False)
        engine = replace(engine, adaptive_count=True, count_weight=self.count_weight)
        mixers: dict[str, Any] = {"engine": engine}
        stack = StackConfig(
            dim=self.dim, num_layers=2, pattern=("hyena_short", "engine"), mixers=mixers, mlp_dim=0
        )
        return ByteLMConfig(stack=stack, vocab_size=max(VOCAB_SIZE, self.symbols + 4))


def state_counts(
    out: str, seeds: int = 6, arms: tuple[Paid, ...] = get_args(Paid), settings: Settings = Settings()
) -> dict[str, Any]:
    """Train engines with an adaptive count on rows of distinct and of equal pairs, and count the slots of each kind.

    `more` is the share of slots that distinct pairs have more than equal ones.

    Args:
      out: file for the figures as JSON, written anew after each model.
      seeds: models of each arm, with seeds 0, 1, ...
      arms: what a row pays of the price of slots: as much as all its answers are right at once, as each is, or all.
      settings: of all of them.

    Raises:
      ValueError: `seeds` is below 1.
    """
    from experiments.benchmark.figures.saved import save

    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}: it is how many models are trained")
    figures: dict[str, Any] = {"settings": asdict(settings), "runs": []}
    for arm in arms:
        for seed in range(seeds):
            figures["runs"].append({"paid": arm, "seed": seed, **train(settings, seed, arm)})
            save("state_counts", out, figures)
    return figures


def draw_rows(settings: Settings, key: Any, count: int, equal: Any) -> "Rows":
    """Draw rows k v k v ... k v k v, whose second half asks for the values; where `equal`, all pairs are the first."""
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.tasks.recall_rows import distinct
    from experiments.benchmark.tasks.small_models import Rows
    from jaxblt.data.vocab import OFFSET

    half, pairs = settings.symbols // 2, settings.pairs
    parts = jax.random.split(key, 3)
    keys, values = (distinct(part, jnp.zeros((half,)), count, pairs) for part in parts[:2])
    keys, values = (jnp.where(equal[:, None], x[:, :1], x) for x in (keys, half + values))
    order = distinct(parts[2], jnp.zeros((pairs,)), count, pairs)
    asked = (jnp.take_along_axis(x, order, 1) for x in (keys, values))
    both = [jnp.stack(two, 2).reshape(count, -1) for two in ((keys, values), tuple(asked))]
    stream = jnp.concatenate(both, 1) + OFFSET
    scored = (jnp.arange(4 * pairs - 1) >= 2 * pairs) & (jnp.arange(4 * pairs - 1) % 2 == 0)
    return Rows(stream[:, :-1], stream[:, 1:], jnp.broadcast_to(scored[None], (count, 4 * pairs - 1)))


def share_paid(paid: Paid, logits: Any, rows: "Rows") -> Any:
    """Return the share of the price of its slots that each row pays."""
    from jaxblt.training.metrics import answered

    if paid == "full":
        return 1.0
    weights = rows.scored.astype("float32")
    mean = answered(logits, rows.targets, weights)
    return mean if paid == "answered" else mean ** weights.sum(1)


def train(settings: Settings, seed: int, paid: Paid) -> dict[str, Any]:
    """Train one model, and return accuracy and mean slots of rows of either kind."""
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.tasks.small_models import fit, scores_on
    from jaxblt.side_outputs import SIDE_OUTPUTS
    from jaxblt.training.metrics import sown_metrics

    init, data, test = jax.random.split(jax.random.key(seed), 3)
    mixed = jnp.arange(settings.rows) % 2 == 0
    # Hand keys to the program as arguments: all seeds are one program, which a compilation cache finds again
    keys = jax.vmap(lambda number: jax.random.fold_in(data, number))
    drawn = lambda key: draw_rows(settings, key, settings.rows, mixed)  # noqa: E731
    chunks = (keys(first + jnp.arange(CHUNK)) for first in range(0, settings.steps - CHUNK + 1, CHUNK))
    length = 4 * settings.pairs - 1
    fitted = fit(settings.model(), length, settings, init, chunks, drawn, paid=partial(share_paid, paid))

    def score(params: Any, equal: Any) -> tuple[Any, Any]:
        rows = draw_rows(settings, test, TEST_ROWS, equal)
        _, side = fitted.module.apply(params, rows.inputs, mutable=SIDE_OUTPUTS)
        counts = [value for name, value in sown_metrics(side).items() if name.endswith("state_count")]
        return scores_on(fitted.module, params, rows)[0], counts[0]

    found = dict(fitted.figures)
    for kind, equal in (("distinct", jnp.zeros(TEST_ROWS, bool)), ("equal", jnp.ones(TEST_ROWS, bool))):
        accuracy, count = jax.jit(score)(fitted.params, equal)
        found[kind] = {"accuracy": float(accuracy), "slots": float(count)}
    return found | {"more": found["distinct"]["slots"] / found["equal"]["slots"] - 1}
