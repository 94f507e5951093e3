"""The gated recurrence against a loop over tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import GatedRecurrenceConfig, init_state
from jaxblt.mixers.driver.base import Clock
from jaxblt.mixers.linear.recurrence import normalised
from jaxblt.testing import Subject
from tests.tolerances import assert_close


def naive_row(params: dict, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    w = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in params["params"].items()}
    b = {
        name: np.asarray(leaf["bias"], np.float64)
        for name, leaf in params["params"].items()
        if "bias" in leaf
    }
    h, last, out = np.zeros(x.shape[1]), 0, np.zeros(x.shape)
    for t, s in enumerate(ids):
        if abs(s) != last:
            h, last = np.zeros(x.shape[1]), abs(s)
        if s > 0:
            forget = 1 / (1 + np.exp(-(x[t] @ w["gate"] + b["gate"])))
            if "write" in w:
                write = 1 / (1 + np.exp(-(x[t] @ w["write"] + b["write"])))
                forget, write = forget / (forget + write), write / (forget + write)
            else:
                write = 1 - forget
            h = forget * h + write * (x[t] @ w["in"])
            out[t] = h @ w["out"]
    return out


@pytest.mark.slow(days=28, group="costly", every="minlstm")
@pytest.mark.parametrize("cell", ["gated", "minlstm"])
def test_equals_the_loop(cell: Any) -> None:
    subject = Subject(GatedRecurrenceConfig(dim=6, cell=cell), length=16)
    for ids in (subject.documents(), subject.with_holes(subject.documents())):
        expected = np.stack([naive_row(subject.params, *row) for row in zip(subject.x, ids, strict=True)])
        assert_close(subject.run(ids=ids), expected, jnp.float32, n=subject.length * 6)


@pytest.mark.slow(days=28, group="costly", turn="mixers/linear/test_recurrence")
@pytest.mark.parametrize("cell", ["gated", "minlstm"])
def test_nan_stays_in_its_document(cell: Any) -> None:
    """Whether it comes in by a token, gates and all, or by the state."""
    config = GatedRecurrenceConfig(dim=6, cell=cell)
    subject, ids = Subject(config, length=16), jnp.asarray([[1] * 5 + [2] * 6 + [3] * 5])
    clean, x = init_state(config, 1, capacity=16), jnp.asarray(subject.x[:1])
    run = jax.jit(lambda x, state: subject.module.apply(subject.params, x, segment_ids=ids, state=state))
    clock = Clock(*[jnp.ones(1, jnp.int32)] * 3)
    y, after = run(x.at[:, 7].set(jnp.nan), dataclasses.replace(clean, clock=clock, h=clean.h * jnp.nan))
    expected, behind = run(x, clean)
    others = np.r_[5, 6, 11:16]
    assert_close(y[:, others], expected[:, others], jnp.float32, n=16 * 6)
    assert_close(after.h, behind.h, jnp.float32, n=16 * 6)


@pytest.mark.parametrize(
    ("forget", "write", "kept"), [(-200.0, -200.0, 0.5), (-200.0, 0.0, 0.0), (0.0, -200.0, 1.0)]
)
def test_normalised_gates_hold_where_both_are_closed(forget: float, write: float, kept: float) -> None:
    given = (jnp.full((1, 1, 1), x, jnp.float32) for x in (forget, write))
    assert float(jax.nn.sigmoid(normalised(*given))[0, 0, 0]) == kept
