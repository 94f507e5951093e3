"""The benchmark of images: views on the device are those of the task, and its trainer learns what can be learned."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmark.tasks import pixel_training
from experiments.benchmark.tasks.pixel_models import LinearPixels, SquareCNN, cnn_of_size
from experiments.benchmark.tasks.pixel_training import Shown, Training, accuracy, change, fit, grown
from jaxblt.data.vocab import OFFSET
from jaxblt.training.flops import count_params
from jaxblt.training.optimisers.adamw import AdamWConfig


@pytest.mark.slow(days=28, group="costly")
def test_views_on_the_device_are_turned_mirrored_and_moved() -> None:
    image = jnp.arange(16, dtype=jnp.uint8).reshape(4, 4)
    views = change(jax.random.key(0), jnp.tile(image, (128, 1, 1)), 0, "square")
    ways = [np.rot90(flip, k) for flip in (image, image[:, ::-1]) for k in range(4)]
    assert {np.asarray(v).tobytes() for v in views} == {np.ascontiguousarray(w).tobytes() for w in ways}
    moved = np.asarray(change(jax.random.key(1), jnp.tile(image, (128, 1, 1)), 1, "none"))
    wide = np.pad(np.asarray(image), 1)
    parts = {np.ascontiguousarray(wide[y : y + 4, x : x + 4]).tobytes() for y in range(3) for x in range(3)}
    assert {view.tobytes() for view in moved} == parts


@pytest.mark.slow(days=28, group="costly")
def test_a_trained_model_is_scored_on_every_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is the brighter half; the last call that scores has fewer images than the others."""
    pixels = np.random.default_rng(0).integers(0, 100, (250, 4, 4), np.uint8)
    labels = np.arange(250, dtype=np.int32) % 2
    pixels[labels == 1, :2] += 150
    shown = Shown(jnp.asarray(pixels), jnp.asarray(labels))
    monkeypatch.setattr(pixel_training, "SCORED", 100)
    training = Training(AdamWConfig(learning_rate=0.05, weight_decay=0.0), 16, 0, "mirror", ramp=0.2)
    params, figures = fit(LinearPixels(2), shown, training, 1.0, jax.random.key(0))
    assert accuracy(LinearPixels(2), params, shown) == 1.0
    assert figures["images"] == 16 * figures["steps"]
    assert figures["parameters"] == 2 * 17
    wrong = Shown(shown.pixels, jnp.where(jnp.arange(250) == 249, 1 - shown.labels, shown.labels))
    assert accuracy(LinearPixels(2), params, wrong) == pytest.approx(249 / 250)
    json.dumps(figures)


def test_images_with_more_ink_join_later() -> None:
    shown = Shown(jnp.zeros((3, 2, 2), jnp.uint8).at[0].set(9).at[2, 0, 0].set(1), jnp.arange(3)).by_ink()
    assert shown.labels.tolist() == [1, 2, 0]
    assert int(shown.pixels[2].min()) == 9
    assert [grown(drawn, right) for drawn, right in ((0.5, 0.9), (0.5, 0.6), (0.99, 1.0))] == [0.55, 0.5, 1.0]


@pytest.mark.slow(days=28, group="costly")
def test_gradients_of_a_cnn_that_sees_black_are_small() -> None:
    cnn, ids = SquareCNN(2, 8, blocks=3), jnp.full((2, 64), OFFSET, jnp.int32)

    @jax.jit
    def gradients():
        return jax.grad(lambda params: jnp.sum(cnn.apply(params, ids)[0][:, 0]))(
            cnn.init(jax.random.key(0), ids)
        )

    assert max(float(np.abs(g).max()) for g in jax.tree.leaves(gradients())) < 100


def test_the_cnn_is_as_large_as_asked() -> None:
    cnn = cnn_of_size(927_426, 2, jnp.float32)
    params = jax.eval_shape(cnn.init, jax.random.key(0), jnp.zeros((1, 1024), jnp.int32))
    assert count_params(params)[0] == pytest.approx(927_426, rel=0.03)
