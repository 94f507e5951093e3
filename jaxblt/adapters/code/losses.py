"""Losses of codes and of rank directions, sown into `losses`."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxblt.side_outputs import sow_loss
from jaxblt.validation import check_bounds, check_fields


@dataclasses.dataclass(frozen=True)
class AdapterLosses:
    """Weights of what is added to the loss; 0 leaves a part out, and only that of the entropy may be negative.

    Shares p are the numbers of a bank before the transforms, or softmax(c) of a free code. Means are over tokens that
    have a code.

    Attributes:
      entropy: of the negative mean entropy of p, in nats; a negative weight makes codes sharper instead.
      balance: of E sum_e f_e P_e, with f_e the share of tokens whose largest number is e and P_e the mean of p_e
        (Switch, 2101.03961, eq. 4); 1 for an even use of all, E for one expert alone.
      flip: of the mean of |c_k - c_{k-1}|_1 / 2 over neighbouring tokens between which the code may change; 1 where a
        one-hot code changes.
      decorrelation: of the mean square covariance of two numbers of c.
      orthogonality: of the mean square product of two directions, columns of V and rows of U, over all pairs; summed
        over sites and layers. Lengths are left alone, as U starts at 0.
    """

    entropy: float = 0.0
    balance: float = 0.0
    flip: float = 0.0
    decorrelation: float = 0.0
    orthogonality: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "balance", "flip", "decorrelation", "orthogonality", least=0)

    @property
    def of_codes(self) -> dict[str, float]:
        """Weights of the losses that a router's code has, by name."""
        return {name: w for name, w in dataclasses.asdict(self).items() if name != "orthogonality" and w}


def sow_code_losses(
    router: nn.Module,
    weights: AdapterLosses,
    before: Float[Array, "B T E"],
    code: Float[Array, "B T E"],
    known: Bool[Array, "B T"],
    changes: Bool[Array, "B T"],
) -> None:
    """Sow the losses of a code.

    Args:
      router: which sows.
      weights: of the losses.
      before: shares of the code before its transforms.
      code: behind them.
      known: tokens that have a code.
      changes: where the code may be another one than at the token before, of the same document.
    """
    tokens = known.astype(jnp.float32)
    found = {
        "entropy": lambda: -mean_entropy(before, tokens),
        "balance": lambda: imbalance(before, tokens),
        "flip": lambda: mean_flip(code, known, changes),
        "decorrelation": lambda: correlation(code, tokens),
    }
    for name, weight in weights.of_codes.items():
        sow_loss(router, f"code_{name}", jnp.float32(weight) * found[name]())


def mean_entropy(shares: Float[Array, "B T E"], tokens: Float[Array, "B T"]) -> Float[Array, ""]:
    """Return the mean entropy in nats of shares that sum to 1, over the tokens with weight."""
    # Keep the logarithm finite: a share may be rounded to 0
    entropy = -jnp.sum(shares * jnp.log(jnp.maximum(shares, jnp.finfo(jnp.float32).tiny)), -1)
    return jnp.sum(entropy * tokens) / jnp.maximum(jnp.sum(tokens), 1)


def imbalance(shares: Float[Array, "B T E"], tokens: Float[Array, "B T"]) -> Float[Array, ""]:
    """Return E sum_e f_e P_e."""
    count, numbers = jnp.maximum(jnp.sum(tokens), 1), shares.shape[-1]
    largest = jax.nn.one_hot(jnp.argmax(shares, -1), numbers, dtype=jnp.float32)
    used, mean = (jnp.einsum("bte,bt->e", x, tokens) / count for x in (largest, shares))
    return numbers * jnp.sum(used * mean)


def mean_flip(
    code: Float[Array, "B T E"], known: Bool[Array, "B T"], changes: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Return the mean total variation from a code to the next."""
    size = jnp.sum(jnp.abs(code[:, 1:] - code[:, :-1]), -1) / 2
    pairs = (changes[:, 1:] & known[:, 1:] & known[:, :-1]).astype(jnp.float32)
    return jnp.sum(size * pairs) / jnp.maximum(jnp.sum(pairs), 1)


def correlation(code: Float[Array, "B T E"], tokens: Float[Array, "B T"]) -> Float[Array, ""]:
    """Return the mean square covariance of two different numbers of a code; 0 for a single number or token."""
    count = jnp.maximum(jnp.sum(tokens), 1)
    mean = jnp.einsum("bte,bt->e", code, tokens) / count
    apart = (code - mean[None, None]) * tokens[..., None]
    covariance = jnp.einsum("bte,btf->ef", apart, apart) / count
    return mean_square_beside(covariance)


def mean_square_beside(matrix: Float[Array, "E E"]) -> Float[Array, ""]:
    """Return the mean square of a matrix beside its diagonal; 0 for one number."""
    numbers = matrix.shape[0]
    beside = jnp.where(jnp.eye(numbers, dtype=bool), 0.0, matrix)
    return jnp.sum(beside * beside) / max(numbers * (numbers - 1), 1)
