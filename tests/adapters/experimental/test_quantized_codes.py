"""Codes of a codebook: the nearest entry, its losses, and that entries find the codes of a router."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, Prefix, RouterConfig
from jaxblt.adapters.experimental.quantized_codes import Codebook
from tests.adapters.routing import DOCUMENTS, in_calls, inputs, params_of, passes, whole
from tests.tolerances import assert_close

PLAIN = AdapterConfig(rank=3, router=RouterConfig(chunk=5, reads=(ChunkMean(), Prefix(3)), hidden=4))
CODED = dataclasses.replace(PLAIN, code=(Codebook(entries=6, commitment=0.5, weight=2.0),))
BOOK = "codebook_0_entries"


@pytest.fixture(scope="module")
def params() -> Any:
    return params_of(CODED)


@pytest.mark.slow(days=28, group="costly", turn="adapters/experimental/test_quantized_codes")
def test_codes_are_the_nearest_entries_and_off_they_are_the_routers(params: Any) -> None:
    ids, book = DOCUMENTS, np.asarray(params[BOOK])
    without = {name: tree for name, tree in params.items() if name != BOOK}
    free, code = whole(PLAIN, without, inputs(), ids), whole(CODED, params, inputs(), ids)
    known = np.zeros(ids.shape, bool)
    for row, first, end in ((0, 5, 26), (0, 31, 40), (1, 5, 9), (1, 16, 35)):
        known[row, first:end] = True
    nearest = book[np.square(free[:, :, None] - book).sum(-1).argmin(-1)]
    assert_close(code, np.where(known[..., None], nearest, free), n=3)
    assert np.abs(code - free)[known].max() > 0.1
    assert len(np.unique(code[known].round(4), axis=0)) > 1
    assert_close(in_calls(CODED, params, inputs(), ids), code, n=40)


@pytest.mark.slow(days=28, group="costly", turn="adapters/experimental/test_quantized_codes")
def test_its_loss_draws_entries_to_codes(params: Any) -> None:
    """Steps on the loss alone leave a fifth of it or less; straight through, the code's gradient is the router's."""
    run, x, ids = passes(CODED), jnp.asarray(inputs()), jnp.asarray(DOCUMENTS)

    def loss(params: Any) -> Any:
        (code, _), side = run({"params": params}, x, segment_ids=ids)
        (found,) = side["losses"]["codebook_0"]
        return found, (jnp.sum(code), side["metrics"]["entries_used"][0].value)

    def step(params: Any, _: Any) -> Any:
        (found, (_, used)), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient), (found, used)

    losses, used = jax.jit(lambda p: jax.lax.scan(step, p, None, length=100)[1])(params)
    assert 0 < losses[-1] < 0.2 * losses[0]
    assert 1 <= used.min() <= used.max() <= 6
    through = jax.jit(jax.grad(lambda params: loss(params)[1][0]))(params)
    assert np.abs(through["code"]["kernel"]).max() > 0
    assert not np.any(through[BOOK])
