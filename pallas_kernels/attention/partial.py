"""Partial attention, over some of the keys, forward and backward: what a ring over devices calls at every step.

These are not differentiable: whoever merges partial results owns the gradient, which needs the merged output and
log-sum-exp. Source: Liu et al., Ring Attention, 2310.01889, with the backward pass of Dao, FlashAttention-2,
2307.08691, algorithm 2, cut along the keys.
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import Implementation
from pallas_kernels.attention import cudnn, hopper, reference, xla
from pallas_kernels.attention.arguments import check_arguments
from pallas_kernels.attention.masks import FULL, Mask

Choice = Literal["cudnn", "xla", "mosaic_gpu", "reference"] | None


def _mosaic_gpu(*args: Any, **options: Any) -> Any:
    """Import the kernel where it runs, as Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.attention.mosaic_gpu_partial import attention_with_lse

    return attention_with_lse(*args, **options)


FORWARD = (
    Implementation("mosaic_gpu", _mosaic_gpu, hopper.why_not, hopper.rather_not),
    Implementation("cudnn", cudnn.attention_with_lse, cudnn.why_not_partial),
    Implementation("xla", xla.attention_with_lse),
    Implementation("reference", reference.attention_with_lse),
)
BACKWARD = (
    Implementation("cudnn", cudnn.gradients_given_lse, cudnn.why_not_partial),
    Implementation("xla", xla.gradients_given_lse),
    Implementation("reference", reference.gradients_given_lse),
)
MERGING = ("mosaic_gpu",)
"""Kernels that merge into an accumulator themselves, and take several rows of queries to a row of keys."""


class Partial(NamedTuple):
    """Attention over some of the keys.

    Attributes:
      o: output; fp32, or in q's dtype where the kernel has no other (cuDNN) or the caller asks for it.
      lse: log-sum-exp of the scores, fp32; EMPTY_LSE, with o = 0, where no key is visible.
    """

    o: Float[Array, "B T H K"]
    lse: Float[Array, "B H T"]


def partial_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    scale: float | None = None,
    accumulator: Partial | None = None,
    cast_output: bool = False,
    implementation: Choice = None,
) -> Partial:
    """Take the softmax over these keys alone, with its log-sum-exp.

    Arguments that are not explained here are as for `attention`.

    Args:
      mask: as for `attention`, without positions, so that intervals need T = S. cuDNN takes documents only as
        `masks.documents(ids)` of the same tokens. What lies beyond lengths has to be numbers. Key lengths [B, R]
        go with no other mask; kernels other than "mosaic_gpu" are given the keys once for each run.
      accumulator: partial attention of the same queries to other keys. The result is then `merge_partials` of both, in
        fp32 without `cast_output`. The kernel "mosaic_gpu" merges before it rounds or writes; after others the merge is
        a pass of its own.
      cast_output: give o in q's dtype, as nothing else is merged into it: "mosaic_gpu" writes half the bytes then.

    Raises:
      ValueError: as `attention`; the accumulator is not of these queries; or key lengths [B, R] do not fit.
    """
    lengths = mask.kv_lengths
    runs = lengths if lengths is not None and lengths.ndim == 2 else None
    check_arguments(q, k, v, mask if runs is None else replace(mask, kv_lengths=None), None)
    _check_accumulator(q, accumulator)
    if runs is not None:
        _check_runs(q, runs, mask)
        return _attend_runs(q, k, v, runs, scale, accumulator, cast_output, implementation)
    entry = _choose("partial_attention", FORWARD, q, k, v, mask, scale, implementation)
    return _attend(entry, q, k, v, mask, scale, accumulator, cast_output)


