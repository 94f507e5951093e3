"""Squares of pixels as tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import AttentionConfig, ExplicitFilter, HyenaConfig
from jaxblt.models import ByteClassifierConfig, StackConfig
from jaxblt.models.squares import Squares
from tests.tolerances import assert_close


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


def test_padding_behind_an_image_changes_no_answer():
    mixers = {"rows": HyenaConfig(dim=8, filter=ExplicitFilter(taps=3))}
    stack = StackConfig(
        dim=8, num_layers=1, pattern=("rows",), mixers=mixers, mlp_dim=0, causal=False, row_norm=True
    )
    model = ByteClassifierConfig(stack=stack, levels=True, squares=2, columns=4, periods=(4,)).build()
    ids = jax.random.randint(jax.random.key(0), (2, 32), 4, 260)
    params = jax.jit(model.init)(jax.random.key(1), ids[:, :16])
    alone, _ = jax.jit(model.apply)(params, ids[:, :16])
    padded, _ = jax.jit(model.apply)(params, ids, segment_ids=jnp.array([[1] * 16 + [0] * 16] * 2))
    assert_close(padded, alone, n=16 * 8, what="logits")


def test_an_image_that_ends_amid_a_row_of_squares_is_read_to_its_end():
    """Three rows of four pixels: what its padding holds is not read, and its last pixel is."""
    mixers = {"rows": HyenaConfig(dim=8, filter=ExplicitFilter(taps=3))}
    stack = StackConfig(
        dim=8, num_layers=1, pattern=("rows",), mixers=mixers, mlp_dim=0, causal=False, row_norm=True
    )
    model = ByteClassifierConfig(stack=stack, levels=True, squares=2, columns=4).build()
    ids, there = jax.random.randint(jax.random.key(0), (1, 16), 4, 260), jnp.array([[1] * 12 + [0] * 4])
    params = jax.jit(model.init)(jax.random.key(1), ids)
    run = jax.jit(lambda ids: model.apply(params, ids, segment_ids=there)[0])
    logits = run(ids)
    assert_close(run(ids.at[:, 12:].set(200)), logits, n=16 * 8, what="logits")
    assert not np.allclose(run(ids.at[0, 11].set(4 + (ids[0, 11] + 124) % 256)), logits, atol=1e-3)


@pytest.mark.parametrize("pixels", [16, 12])
def test_positions_of_squares_have_no_gaps(pixels):
    """Also where an image ends amid a row of squares: positions of padding are 0."""
    mixers = {"rows": AttentionConfig(8, 2, causal=False)}
    stack = StackConfig(dim=8, num_layers=1, pattern=("rows",), mixers=mixers, mlp_dim=0, causal=False)
    model = ByteClassifierConfig(stack=stack, levels=True, squares=2, columns=4).build()
    ids = jax.random.randint(jax.random.key(0), (1, 16), 4, 260)
    place = jnp.arange(16)[None]
    there = (place < pixels).astype(jnp.int32)
    params = jax.jit(model.init)(jax.random.key(1), ids)
    told, _ = jax.jit(model.apply)(params, ids, segment_ids=there, positions=place * there)
    counted, _ = jax.jit(model.apply)(params, ids, segment_ids=there)
    assert_close(told, counted, n=16 * 8, what="logits")
