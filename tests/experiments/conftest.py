"""Results are refused without a commit, and the tests also run where there is no git checkout."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXBLT_COMMIT", "0" * 40)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a ring needs: programs for more take longer to compile."""
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *backend: devices)
    monkeypatch.setattr(jax, "device_count", lambda *backend: len(devices))
