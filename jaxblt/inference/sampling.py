"""The draw of the next byte from logits."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxblt.data.vocab import BOE, BOS, EOS, OFFSET, PAD, VOCAB_SIZE
from jaxblt.random_keys import check_keys
from jaxblt.validation import check_bounds, check_fields

SMALLEST, LARGEST = 1e-6, 1e6
"""Bounds of temperature and top_p within which fp32 neither rounds them to 0 nor overflows."""


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """The settings by which a byte is drawn.

    Attributes:
      temperature: logits are divided by it, from 1e-6 to 1e6; 0 takes the most probable byte.
      top_k: keep the k most probable bytes; 0 keeps all.
      top_p: keep the fewest bytes whose probabilities sum to p (Holtzman et al., 1904.09751), from 1e-6 to 1.

    Raises:
      ValueError: a value lies outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.temperature != 0:
            why = ", or 0 to take the most probable byte"
            check_bounds(self, "temperature", least=SMALLEST, most=LARGEST, why=why)
        check_bounds(self, "top_k", least=0, why=": 0 keeps all bytes")
        check_bounds(self, "top_p", least=SMALLEST, most=1, why=": 1 keeps all bytes")


@flax.struct.dataclass
class SamplingArrays:
    """A `SamplingConfig` a row, as values that a compiled program reads: another setting compiles nothing."""

    temperature: Float[Array | np.ndarray, "B"]
    top_k: Int[Array | np.ndarray, "B"]
    top_p: Float[Array | np.ndarray, "B"]


def sampling_arrays(configs: Sequence[SamplingConfig]) -> SamplingArrays:
    """Return the settings of each row, side by side; the device is not asked, which may be busy."""
    return SamplingArrays(
        temperature=np.array([config.temperature for config in configs], np.float32),
        top_k=np.array([config.top_k for config in configs], np.int32),
        top_p=np.array([config.top_p for config in configs], np.float32),
    )


def sample(
    sampling: SamplingConfig | SamplingArrays,
    keys: Key[Array, "B"],
    logits: Float[Array, "B V"],
    *,
    alphabet: Bool[Array | np.ndarray, "B N"] | None = None,
) -> Int[Array, "B"]:
    """Draw the id of a byte or EOS a row.

    Never BOE, BOS or PAD, which no document holds after its first byte, nor an id of a larger vocabulary. Of ids with
    equal logits the smaller one is the more probable: `top_k` keeps k ids, and `top_p` the fewest, whatever is equal.

    Args:
      sampling: how, for all rows or for each.
      keys: one a row; an id depends on its own row's key, settings and logits only.
      logits: of all ids. A row whose logits are not finite draws an id without meaning, but none of these.
      alphabet: whether each of the ids may be drawn, see `alphabet_table`; None for all.

    Raises:
      ValueError: the keys' generator draws the rows of a batch from one key.
    """
    return sample_by(sampling, draw_noise(keys, logits.shape[-1]), logits, alphabet=alphabet)


def draw_noise(keys: Key[Array, "*N"], num_ids: int) -> Float[Array, "*N I"]:
    """Return what each key adds to the logits of the drawable ones of so many ids, for `sample_by`.

    A loop over bytes draws it for all of them ahead.

    Raises:
      ValueError: the keys' generator draws the rows of a batch from one key.
    """
    check_keys(keys)
    draw = partial(jax.random.gumbel, shape=_drawable(num_ids).shape, dtype=jnp.float32)
    return jax.vmap(draw)(keys.reshape(-1)).reshape(*keys.shape, len(_drawable(num_ids)))


def sample_by(
    sampling: SamplingConfig | SamplingArrays,
    noise: Float[Array, "B I"],
    logits: Float[Array, "B V"],
    *,
    alphabet: Bool[Array | np.ndarray, "B N"] | None = None,
) -> Int[Array, "B"]:
    """Draw as `sample` does, by the noise of the rows' keys."""
    if isinstance(sampling, SamplingConfig):
        sampling = sampling_arrays([sampling] * len(logits))
    drawable = _drawable(logits.shape[-1])
    logits = logits[:, drawable]
    if alphabet is not None:
        logits = jnp.where(alphabet[:, drawable], logits, -jnp.inf)
    return jnp.asarray(drawable)[_draw(sampling, noise, logits)]


def _drawable(num_ids: int) -> Int[np.ndarray, "I"]:
    """Return the ids that may be drawn, of so many.

    A logit of -inf for the others would not do: they would still be drawn where all logits are -inf or NaN.
    """
    ids = np.arange(min(num_ids, VOCAB_SIZE), dtype=np.int32)
    return np.setdiff1d(ids, (BOE, BOS, PAD))


def alphabet_table(alphabets: Sequence[bytes | None]) -> Bool[np.ndarray, "B N"]:
    """Return which ids the alphabet of each row allows: its bytes and EOS, or all for None."""
    table = np.ones((len(alphabets), VOCAB_SIZE), bool)
    for row, alphabet in zip(table, alphabets, strict=True):
        if alphabet is not None:
            row[:] = np.isin(np.arange(VOCAB_SIZE), [EOS, *(byte + OFFSET for byte in alphabet)])
    return table


def _draw(
    sampling: SamplingArrays, noise: Float[Array, "B V"], logits: Float[Array, "B V"]
) -> Int[Array, "B"]:
    greedy, highest = sampling.temperature == 0, jnp.max(logits, -1, keepdims=True)
    # Compute with the noise here: a loop's mere slice of it, copied for the condition, would lie in no CUDA graph
    noise = jnp.where(greedy[:, None], 0, noise)

    def draw(are_kept: Callable[[SamplingArrays, Array], Array]) -> Int[Array, "B"]:
        # Subtract the maximum first: dividing by a small temperature could overflow to inf.
        scaled = (logits - highest) / jnp.where(sampling.temperature > 0, sampling.temperature, 1)[:, None]
        return jnp.argmax(noise + jnp.where(are_kept(sampling, scaled), scaled, -jnp.inf), -1)

    # Sort if a row asks for it: that takes longer than all else of a draw
    cuts = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1))
    drawn = jax.lax.cond(cuts, lambda: draw(_are_kept), lambda: draw(lambda _, scaled: ~jnp.isnan(scaled)))
    return jnp.where(greedy, jnp.argmax(logits, -1), drawn)


def _are_kept(sampling: SamplingArrays, logits: Float[Array, "B V"]) -> Bool[Array, "B V"]:
    """Tell which ids of each row top-k, then top-p among what top-k keeps, leave in; none whose logit is NaN."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
    top_k, top_p = sampling.top_k[:, None], sampling.top_p[:, None]
    order = jnp.argsort(-logits, axis=-1, stable=True).astype(jnp.int32)
    ordered = jnp.take_along_axis(logits, order, -1)
    first = (ids < top_k) | (top_k == 0)
    sums = jnp.cumsum(jax.nn.softmax(jnp.where(first, ordered, -jnp.inf), -1), -1)
    before = jnp.pad(sums[:, :-1], ((0, 0), (1, 0)))
    # Cut nothing at 1: a sum of all probabilities rounds to 1 before its last terms.
    count = jnp.sum(first & ((before < top_p) | (top_p >= 1)), -1, keepdims=True, dtype=jnp.int32)
    # Compare with the last id that is kept: putting ids back in their order would take a second sort.
    least, last = (jnp.take_along_axis(x, jnp.maximum(count - 1, 0), -1) for x in (ordered, order))
    return (logits > least) | ((logits == least) & (ids <= last))
