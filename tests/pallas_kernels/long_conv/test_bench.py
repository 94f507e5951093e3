"""The benchmark's gate on a shape that a test can afford."""

import jax
import pytest

from pallas_kernels._bench import check
from pallas_kernels.long_conv.bench import plan
from pallas_kernels.long_conv.shapes import LongConvShape


@pytest.mark.slow(weeks=6, group="gates of benchmarks")
@pytest.mark.parametrize("documents", [1, 3])
def test_every_version_passes_the_gate(documents: int) -> None:
    shape = LongConvShape("tiny", 2, 8, 300, 300, documents=documents)
    found = plan(shape)
    errors = check(found, jax.random.key(0))
    assert set(errors) == {found.plain.name, *(case.name for case in found.versions)}
