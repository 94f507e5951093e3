"""Norms over rows: those of numpy, document by document, and blocks that have them see no other document."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import ExplicitFilter, HyenaConfig
from jaxblt.models import Stack, StackConfig
from jaxblt.models.row_norm import RowNorm
from tests.parameters import drawn
from tests.tolerances import assert_close

IDS = np.array([[1, 1, 1, 2, -2, 2, 2, 0], [1, 1, 1, 1, 1, -1, 0, 0]], np.int32)


def numbers(length=8, width=3):
    return np.random.default_rng(0).normal(2.0, 3.0, (2, length, width)).astype(np.float32)


@pytest.mark.parametrize(("ids", "packed"), [(None, True), (IDS, True), (IDS[1:], False)])
def test_tokens_are_normalised_over_their_document(ids, packed):
    """Channels have scales and biases of their own; holes and padding do not count."""
    x = numbers() if ids is None else numbers()[-len(ids) :]
    scale, bias = np.array([[1, 2, 3], [0.5, 0, -1]], np.float32)
    params, given = {"scale": scale, "bias": bias}, ids
    holes = np.zeros(x.shape, bool) if ids is None else np.repeat(ids[..., None] <= 0, 3, -1)
    run = jax.jit(RowNorm(packed=packed).apply)
    found = np.asarray(run({"params": params}, np.where(holes, np.float32(np.nan), x), given))
    for row, of_row in enumerate(np.ones(x.shape[:2], np.int32) if ids is None else ids):
        for document in set(of_row[of_row > 0]):
            own = x[row, of_row == document]
            expected = (own - own.mean(0)) / own.std(0) * scale + bias
            assert_close(found[row, of_row == document], expected, n=len(own), what=f"{row} {document}")


def test_long_packed_documents_lose_no_digits():
    """A mean of 100 in fp32: added one after another, 60,000 tokens were 3.7e-4 off."""
    length, mean = 65_536, 100.0
    x = np.random.default_rng(0).normal(mean, 1.0, (1, length, 2)).astype(np.float32)
    ids = np.repeat([[1, 2, 3]], [16, length - 116, 100], axis=1).astype(np.int32)
    params = {"scale": jnp.ones(2), "bias": jnp.zeros(2)}
    found = jax.jit(RowNorm().apply)({"params": params}, jnp.asarray(x), jnp.asarray(ids))
    own = x[ids == 2].astype(np.float64)
    expected = (own - own.mean(0)) / own.std(0)
    # The input itself has steps of 7.6e-6
    np.testing.assert_allclose(found[0, ids[0] == 2], expected, atol=1e-4)


@pytest.mark.slow(days=28, group="costly")
def test_packed_documents_are_as_apart():
    mixers = {"rows": HyenaConfig(dim=8, filter=ExplicitFilter(taps=3))}
    config = StackConfig(
        dim=8, num_layers=2, pattern=("rows",), mixers=mixers, mlp_dim=0, causal=False, row_norm=True
    )
    stack, x = Stack(config), numbers(12, 8)
    ids, alone = (np.array([row] * 2, np.int32) for row in ([1] * 5 + [2] * 7, [1] * 7 + [0] * 5))
    params = drawn(stack, x, segment_ids=ids)
    run = jax.jit(lambda x, ids: stack.apply(params, x, segment_ids=ids)[0])
    together = np.asarray(run(x, ids))
    apart = np.asarray(run(np.pad(x[:, 5:], ((0, 0), (0, 5), (0, 0))), alone))
    assert_close(together[:, 5:], apart[:, :7], n=12 * 8, what="second documents")
