"""A step whose arrays are damaged is told of in a line or two."""

import gc
import logging
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxblt.training.stored import integrity
from jaxblt.training.stored.checkpoint import Checkpointer, restore


def test_damaged_arrays_are_one_warning_and_no_page_of_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Orbax reads many arrays at once: the first error closes its loop under all others, and each printed a page."""
    gc.freeze()  # Keep the collection below from all that other tests left
    rng = np.random.default_rng(0)
    state = {str(i): rng.standard_normal(1 << 18).astype(np.float32) for i in range(6)}
    for step in (1, 2):  # Orbax warns of a save that waits for the one before, on a busy machine
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(step, state)
    file = max((tmp_path / "2" / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    raw = np.fromfile(file, np.uint8)
    raw[::1000] ^= 255  # it is so large that the list of files holds its size alone
    raw.tofile(file)
    caplog.set_level(logging.WARNING)
    assert restore(tmp_path, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)).step == 1
    gc.collect()
    assert [message.partition(" ")[0] for message in caplog.messages] == ["the", "fell"]
    assert max(map(len, caplog.messages)) < 1000
    assert capfd.readouterr().err == ""


def test_ctrl_c_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax makes an error of it; no older step is tried then."""
    state, read = {"a": np.zeros(2, np.float32)}, []

    def interrupt(where: object) -> None:
        read.append(where)
        raise RuntimeError("cannot read") from KeyboardInterrupt()

    for step in (1, 2):
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(step, state)
    monkeypatch.setattr(integrity, "check_files", interrupt)
    with pytest.raises(KeyboardInterrupt):
        restore(tmp_path, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))
    assert len(read) == 1
