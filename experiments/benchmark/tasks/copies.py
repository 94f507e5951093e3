"""Copies longer than in training by neural Turing machines: python -m experiments.benchmark copies --out FILE."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from experiments.benchmark.tasks.training_budget import CHUNK, Budget
from jaxblt.validation import check_bounds

if TYPE_CHECKING:
    from experiments.benchmark.tasks.small_models import Rows
    from jaxblt.models import ByteLMConfig

TEST = 1_000_000
"""The seed of the rows that all machines are tested on."""


@dataclass(frozen=True, kw_only=True)
class Settings(Budget):
    """The settings that all seeds share. Weights do not decay: addresses are to grow sharp.

    Attributes:
      symbols: of the vocabulary.
      trained: symbols of the longest copy of training.
      ramp: share of the steps in which the longest copy grows from one symbol to `trained`, at the soonest; 0 for none.
      mastered: the longest copy grows only after steps with such a share of right symbols.
      tested: symbols of the copies that are tested.
      marked: rows begin with BOS, as documents do: a slot that the reading head finds again by what it holds.
      tape: at first the writing address moves on, the reading one stays, and both are sharp (`first_focus`).
      rows: of a batch.
      test_rows: of each length.
      dim: width.
      slots, width: of the machine's memory.
    """

    steps: int = 3000
    learning_rate: float = 3e-3
    weight_decay: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    symbols: int = 16
    trained: int = 20
    ramp: float = 0.3
    mastered: float = 0.9
    tested: tuple[int, ...] = (20, 40, 80)
    marked: bool = True
    tape: bool = True
    rows: int = 64
    test_rows: int = 256
    dim: int = 64
    slots: int = 128
    width: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "symbols", least=2)
        check_bounds(self, "trained", "tested", "rows", "test_rows", "dim", "width", least=1)
        check_bounds(self, "ramp", "mastered", least=0, most=1)
        if not self.tested:
            raise ValueError("Settings.tested is empty: name at least one number of symbols to test")
        held = max(self.tested) + self.marked
        check_bounds(self, "slots", least=held, why=": BOS and the symbols are written to one each")

    def model(self) -> "ByteLMConfig":
        """Return one machine of one head, then an MLP."""
        from jaxblt.data.vocab import VOCAB_SIZE
        from jaxblt.mixers import NTMConfig
        from jaxblt.models import ByteLMConfig, StackConfig

        mixers: dict[str, Any] = {
            "ntm": NTMConfig(dim=self.dim, num_heads=1, slots=self.slots, width=self.width)
        }
        stack = StackConfig(dim=self.dim, num_layers=1, pattern=("ntm",), mixers=mixers, scan=False)
        return ByteLMConfig(stack=stack, vocab_size=max(VOCAB_SIZE, self.symbols + 4))


def copies(out: str, seeds: int = 6, first_seed: int = 0, settings: Settings = Settings()) -> dict[str, Any]:
    """Train neural Turing machines to copy symbols, all seeds side by side, and ask for longer copies (1410.5401).

    `accuracy` is the share of symbols that are right, `whole` the share of rows without a wrong one. A list has a
    number a seed.

    Args:
      out: file for the figures as JSON.
      seeds: machines, with seeds `first_seed`, `first_seed` + 1, ...
      first_seed: see there.
      settings: of all of them.

    Raises:
      ValueError: `seeds` is below 1.
    """
    from experiments.benchmark.figures.over_seeds import over_seeds
    from experiments.benchmark.figures.saved import save

    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}: it is how many machines are trained")
    chosen = range(first_seed, first_seed + seeds)
    figures: dict[str, Any] = {"settings": asdict(settings), "seeds": list(chosen), **train(settings, chosen)}
    for tested in figures["lengths"]:
        tested["mean"] = over_seeds(tested["whole"])
    save("copies", out, figures)
    return figures


def draw_rows(settings: Settings, key: Any, count: int, least: Any, most: Any, longest: int) -> "Rows":
    """Draw n symbols, EOS and the symbols again, with n in `least`..`most`, in rows with room for `longest`.

    If `marked`, BOS comes first.
    """
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.tasks.small_models import Rows
    from jaxblt.data.vocab import BOS, EOS, OFFSET

    lengths, drawn = jax.random.split(key)
    n = jax.random.randint(lengths, (count, 1), least, most + 1)
    shown = OFFSET + jax.random.randint(drawn, (count, longest), 0, settings.symbols)
    time = jnp.arange(2 * longest + 1, dtype=jnp.int32)[None]
    again = jnp.take_along_axis(shown, jnp.clip(jnp.where(time < n, time, time - n - 1), 0, longest - 1), 1)
    stream = jnp.where(time == n, EOS, jnp.where(time <= 2 * n, again, 0))
    scored = (n <= time) & (time < 2 * n)
    if settings.marked:
        stream, scored = (
            jnp.pad(x, ((0, 0), (1, 0)), constant_values=first)
            for x, first in ((stream, BOS), (scored, False))
        )
    return Rows(stream[:, :-1], stream[:, 1:], scored[:, :-1])


def as_tape(params: Any, width: int) -> Any:
    """Return the machine's parameters with biases of sharp addresses, of which the writing one moves on."""
    import jax
    import jax.numpy as jnp

    from jaxblt.mixers.cells.experimental.addressing import first_focus

    bias = jnp.concatenate([jnp.zeros(2 * width), first_focus(width, 1), first_focus(width, 0)])[None]
    asked = "['mixer']['in']['bias']"
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + bias if jax.tree_util.keystr(path).endswith(asked) else leaf, params
    )


