"""Settings by type of GPU: what they change, what they leave, and what overrides them."""

from dataclasses import replace

import pytest

import configs
from jaxblt.cli.recipe_options import parse_recipe
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.precision import Fp8Config
from jaxblt.training.start.presets import PRESETS, cheapest, detect, with_preset
from tests.training.tiny import tiny_recipe

STACK = StackConfig(dim=64, num_layers=8, pattern=("attention",), remat="full")
RECIPE = tiny_recipe(
    model=ByteLMConfig(stack=STACK), dtype="bfloat16", precision="fp8", fp8=Fp8Config(margin=1), accumulate=4
)


def test_a_preset_is_found_by_device_and_memory():
    assert detect("NVIDIA H200", None) == "h200"
    assert detect("NVIDIA H100 80GB HBM3", 60e9) == "h100"
    assert detect("NVIDIA A100-SXM4-80GB", 60e9) == "a100"
    assert detect("NVIDIA A100-SXM4-40GB", 30e9) == "a100_40"
    with pytest.raises(ValueError, match="no preset for device 'cpu': name one of h200, h100, a100, a100_40"):
        detect("cpu", None)


@pytest.mark.slow(days=28, group="costly", turn="training/start/test_presets", every="h200")
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_changes_how_a_step_is_computed_and_not_what_it_learns(name):
    changed, line = with_preset(RECIPE, name)
    assert line.startswith(f"preset {name}: bfloat16, blocks unrolled, remat none, accumulate 1, precision ")
    assert (changed.model.stack.scan, changed.model.stack.remat, changed.train.accumulate) == (
        False,
        "none",
        1,
    )
    fp8 = PRESETS[name].fp8
    assert (changed.train.precision, changed.train.fp8.margin) == (("fp8", 1) if fp8 else ("dtype", 0))
    train = replace(changed.train, precision="fp8", fp8=RECIPE.train.fp8, accumulate=4)
    assert replace(changed, model=RECIPE.model, train=train) == RECIPE


def test_a_deep_stack_stays_in_a_loop_and_the_line_says_so():
    stack = replace(RECIPE.model.stack, num_layers=49, scan=True)
    changed, line = with_preset(replace(RECIPE, model=replace(RECIPE.model, stack=stack)), "h200")
    assert changed.model.stack.scan
    assert "bfloat16, blocks of stack in a loop, remat none" in line


def test_less_memory_takes_micro_batches_first_and_remat_then():
    recipe = replace(RECIPE, data=replace(RECIPE.data, seq_len=8192, batch_size=8))
    found = {memory: cheapest(recipe, memory)[:2] for memory in (2.5e9, 3e8, 1.5e8, 1.1e8, 5e7)}
    assert list(found.values()) == [("none", 1), ("none", 4), ("none", 8), ("dots", 8), ("full", 4)]
    with pytest.raises(
        ValueError, match=r"no preset holds 1 rows of 8192 bytes in 0.01 GB: split over more devices"
    ):
        cheapest(recipe, 1e7)


@pytest.mark.slow(days=28, group="costly")
def test_the_billion_fits_smaller_gpus_by_smaller_micro_batches():
    recipe = configs.get("books_1b_transformer")
    found = {name: with_preset(recipe, name)[0] for name in ("h200", "a100_40")}
    told = {name: (r.model.stack.remat, r.train.accumulate) for name, r in found.items()}
    assert told == {"h200": ("none", 1), "a100_40": ("dots", 8)}
    assert {r.data.batch_size for r in found.values()} == {8}


def test_options_come_after_a_preset_and_a_wrong_one_is_named(capsys):
    words = ["demo_entropy", "--preset", "a100", "--train.accumulate", "2"]
    recipe, _ = parse_recipe(words, prog="jaxblt train", about="")
    assert "preset a100: bfloat16, blocks unrolled, remat none, accumulate 1" in capsys.readouterr().out
    assert recipe.train.accumulate == 2
    assert not recipe.model.stack.scan
    with pytest.raises(
        ValueError, match="unknown preset 'b200', choose one of: h200, h100, a100, a100_40, auto"
    ):
        parse_recipe(["demo_entropy", "--preset=b200"], prog="jaxblt train", about="")
    with pytest.raises(ValueError, match="no preset for device 'cpu'"):
        parse_recipe(["demo_entropy", "--preset=auto"], prog="jaxblt train", about="")
