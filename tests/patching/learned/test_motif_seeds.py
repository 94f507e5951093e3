"""Over-represented strings: a planted motif comes first, without its own overlaps, and documents stay apart."""

import jax.numpy as jnp
import numpy as np

from jaxblt.data.vocab import encode
from jaxblt.evaluation import planted
from jaxblt.evaluation.planted import MOTIF
from jaxblt.patching.learned import BoundaryConfig, seed_motifs
from jaxblt.patching.learned.motif_seeds import enriched_strings


def test_a_planted_motif_is_found_first_and_once() -> None:
    texts = planted("motifs", documents=32, length=256)
    ids = np.stack([encode(text) for text in texts.source.documents]).astype(np.int32)
    segments = np.ones_like(ids)
    ((first, gain),) = enriched_strings(ids, segments, length=len(MOTIF), count=3)
    np.testing.assert_array_equal(first, encode(MOTIF))
    assert gain > 3
    config = BoundaryConfig(strategy="pattern_aware", learned_motifs=3, motif_length=len(MOTIF))
    drawn = {"motifs": jnp.ones((len(MOTIF), 260, 3)), "theta": jnp.zeros(1)}
    table = np.asarray(seed_motifs(config, drawn, ids, segments)["motifs"])
    response = table[np.arange(len(MOTIF)), encode(MOTIF)[::-1]].sum(0)
    np.testing.assert_allclose(response[0], 1, rtol=1e-6)
    np.testing.assert_array_equal(response[1:], 0)


def test_strings_do_not_span_documents_or_padding() -> None:
    ids = np.tile(encode(b"ABAB"), (4, 1)).astype(np.int32)
    found = enriched_strings(ids, np.tile([1, 1, 2, 2], (4, 1)), length=2, count=4)
    assert [string.tolist() for string, _ in found] == [encode(b"AB").tolist()]
    assert enriched_strings(ids, np.zeros_like(ids), length=2, count=4) == []
