import dataclasses
import json
import re

import jax.numpy as jnp
import pytest

import configs
from jaxblt.data.config import DataConfig
from jaxblt.patching import PatcherConfig
from jaxblt.training.objectives.objectives import Masked, NextByte, OrderAgnostic, Span
from jaxblt.training.objectives.scores import IdScores
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.recipe import Recipe, parts_of
from jaxblt.training.stored.resolved import (
    FIXED,
    FREE,
    Resolved,
    adopt,
    keep_earlier,
    read_resolved,
    recipe_from_json,
    write_resolved,
)
from jaxblt.training.stored.serialize import differences, to_json
from jaxblt.training.train_config import TrainConfig
from tests.training.tiny import TinyConfig, tiny_recipe

ENTROPY = PatcherConfig(mode="entropy", block_size=16)
FROM_RUN = {"patcher": ENTROPY, "entropy_run": "runs/entropy", "bytes_per_patch": 4.0}


@pytest.mark.parametrize("name", configs.RECIPES)
def test_every_recipe_survives_json(name):
    recipe = configs.get(name)
    assert recipe_from_json(to_json(recipe)) == recipe


@pytest.mark.parametrize("objective", [NextByte(), Masked(rate=0.3), Span(max_length=4), OrderAgnostic()])
def test_nested_choices_survive_json(objective):
    recipe = tiny_recipe(
        model=TinyConfig(causal=objective.causal),
        objective=objective,
        patcher=dataclasses.replace(ENTROPY, threshold=1 / 3),
        entropy_model=TinyConfig(dim=8),
        profile_steps=(3, 4),
        mesh={"fsdp": 2},
        time_limit_s=0.1,
    )
    back = recipe_from_json(to_json(recipe))
    assert back == recipe
    assert type(back.objective) is type(objective)


