"""Messages between virtual devices: what is checked, what is refused."""

import jax
import pytest

from experiments.benchmark.splitting.exchange import send_message


@pytest.mark.parametrize("mib", [0.0, -1.0])
def test_nothing_to_send_is_refused(mib: float) -> None:
    with pytest.raises(ValueError, match=rf"at least 3\.8e-06 MiB, got {mib}"):
        send_message(mib)


def test_a_message_that_does_not_arrive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "ppermute", lambda x, *_: x)
    with pytest.raises(RuntimeError, match=r"0\.01 MiB did not arrive as they were sent"):
        send_message(0.01)
