"""The benchmark of routed adapters: rows are spans of domains, comparisons are right, figures are complete."""

import json
from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import RECIPES
from experiments.benchmark.adapters.arms import Settings, check_sizes, make_arm
from experiments.benchmark.adapters.bases import describe, model_of
from experiments.benchmark.adapters.mixed_text import (
    check_text,
    ciphers,
    conflict_mix,
    draw_rows,
)
from experiments.benchmark.adapters.paired_arms import by_distance, compared
from experiments.benchmark.adapters.routed_lora import routed_lora
from experiments.benchmark.adapters.scored import count_picks
from experiments.benchmark.adapters.training import Program, group_shares
from experiments.benchmark.figures.resumed import read_back
from jaxblt.adapters import ChunkMean, Traces
from jaxblt.adapters.update.params import routers
from jaxblt.data import DataConfig
from jaxblt.data.vocab import OFFSET
from jaxblt.mixers import ExplicitFilter, HyenaConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.flops import count_params
from jaxblt.training.recipe import Recipe
from jaxblt.training.state import start, without_frozen
from jaxblt.training.stored.checkpoint import Checkpointer
from jaxblt.training.stored.resolved import Resolved, checkpoint_dir, write_resolved
from jaxblt.training.train_config import TrainConfig
from tests.answers.runs import LOCAL, PATCHER, PATCHES, make_run
from tests.parameters import drawn

SPANS, LENGTH, KEY = (5, 12), 64, jax.random.key(0)


def draw(mix, rows=6):
    return jax.tree.map(np.asarray, draw_rows(mix, jax.random.key(1), rows, LENGTH, SPANS))


def lengths(rows):
    """Bytes of the spans that begin and end in a row."""
    for since in rows.since:
        yield from np.diff(np.flatnonzero(since == 0))


def test_a_conflict_mix_is_one_text_under_permutations():
    text = bytes(range(65, 91)) * 40 + b", b" * 20
    mix = conflict_mix(text, 4)
    tables = np.asarray(mix.table)
    assert (np.sort(tables, 1) == np.arange(256)).all()
    assert (tables[0] == np.arange(256)).all()
    assert len(np.unique(tables, axis=0)) == 4
    rows = draw(mix)
    inverse = np.argsort(tables, 1)
    plain = inverse[rows.domain, rows.inputs - OFFSET].astype(np.uint8)
    assert all(row.tobytes() in text for row in plain)
    np.testing.assert_array_equal(rows.inputs[:, 1:], rows.targets[:, :-1])
    np.testing.assert_array_equal(rows.domain[:, 1:], rows.target_domain[:, :-1])
    found = list(lengths(rows))
    assert found
    assert SPANS[0] <= min(found) <= max(found) <= SPANS[1]
    changes = rows.since == 0
    assert (rows.target_domain[changes] != rows.domain[changes]).all()
    assert (rows.target_domain[~changes] == rows.domain[~changes]).all()


def test_what_no_row_could_be_drawn_from_is_refused():
    with pytest.raises(ValueError, match="the text has 64 bytes, and 65 are read at once: add text"):
        check_text(conflict_mix(b"ab" * 32, 2), LENGTH)
    for changed, said in (
        ({"prefix": 4096}, "prefix must be < length = 4096, got 4096: no byte of a row"),
        ({"chunk": 5000}, "chunk must be < length = 4096, got 5000"),
        ({"steps": 30}, "steps must be a multiple of steps_a_call = 20, got 30"),
        ({"spans": (64, 8)}, r"spans must be the shortest and the longest, got \(64, 8\)"),
    ):
        with pytest.raises(ValueError, match=said):
            Settings(**changed)


def test_few_letters_are_permuted_by_ciphers_that_all_differ():
    tables = ciphers(6, letters=3)
    assert len(np.unique(tables, axis=0)) == 6
    moved = np.flatnonzero((tables != np.arange(256)).any(0))
    assert bytes(moved.astype(np.uint8)) == b"AETaet"
    with pytest.raises(
        ValueError, match="2 letters have 2 permutations, and 3 are asked for: use more letters"
    ):
        ciphers(3, letters=2)


def test_letters_keep_their_case():
    table = ciphers(2, seed=3)[1]
    assert bytes(table[list(b"Zebra, 42\xc3")])[5:] == b", 42\xc3"
    lower, upper = table[97:123].astype(int), table[65:91].astype(int)
    np.testing.assert_array_equal(lower - 97, upper - 65)


def test_a_byte_before_the_first_code_is_no_experts_pick():
    code = jnp.asarray([[[0.5, 0.5], [0.5, 0.5], [0.2, 0.8], [0.9, 0.1]]])
    found = count_picks(code, jnp.asarray([[0, 1, 1, 2]]), 3)
    np.testing.assert_array_equal(found, [[0, 0, 1], [0, 1, 0]])


