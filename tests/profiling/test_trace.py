"""A trace can be opened and totals its operations."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxblt.profiling import op_totals, trace


def test_trace_opens_and_totals_the_operations_that_ran(tmp_path: Path) -> None:
    square = jax.jit(lambda x: jnp.fft.rfft(x @ x).real)
    x = jax.block_until_ready(jnp.ones((128, 128)))
    square(x).block_until_ready()
    with trace(tmp_path / "trace") as folder:
        for _ in range(5):
            square(x).block_until_ready()

    files = list(folder.rglob("*.xplane.pb"))
    assert len(files) == 1
    assert jax.profiler.ProfileData.from_file(str(files[0])) is not None
    totals = op_totals(folder)
    assert totals == sorted(totals, key=lambda row: -row.seconds)
    (fft,) = [row for row in totals if "fft" in row.name]
    assert fft.count == 5
    assert fft.seconds > 0


def test_a_folder_without_a_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*\.xplane\.pb under"):
        op_totals(tmp_path)
