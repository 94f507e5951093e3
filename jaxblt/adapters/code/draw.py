"""A policy over the experts of a bank: in training it draws one a chunk, else it takes the likeliest."""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.code.pools import Smooth

POLICY = "policy"
"""The rng that experts are drawn with, and the collection that holds experts which were drawn before."""
CHOICE = "choice"
"""What routers sow their `Choice` as, into Flax's `intermediates`."""


@flax.struct.dataclass
class Choice:
    """Choice of a policy at each token of whole rows.

    Attributes:
      expert: in force at the token; -1 where there is none yet.
      log_p: log-probability of that expert under the router that ran; 0 where there is none.
      starts: where an expert is chosen, which holds until the next start or the document's end.
    """

    expert: Int[Array, "B T"]
    log_p: Float[Array, "B T"]
    starts: Bool[Array, "B T"]


@dataclasses.dataclass(frozen=True)
class Draw:
    """One-hot code of a bank, whose numbers, over their sum, are the probabilities p of its experts.

    Where an rng "policy" is passed to `apply`, an expert is drawn where the code may change (Gumbel-max), and holds
    until it may change again: one a chunk, a token or a document, by the router's level. Where the collection "policy"
    brings experts, these are taken. Else it is the expert with the largest p. Gradients of the code are those of p
    (straight through, 1308.3432, sec. 4). The choice is sown into `intermediates` as a `Choice`.
    """

    def check(self, adapter: Any) -> None:
        """Raise ValueError for a code that is no bank's, or that each block has of its own."""
        if adapter.blocks is None:
            raise ValueError(
                "Draw chooses an expert of a bank, and blocks is None: set the number of experts"
            )
        if adapter.of_blocks:
            raise ValueError(
                "Draw's choices have one reward, and RouterConfig.per = 'block' makes choices in each block: set "
                "per='stack'"
            )

    def init_state(self, batch_size: int, numbers: int) -> tuple[()]:
        """Return no state: calls with a state take the likeliest expert."""
        return ()

    def apply(
        self, router: nn.Module, name: str, code: Float[Array, "B T E"], moment: Any, rows: Any, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Return the one-hot code; the fallback where there is no code yet.

        Raises:
          ValueError: an rng "policy" is passed to a call with a state.
        """
        numbers, starts = code.shape[-1], moment.changes & moment.known
        logs = jax.nn.log_softmax(jnp.log(jnp.maximum(code, jnp.finfo(jnp.float32).tiny)))
        if router.has_variable(POLICY, name):
            expert = router.get_variable(POLICY, name)
        elif router.has_rng(POLICY):
            if rows.clock is not None:
                raise ValueError(
                    "an rng 'policy' draws experts of whole rows, and the call has a state: leave it out"
                )
            expert = _drawn(router.make_rng(POLICY), logs, starts, rows)
        else:
            expert = jnp.argmax(logs, -1).astype(jnp.int32)
        expert = jnp.where(moment.known, expert, -1)
        if router.is_mutable_collection(POLICY) and not router.is_initializing():
            router.put_variable(POLICY, name, expert)
        one = (expert[..., None] == jnp.arange(numbers, dtype=jnp.int32)[None, None]).astype(code.dtype)
        router.sow(
            "intermediates", CHOICE, Choice(expert, jnp.sum(jnp.where(one > 0, logs, 0.0), -1), starts)
        )
        hard = one + (code - jax.lax.stop_gradient(code))
        return jnp.where(moment.known[..., None], hard, code), state


def _drawn(
    key: Array, logs: Float[Array, "B T E"], starts: Bool[Array, "B T"], rows: Any
) -> Int[Array, "B T"]:
    """Draw an expert at each start, which holds over the tokens behind it."""
    noisy = jax.lax.stop_gradient(logs) + jax.random.gumbel(key, logs.shape, jnp.float32)
    one = jax.nn.one_hot(jnp.argmax(noisy, -1), logs.shape[-1], dtype=jnp.float32)
    keep = jnp.where(starts, 0.0, 1.0)[..., None]
    held, _ = rows.run(Smooth(), (keep, jnp.where(starts[..., None], one, 0.0)), None)
    return jnp.argmax(held, -1).astype(jnp.int32)


def choices(side: Any) -> list[Choice]:
    """Return the choices of every policy that sowed into `intermediates` in a pass, in a fixed order."""
    leaves = jax.tree.leaves(side.get("intermediates", {}), is_leaf=lambda node: isinstance(node, Choice))
    return [leaf for leaf in leaves if isinstance(leaf, Choice)]