def test_distances_count_from_changes_alone():
    since = np.array([[1, 2, 0, 1, 0, 1]])
    nats = np.log(2) * np.array([[9.0, 9.0, 2.0, 4.0, 3.0, 5.0]])
    assert by_distance(nats, since, 6)["0-16"] == pytest.approx(3.5)


def test_a_known_gap_is_found():
    rng = np.random.default_rng(0)
    oracle = rng.normal(2, 0.3, 80)
    gap = rng.normal(1, 0.1, 80)
    arms = {"static": oracle + gap, "oracle": oracle, "half": oracle + gap / 2 + rng.normal(0, 0.01, 80)}
    found = compared(arms)
    closed = found["gap_closed"]["half"]
    assert closed["low"] < 0.5 < closed["high"]
    assert closed["high"] - closed["low"] < 0.02
    assert found["less_than_static"]["oracle"]["value"] == pytest.approx(gap.mean())
    assert all(0 <= arm["p"] <= arm["q"] < 1e-6 for arm in found["less_than_static"].values())


def test_no_share_is_closed_of_a_gap_that_is_none():
    """An oracle behind the static arm would make every arm that is worse close some of it."""
    rng = np.random.default_rng(0)
    static = rng.normal(2, 0.3, 80)
    worse = {"oracle": static + rng.normal(0.03, 0.1, 80), "chunk": static + rng.normal(0.02, 0.01, 80)}
    found = compared({"static": static, **worse})
    assert found["gap_closed"] == {}
    assert found["less_than_static"]["chunk"]["high"] < 0


def test_sizes_that_differ_are_refused():
    check_sizes({"chunk": 104, "static": 100})
    with pytest.raises(ValueError, match=r"trained parameters \{'chunk': 106\} differ from 100"):
        check_sizes({"static": 100, "chunk": 106})
    with pytest.raises(ValueError, match="unknown arm 'statc'"):
        make_arm("statc", Settings(), 2)


SHORT = HyenaConfig(dim=16, filter=ExplicitFilter(taps=3))
MODEL = ByteLMConfig(stack=StackConfig(dim=16, num_layers=1, pattern="S", mixers={"S": SHORT}, mlp_dim=16))


def write_base(folder: Path) -> None:
    """A run's folder; drawing the parameters compiles nothing."""
    recipe = Recipe(name="base", model=MODEL, data=DataConfig(seq_len=64), train=TrainConfig(dtype="float32"))
    params = drawn(recipe.model.build(), jnp.zeros((1, 16), jnp.int32))["params"]
    with Checkpointer(checkpoint_dir(folder)) as checkpoints:
        checkpoints.save(2, without_frozen(start(params, optax.identity())))
    write_resolved(folder, Resolved(recipe, {}))


TEXT = b"It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. " * 8


def write_data(folder: Path) -> None:
    files = {"books/train/1.txt": TEXT, "books/test/1.txt": TEXT[:400:-1]}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


TINY = Settings(
    rank=4,
    sites=("mlp/down",),
    chunk=4,
    hidden=1,
    prefix=4,
    seconds=0.3,
    rows=4,
    length=32,
    spans=(8, 16),
    test_rows=16,
    steps_a_call=2,
    dtype="float32",
)


def measured(folder: Path, arms: tuple[str, ...], seeds: int, settings: Settings = TINY) -> dict:
    if not (folder / "base").exists():
        write_base(folder / "base")
        write_data(folder)
    options = {"data": str(folder), "domains": 3, "seeds": seeds, "settings": settings}
    routed_lora(str(folder / "base"), str(folder / "figures.json"), arms=arms, **options)
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_figures_of_an_adapter(tmp_path: Path) -> None:
    found = measured(tmp_path, ("static",), 2)
    base, static = found["base"], found["arms"]["static"]
    assert [run["seed"] for run in static["seeds"]] == [0, 1]
    assert static["seeds"][0]["curve"] != static["seeds"][1]["curve"]
    assert static["bits_per_byte"] < base["bits_per_byte"]
    assert set(base["by_domain"]) == {"cipher 0", "cipher 1", "cipher 2"}
    assert found["compared"]["less_than_static"]["base"]["high"] < 0


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_a_second_call_goes_on_with_the_file_of_the_first(tmp_path: Path) -> None:
    """What the file has stays bit by bit."""
    settings = replace(TINY, steps=4)
    first = measured(tmp_path, ("static", "oracle"), 1, settings)
    both = measured(tmp_path, ("static", "imitated_traces"), 1, settings)
    assert list(both["arms"]) == ["static", "oracle", "imitated_traces"]
    assert both["base"] == first["base"]
    assert [arm["seeds"][0]["steps"] for arm in both["arms"].values()] == [4, 4, 4]
    for name, arm in first["arms"].items():
        assert both["arms"][name] == arm
        assert both["documents"][name] == first["documents"][name]
    assert set(both["compared"]["less_than_static"]) == {"base", "oracle", "imitated_traces"}
    with pytest.raises(ValueError, match="has all of --arms static, imitated_traces already"):
        measured(tmp_path, ("static", "imitated_traces"), 1, settings)
    with pytest.raises(ValueError, match=r"has seed_count = 1, and this call has 2: .*choose another --out"):
        measured(tmp_path, ("chunk",), 2, settings)


