"""Train steps and decoding of models with a memory: python -m experiments.benchmark titan_speed --out FILE."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxblt.models.titan import Form
from jaxblt.validation import check_bounds, check_fields

if TYPE_CHECKING:
    from jaxblt.mixers import NeuralMemoryConfig
    from jaxblt.profiling import Ceilings
    from jaxblt.training.recipe import Recipe

TOKENS = 32
"""Decoded by a call, one after the other, as `generate` does: a call of one is a launch in the main."""


@dataclass(frozen=True)
class Shape:
    """The model and its rows.

    Attributes:
      form: see `jaxblt.models.titan`.
      dim, num_layers, num_heads: of the model; as they are, 148 million parameters.
      window: steps that attention sees.
      chunk_size: bytes from one update of a memory to the next.
      length: bytes of a row of training.
      rows: of a step.
    """

    form: Form = "mag"
    dim: int = 1024
    num_layers: int = 7
    num_heads: int = 4
    window: int = 2048
    chunk_size: int = 2048
    length: int = 32_768
    rows: int = 2

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(
            self, "dim", "num_layers", "num_heads", "window", "chunk_size", "length", "rows", least=1
        )

    @property
    def recipe(self) -> "Recipe":
        """Rows of one document each, all of them full, through blocks that are not scanned, as in recipes of books."""
        from jaxblt.data import DataConfig
        from jaxblt.models import titan
        from jaxblt.training.recipe import Recipe
        from jaxblt.training.train_config import TrainConfig

        sizes = {name: getattr(self, name) for name in ("dim", "num_layers", "num_heads")}
        model = titan(self.form, **sizes, window=self.window, chunk_size=self.chunk_size)
        # Unroll the stack: a scan would write all that the backward pass needs into stacked arrays, 52 GB instead of
        # 41.
        model = replace(model, stack=replace(model.stack, scan=False))
        data = DataConfig(paths=("book",), seq_len=self.length, batch_size=self.rows, partial="drop")
        return Recipe(name="titan_speed", model=model, data=data, train=TrainConfig(steps=1000))


def titan_speed(
    out: str,
    shape: Shape = Shape(),
    devices: tuple[int, ...] = (1,),
    positions: tuple[int, ...] = (4096, 65_536, 1_048_576),
    decode_rows: int = 64,
    trials: int = 20,
) -> dict[str, Any]:
    """Time train steps with the sequence over devices, and decoded tokens of one memory.

    Tokens are decoded at several positions. A token that ends no chunk reads M once: floor = bytes of M / (bytes/s of a
    large copy of the same run). One that ends a chunk writes M too, and is timed apart.

    Args:
      out: file for the figures as JSON, written anew after each.
      shape: of the model and its rows.
      devices: over how many the sequence is split, one run each; none for no train step.
      positions: of the decoded tokens, from the start of their document; none for no decoding.
      decode_rows: that are decoded at once.
      trials: of each timing, at least 20.

    Raises:
      ValueError: there are fewer devices than asked for, or nothing to time.
    """
    import jax

    from experiments.benchmark.figures.saved import save
    from jaxblt.profiling import measure_ceilings

    if not devices and not positions:
        raise ValueError("there is nothing to time: name devices or positions")
    if devices and not 1 <= min(devices) <= max(devices) <= jax.device_count():
        raise ValueError(
            f"devices must lie in 1..{jax.device_count()}, the devices that are here, got {devices}"
        )
    ceilings = measure_ceilings()
    figures: dict[str, Any] = {
        "shape": asdict(shape),
        "ceilings": asdict(ceilings),
        "steps": [],
        "decoding": [],
    }
    for count in devices:
        figures["steps"].append(train_step(shape.recipe, count, trials))
        save("titan_speed", out, figures)
    for ends in (False, True):
        figures["decoding"] += decoded(memory_of(shape), decode_rows, positions, ceilings, trials, ends=ends)
        save("titan_speed", out, figures)
    return figures


def train_step(recipe: "Recipe", devices: int, trials: int) -> dict[str, Any]:
    """Time a step with AdamW; return bytes a second and the loss before the first update, too."""
    import jax

    from experiments.benchmark.figures.saved import timed
    from jaxblt.data import BytesSource, load_sample
    from jaxblt.parallel import make_mesh
    from jaxblt.profiling import measure
    from jaxblt.training.flops import count_params
    from jaxblt.training.log.meter import peak_memory
    from jaxblt.training.start.timed_step import prepare

    needed = 2 * recipe.data.seq_len * recipe.data.batch_size
    book = load_sample("book")
    source = BytesSource([book * -(-needed // len(book))])
    mesh = make_mesh(data=1, seq=devices, devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        ready = prepare(recipe, mesh, source)
        held, step = [ready.state], ready.step()

        def run() -> Any:
            held[0], metrics = step(held[0], ready.batch)
            return metrics

        loss = float(run()["loss"])
        seconds = timed(measure(run, trials=trials, warmup=1, method="calls"))
    told = {
        "devices": devices,
        "parameters": count_params(held[0].params)[0],
        "loss": loss,
        "seconds": seconds,
    }
    return told | {"bytes_per_second": ready.num_bytes / seconds["median"], **peak_memory()}


def memory_of(shape: Shape) -> "NeuralMemoryConfig":
    """Return a memory of that width, whatever mixes beside it."""
    from jaxblt.mixers import NeuralMemoryConfig

    return NeuralMemoryConfig(shape.dim, shape.num_heads, chunk_size=shape.chunk_size, packed=False)


def decoded(
    memory: "NeuralMemoryConfig",
    rows: int,
    positions: Sequence[int],
    ceilings: "Ceilings",
    trials: int,
    *,
    ends: bool,
) -> list[dict[str, Any]]:
    """Time tokens at each position, kernels in bf16 as `generate` has them.

    `ends`: whether each ends a chunk.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.figures.saved import timed
    from experiments.benchmark.models.forward_pass import narrow_kernels
    from jaxblt.profiling import measure

    module = memory.build(dtype=jnp.bfloat16)
    xs = jax.random.normal(jax.random.key(1), (TOKENS, rows, 1, memory.dim), jnp.bfloat16)
    drawn = nn.meta.unbox(jax.jit(module.init)(jax.random.key(0), xs[0]))
    params = {"params": narrow_kernels(drawn["params"])}
    state = jax.jit(lambda p, x, s: module.apply(p, x, state=s)[1])(
        params, xs[0], memory.init_state(rows, capacity=1, dtype=jnp.bfloat16)
    )
    read_bytes = sum(m.nbytes for m in state.carry.memory.weights)
    floor = ceilings.floor(flops=0, bytes_moved=read_bytes)
    opened = memory.chunk_size - 1 if ends else 0
    call, found = tokens(module), []
    for position in positions:
        held = [standing(state, position, opened)]

        def run(position: int = position, held: list[Any] = held) -> Any:
            y, held[0] = call(params, xs, held[0], position, opened)
            return y

        seconds = timed(measure(run, trials=trials, method="calls"))
        state, each = held[0], seconds["median"] / TOKENS
        told = {"position": position, "ends_chunk": ends, "rows": rows, "tokens": TOKENS, "seconds": seconds}
        told |= {"seconds_a_token": each, "read_bytes": read_bytes, "floor_seconds": floor}
        found.append(told | {"share_of_bandwidth": floor / each})
    return found


def tokens(module: Any) -> Any:
    """Return (params, xs, state, position, opened) -> (last output, state): each token stands where the last did.

    The state is donated: else every call would copy M and S, four times what a read moves.
    """
    import jax

    def call(params: Any, xs: Any, state: Any, position: Any, opened: Any) -> Any:
        def token(state: Any, x: Any) -> Any:
            y, after = module.apply(params, x, state=state)
            return standing(after, position, opened), y

        state, ys = jax.lax.scan(token, state, xs)
        return ys[-1], state

    return jax.jit(call, donate_argnums=2)


def standing(state: Any, position: Any, opened: int) -> Any:
    """Return the state of a memory behind so many tokens of a document, so many of them in the open chunk."""
    import jax.numpy as jnp

    clock, carry = state.clock, state.carry
    clock = clock.replace(
        time=jnp.full_like(clock.time, position), position=jnp.full_like(clock.position, position)
    )
    count = jnp.full_like(carry.opened.count, opened)
    content = jnp.arange(carry.opened.content.shape[-1])[None, None] < count[..., None]
    chunk = carry.opened.replace(count=count, content=jnp.broadcast_to(content, carry.opened.content.shape))
    return state.replace(clock=clock, carry=carry.replace(opened=chunk))
