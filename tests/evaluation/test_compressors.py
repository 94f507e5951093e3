"""Compressors on bytes whose size is known."""

import bz2
import gzip
import lzma

import numpy as np
import pytest

from jaxblt.evaluation import compressor_bits_per_byte, compressor_table

RANDOM = np.random.default_rng(0).bytes(200_000)


@pytest.mark.parametrize("name", ["gzip", "bzip2", "xz"])
def test_random_bytes_cost_eight_bits_and_zeros_next_to_none(name) -> None:
    assert compressor_bits_per_byte(RANDOM, name) == pytest.approx(8.0, abs=0.06)
    assert compressor_bits_per_byte(bytes(200_000), name) < 0.02


@pytest.mark.slow(days=28, group="costly")
def test_figures_are_those_of_the_compressors_files() -> None:
    text = b"".join(b"line %d of a text that repeats itself somewhat\n" % (i * i) for i in range(5000))
    files = {
        "gzip": gzip.compress(text, 9),
        "bzip2": bz2.compress(text, 9),
        "xz": lzma.compress(text, preset=9 | lzma.PRESET_EXTREME),
    }
    for name, figure in compressor_table(text).items():
        assert figure == pytest.approx(8 * len(files[name]) / len(text), rel=0.02)


def test_a_primer_that_holds_the_data_makes_it_nearly_free() -> None:
    part = RANDOM[:20_000]  # within the window of all three
    figures = compressor_table(part, primer=part)
    assert list(figures) == ["gzip", "bzip2", "xz", "gzip, primed", "bzip2, primed", "xz, primed"]
    assert figures["gzip, primed"] < 0.2
    assert figures["xz, primed"] < 0.2
    assert figures["bzip2, primed"] < figures["bzip2"]


def test_no_data_is_an_error() -> None:
    with pytest.raises(ValueError, match="data is empty"):
        compressor_bits_per_byte(b"", "gzip")
