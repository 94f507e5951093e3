"""The benchmark's gate on a shape that a test can afford, and its Toeplitz peer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._bench import check
from pallas_kernels.long_conv import bench, long_conv
from pallas_kernels.long_conv.bench import LONGEST_MATRIX, full_toeplitz, plan
from pallas_kernels.long_conv.blocks import BLOCK
from pallas_kernels.long_conv.shapes import LongConvShape
from tests.pallas_kernels.short_conv.streams import CHANNELS, normal, streams
from tests.tolerances import assert_close


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
@pytest.mark.parametrize("documents", [1, 3])
def test_every_version_passes_the_gate(documents: int) -> None:
    shape = LongConvShape("tiny", 2, 8, 300, 300, documents=documents)
    found = plan(shape)
    errors = check(found, jax.random.key(0))
    assert set(errors) == {found.plain.name, *(case.name for case in found.versions)}


@pytest.mark.parametrize(("length", "documents"), [(300, 1), (300, 3), (LONGEST_MATRIX + 1, 1)])
def test_whole_matrices_are_a_peer_of_short_rows_of_one_document(length: int, documents: int) -> None:
    found = plan(LongConvShape("tiny", 1, 1, length, 8, documents=documents))
    names = [case.name for case in found.versions]
    assert ("toeplitz" in names) == (length == 300 and documents == 1)


def test_documents_begin_anywhere() -> None:
    """Those that begin with a block are the kindest case of the kernel of blocks."""
    *_, ids = plan(LongConvShape("tiny", 2, 1, 4 * BLOCK, 8, documents=3)).plain.args
    starts = [1 + np.flatnonzero(np.diff(row)) for row in np.asarray(ids)]
    assert [len(row) for row in starts] == [2, 2]
    assert not np.array_equal(*starts)
    assert any(start % BLOCK for row in starts for start in row)


@pytest.mark.slow(days=28, group="properties of kernels", every="1-False")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [1, CHANNELS])
def test_a_whole_matrix_is_the_convolution(
    causal: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MATRIX_BYTES", 4 * CHANNELS * 90**2 // groups)
    given = {name: x for name, x in streams(90).items() if name != "bias"}
    filter = normal(4, (CHANNELS, 60 if causal else 2 * 60 - 1))
    wanted = long_conv(**given, filter=filter, causal=causal, implementation="reference")
    assert_close(
        jax.jit(full_toeplitz, static_argnames="causal")(**given, filter=filter, causal=causal),
        wanted,
        jnp.float32,
        90,
    )
