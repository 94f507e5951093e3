"""Runs with quantised weights: answers, decoding, folders, the command, and the price of each product."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxblt
from jaxblt.adapters import fuse
from jaxblt.answers.quantized import (
    choose_products,
    count_flips,
    measure_losses,
    products_of,
    quantize_run,
)
from jaxblt.cli.main import main
from jaxblt.inference import SamplingConfig
from jaxblt.inference.engine import Engine, EngineConfig, Lane, Sampling
from jaxblt.inference.prune import prune
from jaxblt.interchange.card import make_card
from jaxblt.interchange.quantized_run import write_quantized
from jaxblt.interchange.runs import write_run
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.parallel import make_mesh
from jaxblt.precision.weights import bits_per_weight, count_bytes, dense_params, has_quantized
from jaxblt.testing.tolerances import bound
from jaxblt.training.flops import count_params
from jaxblt.training.start.frozen import load_params
from jaxblt.training.start.initial_params import stored_params
from jaxblt.training.stored.integrity import CheckpointCorrupt
from tests.answers.runs import SHORT, make_run, patched_run
from tests.mixer_table import table

HEADS = AttentionConfig(dim=32, num_heads=2)
STACK = StackConfig(dim=32, num_layers=2, pattern="A", mlp_dim=32, mixers=table(attention=HEADS))
TEXT = SHORT[:3]


@pytest.fixture(scope="module")
def run():
    """Of two scanned layers."""
    return make_run(ByteLMConfig(stack=STACK))


@pytest.fixture(scope="module")
def products(run):
    return products_of(run)


@pytest.fixture(scope="module")
def int4(run):
    return run.quantize("int4", keep=["stack/*/down"])


@pytest.fixture(scope="module")
def folder(int4, tmp_path_factory):
    made = tmp_path_factory.mktemp("int4") / "run"
    write_quantized(int4, made)
    return made


def test_products_of_layers_are_found(products):
    """Of the mixer and the MLP; neither embedding, norms nor head."""
    assert {path[-1] for path in products} == {"q", "k", "v", "out", "gate", "up", "down"}


@pytest.mark.slow(days=28, group="costly")
def test_scores_are_those_of_the_rounded_weights(run, int4, products):
    wanted = replace(run, params=dense_params(int4.params, products)).score(TEXT)
    found = int4.score(TEXT)
    np.testing.assert_allclose(
        found.log_likelihood, wanted.log_likelihood, rtol=8 * bound(np.float32, STACK.dim)
    )
    assert not np.allclose(found.log_likelihood, run.score(TEXT).log_likelihood, rtol=1e-4)


def test_bytes_are_those_that_the_scheme_says(run, int4, products):
    quantised = {path: site for path, site in products.items() if path[-1] != "down"}
    weights = sum(2 * np.prod(site.shape) for site in quantised.values())
    bits = bits_per_weight(run.params, quantised, "int4", quantised)
    assert count_bytes(run.params) - count_bytes(int4.params) == weights * (32 - bits) / 8
    assert f"{sum(x.size for x in jax.tree.leaves(run.params)):,} parameters" in repr(int4)
    assert count_params(int4.params) == count_params(run.params)


@pytest.mark.slow(days=14, group="prompts and caches")
def test_generation_and_the_engine_draw_the_same_bytes(int4):
    prompt, seed = b"ab", 3
    found = int4.generate([prompt], max_new_bytes=12, sampling=SamplingConfig(), seed=[seed])
    with Engine(int4, EngineConfig(lanes=(Lane(slots=1, capacity=32),))) as engine:
        assert engine.generate([prompt], max_new_bytes=12, sampling=Sampling(seed=seed)) == found


def test_a_folder_loads_with_the_same_answers(int4, folder):
    loaded = jaxblt.load(folder)
    np.testing.assert_array_equal(loaded.score(TEXT).log_likelihood, int4.score(TEXT).log_likelihood)
    with pytest.raises(ValueError, match="needs weights that are not quantised"):
        loaded.quantize("int8")


def test_a_folder_of_which_a_bit_changed_is_refused(folder):
    file = max((folder / "checkpoints").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    try:
        with pytest.raises(CheckpointCorrupt):
            jaxblt.load(folder)
    finally:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def test_what_needs_whole_weights_says_so(int4, tmp_path):
    for call in (
        lambda: prune(int4.params, 0.5),
        lambda: int4.base_hash,
        lambda: fuse(int4.recipe.model, int4.params),
        lambda: write_run(int4, tmp_path / "run.safetensors"),
    ):
        with pytest.raises(ValueError, match="needs weights that are not quantised: open the run"):
            call()


def test_training_does_not_start_from_a_quantised_folder(run, folder):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run.params)
    with pytest.raises(ValueError, match=r"init_from = '.*' needs weights that are not quantised"):
        stored_params(str(folder), {}, (), make_mesh())
    with pytest.raises(ValueError, match="holds quantised weights: name the run that they were made of"):
        load_params(folder, shapes, weights="raw")


def test_the_least_sensitive_are_quantised_first(run, products):
    """The losses are of one program; a budget takes a beginning of their list."""
    losses = measure_losses(run, products, "int4", TEXT)
    assert [loss.bits for loss in losses] == sorted(loss.bits for loss in losses)
    assert {loss.path for loss in losses} == set(products)
    before = 16.0
    for count in range(1, len(losses) + 1):
        chosen = [loss.path for loss in losses[:count]]
        bits = bits_per_weight(run.params, products, "int4", chosen)
        assert bits < before
        assert choose_products(run, products, "int4", losses, bits) == chosen
        before = bits
    with pytest.raises(ValueError, match=r"'int4' of all products leaves 5\.00: raise it"):
        choose_products(run, products, "int4", losses, 4.9)


@pytest.mark.slow(days=28, group="costly")
def test_an_entropy_model_stays_unless_asked():
    patched = patched_run()
    same, moved = (
        quantize_run(patched, "int4", products=[("up", "out")], entropy=asked) for asked in (False, True)
    )
    assert same.frozen == patched.frozen
    assert has_quantized(moved.entropy_params)
    flips = count_flips(patched, moved, SHORT[5:6])
    assert 0 < flips.flipped < flips.closed < flips.bytes == len(SHORT[5]) + 1


@pytest.mark.slow(days=28, group="costly", turn="answers/quantized/test_quantized")
def test_the_command_writes_a_run_and_what_it_costs(run, tmp_path, capsys):
    text, whole, made = tmp_path / "a.txt", tmp_path / "whole", tmp_path / "made"
    text.write_bytes(SHORT[5])
    write_quantized(run, whole)
    options = ["--scheme", "w8a8", "--data", str(text), "--out", str(made)]
    main(["quantize", str(whole), *options, "--budget", "13", "--chooser", "mse"])
    told = capsys.readouterr().out
    loaded = jaxblt.load(made)
    assert has_quantized(loaded.params)
    assert "- kernels of products in w8a8" in make_card(made)
    assert "bits per byte lost alone" in told
    assert f"{-loaded.score([SHORT[5]]).log_likelihood[0] / np.log(2) / 63:.4f} after" in told
    scores = tmp_path / "scores.tsv"
    main(["score", str(whole), str(text), "--out", str(scores), "--quantize", "int8"])
    assert f"{run.quantize('int8').score([SHORT[5]]).bits_per_byte[0]:.4f}" in capsys.readouterr().out
    for wrong, match in (
        (["--scheme", "int8", "--budget", "9", "--out", str(tmp_path / "b")], "give --data"),
        ([*options[:-1], str(whole)], "nothing is overwritten"),
        (["--scheme", "int8", "--data", "none.txt", "--out", str(tmp_path / "b")], "file does not exist"),
    ):
        with pytest.raises((ValueError, OSError), match=match):
            main(["quantize", str(whole), *wrong])
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scheme": "int3"}, "scheme must be one of 'int8'"),
        ({"scheme": "int8", "keep": ["no/*"]}, "keep='no/\\*' names none of the 7 products"),
        ({"scheme": "int8", "keep": ["*"]}, "keep=.* names all 7 products, and none is left"),
        (
            {"scheme": "int8", "products": [("no", "such")]},
            "products name .'no', 'such'., which is none of the 7",
        ),
        ({"scheme": "int8", "entropy": True}, "has no entropy model to quantise"),
        ({"scheme": "w8a8", "chooser": "mse"}, "give calibration"),
        ({"scheme": "int8", "calibration": TEXT}, "calibrate 'w8a8' only"),
    ],
)
def test_bad_options_are_named(run, options, match):
    with pytest.raises(ValueError, match=match):
        run.quantize(**options)
