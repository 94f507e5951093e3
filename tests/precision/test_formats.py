"""FP8 numbers: the tables of both formats, round trips, and scales by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.precision import E4M3, E5M2, quantise, scale_for

FORMATS = {"E4M3": (E4M3, 448.0, 8, 253), "E5M2": (E5M2, 57344.0, 4, 247)}
"""Of each: its largest number, steps between powers of two, and how many finite numbers it has, 0 once."""


@pytest.mark.parametrize("name", FORMATS)
def test_the_levels_of_a_format_are_those_of_its_dtype(name):
    kind, largest, steps, count = FORMATS[name]
    levels = np.arange(256, dtype=np.uint8).view(kind.dtype).astype(np.float64)
    finite = np.unique(levels[np.isfinite(levels)])
    assert len(finite) == count
    assert finite[-1] == largest == kind.largest
    positive = finite[finite > 0]
    assert positive[0] == kind.smallest == kind.smallest_normal / steps
    assert 2**kind.mantissa_bits == steps
    between = positive[(positive >= 1) & (positive < 2)]
    np.testing.assert_array_equal(between, 1 + np.arange(steps) / steps)
    exact = quantise(jnp.asarray(finite, jnp.float32), jnp.float32(1), kind)
    np.testing.assert_array_equal(np.asarray(exact, np.float64), finite)


@pytest.mark.parametrize(("name", "least", "most"), [("E4M3", 0.02, 0.03), ("E5M2", 0.04, 0.06)])
def test_a_round_trip_errs_by_half_a_step_at_most(name, least, most):
    kind = FORMATS[name][0]
    x = jax.random.normal(jax.random.key(0), (20_000,))
    scale = scale_for(jnp.max(jnp.abs(x)), kind)
    back = np.asarray(quantise(x, scale, kind), np.float64) / float(scale)
    given = np.asarray(x, np.float64)
    assert least < np.linalg.norm(back - given) / np.linalg.norm(given) < most
    normal = np.abs(given) * float(scale) >= kind.smallest_normal
    assert np.max(np.abs(back / given - 1)[normal]) <= 2.0 ** -(kind.mantissa_bits + 1)


@pytest.mark.parametrize(
    ("largest", "margin", "scale"),
    [
        (448.0, 0, 1.0),
        (449.0, 0, 0.5),
        (1.0, 0, 256.0),
        (1.0, 2, 64.0),
        (0.0, 0, 1.0),
        (1e-30, 0, 2.0**60),
        (2e36, 0, 2.0**-60),
    ],
)
def test_a_scale_is_the_greatest_power_of_two_that_leaves_the_margin(largest, margin, scale):
    assert float(scale_for(jnp.float32(largest), E4M3, margin)) == scale
    if scale < 2.0**60:  # 57344 is 448 times 128
        assert float(scale_for(jnp.float32(128 * largest), E5M2, margin)) in (scale, 2.0**-60)


def test_what_exceeds_the_range_becomes_its_largest_number_and_nan_stays():
    x = jnp.asarray([500.0, -jnp.inf, jnp.nan, 3.0], jnp.bfloat16)
    for kind in (E4M3, E5M2):
        found = np.asarray(quantise(x, jnp.float32(2.0**20), kind), np.float64)
        np.testing.assert_array_equal(found, [kind.largest, -kind.largest, np.nan, kind.largest])
