"""Drawn models that write a known text: the byte that follows is sure, and so is where patches end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmark.models.drawn_patches import drawn_patches
from experiments.benchmark.models.drawn_text import draw_words, find_threshold, make_prompts
from experiments.benchmark.models.serving import serving
from jaxblt.data.vocab import OFFSET, encode
from jaxblt.patching.logits import entropies_from_logits
from jaxblt.patching.segment import closes_at


@pytest.mark.slow(days=28, group="costly")
def test_the_next_byte_is_sure_and_patches_end_where_they_should():
    decoder, params = drawn_patches("books", "HHAH", tiny=True, dtype=jnp.float32)
    words, ends = draw_words()
    prompts = make_prompts(decoder, 2, 300)
    assert prompts[0] != prompts[1]
    assert prompts[0][-1] in words[:, -1]
    ids = jnp.asarray([encode(prompt, bos=True) for prompt in prompts], jnp.int32)

    @jax.jit
    def read(params, ids):
        entropies = entropies_from_logits(decoder.reader().apply({"params": params["entropy"]}, ids)[0])
        logits, _ = decoder.build().apply({"params": params["model"]}, ids, entropies=entropies)
        return entropies, jax.nn.softmax(logits)

    entropies, probabilities = read(params, ids)
    # Behind BOS nothing is known of the next byte
    said = jnp.take_along_axis(probabilities[:, 1:-1], ids[:, 2:, None], 2)[..., 0]
    at_last = np.isin(ids[:, 1:-1], OFFSET + words[:, -1])
    assert float(said[~at_last].min()) > 1 - 1e-4
    begun = probabilities[:, 1:-1, OFFSET + words[:, 0]][at_last]
    assert float(begun.sum(1).min()) > 1 - 1e-3
    # Words follow each other at random: the entropy of 14 equally probable ones is 2.6 nats
    assert float(-(begun * jnp.log(begun)).sum(1).mean()) > 2
    segments, threshold = jnp.ones_like(ids), jnp.float32(decoder.patcher.threshold)
    closed = closes_at(decoder.patcher, ids, entropies, segments, threshold)[:, 1:]
    np.testing.assert_array_equal(closed, np.isin(ids[:, 1:], OFFSET + words[ends]))
    np.testing.assert_array_equal(ends.sum(1), 4)


def test_entropies_that_are_not_apart_are_refused():
    with pytest.raises(ValueError, match="entropies behind ends of patches begin at 1 nats, others reach 1"):
        find_threshold(jnp.ones((14, 18)), OFFSET + draw_words()[0])


@pytest.mark.slow(days=28, group="costly", turn="experiments/drawn_text")
@pytest.mark.parametrize("rows", [1, 64])
def test_written_bytes_close_patches_at_the_rate_of_the_text(rows, tmp_path):
    options = {"patches": "entropy", "arms": ("once",), "ways": ("engine",), "tiny": True, "trials": 1}
    found = serving(str(tmp_path / "found.json"), rows=(rows,), capacity=512, **options)["rows"][0]
    assert found["closed_a_byte"] == pytest.approx(1 / 4.5, rel=0.05)
    assert list(found["once"]) == list(found["share_of_floor"]) == ["engine"]
