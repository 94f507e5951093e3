"""Words as features of a head: counted by hand, weighed as scikit-learn weighs them, the same beside any padding."""

from collections import Counter
from functools import partial
from itertools import product

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression

from jaxblt.data.vocab import BOS, OFFSET, PAD
from jaxblt.models import LabelHeadConfig, WordsConfig
from jaxblt.models.label_head import LabelHead, content
from jaxblt.models.word_features import BITS, BOXED, LETTERS, count_words, weigh_words
from jaxblt.training.stored.serialize import decode
from tests.tolerances import assert_close

RECORDS = [b"ACGTTGCATNACGTA", b"acguugcaGGGA", b"AC", b"N", b"GATTACAGATTACAGATT"]
TURN = bytes.maketrans(b"ACGT", b"TGCA")
WIDTH, DIM = 20, 3


def rows_of(records, width=WIDTH):
    """BOS and bytes, then padding that holds letters."""
    ids = np.full((len(records), width), ord("A") + OFFSET, np.int32)
    segments = np.zeros(ids.shape, np.int32)
    for row, segment, record in zip(ids, segments, records, strict=True):
        row[0], segment[: len(record) + 1] = BOS, 1
        row[1 : len(record) + 1] = np.frombuffer(record, np.uint8).astype(np.int32) + OFFSET
    return jax.device_put((ids, segments))


