"""All that depends on the version of JAX, except `attention.cudnn_ragged`. Written for jax 0.11.

What is there for 0.12 has been lowered for CUDA under 0.12.0.1, and has not run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Return mesh axes over which x may differ between devices inside `shard_map`.

    There are none outside of one.
    """
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def may_vary(x: Any, axis: str) -> bool:
    """Return whether x may differ along an axis of the `shard_map` around this.

    It always may where `shard_map` does not check it.
    """
    from jax._src import config

    return axis in varying_axes(x) or not config._check_vma.value


def checks_varying() -> bool:
    """Tell whether the `shard_map` around this, if there is one, keeps track of what varies."""
    from jax._src import config

    return config._check_vma.value or not jax.sharding.get_abstract_mesh().manual_axes


def vary_alike(*arrays: Any) -> tuple[Any, ...]:
    """Mark all arrays as varying over every mesh axis that any varies over; None stays None.

    A `custom_vjp` needs it before its call inside `shard_map`. The cotangent of a weight that all devices share is made
    of local rows. Only the transpose of this cast sums it over the devices. A scan needs it for the first value of its
    carry.
    """
    axes: frozenset[str] = frozenset()
    for x in arrays:
        if x is not None:
            axes |= varying_axes(x)

    def cast(x: Any) -> Any:
        if x is None or not (missing := tuple(sorted(axes - varying_axes(x)))):
            return x
        return lax.pcast(x, missing, to="varying")

    return tuple(cast(x) for x in arrays)


@contextmanager
def unmeshed() -> Iterator[None]:
    """Trace functions for the mesh's kind of device, but as if no mesh were in force."""
    from jax._src import config

    device = jax.sharding.get_abstract_mesh().abstract_device
    alone = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(alone), config._check_vma(False):
        yield


