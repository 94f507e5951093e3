"""Parts that benchmarks of ops with a matrix of state per head share: whole rows, and one step as in decoding."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._bench import Plan, Work, in_fp32, kernels_for
from pallas_kernels._dispatch import Implementation, current_device
from pallas_kernels._measure import Case

KERNEL = "mosaic_gpu_step"


def rows_plan(
    op: Callable[..., Any],
    table: Sequence[Implementation],
    streams: Mapping[str, Any],
    *,
    flops: float,
    chunk_size: int,
) -> Plan:
    """Return the kernels that run here against XLA, or XLA against a loop over chunks.

    All are checked against XLA in fp32. The floor is `flops` forward, and inputs and outputs once.
    """
    names, args = tuple(streams), tuple(streams.values())

    def call(implementation: str) -> Callable[..., Any]:
        return partial(_call, op, implementation, names, chunk_size=chunk_size)

    xla = Case("xla", call("xla"), args)
    kernels = [Case(name, call(name), args) for name in kernels_for(table, **streams)]
    inputs, output = float(sum(x.nbytes for x in args)), float(streams["v"].nbytes)
    return Plan(
        truth=Case("truth", partial(in_fp32, xla.fn), args),
        plain=xla if kernels else Case("plain", partial(_loop, xla.fn, names, chunk_size), args),
        versions=kernels or [xla],
        work={
            "forward": Work(flops, inputs + output),
            # Count what backward moves: it reads the inputs and the cotangent and writes the gradients.
            "forward+backward": Work(3 * flops, 3 * inputs + 2 * output),
        },
    )


def _loop(call: Callable[..., Any], names: tuple[str, ...], chunk_size: int, *args: Any) -> Any:
    """Run one chunk after another, each from the state of the one before.

    The length is a multiple of a chunk.
    """

    def step(state: Any, chunk: tuple[Any, ...]) -> tuple[Any, Any]:
        o, state = call(*chunk, initial_state=state, output_final_state=True)
        return state, o

    def chunks(x: Any) -> Any:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:]), 1, 0)

    k, v = (args[names.index(name)] for name in "kv")
    start = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
    _, o = lax.scan(step, start, tuple(chunks(x) for x in args))
    return jnp.moveaxis(o, 0, 1).reshape(v.shape)


def decode_plan(op: Callable[..., Any], table: Sequence[Implementation], streams: Mapping[str, Any]) -> Plan:
    """Plan the kernel of one step against XLA, all checked against a loop.

    Where the kernel does not run, the loop stands in its place. The floor is the state read once and written once, and
    the streams, at the bandwidth of a copy.
    """
    k, v = streams["k"], streams["v"]
    state = jax.random.normal(jax.random.key(2), (v.shape[0], v.shape[2], k.shape[3], v.shape[3]))
    given = {**streams, "initial_state": state}

    def case(implementation: str) -> Case:
        call = partial(_call, op, implementation, tuple(given), output_final_state=True)
        return Case(implementation, call, tuple(given.values()))

    entry = next(entry for entry in table if entry.name == KERNEL)
    runs = entry.why_not(current_device(), *(streams[name] for name in "qkv")) is None
    moved = float(sum(x.nbytes for x in given.values()) + state.nbytes + v.nbytes)
    return Plan(
        truth=case("reference"),
        plain=case("xla"),
        versions=[case(KERNEL if runs else "reference")],
        work={"forward": Work(6.0 * state.size, moved)},
    )


def _call(
    op: Callable[..., Any], implementation: str, names: tuple[str, ...], *args: Any, **options: Any
) -> Any:
    return op(**dict(zip(names, args, strict=True)), **options, implementation=implementation)