def test_routers_with_traces_give_a_code_a_byte_without_a_prefix() -> None:
    for name, imitation, blocks in (
        ("token_imitated", TINY.imitation, None),
        ("imitated_traces", TINY.imitation, 3),
    ):
        arm = make_arm(name, TINY, 3)
        assert arm.adapter.router is not None
        router = arm.adapter.router
        assert (router.level, router.reads) == ("token", (ChunkMean(), Traces()))
        assert (arm.imitation, arm.adapter.blocks) == (imitation, blocks)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_arms_of_the_recipe_have_the_static_arms_size_and_small_routers() -> None:
    """Over the recipe that the benchmark is made for, with the settings that it has by itself.

    Parameters are within 5 % of the static arm's, and routers have less than 5 % of the base's. Other arms have routers
    of the same sizes.
    """
    model = RECIPES["books_512"]().model
    whole = jax.eval_shape(model.build().init, KEY, jnp.zeros((1, 2), jnp.int32))["params"]
    base, names = nn.meta.unbox(whole), ("static", "chunk", "imitated_traces")
    programs = {name: Program(make_arm(name, Settings(), 8), model, Settings()) for name in names}
    starts = {name: jax.eval_shape(program._start, base, KEY)[0] for name, program in programs.items()}
    counts = {name: count_params(tree)[0] for name, tree in starts.items()}
    check_sizes(counts)
    shares = {name: count_params(routers(tree))[0] / count_params(base)[0] for name, tree in starts.items()}
    assert {name for name, share in shares.items() if not share} == {"static"}
    assert max(shares.values()) < 0.05


def test_shares_of_a_free_code_are_of_the_means_of_its_groups() -> None:
    code = jnp.log(jnp.asarray([[[1.0, 1.0, 9.0, 1.0], [4.0, 4.0, 16.0, 1.0]]]))
    np.testing.assert_allclose(group_shares(code, 2), [[[0.25, 0.75], [0.5, 0.5]]], rtol=1e-6)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_labels_reach_the_router_of_a_free_code(tmp_path: Path) -> None:
    """A weight that outweighs the text's changes what is trained, as the code is the only way."""
    bits = []
    for imitation in (0.0, 100.0):
        (folder := tmp_path / str(imitation)).mkdir()
        settings = replace(TINY, steps=20, rate=0.02, imitation=imitation)
        bits.append(
            measured(folder, ("token_imitated",), 1, settings)["arms"]["token_imitated"]["bits_per_byte"]
        )
    assert bits[0] < bits[1]


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_figures_of_routed_adapters(tmp_path: Path) -> None:
    arms = ("static", "imitated_traces", "oracle")
    found = measured(tmp_path, arms, 1, replace(TINY, steps=4))
    counts = {name: arm["parameters"] for name, arm in found["arms"].items()}
    assert counts["static"] == counts["oracle"] < counts["imitated_traces"]
    assert set(found["compared"]["less_than_static"]) == {"base", *arms[1:]}
    assert 1 / 3 <= found["arms"]["imitated_traces"]["seeds"][0]["purity"] <= 1


def test_a_file_of_another_base_is_refused(tmp_path: Path) -> None:
    """The same recipe at the same step, with other parameters."""
    run, file = make_run(MODEL), tmp_path / "figures.json"
    file.write_text(json.dumps({"base_run": describe(run)}))
    assert read_back(str(file), {"base_run": describe(run)})
    moved = replace(run, params=jax.tree.map(lambda x: x + 1, run.params))
    with pytest.raises(ValueError, match=r"has base_run = .*content_hash.* choose another --out"):
        read_back(str(file), {"base_run": describe(moved)})


def test_a_base_with_patches_is_refused() -> None:
    with pytest.raises(ValueError, match="the base is a BLTConfig, expected a ByteLMConfig: use books_512"):
        model_of(make_run(PATCHES, entropy=ByteLMConfig(stack=LOCAL), patcher=PATCHER))
