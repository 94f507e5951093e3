"""Training of classifiers of images for a number of seconds, with the images on the device."""

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

from jaxblt.data.tasks.pixels.classes import Images, Symmetries
from jaxblt.data.vocab import OFFSET
from jaxblt.training.flops import count_params
from jaxblt.training.optimisers.adamw import AdamWConfig, make_optimizer

CALL = 20
"""Steps of one call of the device."""
WARM_UP = 0.05
"""The share of the seconds in which the learning rate rises."""
SCORED = 500
"""Images of a call that scores."""
FIRST = 0.1
"""The share of the images, of those with the least ink, that a ramp begins with."""
MASTERED = 0.7
"""The share of a call's images that are right before more join."""
GROWTH = 1.1
"""The factor by which the number of images grows then."""


@dataclass(frozen=True)
class Training:
    """How all models of a measurement are trained.

    Attributes:
      optimizer: of which the peak of the rate is taken; it rises, then falls to 2 % like a cosine, by the clock.
      batch_size: images of a step.
      shift, symmetries: of the views, drawn anew for each image of each step.
      ramp: the share of the seconds in which images with more ink join as soon as those before are mastered, the fewest
        pixels above black first; then all are drawn. 0 draws all images from the start.
    """

    optimizer: AdamWConfig
    batch_size: int
    shift: int
    symmetries: Symmetries
    ramp: float = 0.0


class Shown(NamedTuple):
    """Images and labels on the device."""

    pixels: UInt8[Array, "N S S"]
    labels: Int[Array, "N"]

    @classmethod
    def of(cls, images: Images) -> "Shown":
        """Put the images of a split on the device."""
        return cls(jnp.asarray(images.pixels), jnp.asarray(images.labels.astype(np.int32)))

    def by_ink(self) -> "Shown":
        """Return the images in order of their pixels above black."""
        order = jnp.argsort(jnp.sum(self.pixels > 0, (1, 2), dtype=jnp.int32), stable=True)
        return Shown(self.pixels[order], self.labels[order])


def fit(
    module: Any, images: Shown, training: Training, seconds: float, key: Array
) -> tuple[Any, dict[str, Any]]:
    """Train on cross-entropy, and return parameters and figures.

    The clock starts when the program is compiled. Accuracies are those of images before the update.
    """
    keys, images = jax.random.split(key, 2), images.by_ink() if training.ramp else images
    begun = time.perf_counter()
    boxed = jax.jit(module.init)(keys[0], _rows(images.pixels[:1]))
    constant = AdamWConfig(
        learning_rate=1.0,
        warmup_steps=0,
        schedule="constant",
        weight_decay=training.optimizer.weight_decay,
        b2=training.optimizer.b2,
    )
    optimizer = make_optimizer(constant, 1, boxed)
    params = nn.meta.unbox(boxed)
    carried = (params, optimizer.init(params), keys[1])

    def step(carried: Any, images: Shown, rate: Array, count: Array) -> tuple[Any, Any]:
        params, state, key = carried
        key, draw, view, drop = jax.random.split(key, 4)
        chosen = jax.random.randint(draw, (training.batch_size,), 0, count)
        shown = change(view, images.pixels[chosen], training.shift, training.symmetries)
        loss = lambda params: _loss(module, params, shown, images.labels[chosen], drop)  # noqa: E731
        scores, gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
        return (params, state, key), scores

    def call(carried: Any, images: Shown, rate: Array, count: Array) -> tuple[Any, Array]:
        run = lambda carried, _: step(carried, images, rate, count)  # noqa: E731
        carried, (loss, right) = jax.lax.scan(run, carried, None, CALL)
        return carried, jnp.stack([loss.mean(), right.mean()])

    run = jax.jit(call, donate_argnums=0).lower(carried, images, jnp.float32(0), jnp.int32(1)).compile()
    compiled, curve, passed, drawn = time.perf_counter(), [], 0.0, FIRST
    while passed < seconds:
        share = passed / seconds
        drawn = drawn if share < training.ramp else 1.0
        rate, count = _rate(training.optimizer, share), max(1, round(drawn * len(images.labels)))
        carried, scores = run(carried, images, jnp.float32(rate), jnp.int32(count))
        loss, right = (float(x) for x in scores)
        passed = time.perf_counter() - compiled
        curve.append((round(passed, 2), round(loss, 4), round(right, 4), round(drawn, 3)))
        drawn = grown(drawn, right)
    figures = {
        "parameters": count_params(carried[0])[0],
        "steps": CALL * len(curve),
        "images": CALL * len(curve) * training.batch_size,
        "seconds": passed,
        "compile_seconds": compiled - begun,
        "curve": curve[:: max(1, len(curve) // 25)] + curve[-1:],
    }
    return carried[0], figures


def accuracy(module: Any, params: Any, images: Shown) -> float:
    """Return the share of images whose likeliest class is theirs."""
    right, count = 0, len(images.labels)
    for first in range(0, count, SCORED):
        # Score the last image again where the last call has too few: all calls are one program.
        chosen = np.minimum(np.arange(first, first + SCORED), count - 1)
        found = _likeliest(module, params, images.pixels[chosen]) == images.labels[chosen]
        right += int(found[: count - first].sum())
    return right / count


@partial(jax.jit, static_argnums=0)
def _likeliest(module: Any, params: Any, pixels: UInt8[Array, "B S S"]) -> Int[Array, "B"]:
    """Return the likeliest class of each image; a model's splits share one program."""
    return jnp.argmax(module.apply(params, _rows(pixels))[0], -1)


def change(
    key: Array, pixels: UInt8[Array, "B S S"], shift: int, symmetries: Symmetries
) -> UInt8[Array, "B S S"]:
    """Move and turn each image at random, as `jaxblt.data.tasks.pixels.classes.change` does."""
    move, turn = jax.random.split(key)
    side = pixels.shape[1]
    if shift:
        wide = jnp.pad(pixels, ((0, 0), (shift, shift), (shift, shift)))
        corners = jax.random.randint(move, (len(pixels), 2), 0, 2 * shift + 1)
        pixels = jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, at, (side, side)))(wide, corners)
    coins = jax.random.bernoulli(turn, 0.5, (3, len(pixels)))[:, :, None, None]
    if symmetries != "none":
        pixels = jnp.where(coins[0], pixels[:, :, ::-1], pixels)
    if symmetries == "square":
        pixels = jnp.where(coins[1], pixels[:, ::-1], pixels)
        pixels = jnp.where(coins[2], jnp.swapaxes(pixels, 1, 2), pixels)
    return pixels


def grown(drawn: float, right: float) -> float:
    """Return the share of the images to draw from next, after a call of which a share `right` was right."""
    return min(1.0, drawn * GROWTH) if right >= MASTERED else drawn


def _rate(optimizer: AdamWConfig, share: float) -> float:
    """Return the learning rate when a share of the seconds has passed."""
    after = max(0.0, share - WARM_UP) / (1 - WARM_UP)
    fall = 0.02 + 0.98 * (1 + math.cos(math.pi * min(after, 1.0))) / 2
    return optimizer.learning_rate * min(share / WARM_UP, fall)


def _rows(pixels: UInt8[Array, "B S S"]) -> Int[Array, "B T"]:
    return pixels.reshape(len(pixels), -1).astype(jnp.int32) + OFFSET


def _loss(module: Any, params: Any, pixels: Array, labels: Array, key: Array) -> tuple[Array, Any]:
    logits, _ = module.apply(params, _rows(pixels), rngs={"dropout": key})
    nats = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return nats.mean(), jnp.mean(jnp.argmax(logits, -1) == labels, dtype=jnp.float32)
