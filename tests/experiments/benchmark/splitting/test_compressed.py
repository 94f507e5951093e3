"""The benchmark of messages in 8 bits and of moments on the host."""

import json

import jax
import pytest

from experiments.benchmark.splitting import compressed
from jaxblt.parallel import experimental


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_means_and_updates_are_checked_and_timed(tmp_path):
    """A mean in 8 bits errs by more than one in bf16; the first of each part is the measure of the others."""
    out = tmp_path / "compressed.json"
    with jax.numpy_dtype_promotion("standard"):  # of optax
        compressed.compressed(out=str(out), side=24, arrays=2)
    found = json.loads(out.read_text())
    assert found["parameters"] == 2 * 24**2
    means, updates = found["means"], found["updates"]
    assert [*means, *updates] == ["fp32", "bf16", "8 bits", "device", "host"]
    assert 0 == means["fp32"]["error"] < means["bf16"]["error"] < means["8 bits"]["error"]
    for part in (means, updates):
        for taken in part.values():
            ratio, low, high = taken["speed"]
            assert low <= ratio <= high


def test_a_mean_that_errs_is_not_timed(monkeypatch, tmp_path):
    def doubled(gradients, error, axis):
        return jax.tree.map(lambda x: 2 * jax.lax.pmean(x, axis), gradients), error

    monkeypatch.setattr(experimental, "compressed_mean", doubled)
    with pytest.raises(RuntimeError, match="the mean in 8 bits errs by"):
        compressed.compressed(out=str(tmp_path / "none.json"), side=24, arrays=1)


def test_a_mean_takes_two_devices(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="takes 2 devices, this process has 1"):
        compressed.compressed(out=str(tmp_path / "none.json"))
