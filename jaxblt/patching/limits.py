"""Boundaries within one block, made of rules in parallel: no step waits for the byte before.

A patch that starts at i determines where the next one starts, whatever came earlier. So the starts are the
chain 0, next[0], next[next[0]], ...; its k-th element comes from the binary digits of k and log2(S) gathers
of next, next∘next, ... (pointer doubling), where a walk along the bytes would take S steps one after the
other.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.runtime import count_below


def next_from_candidates(
    candidates: Bool[Array, "*R S"], *, shortest: int, longest: int
) -> Int[Array, "*R S"]:
    """Return the next patch's start after one at i: behind the first candidate in the limits."""
    size = candidates.shape[-1]
    at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), candidates.shape)
    first_from = jax.lax.cummin(jnp.where(candidates, at, size - 1), axis=candidates.ndim - 1, reverse=True)
    shifted = jnp.concatenate([first_from, jnp.full_like(first_from[..., : shortest - 1], size - 1)], -1)
    end = shifted[..., shortest - 1 :]
    return jnp.minimum(end, jnp.minimum(at + (longest - 1), size - 1)) + 1


def next_from_budget(
    spent: Int[Array, "*R S"], budget: Int[Array, ""], *, shortest: int, longest: int
) -> Int[Array, "*R S"]:
    """Return the next patch's start after one at i: behind the first t that exceeds the budget.

    t is the first with spent[i] + ... + spent[t] > budget, within the limits of length.
    """
    size = spent.shape[-1]
    total = jnp.concatenate([jnp.zeros_like(spent[..., :1]), jnp.cumsum(spent, -1, dtype=jnp.int32)], -1)
    # Keep the sum inside int32 by the minimum, for a budget larger than what is left.
    target = total[..., :-1] + jnp.minimum(budget, total[..., -1:] - total[..., :-1])
    find = jnp.vectorize(partial(count_below, equal=True), signature="(n),(s)->(s)")
    at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), spent.shape)
    end = jnp.clip(find(total, target), at + shortest, at + longest)
    return jnp.minimum(end, size)


def chain(
    following: Int[Array, "*R n"], origin: Int[Array, "*R"], *, longest_chain: int
) -> Bool[Array, "*R n"]:
    """Mark origin, following[origin], following[following[origin]], ...

    Args:
      following: where each element leads; the chain's end leads to itself.
      origin: the first element.
      longest_chain: steps after which every chain has reached its end.
    """
    step = jnp.arange(longest_chain + 1, dtype=jnp.int32)

    def one(jump: Int[Array, "n"], first: Int[Array, ""]) -> Bool[Array, "n"]:
        at = jnp.broadcast_to(first, step.shape)
        for bit in range(longest_chain.bit_length()):
            at = jnp.where((step >> bit) & 1 == 1, jump[at], at)
            jump = jump[jump]
        return jnp.zeros(jump.shape, bool).at[at].set(True)

    return jnp.vectorize(one, signature="(n),()->(n)")(following, origin)


def closes_from_next(following: Int[Array, "*R S"], *, shortest: int) -> Bool[Array, "*R S"]:
    """Mark last bytes of the patches that start at 0 and go on to `following`.

    The last one ends at the block's edge.
    """
    size = following.shape[-1]
    looped = jnp.concatenate([following, jnp.full_like(following[..., :1], size)], -1)
    origin = jnp.zeros(following.shape[:-1], jnp.int32)
    # Allow one step more than patches of the shortest length: a document's first byte may be a patch of its own.
    return chain(looped, origin, longest_chain=-(-size // shortest) + 1)[..., 1:]


def cut_long(candidates: Bool[Array, "*R S"], longest: int) -> Bool[Array, "*R S"]:
    """Mark the candidates, and every `longest` bytes since the last one.

    This is the case without a least length.
    """
    at = jnp.broadcast_to(jnp.arange(candidates.shape[-1], dtype=jnp.int32), candidates.shape)
    begins = jnp.concatenate([jnp.ones_like(candidates[..., :1]), candidates[..., :-1]], -1)
    start = jax.lax.cummax(jnp.where(begins, at, 0), axis=candidates.ndim - 1)
    return candidates | ((at - start + 1) % longest == 0)