def typed_like(x: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the type of an array on the mesh of type x, varying over the axes of x."""
    sharding = x.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape)))
    return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def is_symbolic(size: Any) -> bool:
    """Return whether an axis size is an unknown of `jax.export.symbolic_shape`.

    An unknown compares with no number.
    """
    return not isinstance(size, int | np.integer)


def same_value(x: Any) -> Any:
    """Return x as another object; of a tracer one more of the same value, without an operation.

    `custom_vjp` numbers the arguments that its forward pass kept, which it knows by identity. In jax 0.11.2 partial
    evaluation puts constants before the arguments and leaves the numbers (`JaxprTrace.process_custom_vjp_call`).
    """
    if not isinstance(x, Tracer):
        return x
    twin = object.__new__(type(x))
    for kind in type(x).__mro__:
        for name in set(getattr(kind, "__slots__", ())) - {"__weakref__"}:
            if hasattr(x, name):
                setattr(twin, name, getattr(x, name))
    return twin


def count_below(row: jax.Array, wanted: jax.Array, *, equal: bool = False) -> jax.Array:
    """Count, as `jnp.searchsorted`, a sorted row's items below each wanted value [W], int32.

    With `equal` those that are equal count too, as in `searchsorted` from the right. That one fails in jax 0.11.2
    inside a `shard_map` that leaves an axis of several devices to the partitioner.
    """
    size = row.shape[0]
    found = jnp.zeros(wanted.shape, jnp.int32)
    for bit in reversed(range(31 if is_symbolic(size) else size.bit_length())):
        ahead = found + jnp.int32(1 << bit)
        item = row[jnp.minimum(ahead, size) - 1]
        less = (ahead <= size) & (item <= wanted if equal else item < wanted)
        found = jnp.where(less, ahead, found)
    return found


def ask_ptxas_once() -> None:
    """Keep the version of ptxas that JAX asks for, in this process.

    In jax 0.11.2 each conversion of a mask in a Mosaic kernel starts ptxas and waits for it, while the kernel is
    lowered. The answer is the same each time.
    """
    from jax.experimental.mosaic.gpu import fragmented_array

    library = getattr(getattr(fragmented_array, "mgpu_lib", None), "_mosaic_gpu_ext", None)
    ask = getattr(library, "_get_ptxas_isa_version", None)
    if ask is not None and not hasattr(ask, "cache_info"):
        library._get_ptxas_isa_version = cache(ask)  # pyright: ignore[reportOptionalMemberAccess]


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    lengths: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:
    """Return cuDNN's output [B, T, H, K] in q's dtype and its fp32 log-sum-exp [B, H, T].

    It has no derivative. `lengths`, int32 [B] each, say how many queries and keys of a row count; both outputs are
    anything beyond.

    The residual that `jax.nn.dot_product_attention` returns is cast to q's dtype.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    q_lengths, kv_lengths = lengths or (None, None)
    result: Any = cudnn.dot_product_attention(
        *(q, k, v),
        q_seqlen=q_lengths,
        kv_seqlen=kv_lengths,
        scale=scale,
        mask_type=_cudnn_mask(causal, lengths),
        sliding_window_length=window,
        return_residual=True,
    )
    return result


def _cudnn_mask(causal: bool, lengths: tuple[jax.Array, jax.Array] | None) -> Any:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType

    if lengths is None:
        return MaskType.CAUSAL if causal else MaskType.NO_MASK
    return MaskType.PADDING_CAUSAL if causal else MaskType.PADDING


def cudnn_attention_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    lengths: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run cuDNN's backward kernel: dq, dk, dv from an output and a log-sum-exp given to it.

    They have the dtypes of q, k, v.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # Pass none of bias, offsets of packed rows and page tables
    (unused,) = vary_alike(jnp.zeros(0, q.dtype), q)[:1]
    return tuple(
        cudnn._dot_product_attention_bwd_p_wrapper.bind(
            *(q, k, v, unused, *(lengths or [unused] * 2), *[unused] * 4, lse, o, do),
            scale=scale,
            seed=0,
            dropout_rate=0.0,
            variadic_args=(False, False),
            mask_type=_cudnn_mask(causal, lengths),
            layout=cudnn.AttentionLayout.BTNH.value,
            sliding_window_length=window,
            **({"score_mod": None} if jax.__version_info__ >= (0, 12) else {}),
        )
    )


def cudnn_attention_fp8(
    weights: float, q: jax.Array, k: jax.Array, v: jax.Array, scales: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return cuDNN's causal attention of arrays in E4M3, the output's largest entry, and its log-sum-exp [B, H, T].

    Args:
      weights: what softmax weights are multiplied by.
      q: queries [B, T, H, K].
      k: keys, likewise.
      v: values, likewise.
      scales: what arrays were and the output is multiplied by, of `attention.fp8`.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    undone = [_cell(1 / x) for x in (scales.q, scales.k, scales.v, weights)]
    o, _, largest, lse = cudnn._dot_product_attention_fp8_fwd_p_wrapper.bind(
        *(q, k, v, *undone, _cell(weights), _cell(scales.o)), is_training=True, **_fp8_options(q)
    )
    return o, largest.reshape(()), lse


def cudnn_attention_fp8_gradients(
    weights: float,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    scales: Any,
    over: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return cuDNN's dq, dk and dv in E4M3, and the largest entries of ds, dq, dk and dv.

    XLA reads the scales in another order than jax 0.11.2 names them: its kernel takes those of weights, o and do where
    JAX writes o, do and weights, and those of ds, dq, dk and dv where JAX writes dq, dk, dv and ds. Here they stand as
    XLA reads them. `pytest -m gpu tests/pallas_kernels/attention/test_fp8.py` finds out if that changes.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    undone = (scales.q, scales.k, scales.v, weights, scales.o, over.o, over.scores)
    done = (weights, over.scores, over.q, over.k, over.v)
    dq, dk, dv, *largest = cudnn._dot_product_attention_fp8_bwd_p_wrapper.bind(
        *(q, k, v, o, do, lse), *(_cell(1 / x) for x in undone), *map(_cell, done), **_fp8_options(q)
    )
    *three, ds = (x.reshape(()) for x in largest)
    return dq, dk, dv, jnp.stack([ds, *three])


def _fp8_options(q: jax.Array) -> dict[str, Any]:
    from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout

    return {"scale": q.shape[3] ** -0.5, "use_causal_mask": True, "layout": AttentionLayout.BTNH.value}


def _cell(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float32).reshape(1, 1, 1, 1)
