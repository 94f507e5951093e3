"""The benchmark of patches on books: its arms, cuts at words, and seeds that share one step."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from experiments.benchmark.boundaries import boundary_books, word_cuts
from experiments.benchmark.boundaries.side_by_side import train_seeds
from jaxblt import recipes
from jaxblt.data.vocab import encode
from jaxblt.patching import PatcherConfig
from jaxblt.patching.patches import from_closed
from tests.training.tiny import Letters, tiny_recipe


def test_arms_differ_in_their_patches():
    base = replace(recipes.get("books"), bytes_per_patch=5.0, entropy_run="runs/entropy")
    arms = {
        name: boundary_books.arm_of(base, name)
        for name in ("learned", "learned_levels", "learned_attention", "entropy", "static")
    }
    assert {name: arm.patcher.mode for name, arm in arms.items()} == {
        "learned": "learned",
        "learned_levels": "learned",
        "learned_attention": "learned",
        "entropy": "entropy",
        "static": "static",
    }
    assert arms["learned"].patcher.target == 5.0
    # Dropped units would make neighbouring bytes differ in training alone, and no arm may gain by having none
    alike = {(arm.model.encoder, arm.model.tie_head, arm.optimizer) for arm in arms.values()}
    assert [(encoder.dropout, tied) for encoder, tied, _ in alike] == [(0.0, False)]
    models = [arms[name].model for name in ("learned", "learned_levels")]
    assert [model.latent.num_layers for model in models] == [8, 6]
    assert (models[0].level, models[1].level.slots_per_group) == (None, 2.0)
    assert arms["learned_attention"].model.router.unmerge == "attention"
    assert (arms["static"].patcher.patch_size, arms["entropy"].entropy_run) == (5, "runs/entropy")
    assert all(arm.entropy_run is None for name, arm in arms.items() if name != "entropy")


def test_cuts_at_words_by_hand():
    ids = encode(b"a cat, sat")[None].astype(np.int32)
    closed = np.zeros(ids.shape, bool)
    closed[0, [1, 4, 5]] = True  # a␣|cat|,| sat
    group = jax.jit(partial(from_closed, block_size=10, capacity=10))
    patches = group(closed, np.ones_like(ids))
    passage = word_cuts.Passage(ids, np.ones_like(ids), patches)
    assert passage.text(12) == "a │cat│,│ sa"
    found = word_cuts.shares_at_words(passage)  # the block's edge is the fourth cut, and ends "sat"
    assert found == {
        "word_ends": 2 / 4,
        "before_words": 1 / 4,
        "word_ends_of_all": 3 / 10,
        "before_words_of_all": 2 / 10,
    }


def test_gaps_are_paired_by_seed():
    bits = {"learned": [1.0, 2.0], "static": [1.5, 2.5]}
    found = boundary_books.gaps({name: {"bits_per_byte": {"seeds": each}} for name, each in bits.items()})
    assert found == {"static - learned": {"value": 0.5, "low": 0.5, "high": 0.5}}


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_seeds_share_a_step_and_learn_apart():
    patcher = PatcherConfig(mode="static", patch_size=4, block_size=16)
    trained = train_seeds(
        tiny_recipe(steps=5, patcher=patcher, eval_batches=1), (0, 1), every=2, source=Letters()
    )
    assert trained.steps == 5
    assert [entry["step"] for entry in trained.curve] == [2, 4, 5]
    one, other = (jax.tree.leaves(state.params) for state in trained.states)
    assert all(np.abs(np.asarray(a) - np.asarray(b)).max() > 0 for a, b in zip(one, other, strict=True))
    first, second = trained.curve[-1]["bits_per_byte"]
    assert first != second