def partial_attention_backward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    merged: Partial,
    do: Float[Array, "B T H K"],
    mask: Mask,
    *,
    scale: float | None = None,
    implementation: Choice = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Give what these keys add to dq, and their dk and dv.

    p = exp(score - lse), dscore = p (do.v - do.o), with o and lse of `merged`, over all the keys that the
    queries see. fp32, or in the dtypes of q, k, v where the kernel has no other. Where lengths hide a query or a
    key, it adds 0, whatever numbers `merged` has there.

    Raises:
      ValueError: as `attention`; or the implementation is "mosaic_gpu", which runs forward only.
    """
    if implementation in MERGING:
        raise ValueError(
            f"partial_attention_backward: {implementation!r} runs forward only: leave implementation None, which takes "
            "it forward where it is fastest, or name 'cudnn' or 'xla', which have gradients"
        )
    check_arguments(q, k, v, mask, None)
    entry = _choose("partial_attention_backward", BACKWARD, q, k, v, mask, scale, implementation)
    return entry.run(q, k, v, merged.o, merged.lse, do, mask, scale=scale)


def merges_in_kernel(
    q: Any, k: Any, v: Any, *, scale: float | None = None, implementation: Choice = None
) -> bool:
    """Check whether the kernel of `partial_attention`, for all of these keys, merges into an accumulator itself."""
    entry = _choose("partial_attention", FORWARD, q, k, v, FULL, scale, implementation)
    return entry.name in MERGING


def merge_partials(a: Partial, b: Partial) -> Partial:
    """Return attention over the keys of both: lse = log(e^lse_a + e^lse_b), o = e^(lse_a - lse) o_a + ...; fp32."""
    top = jnp.maximum(a.lse, b.lse)
    keep, add = jnp.exp(a.lse - top), jnp.exp(b.lse - top)
    total = keep + add

    def weigh(partial: Partial, weight: Float[Array, "B H T"]) -> Float[Array, "B T H K"]:
        return partial.o.astype(jnp.float32) * (weight / total).swapaxes(1, 2)[..., None]

    return Partial(weigh(a, keep) + weigh(b, add), top + jnp.log(total))


def _attend(
    entry: Implementation,
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    scale: float | None,
    accumulator: Partial | None,
    cast_output: bool,
) -> Partial:
    if entry.name in MERGING:
        options = {"scale": scale, "accumulator": accumulator, "cast_output": cast_output}
        return Partial(*entry.run(q, k, v, mask, **options))
    found = Partial(*entry.run(q, k, v, mask, scale=scale))
    found = found if accumulator is None else merge_partials(accumulator, found)
    return found._replace(o=found.o.astype(q.dtype)) if cast_output else found


def _attend_runs(
    q: Array,
    k: Array,
    v: Array,
    lengths: Int[Array, "B R"],
    scale: float | None,
    accumulator: Partial | None,
    cast_output: bool,
    implementation: Choice,
) -> Partial:
    """Take runs of queries as rows, of which a merging kernel takes several to a row of keys."""
    runs, mask = lengths.shape[1], Mask(kv_lengths=lengths.reshape(-1))

    def fold(x: Array) -> Array:
        return x.reshape(x.shape[0] * runs, -1, *x.shape[2:])

    def unfold(x: Array) -> Array:
        return x.reshape(x.shape[0] // runs, -1, *x.shape[2:])

    q = fold(q)
    if accumulator is not None:
        accumulator = Partial(fold(accumulator.o), fold(accumulator.lse.swapaxes(1, 2)).swapaxes(1, 2))
    entry = _choose("partial_attention", FORWARD, q, k, v, mask, scale, implementation)
    if entry.name not in MERGING:
        k, v = (jnp.repeat(x, runs, 0) for x in (k, v))
    found = _attend(entry, q, k, v, mask, scale, accumulator, cast_output)
    return Partial(unfold(found.o), unfold(found.lse.swapaxes(1, 2)).swapaxes(1, 2))


def _choose(
    op: str,
    table: tuple[Implementation, ...],
    q: Any,
    k: Any,
    v: Any,
    mask: Mask,
    scale: float | None,
    implementation: Choice,
) -> Implementation:
    return _dispatch.choose(op, table, implementation, _dispatch.current_device(), q, k, v, mask, scale=scale)


def _check_accumulator(q: Array, accumulator: Partial | None) -> None:
    lse = (q.shape[0], q.shape[2], q.shape[1])
    if accumulator is not None and (accumulator.o.shape != q.shape or accumulator.lse.shape != lse):
        raise ValueError(
            f"the accumulator must be of the same queries, o {q.shape} and lse {lse}, "
            f"got {accumulator.o.shape}, {accumulator.lse.shape}"
        )


def _check_runs(q: Array, lengths: Array, mask: Mask) -> None:
    rows, runs = lengths.shape
    if rows != q.shape[0] or not runs or q.shape[1] % runs:
        raise ValueError(
            f"key_lengths {lengths.shape} are of {rows} rows and {runs} equal runs of their queries, got q {q.shape}: "
            "pass one length a row, or runs apart"
        )
    others = [
        name for name in ("segments", "positions", "q_lengths", "rule") if getattr(mask, name) is not None
    ]
    others += [str(mask.interval)] * (mask.interval != FULL.interval)
    if others:
        raise ValueError(
            f"key_lengths {lengths.shape} of runs go with no other mask, got {', '.join(others)}"
        )