def test_json_of_something_else_is_refused():
    with pytest.raises(ValueError, match="expected a Recipe, got a AdamWConfig"):
        recipe_from_json('{"class": "jaxblt.training.optimisers.adamw:AdamWConfig"}')
    with pytest.raises(ValueError, match=r"has no field stepz"):
        recipe_from_json(to_json(tiny_recipe()).replace('"steps"', '"stepz"'))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"objective": Masked()},
            r"objective Masked needs a model with causal=False, but model.causal is True",
        ),
        ({"model": TinyConfig(causal=False)}, "objective NextByte needs a model with causal=True"),
        ({"patcher": PatcherConfig(mode="optimal", threshold=1.0)}, "patcher mode 'optimal' looks ahead"),
        ({"entropy_run": "runs/entropy"}, "entropy_run is set but patcher is None"),
        ({"patcher": ENTROPY, "bytes_per_patch": 4.0}, "mode 'entropy' needs entropies: set entropy_run"),
        (
            {"patcher": ENTROPY, "entropy_run": "runs/entropy"},
            "the patcher has no threshold: set bytes_per_patch",
        ),
        ({"optimizer": AdamWConfig(warmup_steps=50), "steps": 50}, "warmup_steps = 50 must be less"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        tiny_recipe(**options)


@dataclasses.dataclass(frozen=True)
class EvenBytes(IdScores):
    """An objective of one's own: only every other byte is asked for."""

    causal = True

    def __call__(self, key, batch):
        asked = jnp.arange(batch.inputs.shape[1]) % 2 == 0
        return dataclasses.replace(batch, loss_mask=batch.loss_mask * asked)

    def check(self, recipe):
        if recipe.data.seq_len % 2:
            raise ValueError(f"EvenBytes needs rows of an even length, got {recipe.data.seq_len}")


@dataclasses.dataclass(frozen=True)
class SmallBatches(TinyConfig):
    """A model of one's own."""

    def check(self, recipe):
        if recipe.data.batch_size > 4:
            raise ValueError(f"SmallBatches takes 4 rows, got {recipe.data.batch_size}")


def test_parts_of_ones_own_are_asked_and_stored():
    small = DataConfig(seq_len=16, batch_size=4)
    recipe = dataclasses.replace(tiny_recipe(), objective=EvenBytes(), model=SmallBatches(), data=small)
    assert recipe_from_json(to_json(recipe)) == recipe
    assert {recipe.objective, recipe.model} < set(parts_of(recipe))
    with pytest.raises(ValueError, match="EvenBytes needs rows of an even length, got 15"):
        dataclasses.replace(recipe, data=dataclasses.replace(small, seq_len=15))
    with pytest.raises(ValueError, match="SmallBatches takes 4 rows, got 8"):
        dataclasses.replace(recipe, data=dataclasses.replace(small, batch_size=8))
    with pytest.raises(ValueError, match=r"Recipe\.objective must be .* got 'next'"):
        tiny_recipe(objective="next")


def test_an_entropy_model_is_not_asked():
    """It was trained by a recipe of its own."""
    tiny_recipe(**FROM_RUN, entropy_model=SmallBatches())


@pytest.mark.parametrize("name", ["a/b", ".."])
def test_name_is_a_folder_name(name):
    with pytest.raises(ValueError, match="name must be a plain word"):
        dataclasses.replace(tiny_recipe(), name=name)


def test_dtypes():
    assert TrainConfig().compute_dtype == jnp.bfloat16
    assert TrainConfig(dtype="float32").compute_dtype == jnp.float32


def test_differences_name_the_fields():
    new = tiny_recipe(model=TinyConfig(dim=8, side=True), steps=30)
    assert differences(tiny_recipe(), new) == [
        "recipe.model.dim: 16 -> 8",
        "recipe.model.side: False -> True",
        "recipe.train.steps: 24 -> 30",
    ]
    assert differences(tiny_recipe(), tiny_recipe()) == []


def test_a_resumed_recipe_adopts_what_the_run_settled():
    settled = dataclasses.replace(ENTROPY, threshold=0.5, capacity=8)
    stored = Resolved(tiny_recipe(**FROM_RUN | {"patcher": settled}, entropy_model=TinyConfig(dim=8)), {})
    adopted = adopt(tiny_recipe(**FROM_RUN, steps=50), stored, resume_with=True)
    assert adopted.patcher == settled
    assert adopted.entropy_model == TinyConfig(dim=8)
    assert adopted.train.steps == 50
    with pytest.raises(ValueError, match=r"patcher\.threshold: 0.5 -> 0.75"):
        adopt(tiny_recipe(**FROM_RUN | {"patcher": dataclasses.replace(ENTROPY, threshold=0.75)}), stored)
    assert {f.name for f in dataclasses.fields(Recipe)} >= set(FIXED)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": AdamWConfig(learning_rate=1e-2, warmup_steps=4, b1=0.8)}, "optimizer.b1: 0.9 -> 0.8"),
        ({"data": {"seed": 3}}, "data.seed: 0 -> 3"),
        ({"data": {"paths": ("a.txt",)}}, "data.paths: () -> ('a.txt',)"),
        ({"seed": 1}, "train.seed: 0 -> 1"),
        ({"steps": 30}, "train.steps: 24 -> 30"),
        ({"accumulate": 2}, "train.accumulate: 1 -> 2"),
        ({"dtype": "bfloat16"}, "train.dtype: 'float32' -> 'bfloat16'"),
        ({"init_from": "runs/a"}, "init_from: None -> 'runs/a'"),
    ],
)
def test_what_is_learned_changes_only_if_it_is_meant(options, said):
    stored, recipe = Resolved(tiny_recipe(), {}), tiny_recipe(**options)
    with pytest.raises(ValueError, match=f"--resume-with.*{re.escape(said)}$"):
        adopt(recipe, stored)
    assert adopt(recipe, stored, resume_with=True) == recipe
    fixed = dataclasses.replace(recipe, model=TinyConfig(dim=8))
    with pytest.raises(ValueError, match=r"run of another recipe.*: model\.dim: 16 -> 8$"):
        adopt(fixed, stored, resume_with=True)


def test_many_changes_stand_below_each_other():
    """One line of all of them was read by nobody; values are shortened, and the fix comes first."""
    optimizer = AdamWConfig(learning_rate=0.01, warmup_steps=4, b1=0.8, b2=0.9, weight_decay=0.3)
    recipe = tiny_recipe(optimizer=optimizer, seed=1, data={"paths": tuple(f"{i}.txt" for i in range(99))})
    with pytest.raises(ValueError, match="--resume-with") as caught:
        adopt(recipe, Resolved(tiny_recipe(), {}), run_dir="runs/a")
    first, *lines = str(caught.value).split("\n")
    assert first.startswith("'runs/a' holds a run with other settings; use another folder")
    assert "  train.seed: 0 -> 1" in lines
    assert max(map(len, lines)) < 100
    assert any(line.startswith("  data.paths: () -> ('0.txt', ") and line.endswith("...") for line in lines)


