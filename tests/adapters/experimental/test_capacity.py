"""Capacity of experts against a loop over choices, and a bank that all experts act in."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, Prefix, RouterConfig, Sticky, TopK
from jaxblt.adapters.experimental.capacity import Capacity
from tests.adapters.routing import DOCUMENTS, in_calls, inputs, params_of, sown, whole, with_holes
from tests.tolerances import assert_close

ROUTER = RouterConfig(level="token", chunk=5, reads=(ChunkMean(), Prefix(3)), hidden=4)
BANK = AdapterConfig(rank=8, blocks=4, router=ROUTER, code=(TopK(2),))
LIMIT = Capacity(factor=1.0, window=6)
"""Three of six choices for each of four experts, where each choice names two."""


def limited(bank: AdapterConfig, capacity: Capacity = LIMIT) -> AdapterConfig:
    return dataclasses.replace(bank, code=(*bank.code, capacity))


def loop(code: np.ndarray, ids: np.ndarray, most: int, window: int) -> np.ndarray:
    """Drop from left to right, where each step of a document is a choice; holes choose as well."""
    found = code.copy()
    for row, document in ((i, s) for i, own in enumerate(ids) for s in np.unique(abs(own)) if s):
        steps = np.flatnonzero(abs(ids[row]) == document)
        for at in range(0, len(steps), window):
            asked = np.zeros(code.shape[-1])
            for t in steps[at : at + window]:
                asked += code[row, t] != 0
                found[row, t] = np.where(asked > most, 0, code[row, t])
    return found


@pytest.fixture(scope="module")
def params() -> Any:
    return params_of(BANK)


@pytest.mark.slow(days=28, group="costly", turn="adapters/experimental/test_capacity")
def test_what_exceeds_the_capacity_is_dropped_and_counted(params: Any) -> None:
    config = limited(BANK)
    free = whole(BANK, params, inputs(), DOCUMENTS)
    (code, _), side = sown(config, params, inputs(), DOCUMENTS)
    expected = loop(free, DOCUMENTS, most=3, window=6)
    np.testing.assert_array_equal(code, expected)
    drops = (free != expected).sum((0, 1))
    assert drops.sum() > 10
    np.testing.assert_array_equal(side["metrics"]["drops"][0].value, drops)
    ids = with_holes(DOCUMENTS)
    calls, rows = (run(config, params, inputs(), ids) for run in (in_calls, whole))
    np.testing.assert_array_equal(calls == 0, rows == 0)
    assert_close(calls, rows, n=40)


@pytest.mark.slow(days=28, group="costly", turn="adapters/experimental/test_capacity")
def test_a_bank_in_which_all_experts_act_is_the_dense_one(params: Any) -> None:
    """k = E: no window of any length drops one."""
    dense = dataclasses.replace(BANK, code=())
    every = dataclasses.replace(BANK, code=(TopK(4), Capacity(factor=1.0, window=3)))
    (code, _), side = sown(every, params, inputs(), DOCUMENTS)
    np.testing.assert_allclose(code, whole(dense, params, inputs(), DOCUMENTS), rtol=1e-6)
    assert not np.any(side["metrics"]["drops"][0].value)


@pytest.mark.slow(days=28, group="costly", turn="adapters/experimental/test_capacity")
def test_a_chunk_is_one_choice() -> None:
    """An expert may have two chunks of six. Those that it has beyond that are dropped whole."""
    chunked = dataclasses.replace(
        BANK, router=dataclasses.replace(ROUTER, level="chunk"), code=(Sticky(0.0),)
    )
    free, code = (
        whole(c, params_of(c), inputs(), DOCUMENTS) for c in (chunked, limited(chunked, Capacity(0.7, 6)))
    )
    kept, first = np.any(code != 0, -1), DOCUMENTS[0] == 1
    chunks = free[0][first].argmax(-1)[5::5]
    seen = [int(np.sum(chunks[: i + 1] == chunk)) for i, chunk in enumerate(chunks)]
    assert max(seen) > 2
    np.testing.assert_array_equal(kept[0][first][5::5], np.array(seen) <= 2)
    np.testing.assert_array_equal(kept[0][first][5:25], np.repeat(kept[0][first][5:25:5], 5))
