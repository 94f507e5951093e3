"""Bytes to ids and back."""

import numpy as np

from jaxblt.data import BOS, EOS, PAD, VOCAB_SIZE, decode, encode
from tests.data.naive import ALL_BYTES


def test_every_byte_survives():
    ids = encode(ALL_BYTES, bos=True, eos=True)
    assert ids.dtype == np.int32
    assert ids.tolist() == [BOS, *range(4, VOCAB_SIZE), EOS]
    assert decode(np.append(ids, PAD)) == ALL_BYTES
