"""What cuDNN's kernels for documents in one buffer do, densely, from the operands that JAX hands to them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn


class Forward:
    """Stands for JAX's forward primitive: NaN in all that the kernel leaves unwritten."""

    @staticmethod
    @jax.numpy_rank_promotion("allow")
    @jax.numpy_dtype_promotion("standard")
    def bind(*operands: Any, **options: Any) -> tuple[Any, Any]:
        q, k, v = (_flat(x) for x in operands[:3])
        places = _places(*operands[:2], *operands[4:8])
        p, lse = _softmax(q, k, places, options)
        o = jnp.einsum("hts,shk->thk", p, _repeat(v, q))
        rows = jnp.where(places.q_index < q.shape[0], places.q_index, -1)
        sums = jnp.where(rows[..., None] < 0, jnp.nan, lse.T[rows]).swapaxes(1, 2)
        return _written(o, places.q_owner).reshape(operands[0].shape).astype(operands[0].dtype), sums


class Backward:
    """Stands for JAX's backward primitive."""

    @staticmethod
    @jax.numpy_rank_promotion("allow")
    @jax.numpy_dtype_promotion("standard")
    def bind(*operands: Any, **options: Any) -> tuple[Any, ...]:
        q, k, v, o, do = (_flat(x) for x in (*operands[:3], *operands[11:13]))
        places, sums = _places(*operands[:2], *operands[4:8]), operands[10]
        lse = jnp.zeros((q.shape[0], q.shape[1])).at[places.q_index].set(sums.swapaxes(1, 2), mode="drop").T
        p, _ = _softmax(q, k, places, options, lse)
        ds = p * (jnp.einsum("thk,shk->hts", do, _repeat(v, q)) - jnp.einsum("thk,thk->ht", do, o)[..., None])
        ds *= options["scale"]
        dq = jnp.einsum("hts,shk->thk", ds, _repeat(k, q))
        dk, dv = (_sum(jnp.einsum("hts,thk->shk", a, b), k) for a, b in ((ds, q), (p, do)))
        found = (dq, places.q_owner), (dk, places.kv_owner), (dv, places.kv_owner)
        return tuple(
            _written(x, owner).reshape(like.shape).astype(like.dtype)
            for (x, owner), like in zip(found, operands, strict=False)
        )


class _Places:
    def __init__(self, starts: Any, lengths: Any, size: int, longest: int) -> None:
        place = jnp.arange(longest)
        inside = place < lengths[:, None]
        self.index = jnp.where(inside, starts[:, None] + place, size)
        slots = jnp.broadcast_to(jnp.arange(len(starts))[:, None], self.index.shape)
        self.owner = jnp.full(size, -1).at[self.index].set(slots, mode="drop")


class _Both:
    def __init__(self, q: _Places, kv: _Places) -> None:
        self.q_index, self.q_owner, self.kv_owner = q.index, q.owner, kv.owner


def _places(q: Any, k: Any, q_lengths: Any, kv_lengths: Any, q_starts: Any, kv_starts: Any) -> _Both:
    """From lengths [R, M] in tokens and starts [R, M + 1] in elements, read as one list."""

    def of(x: Any, lengths: Any, starts: Any) -> _Places:
        stride, count = x.shape[2] * x.shape[3], lengths.size
        return _Places(
            starts.reshape(-1)[:count] // stride, lengths.reshape(-1), x.shape[0] * x.shape[1], x.shape[1]
        )

    return _Both(of(q, q_lengths, q_starts), of(k, kv_lengths, kv_starts))


def _softmax(q: Any, k: Any, places: _Both, options: dict[str, Any], lse: Any = None) -> tuple[Any, Any]:
    scores = jnp.einsum("thk,shk->hts", q, _repeat(k, q)) * options["scale"]
    seen = (places.q_owner[:, None] == places.kv_owner[None]) & (places.q_owner[:, None] >= 0)
    distance = jnp.arange(q.shape[0])[:, None] - jnp.arange(k.shape[0])[None]
    if options["mask_type"] == cudnn.MaskType.PADDING_CAUSAL:
        seen &= distance >= 0
    if options["sliding_window_length"] is not None:
        seen &= distance < options["sliding_window_length"]
    scores = jnp.where(seen, scores, -1e30)
    if lse is None:
        top = jnp.max(scores, -1)
        lse = top + jnp.log(jnp.sum(jnp.exp(scores - top[..., None]), -1))
    return jnp.where(seen, jnp.exp(scores - lse[..., None]), 0.0), lse


def _flat(x: Any) -> Any:
    return jnp.nan_to_num(x.reshape(-1, *x.shape[2:]).astype(jnp.float32), nan=1e3)


def _repeat(x: Any, q: Any) -> Any:
    return jnp.repeat(x, q.shape[1] // x.shape[1], axis=1)


def _sum(x: Any, like: Any) -> Any:
    return x.reshape(x.shape[0], like.shape[1], -1, x.shape[2]).sum(2)


def _written(x: Any, owner: Any) -> Any:
    return jnp.where(owner[:, None, None] < 0, jnp.nan, x)
