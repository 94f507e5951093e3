"""Reports against counts of the dense mask, and pictures against the mask that they draw."""

import re
from functools import partial
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, blocks, masks
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.picture import draw_masks
from pallas_kernels.attention.presets import bigbird, local_global
from pallas_kernels.attention.report import report
from pallas_kernels.attention.rules import Global, Interval

T, HEADS, WIDTH, BLOCK = 84, 2, 8, 16
IDS = jnp.asarray([[1] * 40 + [2] * 30 + [0] * 14], jnp.int32)
TIMES = jnp.asarray([[*range(40), *range(30), *range(14)]], jnp.int32)
MASKS = {
    "bigbird": masks.CAUSAL & bigbird(block=16, near=0, random=1),
    "local_global": masks.FULL & local_global(before=5, after=4, every=40),
    "documents": masks.CAUSAL & masks.documents(IDS) & masks.positions(TIMES, TIMES) & Global(2),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CPU_BLOCK", BLOCK)


def _density(mask: Mask, size: int) -> tuple[float, float]:
    seen = np.asarray(mask.seen(T, T)).any((0, 1, 2))
    padded = np.pad(seen, ((0, -T % size), (0, -T % size)))
    side = len(padded) // size
    return seen.sum(), padded.reshape(side, size, side, size).any((1, 3)).sum()


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize("name", MASKS)
def test_counts_are_those_of_the_dense_mask(name: str) -> None:
    mask, x = MASKS[name], jax.ShapeDtypeStruct((1, T, HEADS, WIDTH), jnp.float32)
    found = report(mask, x, x, rate=1e9)
    (pairs, live), (all_pairs, all_live) = (
        _density(Mask(mask.interval, mask.segments, mask.positions, rule=rule), BLOCK)
        for rule in (mask.rule, None)
    )
    assert (found.block_q, found.block_k, found.error) == (BLOCK, BLOCK, None)
    assert found.pair_density == pytest.approx(pairs / all_pairs)
    if mask.segments is None:
        assert found.block_density == pytest.approx(live / all_live)
        assert found.flops == 4 * HEADS * WIDTH * BLOCK**2 * live
    # Blocks that hold parts of two documents may be visited for caution.
    assert live / all_live <= found.block_density < 1
    assert found.seconds == pytest.approx(found.flops / 1e9)
    assert 0 <= found.full <= 1 <= found.longest


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize("rule", [Interval(), Interval(before=20) | Global(1)])
def test_errors_are_those_against_dense_attention(rule) -> None:
    q, k, v = (jax.random.normal(key, (1, T, HEADS, WIDTH)) for key in jax.random.split(jax.random.key(0), 3))
    mask = Mask(Interval(after=0), rule=rule)
    found = report(mask, q, k, v)
    dense = jax.jit(partial(attention, implementation="reference"))
    both = [np.asarray(dense(q, k, v, each)) for each in (mask, masks.CAUSAL)]
    error = np.linalg.norm(both[0] - both[1]) / np.linalg.norm(both[1])
    assert found.error == pytest.approx(float(error), abs=1e-5)
    assert found.kept == pytest.approx(1, abs=1e-5) if rule == Interval() else 0.3 < found.kept < 0.95  # pyright: ignore[reportOptionalOperand]


def test_a_mask_without_a_rule_has_no_report() -> None:
    x = jax.ShapeDtypeStruct((1, T, HEADS, WIDTH), jnp.float32)
    with pytest.raises(ValueError, match="join a rule by &"):
        report(masks.CAUSAL, x, x)


def test_a_picture_shows_the_mask() -> None:
    drawable = {f"{name} & <more>": mask for name, mask in MASKS.items() if mask.segments is None}
    picture = draw_masks(drawable, tokens=14, columns=2)
    assert [text.text for text in ElementTree.fromstring(picture).iter() if text.text in drawable] == [
        *drawable
    ]
    drawn = re.findall(r'<path [^>]*d="([^"]*)"', picture)
    for path, mask in zip(drawn, drawable.values(), strict=True):
        seen = np.zeros((14, 14), bool)
        for first, row, length in re.findall(r"M(\d+) (\d+)\.5h(\d+)", path):
            seen[int(row), int(first) : int(first) + int(length)] = True
        np.testing.assert_array_equal(seen, np.asarray(mask.seen(14, 14))[0, 0, 0])
