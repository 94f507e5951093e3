"""GRU and LSTM against Flax's cells, and against the linear recurrence that a GRU without recurrent weights is."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jaxblt.mixers import GRUConfig, LSTMConfig
from jaxblt.testing import Subject
from pallas_kernels.linear_scan import linear_scan
from tests.tolerances import assert_close

DIM, HEADS = 8, 2
WIDTH = DIM // HEADS
NAMES = {GRUConfig: "rzn", LSTMConfig: "ifgo"}


def subject_of(kind: type, heads: int = HEADS) -> Subject:
    """A mixer with every parameter drawn, biases included."""
    plain = Subject(kind(DIM, num_heads=heads), length=16)
    params = jax.tree.map(lambda leaf: leaf + 0.3 * plain.noise(leaf.size, leaf.shape), plain.params)
    return Subject(plain.config, length=16, params=params)


def cell_params(weights: dict[str, Any], head: int, kind: type) -> dict[str, Any]:
    """One head's weights, as Flax's cell of `kind` names them."""
    given: dict[str, Any] = {}
    for gate, name in enumerate(NAMES[kind]):
        of_input = {"kernel": weights["in"]["kernel"][:, head, gate]}
        of_state = {"kernel": weights["recurrent"][head, gate]}
        bias = weights["in"]["bias"][head, gate]
        if kind is LSTMConfig:
            of_state["bias"] = bias
        else:
            of_input["bias"] = bias
            if name == "n":
                of_state["bias"] = weights["recurrent_bias"][head]
        given |= {f"i{name}": of_input, f"h{name}": of_state}
    return {"params": given}


def by_flax(subject: Subject, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of the mixer, and the carries [rows, heads, ...] behind the rows, from Flax's cells in a loop."""
    kind, weights = type(subject.config), subject.params["params"]
    cell: Any = nn.GRUCell(WIDTH) if kind is GRUConfig else nn.OptimizedLSTMCell(WIDTH)
    zero = cell.initialize_carry(jax.random.key(0), (DIM,))
    params = [cell_params(weights, head, kind) for head in range(HEADS)]
    step = jax.jit(cell.apply)
    outputs, carries = np.zeros(subject.x.shape), []
    for row, (x, segments) in enumerate(zip(subject.x, ids, strict=True)):
        carry, last = [zero] * HEADS, 0
        for t, s in enumerate(segments):
            if s and abs(s) != last:
                carry, last = [zero] * HEADS, abs(s)
            if s > 0:
                pairs = [step(p, c, x[t]) for p, c in zip(params, carry, strict=True)]
                carry = [after for after, _ in pairs]
                outputs[row, t] = sum(
                    np.asarray(h, np.float64) @ np.asarray(weights["out"]["kernel"][head], np.float64)
                    for head, (_, h) in enumerate(pairs)
                )
        carries.append(carry)
    return outputs, np.asarray(carries)


@pytest.mark.slow(days=14)
@pytest.mark.parametrize("kind", [GRUConfig, LSTMConfig])
def test_equals_flax_s_cell_in_documents_and_holes(kind: type) -> None:
    subject = subject_of(kind)
    ids = subject.with_holes(subject.documents())
    expected, _ = by_flax(subject, ids)
    assert_close(subject.run(ids=ids), expected, jnp.float32, n=subject.length * DIM)


@pytest.mark.slow(days=28, group="costly", turn="mixers/cells/test_cells")
@pytest.mark.parametrize("kind", [GRUConfig, LSTMConfig])
def test_the_state_is_the_cell_s_carry(kind: type) -> None:
    subject = subject_of(kind)
    ids = subject.with_holes(subject.documents())
    _, carries = by_flax(subject, ids)
    _, state = subject.step(subject.params, jnp.asarray(subject.x), jnp.asarray(ids), subject.start())
    if kind is GRUConfig:
        assert_close(state.h, carries, jnp.float32, n=subject.length * DIM)
    else:
        assert_close(state.c, carries[:, :, 0], jnp.float32, n=subject.length * DIM)
        assert_close(state.h, carries[:, :, 1], jnp.float32, n=subject.length * DIM)


def test_the_cell_state_reaches_beyond_the_output() -> None:
    """c is more than what h tells: with h kept and c cleared, the next outputs change."""
    subject = subject_of(LSTMConfig)
    ids = jnp.ones((subject.rows, subject.length), jnp.int32)
    _, state = subject.step(subject.params, jnp.asarray(subject.x), ids, subject.start())
    kept, _ = subject.step(subject.params, jnp.asarray(subject.x), ids, state)
    cleared, _ = subject.step(subject.params, jnp.asarray(subject.x), ids, state.replace(c=0 * state.c))
    assert np.max(np.abs(kept[:, 0] - cleared[:, 0])) > 1e-3


@pytest.mark.slow(days=28, group="costly", turn="mixers/cells/test_cells")
def test_a_gru_whose_gates_see_the_input_alone_is_a_linear_recurrence() -> None:
    """Without recurrent weights h' = z h + (1 - z) n, which an associative scan computes as well."""
    subject = subject_of(GRUConfig)
    weights = subject.params["params"]
    weights["recurrent"] = jnp.zeros_like(weights["recurrent"])
    kernel, bias = np.asarray(weights["in"]["kernel"]), np.asarray(weights["in"]["bias"])
    r, z, n = np.moveaxis(np.einsum("btd,dhgk->bthgk", subject.x, kernel) + bias, 3, 0)
    keep = scipy.special.expit(z.reshape(*z.shape[:2], -1))
    new = np.tanh(n + scipy.special.expit(r) * np.asarray(weights["recurrent_bias"])).reshape(keep.shape)
    h = jax.jit(linear_scan)(keep, (1 - keep) * new)
    expected = np.asarray(h) @ np.asarray(weights["out"]["kernel"]).reshape(DIM, DIM)
    assert_close(subject.run(), expected, jnp.float32, n=subject.length * DIM)


@pytest.mark.slow(days=28, group="costly", turn="mixers/cells/test_cells")
def test_heads_do_not_reach_each_other() -> None:
    """Recurrent weights are a block per head: what moves one head's state leaves the other's."""
    subject = subject_of(GRUConfig)
    ids = jnp.ones((subject.rows, subject.length), jnp.int32)
    given = (subject.params, jnp.asarray(subject.x), ids)
    _, start = subject.step(*given, subject.start())
    _, before = subject.step(*given, start)
    _, after = subject.step(*given, start.replace(h=start.h.at[:, 0].add(10.0)))
    assert np.all(np.asarray(before.h[:, 1]) == np.asarray(after.h[:, 1]))
    assert np.any(np.asarray(before.h[:, 0]) != np.asarray(after.h[:, 0]))
