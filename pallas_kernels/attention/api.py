"""The public functions of attention, and the table of what runs them."""

from dataclasses import replace
from typing import Any, Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import _dispatch
from pallas_kernels._arguments import checked
from pallas_kernels._compat import is_symbolic
from pallas_kernels._dispatch import Device, Implementation
from pallas_kernels._ranges import Range, check_values
from pallas_kernels.attention import cudnn, reference, triton_gpu, triton_why, xla
from pallas_kernels.attention.arguments import check_arguments, without_padding, zero_where_not
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.rules import is_static
from pallas_kernels.attention.schedule import hides_nothing
from pallas_kernels.attention.scores import Score, check_score

TABLE = (
    Implementation("cudnn", cudnn.attention, cudnn.why_not, triton_why.why_first),
    Implementation("triton", triton_gpu.attention, triton_why.why_not),
    Implementation("xla", xla.attention),
    Implementation("reference", reference.attention),
)
"""Fastest first."""

RANGES = {"alibi_slopes": Range()}
"""Of arguments."""


@checked
def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    alibi_slopes: Float[Array, "H"] | None = None,
    scale: float | None = None,
    score: Score | None = None,
    implementation: Literal["cudnn", "triton", "xla", "reference"] | None = None,
) -> Float[Array, "B T H K"]:
    """Compute softmax attention: o_t = sum_s softmax_s(scale q_t.k_s - slope (pos_t - pos_s)) v_s over the keys seen.

    The softmax is fp32 whatever the dtype; the products are in q's dtype, accumulated in fp32. A query that
    sees no key gives 0. What padding and holes hold is not read, not even if it is NaN.

    Args:
      q: queries, H heads of size K.
      k: keys, G heads; H is a multiple of G and heads h*H/G .. share one.
      v: values, G heads.
      mask: which keys a query sees, such as `masks.CAUSAL & masks.documents(segment_ids) & presets.bigbird()`.
        Intervals, rules and ALiBi compare indices unless it has positions, which T != S needs. Pairs of blocks that a
        rule leaves empty are not visited.
      alibi_slopes: slope of each head (Press et al., 2108.12409).
      scale: of the scores; K**-0.5 if None.
      score: becomes of each score, such as `SoftCap(50.0)`; see `scores.Score`.
      implementation: which to run; the best for the device and these arguments if None.

    Raises:
      ValueError: shapes or dtypes do not fit together, or the implementation cannot run this here.
    """
    check_arguments(q, k, v, mask, alibi_slopes)
    check_values("attention", RANGES, {"alibi_slopes": alibi_slopes})
    check_score(score)
    mask = _without_idle_rule(mask, q.shape[1], k.shape[1])
    options: dict[str, Any] = {"alibi_slopes": alibi_slopes, "scale": scale}
    options |= {} if score is None else {"score": score}
    entry = _dispatch.choose(
        "attention", TABLE, implementation, _dispatch.current_device(), q, k, v, mask, **options
    )
    q, k, v, q_valid = without_padding(q, k, v, mask)
    return zero_where_not(q_valid, entry.run(q, k, v, mask, **options))


def _without_idle_rule(mask: Mask, queries: int, keys: int) -> Mask:
    """Return the mask without a static rule that hides nothing of such rows: kernels without rules are faster."""
    rule, named = mask.rule, not (is_symbolic(queries) or is_symbolic(keys))
    if rule is None or not named or not is_static(rule) or mask.positions is not None:
        return mask
    return replace(mask, rule=None) if hides_nothing(rule, mask.interval, queries, keys) else mask


@checked
def split_attention(
    q: Float[Array, "B t H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    runs: tuple[tuple[int, ...], ...],
    device: Int[Array, ""],
    scale: float | None = None,
) -> Float[Array, "B t H K"]:
    """Compute `attention` of the queries that one of several devices holds to all keys, under a static rule.

    Args:
      q: queries of this device: its runs, one after another.
      k: keys of whole rows, or what stands for blocks of their tokens.
      v: values, likewise.
      mask: as for whole rows; segment ids are those of these queries and of all keys.
      runs: for each device the numbers of its runs of queries, counted along the row; all are of one length.
      device: the number of this device, which may be known only when the program runs.
      scale: of the scores; K**-0.5 if None.

    Raises:
      ValueError: no kernel takes this here, see `explain_split`.
    """
    if reason := explain_split(q, k, mask, runs):
        raise ValueError(
            f"queries of several devices are not split: {reason}; call attention with masks.positions"
        )
    q, k, v, q_valid = without_padding(q, k, v, mask)
    return zero_where_not(q_valid, triton_gpu.split_attention(q, k, v, mask, runs, device, scale=scale))


def explain_split(
    q: jax.ShapeDtypeStruct | Array,
    k: jax.ShapeDtypeStruct | Array,
    mask: Mask,
    runs: tuple[tuple[int, ...], ...],
) -> str | None:
    """Say why `split_attention` does not run such arguments here, or None if it does."""
    if _dispatch.has_reference_ops():
        return "reference_ops asks for operations without gradients of their own"
    return triton_why.why_not_split(_dispatch.current_device(), q, k, mask, runs)


@checked
def attention_with_lse(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    alibi_slopes: Float[Array, "H"] | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """Compute `attention` over some of the keys, with what it takes to merge it with the rest.

    Returns:
      The output and lse = log sum_s exp(score), both fp32 and both differentiable; EMPTY_LSE where no key is
      visible. Results over chunks of the keys merge as sum_i exp(lse_i - lse) o_i, lse = logsumexp_i lse_i.

    Raises:
      ValueError: as `attention`.
    """
    check_arguments(q, k, v, mask, alibi_slopes)
    check_values("attention", RANGES, {"alibi_slopes": alibi_slopes})
    q, k, v, q_valid = without_padding(q, k, v, mask)
    run = (reference if _dispatch.has_reference_ops() else xla).attention_with_lse
    o, lse = run(q, k, v, mask, alibi_slopes=alibi_slopes, scale=scale)
    return zero_where_not(q_valid, o), lse


@checked
def explain(
    q: jax.ShapeDtypeStruct | Array,
    k: jax.ShapeDtypeStruct | Array,
    mask: Mask,
    *,
    alibi: bool = False,
    score: Score | None = None,
    device: Device | None = None,
) -> str:
    """Say which implementation `attention` runs for such arguments, and why not the faster ones.

    Args:
      q: queries, or their shape and dtype.
      k: keys, likewise.
      mask: of arrays, or of shapes and dtypes.
      alibi: whether there are slopes.
      score: as for `attention`.
      device: what it would run on; this machine's default if None.
    """
    slopes = jax.ShapeDtypeStruct((q.shape[2],), "float32") if alibi else None
    return _dispatch.explain_call(attention, device, q, k, k, mask, alibi_slopes=slopes, score=score)