def counted(records, config):
    """A column a word, in the order of its letters; shorter words first."""
    letters, rows = LETTERS[config.letters], []
    words = [""]
    columns = []
    for _ in range(config.longest):
        words = [word + letter for word in words for letter in letters]
        columns += words
    for record in records:
        one = record.upper().replace(b"U", b"T")
        strands = [one, one.translate(TURN)[::-1]] if config.both_strands else [one]
        found = Counter(
            s[i : i + k].decode()
            for s in strands
            for k in range(1, config.longest + 1)
            for i in range(len(s) - k + 1)
        )
        apart = [
            sum(
                s[i : i + 1].decode() + s[i + gap + 1 : i + gap + 2].decode() == x + z
                for s in strands
                for i in range(len(s))
            )
            for gap in range(1, config.gaps + 1)
            for x in letters
            for z in letters
        ]
        placed = [one[t : t + 1].decode() == x for t in range(config.places) for x in letters]
        near = Counter(
            (k, (i + k - 1) // config.box, one[i : i + k].decode())
            for k in range(1, BOXED + 1)
            for i in range(min(len(one), config.places) - k + 1)
            if config.box
        )
        boxed = [
            near[k, b, "".join(word)]
            for k in range(1, BOXED + 1)
            for b in range(config.boxes)
            for word in product(letters, repeat=k)
        ]
        rows.append([*(found[word] for word in columns), *apart, *placed, *boxed])
    return np.array(rows, np.float32)


@pytest.mark.parametrize(
    ("both_strands", "places", "box", "gaps"),
    [(False, 0, 0, 0), (True, 0, 0, 2), (False, 12, 0, 0), (False, 12, 5, 1)],
)
def test_words_are_counted_and_weighed_as_written_out(both_strands, places, box, gaps):
    """Places are counted from a record's first byte, and a letter that is none leaves its place empty."""
    config = WordsConfig(longest=3, both_strands=both_strands, places=places, box=box, gaps=gaps)
    ids, segments = rows_of(RECORDS)
    found = jax.jit(lambda *of: count_words(ids, content(*of), config))(ids, segments)
    wanted = counted(RECORDS, config)
    np.testing.assert_array_equal(found, wanted)
    rarity = np.log((1 + len(RECORDS)) / (1 + (wanted > 0).sum(0))) + 1
    blocks = zip(config.edges, config.edges[1:], strict=False)
    blocks = [TfidfTransformer(sublinear_tf=True).fit_transform(wanted[:, a:b]).toarray() for a, b in blocks]
    weigh = jax.jit(partial(weigh_words, config=config))
    weighed = weigh(found, rarity.astype(np.float32))
    np.testing.assert_allclose(weighed, np.concatenate(blocks, 1), rtol=2e-6, atol=1e-7)


def test_phrases_of_text_are_counted_by_their_hashes():
    """Case does not count; a word ends at a hole, a phrase does not; characters of three bytes are words alone."""
    config = WordsConfig("phrases", longest=2)
    texts = ["Don't: DON'T  é?".encode(), "日本ab é1".encode(), b"a", b" \x80 \n"]
    words = [["don't", ":", "don't", "é", "?"], ["日", "本", "ab", "é1"], ["a"], []]
    ids, segments = rows_of(texts)
    count = jax.jit(lambda ids, there: count_words(ids, there, config).reshape(4, 2, 1 << BITS))
    there = np.array(jax.jit(content)(ids, segments))
    there[2, 1] = True
    found = np.asarray(count(ids, there))
    wanted = np.zeros_like(found)
    for row, own in enumerate(words):
        for k in (1, 2):
            for i in range(len(own) - k + 1):
                wanted[row, k - 1, feature([word.encode() for word in own[i : i + k]])] += 1
    np.testing.assert_array_equal(found, wanted)
    there[0, 3] = False
    cut = np.asarray(count(ids, there))
    for k, phrase in enumerate(([b"do"], [b"'t"], [b"do", b"'t"])):
        assert cut[0, k // 2, feature(phrase)] == 1


def feature(words):
    """A phrase joins the hash of its first words to the last one, a polynomial of its bytes + 1, last byte first."""
    a, b, phrase = 0x9E3779B1, 0x85EBCA6B, 0
    for i, word in enumerate(words):
        own = sum((byte + 1) * a**j for j, byte in enumerate(reversed(word)))
        phrase = ((phrase ^ phrase >> 15) * b * (i > 0) + own) % 2**32
    return (phrase ^ phrase >> 16) * a % 2**32 >> 32 - BITS


def test_stored_heads_that_read_runs_of_bytes_answer_as_before():
    """Case does not count, nor what lies across a hole; equal hashes are equal features."""
    fields = {"letters": "text", "longest": 3, "both_strands": False, "places": 0}
    config = decode({"class": "words", **fields})
    texts = [b"Aa! aA?", b"\xff\x00\xff", b"a"]
    ids, segments = rows_of(texts)
    there = np.array(jax.jit(content)(ids, segments))
    there[0, 4] = False  # "Aa!" and "aA?" without the space
    found = np.asarray(jax.jit(partial(count_words, config=config))(ids, there)).reshape(3, 3, 1 << 15)
    wanted = np.zeros_like(found)
    for row, pieces in enumerate([(b"aa!", b"aa?"), (b"\xff\x00\xff",), (b"a",)]):
        for piece in pieces:
            for k in range(1, 4):
                for i in range(len(piece) - k + 1):
                    wanted[row, k - 1, byte_feature(piece[i : i + k])] += 1
    np.testing.assert_array_equal(found, wanted)


def byte_feature(word):
    """The polynomial of the bytes + 1, the last byte first, mixed as MurmurHash3 ends, in its table."""
    x = sum((byte + 1) * 0x9E3779B1**i for i, byte in enumerate(reversed(word))) % 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return (x ^ x >> 16) % (1 << 15)


@pytest.mark.slow(days=28, group="costly", turn="models/test_word_features")
def test_a_head_without_states_is_the_regression_and_states_add_to_it():
    config = LabelHeadConfig(outputs=3, words=WordsConfig(longest=2))
    rng = np.random.default_rng(0)
    records = ["".join("ACGT"[i] for i in rng.integers(0, 4, 15)).encode() for _ in range(30)]
    x = TfidfTransformer(sublinear_tf=True, norm=None, use_idf=False).fit_transform(
        counted(records, config.words)
    )
    x = np.concatenate(
        [block / np.linalg.norm(block, axis=1)[:, None] for block in np.split(x.toarray(), [4], 1)], 1
    )
    model = LogisticRegression().fit(x, np.arange(30) % 3)
    head, (ids, segments) = LabelHead(config, causal=False), rows_of(records)
    states = jnp.asarray(rng.normal(size=(30, WIDTH, DIM)).astype(np.float32))
    params = jax.tree.map(jnp.asarray, head.init(jax.random.key(0), states, ids, segments))
    params = jax.tree.map(lambda box: box.unbox(), params, is_leaf=lambda leaf: hasattr(leaf, "unbox"))
    own, apply = params["params"], jax.jit(head.apply)
    assert not np.any(own["outputs"]["kernel"])
    assert not np.any(apply(params, states, ids, segments))
    own["words"]["outputs"] = {"kernel": jnp.asarray(model.coef_.T, jnp.float32)}
    own["words"]["outputs"]["bias"] = jnp.asarray(model.intercept_, jnp.float32)
    found = apply(params, states, ids, segments)
    np.testing.assert_allclose(found, model.decision_function(x), rtol=1e-5, atol=1e-5)
    alone = apply(params, states[4:5], ids[4:5], segments[4:5])
    assert_close(alone, found[4:5], n=WIDTH)
    longer = [jnp.pad(a, ((0, 0), (0, 5)), constant_values=v) for a, v in ((ids, PAD), (segments, 0))]
    more = jnp.pad(states, ((0, 0), (0, 5), (0, 0)))
    np.testing.assert_array_equal(apply(params, more, *longer), found)
    own["outputs"]["kernel"] = jnp.ones((DIM, 3), jnp.float32)
    moved = apply(params, states, ids, segments) - found
    assert_close(moved, jnp.sum(jnp.mean(states[:, 1:16], 1), -1, keepdims=True) * jnp.ones((1, 3)), n=WIDTH)


@pytest.mark.parametrize(("target", "outputs"), [("class", 2), ("number", 1)])
def test_words_of_some_records_say_nothing_of_classes_in_training(target, outputs):
    """Of numbers they go on: what states learned alone would be added to what words say of the same records."""
    config = LabelHeadConfig(target, outputs, dropout=0.5, words=WordsConfig(longest=1))
    head, (ids, segments) = LabelHead(config, causal=False), rows_of(RECORDS[:1] * 64)
    states = jnp.zeros((64, WIDTH, DIM))
    params = nn.meta.unbox(jax.jit(head.init)(jax.random.key(0), states, ids, segments))
    params["params"]["words"]["outputs"]["bias"] = jnp.ones(outputs)
    apply = jax.jit(head.apply)
    said = apply(params, states, ids, segments, rngs={"dropout": jax.random.key(1)})
    shares = {"class": (0.3, 0.7), "number": (1, 1)}[target]
    assert shares[0] <= np.mean(said == 1) <= shares[1]
    assert np.all((said == 1) | (said == 0))
    assert np.all(apply(params, states, ids, segments) == 1)
