"""Segment-aware positions against a loop over bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.models import ByteClassifierConfig, StackConfig
from jaxblt.models.positions import PeriodicPosition, Places, PositionConfig, features, places
from jaxblt.patching.patches import from_closed

place = jax.jit(lambda *of, causal: vars(places(*of, causal=causal)), static_argnames="causal")
feature = jax.jit(lambda config, *of: features(config, Places(*of)), static_argnums=0)
grouped = jax.jit(from_closed, static_argnames=("block_size", "capacity"))
CONFIG = PositionConfig(offset_periods=(2, 8), periods=(3, 64))


def example():
    rng = np.random.default_rng(0)
    closed = rng.random((2, 29)) < 0.3
    segments = np.array([[1] * 16 + [2] * 13, [1] * 25 + [0] * 4], np.int32)
    return grouped(closed, segments, block_size=8, capacity=6), segments


def test_places_equal_a_loop():
    patches, segments = example()
    got = jax.device_get(place(patches, np.zeros((2, 29), np.int32), causal=False))
    ids = np.asarray(patches.patch_ids).reshape(2, -1)[:, :29]
    for b in range(2):
        previous, length, last = 0, 0, None
        for t in range(29):
            if segments[b, t] == 0:
                continue
            here = (t // 8, ids[b, t])
            if t and segments[b, t] != segments[b, t - 1]:
                previous, length = 0, 0
            elif here != last:
                previous, length = length, 0
            last, length = here, length + 1
            end = t
            while (
                end + 1 < 29
                and segments[b, end + 1] == segments[b, t]
                and ((end + 1) // 8, ids[b, end + 1]) == here
            ):
                end += 1
            assert (int(got["offset"][b, t]), int(got["previous"][b, t])) == (length - 1, previous), (b, t)
            assert int(got["left"][b, t]) == end - t


def test_the_causal_form_has_nothing_of_the_patch_end():
    patches, _ = example()
    assert place(patches, np.zeros((2, 29), np.int32), causal=True)["left"] is None


def test_the_same_place_in_different_patches_has_the_same_features():
    here = (np.array([x], np.int32) for x in ([3, 3], [5, 5], [0, 192]))
    one, other = np.asarray(feature(CONFIG, *here))[0]
    np.testing.assert_array_equal(one, other)


def test_phases_are_exact_far_out():
    here = (np.array([[x]], np.int32) for x in (0, 0, 2**30 + 7))
    turns = np.array([(2**30 + 7) % 3 / 3, (2**30 + 7) % 64 / 64])
    want = np.concatenate([np.sin(2 * np.pi * turns), np.cos(2 * np.pi * turns)])
    np.testing.assert_allclose(np.asarray(feature(CONFIG, *here))[0, 0, 4:8], want, atol=1e-6)


@pytest.mark.parametrize("config", [PositionConfig(periods=(4, 16)), PositionConfig.genomic()])
def test_the_spectrum_has_the_configured_periods_alone(config):
    """Codon, hexamer, promoter, helix and nucleosome for genomes: over a whole number of each."""
    length = np.lcm.reduce(config.periods)
    t = np.arange(length, dtype=np.int32)[None]
    first = 2 * len(config.offset_periods)
    x = np.asarray(feature(config, t * 0, t * 0, t))[0, :, first : first + 2 * len(config.periods)]
    power = np.abs(np.fft.rfft(x, axis=0)).sum(-1)
    assert set(np.flatnonzero(power > 1e-3 * power.max())) == {length // period for period in config.periods}


def test_jit_equals_no_jit():
    patches, _ = example()
    positions = jax.device_put(np.arange(29, dtype=np.int32)[None].repeat(2, 0))
    plain, jitted = places(patches, positions, causal=True), place(patches, positions, causal=True)
    np.testing.assert_array_equal(plain.offset, jitted["offset"])
    np.testing.assert_array_equal(plain.previous, jitted["previous"])


def test_periodic_positions_tell_places_of_a_period_apart_and_periods_not():
    module = PeriodicPosition((4,), 8)
    positions = jnp.arange(12, dtype=jnp.int32)[None]
    params = module.init(jax.random.key(0), positions)
    out = np.asarray(module.apply(params, positions))
    np.testing.assert_array_equal(out[:, :4], out[:, 4:8])
    assert len(np.unique(out[0, :4].round(4), axis=0)) == 4


def test_a_classifier_adds_periodic_positions_only_if_it_is_told_to():
    def names(**options):
        stack = StackConfig(dim=8, num_layers=1, pattern=("hyena_short",), causal=False)
        model = ByteClassifierConfig(stack=stack, **options).build()
        return set(jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 8), np.int32))["params"])

    assert names(periods=(4, 8)) - names() == {"positions"}
