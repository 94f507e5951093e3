"""The neural Turing machine against a loop in numpy, and its addresses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit as sigmoid
from scipy.special import softmax

from jaxblt.mixers import NTMConfig
from jaxblt.mixers.cells.experimental.addressing import (
    Focus,
    erase_and_add,
    first_focus,
    focus,
    likeness,
    place,
    recall,
)
from jaxblt.testing import Subject
from tests.tolerances import assert_close

CONFIG = NTMConfig(dim=6, num_heads=2, slots=5, width=4)


def naive_place(raw: np.ndarray, memory: np.ndarray, before: np.ndarray) -> np.ndarray:
    """An address of one head, slot by slot."""
    count, width = memory.shape
    key, beta, gate, gamma, shift = np.split(raw, [width, width + 1, width + 2, width + 3])
    cosines = [key @ slot / np.sqrt((key @ key + 1e-4) * (slot @ slot + 1e-4)) for slot in memory]
    found = softmax(np.logaddexp(0, beta) * np.array(cosines))
    mixed = sigmoid(gate) * found + (1 - sigmoid(gate)) * before
    moves, moved = softmax(shift), np.zeros(count)
    for i in range(count):
        for move, share in zip((-1, 0, 1), moves, strict=True):
            moved[(i + move) % count] += share * mixed[i]
    sharp = (moved + 1e-8) ** (1 + np.logaddexp(0, gamma))
    return sharp / sharp.sum()


def naive_row(params: dict, x: np.ndarray, ids: np.ndarray, config: NTMConfig) -> np.ndarray:
    """Outputs of a row: a loop over tokens, heads and slots."""
    weights = params["params"]
    w_in, b_in = (np.asarray(weights["in"][n], np.float64) for n in ("kernel", "bias"))
    feedback, w_out = (np.asarray(a, np.float64) for a in (weights["feedback"], weights["out"]["kernel"]))
    count, width, out, last = config.slots, config.width, np.zeros(x.shape), 0
    tapes: list[Any] = []
    for t, s in enumerate(ids):
        if s and abs(s) != last:
            first = np.eye(count)[0]
            last = abs(s)
            tapes = [
                (np.zeros((count, width)), first, first, np.zeros(width)) for _ in range(config.num_heads)
            ]
        if s <= 0:
            continue
        for head, (memory, writing, reading, seen) in enumerate(tapes):
            raw = x[t] @ w_in[:, head] + b_in[head] + seen @ feedback[head]
            erase, add, rest = np.split(raw, [width, 2 * width])
            to_write, to_read = np.split(rest, 2)
            writing, reading = naive_place(to_write, memory, writing), naive_place(to_read, memory, reading)
            memory = memory.copy()
            for i in range(count):
                memory[i] = memory[i] * (1 - writing[i] * sigmoid(erase)) + writing[i] * np.tanh(add)
            seen = sum(reading[i] * memory[i] for i in range(count))
            tapes[head] = (memory, writing, reading, seen)
            out[t] += seen @ w_out[head]
    return out


@pytest.mark.slow(days=28, group="costly")
def test_equals_the_loop() -> None:
    plain = Subject(CONFIG, length=16)
    params = {"params": {**plain.params["params"]}}
    bias = params["params"]["in"]["bias"]
    params["params"]["in"] = params["params"]["in"] | {"bias": bias + plain.noise(3, bias.shape)}
    subject = Subject(CONFIG, length=16, params=params)
    for ids in (subject.documents(), subject.with_holes(subject.documents())):
        expected = np.stack([naive_row(params, *row, CONFIG) for row in zip(subject.x, ids, strict=True)])
        assert_close(subject.run(ids=ids), expected, jnp.float32, n=subject.length * CONFIG.dim)


def asked(*, move: int = 0, gate: float = 0.0, key: Any = (1.0, 0.0, 0.0), strength: float = 1.0) -> Focus:
    """One address of one head of one row; `move` is certain, and nothing is sharpened."""
    return Focus(
        key=jnp.asarray(key, jnp.float32)[None, None, None],
        strength=jnp.full((1, 1, 1), strength),
        gate=jnp.full((1, 1, 1), gate),
        shift=jnp.eye(3, dtype=jnp.float32)[move + 1][None, None, None],
        sharpness=jnp.ones((1, 1, 1)),
    )


@pytest.mark.slow(days=28, group="costly", turn="mixers/cells/experimental/test_ntm")
def test_a_shift_moves_the_head_and_wraps() -> None:
    memory, at = jnp.zeros((1, 1, 5, 3)), jnp.eye(5, dtype=jnp.float32)[0][None, None, None]
    for move in (1, 0, -1):
        places, weights = [], at
        for _ in range(6):
            weights = jax.jit(place)(memory, weights, asked(move=move))
            places.append(int(np.argmax(weights)))
        assert places == [(move * step) % 5 for step in range(1, 7)]
        assert np.max(weights) > 0.999


def test_sharp_addresses_move_as_asked() -> None:
    memory, at = jnp.zeros((1, 1, 9, 3)), np.eye(9, dtype=np.float32)[0][None, None, None]
    step = jax.jit(lambda weights, first: place(memory, weights, focus(first[None, None, None], 3)))
    for move in (1, 0, -1):
        weights = at
        for _ in range(20):
            weights = step(weights, first_focus(3, move))
        assert np.argmax(weights) == 20 * move % 9
        assert np.max(weights) > 0.95


@pytest.mark.slow(days=28, group="costly", turn="mixers/cells/experimental/test_ntm")
def test_a_key_finds_the_slot_that_is_like_it() -> None:
    memory = jnp.asarray([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 0.1, 0.0]])[None, None]
    start = jnp.eye(3, dtype=jnp.float32)[1][None, None, None]
    found = place(memory, start, asked(gate=1.0, strength=20.0))
    assert int(jnp.argmax(found)) == 2
    assert float(found[0, 0, 0, 2]) > 0.999
    kept = place(memory, start, asked(gate=0.0, strength=20.0))
    assert int(jnp.argmax(kept)) == 1


def test_an_empty_slot_is_like_nothing_and_a_full_one_like_itself() -> None:
    memory = jnp.asarray([[0.0, 0.0, 0.0], [0.0, 5.0, 0.0]])[None, None]
    likened = np.asarray(likeness(jnp.asarray([0.0, 1.0, 0.0])[None, None, None], memory))[0, 0, 0]
    assert likened[0] == 0.0
    assert abs(likened[1] - 1) < 1e-3


def test_what_is_erased_and_added_is_read() -> None:
    memory = jnp.ones((1, 1, 4, 2))
    at = jnp.eye(4, dtype=jnp.float32)[2][None, None]
    erase, add = jnp.asarray([[[1.0, 0.0]]]), jnp.asarray([[[0.0, 0.5]]])
    after = erase_and_add(memory, at, erase, add)
    np.testing.assert_array_equal(np.asarray(recall(after, at))[0, 0], [0.0, 1.5])
    np.testing.assert_array_equal(np.asarray(after)[0, 0, [0, 1, 3]], np.ones((3, 2)))


@pytest.mark.slow(days=28, group="costly", turn="mixers/cells/experimental/test_ntm")
def test_a_row_s_memory_is_its_own() -> None:
    """What one row writes leaves the memories of the others, bit by bit."""
    subject = Subject(CONFIG, length=16)
    ids = jnp.ones((subject.rows, subject.length), jnp.int32)
    other = subject.x.copy()
    other[0] += 1.0
    states = [
        subject.step(subject.params, jnp.asarray(x), ids, subject.start())[1] for x in (subject.x, other)
    ]
    first, second = (np.asarray(state.tape.memory) for state in states)
    assert np.any(first[0] != second[0])
    np.testing.assert_array_equal(first[1:], second[1:])
