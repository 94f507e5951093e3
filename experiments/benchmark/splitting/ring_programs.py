"""Attention over the devices of a host and on one of them, as programs that are compiled and have arguments."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """One row of attention, and the kernel that rings of it run; None for the fastest that runs."""

    length: int
    heads: int
    groups: int
    head_dim: int
    dtype: str
    implementation: Any = None

    def flops(self, *, backward: bool) -> float:
        """Return of the visible half of the scores: 2 matmuls forward, 5 backward."""
        return (2 + 5 * backward) * float(self.length) ** 2 * self.head_dim * self.heads


def inputs(shape: Shape, sharding: Any, rows: int = 1) -> tuple[Any, ...]:
    """Draw q, k, v and a cotangent of the output, the same numbers however they are placed."""
    import jax

    counts = (shape.heads, shape.groups, shape.groups, shape.heads)

    def draw() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 4)
        sizes = [(rows, shape.length, count, shape.head_dim) for count in counts]
        return tuple(jax.random.normal(k, s, shape.dtype) for k, s in zip(keys, sizes, strict=True))

    return jax.block_until_ready(jax.jit(draw, out_shardings=sharding)())


def one_device(shape: Shape, *, backward: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the fastest local kernel on the first device, compiled, and its arguments."""
    import jax

    from pallas_kernels.attention import attention, masks

    given = inputs(shape, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return compiled(lambda q, k, v: attention(q, k, v, masks.CAUSAL), given, backward=backward)


def split(
    shape: Shape, variant: str, *, backward: bool, devices: int | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a mode over the first `devices` devices; "ring" has the zig-zag order, "ring_swapped" swaps tokens."""
    import jax

    from jaxblt.parallel import CONTIGUOUS, ZIGZAG, batch_sharding, context_attention, make_mesh

    mesh = make_mesh(data=1, seq=-1, devices=jax.devices()[:devices])
    mode: Any = "ring" if variant == "ring_swapped" else variant
    layout = ZIGZAG if variant == "ring" else CONTIGUOUS

    implementation = shape.implementation if mode == "ring" else None

    def attend(q: Any, k: Any, v: Any) -> Any:
        return context_attention(
            q, k, v, causal=True, mode=mode, layout=layout, implementation=implementation
        )

    with jax.set_mesh(mesh):
        return compiled(attend, inputs(shape, batch_sharding(mesh)), backward=backward)


def independent(shape: Shape, *, backward: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the one-GPU kernel on all devices, without exchanges: rows of length / sqrt(n), a multiple of 128."""
    import jax

    from jaxblt.parallel import batch_sharding, make_mesh
    from jaxblt.parallel.islands import over_batch
    from pallas_kernels.attention import attention, masks

    mesh = make_mesh(data=-1)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return over_batch(lambda x, _: attention(*x, mask=masks.CAUSAL), (q, k, v))

    with jax.set_mesh(mesh):
        given = inputs(shape._replace(length=share(shape.length)), batch_sharding(mesh), len(jax.devices()))
        return compiled(attend, given, backward=backward)


def share(length: int) -> int:
    """Return tokens of a row that is 1/n of the work."""
    import jax

    return max(1, round(length / len(jax.devices()) ** 0.5 / 128)) * 128


def compiled(
    attend: Callable[..., Any], given: tuple[Any, ...], *, backward: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return only the output, or with the gradients of q, k, v; each result lies where its input does."""
    import jax

    def forward(q: Any, k: Any, v: Any) -> tuple[Any]:
        return (attend(q, k, v),)

    def both(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        o, vjp = jax.vjp(attend, q, k, v)
        return (o, *vjp(do))

    args = given if backward else given[:3]
    step = jax.jit(both if backward else forward, out_shardings=given[0].sharding)
    return step.lower(*args).compile(), args
