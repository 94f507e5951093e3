"""Calls of the Hopper kernels of jax-linear-attention, an optional package, and where they run.

Its rules for gradients know no mesh axes: inside `shard_map` it is called by `on_one_device`.

The package knows documents, but neither holes nor padding. Here they become tokens that do nothing: zeros write
nothing, and a log gate of zero keeps the state. So a row is exact whatever its ids are. A document begins, from a state
of zero, wherever the ids that the package is given change.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module, metadata
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import varying_axes
from pallas_kernels._dispatch import Device, as_device
from pallas_kernels._hopper import MOST_BLOCKS, why_not_on, why_not_streams
from pallas_kernels._linear_state.tokens import count_documents, only_tokens

PACKAGE, VERSION = "jax-linear-attention", "0.1.0"

JAX = "0.11.2"
"""The version of JAX that the package is written for. Pallas' GPU dialect changes with every version."""

CHUNK = 64
"""Steps of a chunk in all of its kernels."""

MOST_CHUNKS = MOST_BLOCKS - 128
"""Chunks that it takes in one row: the blocks of a CUDA grid, less the pieces that it may cut a row into."""

LOWEST_LOG_GATE = -88.0
"""exp(-88) is less than the least normal number of fp32, so it forgets all. The kernels subtract sums of log gates from
a chunk's start: -inf would give NaN, and sums of larger gates lose the digits of small ones beside them."""


def why_not_package(device: Device) -> str | None:
    """Return why none of the package's kernels runs on `device`, or None.

    The GPU, what is installed, and this machine count.
    """
    if (reason := why_not_on(device)) is not None:
        return reason
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} {VERSION} is not installed: pip install 'jaxblt[jla]'"
    if found != VERSION:
        return f"{PACKAGE} {VERSION} is what it is tested with, {found} is installed"
    if jax.__version__ != JAX:
        return f"{PACKAGE} {VERSION} is written for jax {JAX}, this is {jax.__version__}"
    if why_not_on(here := this_machine()) is not None:
        return f"it compiles on a machine with such a GPU only, this one has {here.kind}"
    return None


def this_machine() -> Device:
    """Return the device that the package looks at to decide whether its kernels run."""
    return as_device(jax.devices()[0])


def why_not_rows(device: Device, q: Any, k: Any, v: Any) -> str | None:
    """Return why the package's kernels do not take these streams, or None."""
    if (reason := why_not_package(device)) is not None:
        return reason
    if (reason := why_not_streams(device, q, k, v)) is not None:
        return reason
    if (chunks := -(-v.shape[1] // CHUNK)) > MOST_CHUNKS:
        return f"it takes at most {MOST_CHUNKS * CHUNK} steps a row, not {v.shape[1]} ({chunks} chunks)"
    return None


def rather_not(device: Device, q: Any, k: Any, v: Any, *others: Any, **options: Any) -> str | None:
    """Return why a call is left to others, or None: a row of a few steps, as in decoding."""
    if (length := v.shape[1]) < CHUNK:
        return f"rows of {length} steps would be filled up to {CHUNK}"
    return None


def call_jla(
    kind: str,
    q: Float[Array, "B T J K"],
    k: Float[Array, "B T J K"],
    v: Float[Array, "B T H V"],
    *,
    segment_ids: Int[Array, "B T"] | None,
    initial_state: Float[Array, "B H K V"] | None,
    output_final_state: bool,
    scale: float,
    log_gate: Float[Array, "B T ..."] | None = None,
    beta: Float[Array, "B T H"] | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Run the package's op `kind` under our segment ids, by its Mosaic kernels only.

    Outputs and gradients are zero at holes and padding, where NaN may lie. A log gate below `LOWEST_LOG_GATE` acts as
    that and has a gradient of zero.

    Raises:
      ValueError: the package's own, where its kernels do not take the call.
    """
    q, k, v = (only_tokens(x, segment_ids) for x in (q, k, v))
    floats = {"q": q, "k": k, "v": v}
    if log_gate is not None:
        wide = only_tokens(log_gate, segment_ids).astype(jnp.float32)
        floats["g"] = jnp.maximum(wide, jnp.float32(LOWEST_LOG_GATE))
    if beta is not None:
        floats["beta"] = only_tokens(beta, segment_ids)
    if initial_state is not None:
        floats["initial_state"] = initial_state.astype(jnp.float32)
    documents = None if segment_ids is None else count_documents(segment_ids)
    call = partial(_package_op, kind, {"output_final_state": output_final_state, "scale": scale})
    if any(varying_axes(x) for x in (*floats.values(), documents) if x is not None):
        from pallas_kernels._linear_state.one_device import on_one_device

        call = partial(on_one_device, call)
    o, final = call(floats, documents)
    o = only_tokens(o, segment_ids)
    return (o, final) if output_final_state else o


def _package_op(kind: str, options: dict[str, Any], floats: dict[str, Array], documents: Array | None) -> Any:
    op = import_module("jla.ops").linear_attention
    return _shared(op, kind, tuple(options.items()))(floats, documents)


@lru_cache(maxsize=256)
def _shared(op: Callable[..., Any], kind: str, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Return one function for equal calls.

    jit traces it once, so layers of a program share its kernels, which compile once. Else each layer has kernels of its
    own, as JAX numbers them (`_mosaic_gpu.py`).
    """

    def run(floats: dict[str, Array], documents: Array | None) -> Any:
        return op(kind, **floats, **dict(options), impl="mosaic_gpu", segment_ids=documents)

    return jax.jit(run)