def train(settings: Settings, seeds: Sequence[int]) -> dict[str, Any]:
    """Train all seeds, and return how training went and what each copies of each tested length."""
    import time

    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.tasks.small_models import cross_entropy, scores_on
    from jaxblt.training.flops import count_params
    from jaxblt.training.optimisers.adamw import AdamWConfig, make_optimizer

    module = settings.model().build(dtype=jnp.dtype(settings.dtype))
    rates = {"learning_rate": settings.learning_rate, "weight_decay": settings.weight_decay}
    boxed = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    adamw = AdamWConfig(**rates, warmup_steps=settings.steps // 10)
    optimizer = make_optimizer(adamw, settings.steps, boxed)

    def start(key: Any) -> Any:
        params = nn.meta.unbox(module.init(key, jnp.zeros((1, 3), jnp.int32)))
        params = as_tape(params, settings.width) if settings.tape else params
        return params, optimizer.init(params), jnp.float32(settings.trained if settings.ramp == 0 else 1)

    def step(carried: Any, number: Any, key: Any) -> tuple[Any, Any]:
        params, state, longest = carried
        most = jnp.ceil(longest).astype(jnp.int32)
        rows = draw_rows(settings, jax.random.fold_in(key, number), settings.rows, 1, most, settings.trained)
        loss = lambda params: cross_entropy(module, params, rows)  # noqa: E731
        (_, accuracy), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        with jax.numpy_dtype_promotion("standard"):
            params = jax.tree.map(lambda p, u: p + u, params, updates)
        longer = jnp.minimum(
            longest + settings.trained / max(settings.ramp * settings.steps, 1), settings.trained
        )
        return (params, state, jnp.where(accuracy >= settings.mastered, longer, longest)), accuracy

    def call(carried: Any, first: Any, key: Any) -> tuple[Any, Any]:
        numbers = first + jnp.arange(CHUNK, dtype=jnp.int32)
        carried, accuracies = jax.lax.scan(lambda c, n: step(c, n, key), carried, numbers)
        return carried, jnp.mean(accuracies)

    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    run = jax.jit(jax.vmap(call, (0, None, 0)), donate_argnums=0)
    carried, curve, begun = jax.jit(jax.vmap(start))(keys), [], time.perf_counter()
    for first in range(0, settings.steps - CHUNK + 1, CHUNK):
        carried, accuracy = run(carried, first, keys)
        curve.append([round(float(a), 4) for a in accuracy])
    seconds, lengths = time.perf_counter() - begun, []
    for n in settings.tested:
        rows = draw_rows(settings, jax.random.key(TEST), settings.test_rows, n, n, n)
        right, whole = jax.jit(jax.vmap(lambda p, rows=rows: scores_on(module, p, rows)))(carried[0])
        lengths.append({"symbols": n, "accuracy": right.tolist(), "whole": whole.tolist()})
    each = count_params(jax.tree.map(lambda leaf: leaf[0], carried[0]))[0]
    reached = jnp.ceil(carried[2]).tolist()
    found = {
        "parameters": each,
        "seconds": seconds,
        "accuracy_by_chunk": curve,
        "longest_of_training": reached,
    }
    return found | {"lengths": lengths}