def test_mappings_of_other_keys_differ_by_key():
    old, new = {"A": TinyConfig(dim=8), "B": 1}, {"A": TinyConfig(dim=8), "C": TinyConfig(dim=16)}
    assert [change.partition("(")[0] for change in differences(old, new)] == [
        "recipe['B']: 1 -> nothing",
        "recipe['C']: nothing -> TinyConfig",
    ]


def test_what_a_run_writes_and_where_it_runs_may_change():
    free = {
        "log_every": 3,
        "eval_every": 5,
        "eval_start": True,
        "eval_batches": 1,
        "checkpoint_every": 7,
        "checkpoint_every_s": None,
    }
    free |= {"keep": 4, "max_skips": 9, "max_overflow": 0.5, "time_limit_s": 9.0, "profile_steps": (1, 2)}
    free |= {"trackers": ("jsonl",), "sample_bytes": 9}
    free |= {"compilation_cache": "a", "mesh": {"fsdp": 2}, "keep_best": 1, "patience": 3}
    free |= {"best_by": "bits_per_byte", "layer_norms": True}
    recipe = dataclasses.replace(tiny_recipe(**free), name="other")
    assert adopt(recipe, Resolved(tiny_recipe(), {})) == recipe
    changed = [change.partition(":")[0] for change in differences(tiny_recipe(), recipe)]
    assert {path.removeprefix("recipe.").replace("mesh.fsdp", "mesh") for path in changed} == set(FREE)


def test_every_config_of_a_run_is_kept(tmp_path):
    first, second, third = (Resolved(tiny_recipe(log_every=n), {}) for n in (1, 2, 3))
    for resolved, step in ((first, 0), (first, 5), (second, 10), (third, 10), (third, 15)):
        keep_earlier(tmp_path, resolved, step)
        write_resolved(tmp_path, resolved)
    assert read_resolved(tmp_path) == third
    kept = sorted((tmp_path / "configs").iterdir())
    assert [file.name for file in kept] == ["000_until_step_10.json", "001_until_step_10.json"]
    assert [json.loads(file.read_text())["recipe"]["train"]["log_every"] for file in kept] == [1, 2]


def test_config_file_round_trip_and_damage(tmp_path):
    stored = Resolved(tiny_recipe(), {})
    write_resolved(tmp_path / "run", stored)
    assert read_resolved(tmp_path / "run") == stored
    file = tmp_path / "run" / "config.json"
    for text in (file.read_text()[:100], "{}", "[]"):
        file.write_text(text)
        with pytest.raises(
            ValueError, match=r"is not the config of a run .*: restore it from a copy"
        ) as error:
            read_resolved(tmp_path / "run")
        assert str(error.value).count("config.json") == 1


@pytest.mark.parametrize(
    "frozen",
    [
        None,
        "a" * 64,
        ["a" * 64],
        *({"entropy": wrong} for wrong in (None, "../" * 21 + "a", "A" * 64, "a" * 63, "a" * 64 + "\n")),
        *({wrong: "a" * 64} for wrong in ("../x", "", "a" * 41)),
    ],
)
def test_a_content_hash_names_a_folder_and_nothing_else(tmp_path, frozen):
    write_resolved(tmp_path, Resolved(tiny_recipe(), frozen))
    with pytest.raises(ValueError, match="expected SHA-256 content hashes in hex by name"):
        read_resolved(tmp_path)


def test_a_config_from_before_frozen_trees_had_names(tmp_path):
    file = tmp_path / "config.json"
    for old, frozen in ((None, {}), ("a" * 64, {"entropy": "a" * 64})):
        write_resolved(tmp_path, Resolved(tiny_recipe(), {}))
        content = json.loads(file.read_text())
        del content["frozen"]
        file.write_text(json.dumps(content | {"frozen_hash": old}))
        assert read_resolved(tmp_path) == Resolved(tiny_recipe(), frozen)
