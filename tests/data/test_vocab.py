"""Bytes to ids and back."""

import numpy as np
import pytest

from jaxblt.data import BOS, EOS, PAD, VOCAB_SIZE, decode, encode
from tests.data.naive import ALL_BYTES


def test_every_byte_survives():
    ids = encode(ALL_BYTES, bos=True, eos=True)
    assert ids.dtype == np.int32
    assert ids.tolist() == [BOS, *range(4, VOCAB_SIZE), EOS]
    assert decode(np.append(ids, PAD)) == ALL_BYTES


@pytest.mark.parametrize("ids", [[-1], [VOCAB_SIZE]])
def test_other_ids_are_errors(ids):
    with pytest.raises(ValueError, match=r"ids must lie in 0\.\.259"):
        decode(np.array(ids))
