"""k-mers: every byte string survives, and the alphabet's runs become k-mers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxblt.data import EOS, VOCAB_SIZE, KmerVocab, load_sample
from tests.data.naive import ALL_BYTES

sequences = st.lists(
    st.sampled_from([b"ACGT", b"GATTACA", b"N", b"acg", b"R", b"\xff", b"A", b"CCCCCC"])
).map(b"".join)
vocabularies = st.integers(1, 4).flatmap(lambda k: st.builds(KmerVocab, st.just(k), st.integers(1, k)))


def naive_encode(data: bytes, k: int, stride: int, alphabet: bytes) -> list[int]:
    ids, i = [], 0
    while i < len(data):
        run = i
        while run < len(data) and data[run] in alphabet:
            run += 1
        end = i
        while i + k <= run:
            number = 0
            for letter in data[i : i + k]:
                number = number * len(alphabet) + alphabet.index(letter)
            ids.append(VOCAB_SIZE + number)
            end, i = i + k, i + stride
        ids += [byte + 4 for byte in data[end : max(run, end)]]
        i = max(run, end)
        if i < len(data):
            ids.append(data[i] + 4)
            i += 1
    return ids


@given(vocabularies, sequences)
def test_encoding_is_the_naive_one_and_comes_back(vocab, data):
    ids = vocab.encode(data)
    assert ids.tolist() == naive_encode(data, vocab.k, vocab.stride, vocab.alphabet)
    assert vocab.decode(ids) == data


@given(vocabularies, st.binary(max_size=100))
def test_any_bytes_come_back(vocab, data):
    assert vocab.decode(vocab.encode(data)) == data


def test_a_genome_becomes_k_mers_and_comes_back():
    genome = load_sample("lambda") + ALL_BYTES
    vocab = KmerVocab(k=6, stride=6)
    ids = vocab.encode(genome)
    assert vocab.size == VOCAB_SIZE + 4**6
    assert len(ids) < len(genome) / 5
    assert vocab.decode(ids) == genome


def test_special_ids_are_dropped():
    vocab = KmerVocab()
    assert vocab.decode(np.append(vocab.encode(b"ACGTA"), EOS)) == b"ACGTA"


def test_bad_vocabularies_and_ids():
    for stride in (0, 4):
        with pytest.raises(ValueError, match=f"stride must lie in 1..k = 1..3 .*got {stride}"):
            KmerVocab(k=3, stride=stride)
    with pytest.raises(ValueError, match="each letter once"):
        KmerVocab(alphabet=b"AAC")
    with pytest.raises(ValueError, match="more than int32 holds"):
        KmerVocab(k=20, stride=1)
    with pytest.raises(ValueError, match=r"0\.\.323, got 324\.\.324"):
        KmerVocab().decode(np.array([324]))
