"""Routers trained by reinforcement: the reward of a choice of expert, REINFORCE and PPO.

An action a_k is the expert that a policy (`jaxblt.adapters.Draw`) draws for chunk k. Its reward is

    r_k = sum over the scored bytes of chunk k of (base nats - adapted nats) - price [a_k is not a_{k-1}]

in nats. Base nats are those of the model without adapters: they do not depend on actions, and take away how hard the
text is. A policy maximises the mean reward a scored byte, so its loss has the unit of the language model's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.code.draw import Choice
from jaxblt.adapters.code.router import ROUTER
from jaxblt.validation import check_bounds, check_fields, check_read


@dataclass(frozen=True)
class PolicyConfig:
    """Settings of a policy that learns from rewards.

    A choice influences later chunks too: its update enters keys, values and states that they read, and it decides
    whether the next chunk's expert is a flip. The credit of chunk k is therefore the return
    G_k = r_k + discount r_{k+1} + discount^2 r_{k+2} + ... to its document's end. With discount 1 the gradient of the
    expected reward is exact. That sum holds the noise of every later draw, while the influence dies out fast. A smaller
    discount trades a bias for less variance; 0 credits a chunk with its own bytes alone, as a contextual bandit.

    The baseline of a row is the mean return of all choices in the other rows of the (micro-)batch, 0 for a single row.
    Rows are drawn apart, so that it leaves the expectation of the gradient as it is.

    Attributes:
      method: "reinforce" (Williams 1992, "Simple statistical gradient-following algorithms", sec. 2) minimises
        -A log p(a) with A = G - baseline. "ppo" (Schulman et al., 1707.06347, eq. 7) minimises
        -min(q A, clip(q, 1 - clip, 1 + clip) A) with q = p(a) / p_old(a).
      discount: of the return.
      flip_price: in nats, of a choice that differs from the one before it in the document.
      clip: of "ppo".
      refresh: of "ppo", updates for which the router that acts, p_old, stays as it is. Each update reads rows of its
        own: algorithm 1 with a phase of so many minibatches and one epoch.
    """

    method: Literal["reinforce", "ppo"] = "reinforce"
    discount: float = 0.5
    flip_price: float = 0.0
    clip: float = 0.2
    refresh: int = 4

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "discount", least=0, most=1)
        check_bounds(self, "flip_price", least=0)
        check_bounds(self, "clip", above=0, below=1)
        check_bounds(self, "refresh", least=1)
        for name in ("clip", "refresh"):
            check_read(self, name, needed="method='ppo'", is_read=self.method == "ppo")


def surrogate(
    config: PolicyConfig,
    now: Sequence[Choice],
    old: Sequence[Choice],
    gain: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return the loss of a batch's choices, summed over them, and sums to report.

    Gradients are those of `now.log_p`; rewards, returns and baselines have none.

    Args:
      config: of the policy.
      now: the choices of every router, with log-probabilities under the routers that learn.
      old: the same choices, under the routers that drew them.
      gain: base nats - adapted nats of each target; 0 where it is not scored.
      segment_ids: of the rows.

    Returns:
      The loss; and sums of rewards ("reward", nats), choices ("choices"), flips, and for "ppo" of the
      estimate q - 1 - log q >= 0 of KL(old || now) ("policy_kl") and of choices beyond the clip ("clipped").
    """
    loss, sums = jnp.float32(0), {}
    for ours, theirs in zip(now, old, strict=True):
        part, found = _surrogate(config, ours, theirs, jax.lax.stop_gradient(gain), segment_ids)
        loss, sums = loss + part, {name: sums.get(name, 0) + value for name, value in found.items()}
    return loss, sums


