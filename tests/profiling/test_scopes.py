"""Device time by part of a program."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxblt.profiling import op_totals, scope_totals, trace


def test_parts_of_a_program_add_up_to_all_that_ran(tmp_path: Path) -> None:
    def run(x):
        with jax.named_scope("up"):
            y = jnp.fft.rfft(x).real
        with jax.named_scope("down"):
            y = y.T @ y
        return y + jnp.fft.rfft(y, axis=0).real[:1]

    x = jnp.ones((64, 64))
    compiled = jax.jit(run).lower(x).compile()
    jax.block_until_ready(compiled(x))
    with trace(tmp_path) as folder:
        jax.block_until_ready(compiled(x))
    found = scope_totals(folder, compiled.as_text() or "", {"bridge": r"/up/", "product": r"/down/"})
    assert list(found) == ["bridge", "product", "other"]
    assert all(seconds > 0 for seconds in found.values())
    assert sum(found.values()) == pytest.approx(sum(row.seconds for row in op_totals(folder)))
    with pytest.raises(ValueError, match="no scope may be called 'other'"):
        scope_totals(folder, "", {"other": "x"})
