"""A trace can be opened and totals its operations and the parts of a program."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxblt.profiling import op_totals, scope_totals, trace


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
    with pytest.raises(ValueError, match=r"nothing of the program 'jit_else', only of \['jit_run'\]"):
        scope_totals(folder, "HloModule jit_else", {})


def test_other_programs_in_a_trace_are_left_out(tmp_path: Path) -> None:
    """Both number their instructions in the same way."""

    def rows(x):
        return jnp.fft.rfft(x).real

    def columns(x):
        return jnp.fft.rfft(x.T).real

    x = jnp.ones((64, 64))
    programs = [jax.jit(fn).lower(x).compile() for fn in (rows, columns)]
    with trace(tmp_path) as folder:
        for compiled in programs:
            jax.block_until_ready(compiled(x))
    found = [scope_totals(folder, compiled.as_text() or "", {"transform": "fft"}) for compiled in programs]
    assert all(parts["transform"] > 0 for parts in found)
    every = sum(row.seconds for row in op_totals(folder))
    assert sum(sum(parts.values()) for parts in found) == pytest.approx(every)
