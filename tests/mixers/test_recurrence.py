"""The gated recurrence against a loop over tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import GatedRecurrenceConfig
from jaxblt.testing import Subject
from tests.tolerances import assert_close


def naive_row(params: dict, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    w = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in params["params"].items()}
    h, last, out = np.zeros(x.shape[1]), 0, np.zeros(x.shape)
    for t, s in enumerate(ids):
        if abs(s) != last:
            h, last = np.zeros(x.shape[1]), abs(s)
        if s > 0:
            a = 1 / (1 + np.exp(-(x[t] @ w["gate"] + np.asarray(params["params"]["gate"]["bias"]))))
            h = a * h + (1 - a) * (x[t] @ w["in"])
            out[t] = h @ w["out"]
    return out


def test_equals_the_loop() -> None:
    subject = Subject(GatedRecurrenceConfig(dim=6), length=16)
    for ids in (subject.documents(), subject.with_holes(subject.documents())):
        expected = np.stack([naive_row(subject.params, *row) for row in zip(subject.x, ids, strict=True)])
        assert_close(subject.run(ids=ids), expected, jnp.float32, n=subject.length * 6)


def test_there_is_no_bidirectional_form() -> None:
    with pytest.raises(ValueError, match="runs forward only"):
        GatedRecurrenceConfig(dim=6, causal=False)
