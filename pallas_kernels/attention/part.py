"""Attention over a part of the keys, forward and backward: what a ring over devices calls at every step.

These are not differentiable: whoever merges the parts owns the gradient, which needs the merged output and
log-sum-exp, not those of the part. Source: Liu et al., Ring Attention, 2310.01889, with the backward pass of
Dao, FlashAttention-2, 2307.08691, algorithm 2, cut along the keys.
"""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import Implementation
from pallas_kernels.attention import cudnn, hopper, reference, xla
from pallas_kernels.attention.mask import Mask, check_arguments

Choice = Literal["cudnn", "xla", "mosaic_gpu", "reference"] | None


def _mosaic_gpu(*args: Any, **options: Any) -> Any:
    """Imported where it runs, as Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.attention.mosaic_gpu_part import attention_with_lse

    return attention_with_lse(*args, **options)


def _mosaic_gpu_gradients(*args: Any, **options: Any) -> Any:
    from pallas_kernels.attention.mosaic_gpu_pull import gradients_given_lse

    return gradients_given_lse(*args, **options)


FORWARD = (
    Implementation("mosaic_gpu", _mosaic_gpu, hopper.why_not_part, hopper.rather_not),
    Implementation("cudnn", cudnn.attention_with_lse, cudnn.why_not_part),
    Implementation("xla", xla.attention_with_lse),
    Implementation("reference", reference.attention_with_lse),
)
BACKWARD = (
    Implementation("cudnn", cudnn.gradients_given_lse, cudnn.why_not_part),
    Implementation("xla", xla.gradients_given_lse),
    Implementation("mosaic_gpu", _mosaic_gpu_gradients, hopper.why_not_part),
    Implementation("reference", reference.gradients_given_lse),
)
MERGING = ("mosaic_gpu",)
"""Those that merge onto an earlier part themselves, and take several rows of queries to a row of keys."""


class Part(NamedTuple):
    """Attention over some of the keys.

    Attributes:
      o: output; fp32, or in q's dtype where the kernel has no other (cuDNN) or that is asked for.
      lse: log-sum-exp of the scores, fp32; EMPTY_LSE, with o = 0, where no key is visible.
    """

    o: Float[Array, "B T H K"]
    lse: Float[Array, "B H T"]


def attend_part(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    *,
    causal: bool,
    window: int | None = None,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    q_lengths: Int[Array, "B"] | None = None,
    kv_lengths: Int[Array, "B"] | Int[Array, "B R"] | None = None,
    same_tokens: bool = False,
    scale: float | None = None,
    onto: Part | None = None,
    rounded: bool = False,
    implementation: Choice = None,
) -> Part:
    """softmax over these keys alone, and its log-sum-exp; causal and window go by index and need T = S.

    Args:
      q, k, v, causal, window, q_segment_ids, kv_segment_ids, scale, implementation: as for `attention`.
      same_tokens: the promise that queries and keys are the same tokens and both ids alike: cuDNN takes no others.
      q_lengths: queries at an index >= q_lengths[b] see no key; they have to be numbers.
      kv_lengths: keys at an index >= kv_lengths[b] are seen by no query; they and their values have to be numbers.
        Where they are [B, R], each of R equal runs of the queries has its own, and there is no other mask; kernels but
        "mosaic_gpu" are given the keys once for each run.
      onto: what other keys gave the same queries; the result is then `merge_parts` of it and this part, in fp32 if
        not `rounded`. The kernel "mosaic_gpu" merges before it rounds or writes anything; after others it is a pass of
        its own.
      rounded: o is to be in q's dtype, as nothing else is merged: "mosaic_gpu" writes half the bytes then.

    Raises:
      ValueError: as `attention`; `onto` is not of these queries; or kv_lengths [B, R] do not fit.
    """
    reaches = kv_lengths if kv_lengths is not None and kv_lengths.ndim == 2 else None
    lengths = kv_lengths if reaches is None else None
    ids, marks = (q_segment_ids, kv_segment_ids), {"q_lengths": q_lengths, "kv_lengths": lengths}
    mask = Mask(causal, window, *ids, **marks, same_tokens=same_tokens)
    check_arguments(q, k, v, mask, None)
    _check_onto(q, onto)
    if reaches is not None:
        _check_runs(q, reaches, mask)
        return _attend_runs(q, k, v, reaches, scale, onto, rounded, implementation)
    entry = _choose("attend_part", q, k, v, mask, scale, implementation)
    return _attend(entry, q, k, v, mask, scale, onto, rounded)


def pull_part(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    merged: Part,
    do: Float[Array, "B T H K"],
    *,
    causal: bool,
    window: int | None = None,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    q_lengths: Int[Array, "B"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    same_tokens: bool = False,
    scale: float | None = None,
    implementation: Choice = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """What these keys add to dq, and their dk and dv.

    p = exp(score - lse), dscore = p (do.v - do.o), with o and lse of `merged`, over all the keys that the
    queries see. fp32, or in the dtypes of q, k, v where the kernel has no other. Where lengths hide a query or a
    key, it adds 0, whatever numbers `merged` has there.

    Raises:
      ValueError: as `attention`.
    """
    ids, marks = (q_segment_ids, kv_segment_ids), {"q_lengths": q_lengths, "kv_lengths": kv_lengths}
    mask = Mask(causal, window, *ids, **marks, same_tokens=same_tokens)
    check_arguments(q, k, v, mask, None)
    entry = _choose("pull_part", q, k, v, mask, scale, implementation)
    return entry.run(q, k, v, merged.o, merged.lse, do, mask, scale=scale)


def merges(q: Any, k: Any, v: Any, *, scale: float | None = None, implementation: Choice = None) -> bool:
    """Whether the kernel of `attend_part`, for all of these keys, merges onto an earlier part itself."""
    return _choose("attend_part", q, k, v, Mask(False), scale, implementation).name in MERGING


def merge_parts(a: Part, b: Part) -> Part:
    """Attention over the keys of both: lse = log(e^lse_a + e^lse_b), o = e^(lse_a - lse) o_a + ...; fp32."""
    top = jnp.maximum(a.lse, b.lse)
    keep, add = jnp.exp(a.lse - top), jnp.exp(b.lse - top)
    total = keep + add

    def weigh(part: Part, weight: Float[Array, "B H T"]) -> Float[Array, "B T H K"]:
        return part.o.astype(jnp.float32) * (weight / total).swapaxes(1, 2)[..., None]

    return Part(weigh(a, keep) + weigh(b, add), top + jnp.log(total))


def _attend(
    entry: Implementation,
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    scale: float | None,
    onto: Part | None,
    rounded: bool,
) -> Part:
    if entry.name in MERGING:
        return Part(*entry.run(q, k, v, mask, scale=scale, onto=onto, rounded=rounded))
    part = Part(*entry.run(q, k, v, mask, scale=scale))
    part = part if onto is None else merge_parts(onto, part)
    return part._replace(o=part.o.astype(q.dtype)) if rounded else part


def _attend_runs(
    q: Array,
    k: Array,
    v: Array,
    lengths: Int[Array, "B R"],
    scale: float | None,
    onto: Part | None,
    rounded: bool,
    implementation: Choice,
) -> Part:
    """Runs of queries as rows, of which a merging kernel takes several to a row of keys."""
    runs, mask = lengths.shape[1], Mask(False, kv_lengths=lengths.reshape(-1))

    def fold(x: Array) -> Array:
        return x.reshape(x.shape[0] * runs, -1, *x.shape[2:])

    def unfold(x: Array) -> Array:
        return x.reshape(x.shape[0] // runs, -1, *x.shape[2:])

    q = fold(q)
    if onto is not None:
        onto = Part(fold(onto.o), fold(onto.lse.swapaxes(1, 2)).swapaxes(1, 2))
    entry = _choose("attend_part", q, k, v, mask, scale, implementation)
    if entry.name not in MERGING:
        k, v = (jnp.repeat(x, runs, 0) for x in (k, v))
    part = _attend(entry, q, k, v, mask, scale, onto, rounded)
    return Part(unfold(part.o), unfold(part.lse.swapaxes(1, 2)).swapaxes(1, 2))


def _choose(
    op: str, q: Any, k: Any, v: Any, mask: Mask, scale: float | None, implementation: Choice
) -> Implementation:
    table = FORWARD if op == "attend_part" else BACKWARD
    return _dispatch.choose(op, table, implementation, _dispatch.current_device(), q, k, v, mask, scale=scale)


def _check_onto(q: Array, onto: Part | None) -> None:
    lse = (q.shape[0], q.shape[2], q.shape[1])
    if onto is not None and (onto.o.shape != q.shape or onto.lse.shape != lse):
        raise ValueError(
            f"onto must be of the same queries, o {q.shape} and lse {lse}, got {onto.o.shape}, {onto.lse.shape}"
        )


def _check_runs(q: Array, lengths: Array, mask: Mask) -> None:
    rows, runs = lengths.shape
    if rows != q.shape[0] or not runs or q.shape[1] % runs:
        raise ValueError(
            f"kv_lengths {lengths.shape} are of {rows} rows and {runs} equal runs of their queries, got q {q.shape}: "
            "pass one length a row, or runs apart"
        )
    others = ("window", "q_segment_ids", "q_lengths")
    masks = ["causal"] * mask.causal + [name for name in others if getattr(mask, name) is not None]
    if masks:
        raise ValueError(f"kv_lengths {lengths.shape} of runs go with no other mask, got {', '.join(masks)}")
