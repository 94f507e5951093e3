"""Positions before none, some or all blocks of a byte model: python -m experiments.benchmark position_layers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxblt.validation import check_bounds, check_fields

if TYPE_CHECKING:
    from experiments.benchmark.boundaries.side_by_side import Trained
    from jaxblt.models import StackConfig
    from jaxblt.training.recipe import Recipe

Arm = Literal["none", "first", "ends", "fourth", "all"]
"""Blocks before which positions enter: no block, the first, the first and the last, every fourth, all."""
TRIALS = 20
"""Alternating rounds of times."""


@dataclass(frozen=True)
class Setting:
    """The settings that all arms share.

    Attributes:
      seeds: models of each arm, with seeds 0, 1, ... of parameters and of the order of rows.
      steps: of training.
      blocks: of attention that tells no positions itself.
      dim: their width.
      length: bytes of a row.
      rows: of a step.
      learning_rate: the peak.
    """

    seeds: int = 3
    steps: int = 200
    blocks: int = 8
    dim: int = 48
    length: int = 128
    rows: int = 8
    learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "seeds", "blocks", "length", "rows", least=1)
        check_bounds(self, "steps", least=5)
        check_bounds(self, "dim", least=8)
        check_bounds(self, "learning_rate", above=0)


def position_layers(
    out: str = "runs/benchmark/position_layers.json",
    arms: tuple[Arm, ...] = ("none", "first", "ends", "fourth", "all"),
    setting: Setting = Setting(),
) -> dict[str, Any]:
    """Train a byte model on a book with positions before chosen blocks: bits per byte, times, and calls.

    Attention here knows no order, so that positions are all that tells it. Bits are of the book's validation part.
    Times are of the loss with its gradients, in alternating rounds; on a CPU processor time. `gaps` are bits of an arm
    less those of the first one, paired by seed.

    Args:
      out: file for the figures as JSON.
      arms: blocks before which positions enter.
      setting: of all of them.

    Raises:
      ValueError: there is no arm.
    """
    from experiments.benchmark.boundaries.boundary_books import gaps
    from experiments.benchmark.boundaries.side_by_side import train_seeds
    from experiments.benchmark.figures.saved import save

    if not arms:
        raise ValueError("arms are empty: name one of none, first, ends, fourth, all at least")
    trained: dict[Arm, Trained] = {
        arm: train_seeds(recipe_of(arm, setting), range(setting.seeds), every=setting.steps) for arm in arms
    }
    figures: dict[str, Any] = {"setting": asdict(setting)}
    figures["arms"] = {arm: figures_of(recipe_of(arm, setting), one) for arm, one in trained.items()}
    for arm, seconds in time_arms(trained, setting).items():
        figures["arms"][arm]["seconds"] = seconds
    figures["gaps"] = gaps(figures["arms"])
    save("position_layers", out, figures)
    return figures


def stack_of(arm: Arm, setting: Setting) -> "StackConfig":
    """Return the stack of an arm."""
    from jaxblt.mixers import AttentionConfig
    from jaxblt.models import StackConfig, with_positions

    attention = AttentionConfig(dim=setting.dim, num_heads=4, position="none")
    plain = StackConfig(
        dim=setting.dim, num_layers=setting.blocks, pattern="A", mixers={"A": attention}, scan=False
    )
    layers: Mapping[Arm, Any] = {"first": setting.blocks, "ends": "ends", "fourth": 4, "all": "all"}
    return plain if arm == "none" else with_positions(plain, layers[arm])


def recipe_of(arm: Arm, setting: Setting) -> "Recipe":
    """Return the training of an arm."""
    from jaxblt.data import DataConfig
    from jaxblt.models import ByteLMConfig
    from jaxblt.training.optimisers.adamw import AdamWConfig
    from jaxblt.training.recipe import Recipe
    from jaxblt.training.train_config import TrainConfig

    data = DataConfig(sample="book", seq_len=setting.length, batch_size=setting.rows, partial="drop")
    steps = setting.steps
    train = TrainConfig(steps=steps, dtype="float32", log_every=steps, eval_every=1, checkpoint_every=steps)
    optimizer = AdamWConfig(learning_rate=setting.learning_rate, warmup_steps=steps // 5)
    model = ByteLMConfig(stack=stack_of(arm, setting))
    return Recipe(name=f"positions_{arm}", model=model, data=data, optimizer=optimizer, train=train)


def count_calls(stack: "StackConfig") -> int:
    """Return how many layers of positions one pass of the stack calls."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxblt.models import Stack
    from jaxblt.models.position_layers import PositionLayer

    calls = []

    def note(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, PositionLayer) and context.method_name == "__call__":
            calls.append(context.module.path)
        return run(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(Stack(stack).init, jax.random.key(0), jnp.zeros((1, 2, stack.dim)))
    return len(calls)


def figures_of(recipe: "Recipe", trained: "Trained") -> dict[str, Any]:
    """Return calls, parameters, and bits of the validation part by seed."""
    import jax

    from experiments.benchmark.figures.over_seeds import over_seeds
    from jaxblt.training.evaluate import Validation
    from jaxblt.training.flops import count_params

    with jax.set_mesh(trained.setup.mesh):
        validation = Validation(trained.setup)
        bits = [float(validation(state)["bits_per_byte"]) for state in trained.states]
    return {
        "calls": count_calls(recipe.model.stack),
        "parameters": count_params(trained.states[0].params)[0],
        "bits_per_byte": {"seeds": bits, **over_seeds(bits)},
    }


def time_arms(trained: "Mapping[Arm, Trained]", setting: Setting) -> dict[Arm, dict[str, Any]]:
    """Return seconds of the loss with its gradients, of all arms in alternating rounds."""
    import jax
    import jax.numpy as jnp
    import optax

    from experiments.benchmark.figures.saved import timed
    from jaxblt.profiling import Case, measure_all

    shape = (setting.rows, setting.length)
    ids = jnp.broadcast_to(jnp.arange(setting.length, dtype=jnp.int32)[None] % 200 + 4, shape)

    def case(arm: Arm, one: "Trained") -> Case:
        @jax.jit
        def step(params: Any, ids: Any) -> Any:
            def loss(params: Any) -> Any:
                logits = one.setup.task.model.apply({"params": params}, ids)[0]
                return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, ids))

            return jax.grad(loss)(params)

        return Case(arm, step, (one.states[0].params, ids))

    found = measure_all([case(arm, one) for arm, one in trained.items()], trials=TRIALS, method="processor")
    return {arm: timed(one) for arm, one in zip(trained, found, strict=True)}