def _surrogate(
    config: PolicyConfig, now: Choice, old: Choice, gain: Float[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    made = now.starts & (segment_ids != 0)
    flips = find_flips(now.expert, made, segment_ids).astype(jnp.float32)
    reward = gain - jnp.float32(config.flip_price) * flips
    advantage = advantages(returns(reward, made, segment_ids, config.discount), made)
    log_q = jnp.where(made, now.log_p - jax.lax.stop_gradient(old.log_p), 0.0)
    sums = {"reward": jnp.sum(reward), "choices": jnp.sum(made, dtype=jnp.float32), "flips": jnp.sum(flips)}
    if config.method == "reinforce":
        return -jnp.sum(advantage * jnp.where(made, now.log_p, 0.0)), sums
    loss = -jnp.sum(clipped(log_q, advantage, config.clip))
    log_q = jax.lax.stop_gradient(log_q)
    beyond = jnp.abs(jnp.exp(log_q) - 1) > config.clip
    sums["policy_kl"] = jnp.sum(jnp.expm1(log_q) - log_q)
    return loss, sums | {"clipped": jnp.sum(beyond, dtype=jnp.float32)}


def clipped(log_q: Float[Array, "B T"], advantage: Float[Array, "B T"], clip: float) -> Float[Array, "B T"]:
    """Return min(q A, clip(q, 1 - clip, 1 + clip) A) of each choice (1707.06347, eq. 7); 0 where A is 0."""
    q = jnp.exp(log_q)
    return jnp.minimum(q * advantage, jnp.clip(q, 1 - clip, 1 + clip) * advantage)


def find_flips(
    expert: Int[Array, "B T"], made: Bool[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Bool[Array, "B T"]:
    """Mark choices that differ from the one before them in their document; its first is none."""
    was, is_now = expert[:, :-1], expert[:, 1:]
    flipped = made[:, 1:] & _same_document(segment_ids) & (was >= 0) & (is_now != was)
    return jnp.pad(flipped, ((0, 0), (1, 0)))


def returns(
    reward: Float[Array, "B T"], made: Bool[Array, "B T"], segment_ids: Int[Array, "B T"], discount: float
) -> Float[Array, "B T"]:
    """Return G at each choice: rewards of its tokens, and of later choices times powers of the discount."""
    follows = jnp.where(made[:, ::-1], jnp.float32(discount), 1.0)
    follows = jnp.pad(follows[:, :-1], ((0, 0), (1, 0)))
    joined = _same_document(segment_ids)[:, ::-1]
    return _decayed(reward[:, ::-1], follows, joined)[:, ::-1]


def _same_document(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B S"]:
    """Return whether a token, from the second on, is of the same document as the one before it."""
    return jnp.abs(segment_ids[:, 1:]) == jnp.abs(segment_ids[:, :-1])


def _decayed(
    x: Float[Array, "B T"], factor: Float[Array, "B T"], joined: Bool[Array, "B S"]
) -> Float[Array, "B T"]:
    """Return h_t = factor_t h_{t-1} + x_t, with h_{t-1} taken for 0 where t is not joined to the token before it."""
    keep = factor * jnp.pad(joined.astype(jnp.float32), ((0, 0), (1, 0)))

    def then(one: Any, two: Any) -> Any:
        return one[0] * two[0], one[1] * two[0] + two[1]

    return jax.lax.associative_scan(then, (keep, x), axis=1)[1]


def advantages(returned: Float[Array, "B T"], made: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Return G minus the mean G of the choices in other rows; 0 where no choice was made."""
    count, total = (jnp.sum(jnp.where(made, x, 0.0), 1, keepdims=True) for x in (1.0, returned))
    others = jnp.sum(count) - count
    baseline = (jnp.sum(total) - total) / jnp.maximum(others, 1)
    return jnp.where(made, returned - baseline, 0.0)


def only_routers(params: Any) -> Any:
    """Stop the gradients of all parameters but routers."""

    def live(path: tuple[Any, ...], leaf: Any) -> Any:
        return leaf if is_routers(path) else jax.lax.stop_gradient(leaf)

    return jax.tree_util.tree_map_with_path(live, params)


def is_routers(path: tuple[Any, ...]) -> bool:
    """Return whether a leaf of parameters is a router's."""
    return any(getattr(entry, "key", None) == ROUTER for entry in path)
