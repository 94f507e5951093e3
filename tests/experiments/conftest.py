"""Results need a commit, and tests also run where there is no git checkout; times are of short trials."""

import jax
import pytest

from tests.quick_timing import quick_timing

__all__ = ["quick_timing"]


@pytest.fixture(autouse=True)
def _quick(quick_timing: None) -> None:
    """For all."""


@pytest.fixture(autouse=True)
def _commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXBLT_COMMIT", "0" * 40)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a ring needs: programs for more take longer to compile."""
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *backend: devices)
    monkeypatch.setattr(jax, "device_count", lambda *backend: len(devices))
