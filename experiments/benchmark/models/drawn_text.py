"""Drawn models that write a text whose patches are known: every byte in turn, and a patch ends behind some of them.

Bytes that merely drawn parameters write fall into cycles of few, and entropies with them. So patches end at rates
between 0.03 and 0.72 a byte, otherwise in each run. Here only tables, one product and the scales of two norms are
chosen, of the very shapes of the model: what is computed and read stays as it is.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.data.vocab import EOS, OFFSET

if TYPE_CHECKING:
    from jaxblt.inference import Decoder

BYTES_PER_PATCH = 4.5
"""The mean length of patches."""

APART = 97
"""Bytes between the beginnings of two prompts in the book."""

LOUD = 30.0
"""The root mean square of a byte's embedding beside which the outputs of layers hardly change its direction."""

OUTRIGHT = 4.0
"""How much longer the product's output is than the embedding that it is added to."""

PEAKED, CALM = 4.0, 1.5
"""Standard deviations of logits of other bytes than the next one, and of those of the entropy model."""


def draw_text() -> tuple[np.ndarray, np.ndarray]:
    """Return all 256 bytes in the order in which they follow each other round and round, and which end a patch."""
    rng = np.random.default_rng(0)
    order, ends = rng.permutation(256), np.zeros(256, bool)
    ends[rng.choice(256, round(256 / BYTES_PER_PATCH), replace=False)] = True
    return order, ends


def make_prompts(decoder: "Decoder", count: int, length: int) -> list[bytes]:
    """Return prompts: stretches of the text of `draw_text` that end at unlike bytes, or of a book without entropies."""
    from jaxblt.data import load_sample

    if not decoder.needs_entropies:
        book = load_sample("book")
        return [book[APART * i : APART * i + length] for i in range(count)]
    text = bytes(draw_text()[0].tolist()) * (2 + length // 256)
    starts = np.random.default_rng(1).permutation(256)
    return [text[starts[i % 256] :][:length] for i in range(count)]


def write_text(params: dict[str, Any]) -> None:
    """Make a byte-latent model write the text: change `params` so that a byte is followed by its next one.

    The embedding of byte i is e_i = LOUD r_i, with r_i drawn. The last product W of the decoder's last MLP solves
    h_i W = OUTRIGHT e_next(i), h_i its hidden layer at e_i alone. So the head, which is tied, finds the next byte.
    """
    order, _ = draw_text()
    embedding, mlp = params["embedding"], params["decoder"]["periods"]["block_0"]["mlp"]
    table = LOUD * _normed(embedding["bytes"])
    here = _normed(table)[OFFSET + order]
    gate, up = (here @ mlp[name]["kernel"][-1] for name in ("gate", "up"))
    wanted = OUTRIGHT * np.asarray(table)[OFFSET + np.roll(order, -1)]
    found = np.linalg.pinv(np.asarray(jax.nn.silu(gate) * up)) @ wanted
    mlp["down"]["kernel"] = mlp["down"]["kernel"].at[-1].set(found)
    _tell(params, table, PEAKED)
    # Beside the next byte's logit that of EOS is 0
    embedding["bytes"] = table.at[EOS].set(0.0)


def mark_ends(params: dict[str, Any]) -> None:
    """Make an entropy model unsure behind bytes that end a patch: change its `params`.

    It expects a byte again whose embedding is loud, and knows nothing behind one whose embedding is as drawn.
    """
    order, ends = draw_text()
    drawn = params["embedding"]["bytes"]
    table = (LOUD * _normed(drawn)).at[OFFSET + order[ends]].set(drawn[OFFSET + order[ends]])
    _tell(params, table, CALM)
    params["embedding"]["bytes"] = table


def find_threshold(entropies: jax.Array, ids: np.ndarray) -> float:
    """Return the middle between entropies behind bytes that end patches and those behind others, nats.

    Raises:
      ValueError: they are not apart.
    """
    order, ends = draw_text()
    at_end = np.isin(ids, OFFSET + order[ends])
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
