"""Drawn models that write a text whose patches are known: words follow each other at random, each of four patches.

A model of random parameters writes cycles of few bytes, and its entropies repeat with them. Patches then end at rates
between 0.03 and 0.72 a byte, which differ from run to run. So tables, one kernel and the scales of two norms are set
here. All shapes stay, so the model computes and reads as much as before. Each row draws words by its own seed: rows
that wrote one text would soon stand at the same places, and no longer wait for each other.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.data.vocab import EOS, OFFSET

if TYPE_CHECKING:
    from jaxblt.inference import Decoder

WORDS, WORD_BYTES, WORD_PATCHES = 14, 18, 4
"""Words, bytes of each, and the patches that end in it. No byte is in two words."""

BYTES_PER_PATCH = WORD_BYTES / WORD_PATCHES
"""The mean length of patches."""

APART = 97
"""Bytes between the beginnings of two prompts in the book."""

LOUD = 30.0
"""The root mean square of a byte's embedding beside which the outputs of layers hardly change its direction."""

OUTRIGHT = 16.0
"""How much longer the product's output is than the embedding that it is added to."""

PEAKED, CALM = 4.0, 1.5
"""Standard deviations of logits of other bytes than the next one, and of those of the entropy model."""


def draw_words() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of each word, and which of them end a patch: two arrays [WORDS, WORD_BYTES]."""
    rng, ends = np.random.default_rng(0), np.zeros((WORDS, WORD_BYTES), bool)
    words = rng.permutation(256)[: ends.size].reshape(ends.shape)
    for word in ends:
        word[rng.choice(WORD_BYTES, WORD_PATCHES, replace=False)] = True
    return words, ends


def make_prompts(decoder: "Decoder", count: int, length: int) -> list[bytes]:
    """Return prompts: words that begin and end anywhere, or stretches of a book for a decoder without entropies."""
    from jaxblt.data import load_sample

    if not decoder.needs_entropies:
        book = load_sample("book")
        return [book[APART * i : APART * i + length] for i in range(count)]
    words, rng = draw_words()[0].astype(np.uint8), np.random.default_rng(1)
    texts = words[rng.integers(WORDS, size=(count, 1 + -(-length // WORD_BYTES)))].reshape(count, -1)
    starts = rng.integers(WORD_BYTES, size=count)
    # Let a lone row begin with a word: of 256 bytes a part of a word more or less would tell
    starts[0] = -length % WORD_BYTES
    return [text[start : start + length].tobytes() for text, start in zip(texts, starts, strict=True)]


def write_text(params: dict[str, Any]) -> None:
    """Make a byte-latent model write the text by changing `params`: a word goes on, and any follows behind its end.

    The embedding of byte i is e_i = LOUD r_i, with r_i drawn. The last product W of the decoder's last MLP solves
    h_i W = OUTRIGHT a_i, h_i its hidden layer at e_i alone. All bytes that may follow i have the same product with a_i,
    which is as long as an embedding. So the head, which is tied, finds them alike.
    """
    words, _ = draw_words()
    embedding, mlp = params["embedding"], params["decoder"]["periods"]["block_0"]["mlp"]
    table = LOUD * _normed(embedding["bytes"])
    own = np.asarray(table)[OFFSET:]
    # Bytes of no word begin one too
    ahead = np.tile(_between(own[words[:, 0]]), (256, 1))
    ahead[words[:, :-1]] = own[words[:, 1:]]
    gate, up = (_normed(own) @ mlp[name]["kernel"][-1] for name in ("gate", "up"))
    found = np.linalg.pinv(np.asarray(jax.nn.silu(gate) * up)) @ (OUTRIGHT * ahead)
    mlp["down"]["kernel"] = mlp["down"]["kernel"].at[-1].set(found)
    _tell(params, table, PEAKED)
    # Beside the next byte's logit that of EOS is 0
    embedding["bytes"] = table.at[EOS].set(0.0)


def _between(vectors: np.ndarray) -> np.ndarray:
    """Return the vector whose products with all of these are the same, LOUD in the root mean square."""
    found = np.linalg.pinv(vectors) @ np.ones(len(vectors), np.float32)
    return LOUD * found / np.sqrt(np.mean(found**2))


def mark_ends(params: dict[str, Any]) -> None:
    """Make an entropy model unsure behind bytes that end a patch: change its `params`.

    It expects a byte again whose embedding is loud, and knows nothing behind one whose embedding is as drawn.
    """
    words, ends = draw_words()
    drawn = params["embedding"]["bytes"]
    at_end = OFFSET + words[ends]
    table = (LOUD * _normed(drawn)).at[at_end].set(drawn[at_end])
    _tell(params, table, CALM)
    params["embedding"]["bytes"] = table


def find_threshold(entropies: jax.Array, ids: np.ndarray) -> float:
    """Return the middle between entropies behind bytes that end patches and those behind others, nats.

    Raises:
      ValueError: they are not apart.
    """
    words, ends = draw_words()
    at_end = np.isin(ids, OFFSET + words[ends])
    least, most = (float(found) for found in (entropies[at_end].min(), entropies[~at_end].max()))
    if least <= most:
        raise ValueError(
            f"entropies behind ends of patches begin at {least:.3g} nats, others reach {most:.3g}"
        )
    return (least + most) / 2


def _normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))


def _tell(params: dict[str, Any], table: jax.Array, spread: float) -> None:
    """Scale a head's norm so that logits of bytes without a say have this standard deviation."""
    params["head"]["norm"]["scale"] *= spread / (LOUD * table.shape[1] ** 0.5)
