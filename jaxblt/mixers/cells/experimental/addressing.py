"""Addressed memory of the neural Turing machine: where its heads stand, and how they erase, add and read (1410.5401).

Pure functions of one token, in fp32. A memory `[B, H, N, M]` has N slots of width M; each of its A addresses is a
distribution over the slots.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EMPTY = 1e-2
"""Length below which a slot or a key matches nothing. Keeps the cosine's gradient finite at empty slots."""
LEAST_WEIGHT = 1e-8
"""Added to a weight before its logarithm. Keeps gradients finite at slots without weight."""
SHIFTS = 3
"""Moves that are possible at a step: one slot back, none, one forward."""
STRONG, SURE = 3.0, 2.0
"""Of sharp addresses: the numbers of beta = 3 and gamma = 4, and that of the likeliest move, which gives it 79 %."""


@flax.struct.dataclass
class Focus:
    """The parts that an address is made from, each bounded to its range already.

    Attributes:
      key: k, what to look for.
      strength: beta > 0, how sharply.
      gate: g in 0..1, the share of what the key finds; the rest is where the address was.
      shift: s, a distribution over the moves -1, 0 and 1.
      sharpness: gamma >= 1, the power of the weights.
    """

    key: Float[Array, "B H A M"]
    strength: Float[Array, "B H A"]
    gate: Float[Array, "B H A"]
    shift: Float[Array, "B H A 3"]
    sharpness: Float[Array, "B H A"]


def focus_size(width: int) -> int:
    """Return how many numbers `focus` needs for an address."""
    return width + 3 + SHIFTS


def first_focus(width: int, move: int) -> Float[Array, " F"]:
    """Return a controller's biases, for `focus`, of a sharp address that moves by `move`, -1, 0 or 1.

    Machines that start so copy rows longer than in training. `NTMConfig` starts with biases of 0: gamma = 4 amplifies
    differences between slots with each token, and gradients of long rows whose addresses are not sure explode.
    """
    moves = jnp.zeros(SHIFTS).at[1 + move].set(SURE)
    return jnp.concatenate([jnp.zeros(width), jnp.array([STRONG, 0, STRONG]), moves])


def focus(raw: Float[Array, "B H A F"], width: int) -> Focus:
    """Bound a controller's numbers: key, beta, g, s, gamma in that order (sec. 3.3)."""
    key, strength, gate, sharpness, shift = jnp.split(raw, [width, width + 1, width + 2, width + 3], -1)
    return Focus(
        key=key,
        strength=jax.nn.softplus(strength[..., 0]),
        gate=jax.nn.sigmoid(gate[..., 0]),
        shift=jax.nn.softmax(shift, -1),
        sharpness=1 + jax.nn.softplus(sharpness[..., 0]),
    )


def place(
    memory: Float[Array, "B H N M"], before: Float[Array, "B H A N"], asked: Focus
) -> Float[Array, "B H A N"]:
    """Move addresses to where they are asked (sec. 3.3.1 and 3.3.2, eq. 5 to 9).

    w_c = softmax(beta cos(k, M)), w_g = g w_c + (1 - g) w_before, w_s(i) = sum_j w_g(i - j) s(j) round the slots,
    w = w_s^gamma / sum w_s^gamma.
    """
    found = jax.nn.softmax(asked.strength[..., None] * likeness(asked.key, memory), -1)
    gated = asked.gate[..., None] * found + (1 - asked.gate[..., None]) * before
    back, stay, on = (asked.shift[..., i, None] for i in range(SHIFTS))
    moved = back * jnp.roll(gated, -1, -1) + stay * gated + on * jnp.roll(gated, 1, -1)
    return jax.nn.softmax(asked.sharpness[..., None] * jnp.log(moved + LEAST_WEIGHT), -1)


def likeness(key: Float[Array, "B H A M"], memory: Float[Array, "B H N M"]) -> Float[Array, "B H A N"]:
    """Return the cosine of keys and slots, 0 for an empty slot.

    It is k . m / sqrt((|k|^2 + e^2)(|m|^2 + e^2)) with e = `EMPTY`.
    """
    return exact_product("bham,bhnm->bhan", _unit(key), _unit(memory))


def erase_and_add(
    memory: Float[Array, "B H N M"],
    weights: Float[Array, "B H N"],
    erase: Float[Array, "B H M"],
    add: Float[Array, "B H M"],
) -> Float[Array, "B H N M"]:
    """Return M (1 - w e^T) + w a^T (sec. 3.2, eq. 3 and 4)."""
    where = weights[..., None]
    return memory * (1 - where * erase[..., None, :]) + where * add[..., None, :]


def recall(memory: Float[Array, "B H N M"], weights: Float[Array, "B H N"]) -> Float[Array, "B H M"]:
    """Return r = sum_i w(i) M(i) (sec. 3.1, eq. 2)."""
    return exact_product("bhn,bhnm->bhm", weights, memory)


def _unit(x: Float[Array, "... M"]) -> Float[Array, "... M"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EMPTY**2)


def exact_product(equation: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute an einsum at the highest precision.

    What is compared with a threshold must not depend on the device's default.
    """
    return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST)
