"""Squares of pixels as tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import AttentionConfig, ExplicitFilter, HyenaConfig
from jaxblt.models import ByteClassifierConfig, StackConfig
from jaxblt.models.squares import Squares
from tests.parameters import drawn
from tests.tolerances import assert_close


def pixels_of(rows, count):
    return np.random.default_rng(0).integers(4, 260, (rows, count)).astype(np.int32)


def test_a_token_is_a_linear_map_of_its_square():
    rng = np.random.default_rng(0)
    image, kernel = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 4, 6, 3), (2, 2, 3, 3)))
    squares = Squares(side=2, columns=6)
    found = squares.apply({"params": {"pixels": {"kernel": kernel}}}, jnp.asarray(image.reshape(1, 24, 3)))
    for number, (y, x) in enumerate((y, x) for y in (0, 2) for x in (0, 2, 4)):
        own = np.einsum("ijd,ijde->e", image[0, y : y + 2, x : x + 2], kernel)
        assert_close(found[0, number], own, n=12, what=f"square {number}")
    with pytest.raises(ValueError, match="a row of 18 pixels is no image of 6 columns in squares of 2 x 2"):
        squares.init(jax.random.key(0), jnp.zeros((1, 18, 3)))


@pytest.mark.slow(days=28, group="costly")
def test_padding_behind_an_image_changes_no_answer():
    mixers = {"rows": HyenaConfig(dim=8, filter=ExplicitFilter(taps=3))}
    stack = StackConfig(
        dim=8, num_layers=1, pattern=("rows",), mixers=mixers, mlp_dim=0, causal=False, row_norm=True
    )
    model = ByteClassifierConfig(stack=stack, levels=True, squares=2, columns=4, periods=(4,)).build()
    ids = pixels_of(2, 32)
    params = drawn(model, ids[:, :16])
    alone, _ = jax.jit(model.apply)(params, ids[:, :16])
    padded, _ = jax.jit(model.apply)(params, ids, segment_ids=np.array([[1] * 16 + [0] * 16] * 2, np.int32))
    assert_close(padded, alone, n=16 * 8, what="logits")


def test_an_image_that_ends_amid_a_row_of_squares_is_read_to_its_end():
    """Three rows of four pixels: what its padding holds is not read, and its last pixel is."""
    mixers = {"rows": HyenaConfig(dim=8, filter=ExplicitFilter(taps=3))}
    stack = StackConfig(
        dim=8, num_layers=1, pattern=("rows",), mixers=mixers, mlp_dim=0, causal=False, row_norm=True
    )
    model = ByteClassifierConfig(stack=stack, levels=True, squares=2, columns=4).build()
    ids, there = pixels_of(1, 16), np.array([[1] * 12 + [0] * 4], np.int32)
    params = drawn(model, ids)
    run = functools.partial(jax.jit(lambda there, ids: model.apply(params, ids, segment_ids=there)[0]), there)
    logits, behind, last = run(ids), ids.copy(), ids.copy()
    behind[:, 12:] = 200
    last[0, 11] = 4 + (ids[0, 11] + 124) % 256
    assert_close(run(behind), logits, n=16 * 8, what="logits")
    assert not np.allclose(run(last), logits, atol=1e-3)


@pytest.fixture(scope="module")
def attend():
    """Logits of an image by (segment_ids, positions)."""
    mixers = {"rows": AttentionConfig(8, 2, causal=False)}
    stack = StackConfig(dim=8, num_layers=1, pattern=("rows",), mixers=mixers, mlp_dim=0, causal=False)
    ids, model = (
        pixels_of(1, 16),
        ByteClassifierConfig(stack=stack, levels=True, squares=2, columns=4).build(),
    )
    run = functools.partial(jax.jit(model.apply), drawn(model, ids), ids)
    return lambda there, positions: run(segment_ids=there, positions=positions)[0]


@pytest.mark.parametrize("pixels", [16, 12])
def test_positions_of_squares_have_no_gaps(attend, pixels):
    """Also where an image ends amid a row of squares: positions of padding are 0."""
    place = np.arange(16, dtype=np.int32)[None]
    there = (place < pixels).astype(np.int32)
    assert_close(attend(there, place * there), attend(there, None), n=16 * 8, what="logits")
