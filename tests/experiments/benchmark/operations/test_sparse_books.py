"""The benchmark of sparse attention on books: its arms, what they show, and its figures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.benchmark.operations.sparse_books import gaps, rule_of, shown, sparse_books, stack_of
from jaxblt import recipes
from jaxblt.mixers import AttentionConfig, SparseAttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from pallas_kernels.attention import masks

STACK = StackConfig(dim=64, num_layers=3, pattern=("attention",))


@pytest.mark.parametrize("density", [0.5, 0.25, 0.1])
def test_rules_show_no_more_than_their_share(density: float) -> None:
    found = shown(AttentionConfig(dim=64, rule=rule_of(density, 32_768)), 32_768)
    assert found is not None
    assert 0.8 * density < found <= density


def test_shares_are_those_of_the_masks() -> None:
    """A static rule and a window are counted pair by pair."""
    rule = rule_of(0.5, 1024)
    for mixer, mask in (
        (AttentionConfig(dim=64, rule=rule), masks.CAUSAL & rule),
        (AttentionConfig(dim=64, window=100), masks.band(True, 100)),
        (AttentionConfig(dim=64), masks.CAUSAL),
    ):
        seen = np.asarray(mask.seen(1024, 1024)).sum() / (1024 * 1025 / 2)
        assert shown(mixer, 1024) == pytest.approx(seen)


def test_arms_differ_in_their_mixers() -> None:
    arms = {arm: stack_of(STACK, arm, 32_768) for arm in ("dense", "rule_90", "chosen_90", "stack")}
    assert {arm: made.pattern for arm, made in arms.items()} == {
        "dense": ("attention",),
        "rule_90": ("attention",),
        "chosen_90": ("sparse_attention",),
        "stack": ("window", "sparse_attention", "hyena"),
    }
    chosen = arms["chosen_90"].mixers["sparse_attention"]
    assert isinstance(chosen, SparseAttentionConfig)
    assert 0.08 < (shown(chosen, 32_768) or 0) <= 0.1
    assert shown(arms["stack"].mixers["hyena"], 32_768) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arms": ()}, "--arms names no arm"),
        ({"arms": ("rule_5",)}, "unknown arm 'rule_5'"),
        ({"steps": 0}, "--steps"),
    ],
)
def test_what_means_nothing_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sparse_books("nowhere.json", **change)


def test_gaps_are_shares_of_the_first_arms_bits() -> None:
    bits = {"dense": [2.0, 4.0], "rule_50": [2.2, 4.4]}
    found = gaps({name: {"bits_per_byte": {"seeds": each}} for name, each in bits.items()})
    assert found["rule_50"]["value"] == pytest.approx(0.1)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "validation", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "book.txt").write_bytes(bytes(range(97, 123)) * 40)
    base = recipes.get("books_512")
    base = replace(
        base,
        model=ByteLMConfig(stack=STACK),
        train=replace(base.train, dtype="float32", compilation_cache=None),
    )
    monkeypatch.setattr(recipes, "get", lambda name: base)
    sizes = {"length": 256, "layers": 1, "seeds": 1, "steps": 2, "eval_batches": 1}
    out = tmp_path / "found.json"
    sparse_books(str(out), ("dense", "learned_50"), paths=(f"{tmp_path}/*/*.txt",), **sizes)
    found = json.loads(out.read_text())
    assert list(found["arms"]) == ["dense", "learned_50"]
    assert found["gaps"].keys() == {"learned_50"}
    for name in ("kept", "kept_by_pooled"):
        assert found["arms"]["learned_50"][name]["value"] == pytest.approx(1)  # the window spans a row
    for arm in found["arms"].values():
        assert 0 < arm["bits_per_byte"]["value"] < 20
        assert arm["step_ms"] > 0
