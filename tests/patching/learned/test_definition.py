"""The equations of H-Net (2507.07955) by hand in NumPy, motifs, and the calibration before step 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data.vocab import VOCAB_SIZE, encode
from jaxblt.mixers.driver.marks import mark
from jaxblt.models.unmerge import smooth
from jaxblt.patching.learned import BoundaryConfig, Router, calibrate_router, confidence, ratio_loss
from jaxblt.patching.learned.cores import Responses, motif_table
from jaxblt.patching.learned.mixture import MOST, SHARPNESS, measure_separation
from tests.tolerances import tol

DIM, LENGTH, TARGET = 6, 20, 4.0
SEGMENTS = np.array([[1] * 12 + [2] * 5 + [0] * 3], np.int32)


def test_plain_probabilities_and_the_ratio_loss_are_those_of_the_paper() -> None:
    """Eqs. 4 and 10: identity products, a first byte with p = 1, zero vectors that are no NaN, two documents."""
    h = np.random.default_rng(0).standard_normal((1, LENGTH, DIM)).astype(np.float32)
    h[0, 5] = 0
    router = Router(BoundaryConfig(plain=True), VOCAB_SIZE, TARGET)
    ids, places = np.full((1, LENGTH), 70, np.int32), np.zeros((1, LENGTH), np.int32)
    given = {"segment_ids": jnp.asarray(SEGMENTS), "positions": jnp.asarray(places)}
    names = ("query", "key")
    params = {name: {"kernel": jnp.eye(DIM)} for name in names}

    def run(h):
        (p, _, _), side = router.apply(
            {"params": params}, h, jnp.asarray(ids), **given, mutable=["losses", "metrics"]
        )
        return side["losses"]["ratio"][0], (p, side["metrics"])

    (loss, (p, metrics)), gradient = jax.jit(jax.value_and_grad(run, has_aux=True))(jnp.asarray(h))
    expected = np.ones(LENGTH)
    for t in range(1, LENGTH):
        if SEGMENTS[0, t] == SEGMENTS[0, t - 1]:
            size = np.linalg.norm(h[0, t]) * np.linalg.norm(h[0, t - 1])
            expected[t] = 0.5 * (1 - h[0, t] @ h[0, t - 1] / size) if size else 0.5
    np.testing.assert_allclose(np.asarray(p)[0, :17], expected[:17], **tol(jnp.float32, DIM))
    f, g = (expected[:17] > 0.5).mean(), expected[:17].mean()
    wanted = TARGET / (TARGET - 1) * ((TARGET - 1) * f * g + (1 - f) * (1 - g))
    np.testing.assert_allclose(loss, 0.03 * wanted, rtol=1e-5)
    np.testing.assert_allclose([metrics[name][0].value for name in ("cut_rate", "mean_p")], [f, g], rtol=1e-5)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0
    assert float(ratio_loss(jnp.float32(0.25), jnp.float32(0.25), TARGET)) == pytest.approx(1.0)


def test_confidence_is_one_with_the_gradient_of_p_or_of_its_rest() -> None:
    closed = jnp.asarray([True, False])
    value, gradient = jax.value_and_grad(lambda p: jnp.sum(confidence(p, closed)))(jnp.asarray([0.9, 0.2]))
    assert float(value) == 2
    np.testing.assert_array_equal(gradient, [1, -1])


def test_smoothing_is_that_of_the_paper_and_passes_holes() -> None:
    """Eq. 5, each document from zero, p clipped at both ends."""
    rng = np.random.default_rng(1)
    z, p = rng.standard_normal((1, 8, 3)).astype(np.float32), rng.random((1, 8)).astype(np.float32)
    p[0, :2] = 1, 0
    slots = np.array([[1, 1, -1, 1, 2, -2, 2, 0]], np.int32)
    found, _ = jax.jit(smooth)(z, p, slots)
    last, document = np.zeros(3), 0
    for j, slot in enumerate(slots[0]):
        if slot <= 0:
            np.testing.assert_array_equal(found[0, j], 0)
            continue
        share = np.clip(p[0, j], 1e-4, 1 - 1e-4)
        last = share * z[0, j] + (1 - share) * (last if slot == document else 0)
        document = slot
        np.testing.assert_allclose(found[0, j], last, **tol(jnp.float32, 8))


def test_motifs_respond_where_they_end() -> None:
    """A full match is 1, in either case, and no match reaches into another document."""
    config = BoundaryConfig(strategy="pattern_aware", motifs=("TATR",), matrices=(((0.0, 2.0, 0.0, 1.0),),))
    table = motif_table(config.given, length=config.longest, vocab_size=VOCAB_SIZE)
    ids = encode(b"TATGtatatTATATGC")[None]
    segments = np.array([[1] * 11 + [2] * 5], np.int32)
    run = jax.jit(lambda ids, segments: Responses(jnp.asarray(table)).run(ids, mark(segments), None)[0])
    found = np.asarray(run(ids + 1, segments))
    assert np.flatnonzero(np.isclose(found[0, :, 0], 1)).tolist() == [3, 7, 14]
    np.testing.assert_allclose(found[0, :, 1], [{"C": 1, "T": 0.5}.get(x, 0) for x in "TATGTATATTATATGC"])


@pytest.mark.parametrize("strategy", ["content_similarity", "adaptive_hybrid"])
def test_calibration_cuts_at_the_targets_rate(strategy: str) -> None:
    parts = ("content_similarity", "entropy_based")
    config = BoundaryConfig(strategy=strategy, **({"parts": parts} if strategy == "adaptive_hybrid" else {}))
    s = np.random.default_rng(2).gamma(2.0, size=(4, 500, len(config.scores))).astype(np.float32) * 0.02
    here = np.ones(s.shape[:2], bool)
    found = jax.tree.map(np.asarray, calibrate_router(config, {}, s, here=here, target=TARGET))
    mixed = s[..., 0]
    if strategy == "adaptive_hybrid":
        np.testing.assert_allclose((s > found["center"]).mean((0, 1)), 1 / TARGET, rtol=0.03)
        share = np.exp(SHARPNESS * found["separation"])
        mixed = (s - found["center"]) / np.exp(found["log_spread"]) @ (share / share.sum())
    assert (mixed > np.asarray(found["theta"])).mean() == pytest.approx(1 / TARGET, rel=0.03)
    np.testing.assert_allclose(np.exp(np.asarray(found["log_tau"]))[0], mixed.std(), rtol=1e-4)
    with pytest.raises(ValueError, match="must be finite before step 0"):
        calibrate_router(config, {}, s * np.nan, here=here, target=TARGET)
    with pytest.raises(ValueError, match="none of the 2000 places of the sample counts before step 0"):
        calibrate_router(config, {}, s, here=~here, target=TARGET)


@pytest.mark.parametrize(("target", "theta"), [(20.0, 0.75), (4.0, 0.25), (2.0, 0.25)])
def test_theta_lies_between_scores_where_many_are_equal(target: float, theta: float) -> None:
    """One score in 16 is 1, six are 1/2, nine are 0: half of a motif matches more often than all of it."""
    s = np.repeat([1.0, 0.5, 0.0], [1, 6, 9]).astype(np.float32)
    s = np.tile(s, (4, 50))[..., None]
    config = BoundaryConfig(strategy="pattern_aware", motifs=("CG",))
    found = calibrate_router(config, {}, s, here=np.ones(s.shape[:2], bool), target=target)
    np.testing.assert_allclose(found["theta"], theta)


def test_separation_is_ashmans_by_hand_whatever_the_scale() -> None:
    """A score in two clumps, the same times a thousand, two exact values, and one that is above nowhere."""
    own = np.array([0.0, 1.0, 2.0, 7.0, 9.0, 50.0])
    s = np.stack([own, 1e3 * own, np.array([0.0, 0, 0, 1, 1, 1]), own], -1).astype(np.float32)
    above, inside = s > np.array([5.0, 5e3, 0.5, 99.0]), np.array([True] * 5 + [False])[:, None]
    by_hand = 2**0.5 * (8 - 1) / (1 + 2 / 3) ** 0.5
    for found in (
        measure_separation(s, above, inside),
        measure_separation(*map(jnp.asarray, (s, above, inside))),
    ):
        np.testing.assert_allclose(found, [by_hand, by_hand, MOST, 0], rtol=1e-5)


def test_a_gate_weighs_the_score_that_separates_and_follows_it() -> None:
    """Entropies in two clumps beside vectors that tell nothing: before step 0, and in what the step is told."""
    config = BoundaryConfig(strategy="adaptive_hybrid", parts=("content_similarity", "entropy_based"))
    rng = np.random.default_rng(3)
    h = jnp.asarray(rng.standard_normal((2, 200, DIM)), jnp.float32)
    cuts = rng.random((2, 200)) < 1 / TARGET
    entropies = jnp.asarray(cuts + 0.1 * rng.standard_normal(cuts.shape), jnp.float32)
    ids, router = jnp.full((2, 200), 70), Router(config, VOCAB_SIZE, TARGET)
    given = {"segment_ids": jnp.ones_like(ids), "positions": jnp.zeros_like(ids), "entropies": entropies}
    params = {name: {"kernel": jnp.eye(DIM)} for name in ("query", "key")}
    params |= {"gate": {"kernel": jnp.zeros((DIM, 2))}, "theta": jnp.zeros(1), "log_tau": jnp.zeros(1)}
    params |= {name: jnp.zeros(2) for name in ("center", "log_spread", "separation")}
    run = jax.jit(
        lambda params: router.apply({"params": params}, h, ids, **given, mutable=["losses", "metrics"])
    )
    (_, scores, _), _ = run(params)
    here = np.ones(cuts.shape, bool)
    here[:, 0] = False
    found = calibrate_router(config, params, np.asarray(scores), here=here, target=TARGET)
    (p, _, _), side = run(found)
    assert ((np.asarray(p) > 0.5) == cuts)[here].mean() > 0.95
    (told,) = side["metrics"]["separation"]
    np.testing.assert_allclose(told.value, found["separation"], rtol=1e-3)
    assert told.is_next
    assert told.value[1] > told.value[0] + 2
