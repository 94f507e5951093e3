"""PEFT files: they come back as they were, mean what PEFT means by them, and are read strictly."""

import dataclasses
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxblt.adapters import (
    AdapterConfig,
    ChunkMean,
    Prefix,
    RouterConfig,
    attach,
    fuse,
    join_params,
    load_peft,
    save_peft,
    split_params,
)
from jaxblt.adapters.files.peft import CONFIG, WEIGHTS
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from tests.flipped import flips

STACK = StackConfig(
    dim=8, num_layers=3, pattern="HA", mixers={"A": AttentionConfig(dim=8, num_heads=2)}, mlp_dim=16
)
MODEL = ByteLMConfig(stack=STACK)
CONFIG_OF = attach(MODEL, AdapterConfig(sites=("mixer/*", ("mlp/down", 4)), rank=2, alpha=6.0))


def drawn(config):
    ids = jnp.zeros((1, 8), jnp.int32)
    shapes = nn.meta.unbox(jax.eval_shape(config.build().init, jax.random.key(0), ids))["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jax.device_put(rng.standard_normal(s.shape).astype(s.dtype)), shapes)


@pytest.fixture(scope="module")
def params():
    return drawn(CONFIG_OF)


@pytest.fixture
def folder(tmp_path, params):
    save_peft(tmp_path / "peft", CONFIG_OF, params, base_name="base", base_hash="a" * 64)
    return tmp_path / "peft"


@pytest.mark.slow(days=28, group="costly")
def test_adapters_come_back_as_they_were(folder, params):
    base, trained = split_params(params)
    found = load_peft(folder, CONFIG_OF, base_hash="a" * 64)
    jax.tree.map(np.testing.assert_array_equal, found, trained)
    unrolled = dataclasses.replace(CONFIG_OF, stack=dataclasses.replace(CONFIG_OF.stack, scan=False))
    assert load_peft(folder, unrolled)["stack"].keys() == {"period_0", "rest"}
    assert join_params(base, found).keys() == params.keys()


@pytest.mark.slow(days=28, group="costly")
def test_entries_mean_what_peft_means(folder, params):
    """W + (alpha / r) B A, by the names of an unrolled stack, at a site of its own rank too."""
    said, arrays = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    assert (said["peft_type"], said["r"], said["lora_alpha"]) == ("LORA", 2, 6.0)
    assert said["rank_pattern"] == {"mlp.down": 4}
    assert said["target_modules"] == ["mixer.in", "mixer.k", "mixer.out", "mixer.q", "mixer.v", "mlp.down"]
    before, after = params["stack"], fuse(CONFIG_OF, params)[1]["stack"]
    for stem, path, rank in (
        ("stack.rest.block_0.mlp.down", ("rest", "block_0", "mlp", "down"), 4),
        ("stack.period_0.block_1.mixer.out", ("periods", "block_1", "mixer", "out"), 2),
    ):
        a, b = (arrays[f"base_model.model.{stem}.lora_{part}.weight"] for part in "AB")
        kernels = []
        for tree in (before, after):
            for name in path:
                tree = tree[name]
            kernels.append(np.asarray(tree["kernel"]).reshape(a.shape[1], -1))
        np.testing.assert_allclose(kernels[1] - kernels[0], 6.0 / rank * (b @ a).T, atol=1e-5)


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_peft_reads_what_is_written_and_is_read(folder, params, tmp_path):
    """PEFT adds (alpha / r) B A to a base of zeros, and the copy that it writes comes back bit for bit."""
    script = Path(__file__).with_name("merged_by_peft.py")
    subprocess.run([sys.executable, script, folder, tmp_path], check=True, timeout=300)
    arrays, merged = load_file(folder / WEIGHTS), load_file(tmp_path / "merged.safetensors")
    assert len(merged) == len(arrays) / 2
    for name, weight in merged.items():
        a, b = (arrays[f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight"] for part in "AB")
        np.testing.assert_allclose(weight, 6.0 / len(a) * (b @ a), atol=1e-5)
    found = load_peft(tmp_path / "again", CONFIG_OF, base_hash="a" * 64)
    jax.tree.map(np.testing.assert_array_equal, found, split_params(params)[1])


@pytest.mark.slow(days=28, group="costly")
def test_a_routed_adapter_is_written_at_a_code(tmp_path):
    router = RouterConfig(chunk=4, reads=(ChunkMean(), Prefix(3)), hidden=8)
    config = attach(MODEL, AdapterConfig(rank=4, blocks=2, router=router))
    params, code = drawn(config), jnp.asarray([0.25, 0.75])
    with pytest.raises(ValueError, match="another weight at every code"):
        save_peft(tmp_path / "a", config, params)
    save_peft(tmp_path / "a", config, params, code=code)
    static = attach(MODEL, AdapterConfig(rank=4, alpha=32.0))
    fixed = fuse(static, join_params(split_params(params)[0], load_peft(tmp_path / "a", static)))[1]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), fixed, fuse(config, params, code=code)[1]
    )
    with pytest.raises(ValueError, match="such files hold static adapters"):
        load_peft(tmp_path / "a", config)


def edited(change):
    def spoil(folder):
        arrays = load_file(folder / WEIGHTS)
        change(arrays)
        save_file(arrays, folder / WEIGHTS)

    return spoil


def told(**settings):
    def spoil(folder):
        said = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(said | settings))

    return spoil


def untold(name):
    def spoil(folder):
        said = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in said.items() if key != name}))

    return spoil


NAME = "base_model.model.stack.rest.block_0.mixer.in.lora_A.weight"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (edited(lambda arrays: arrays.pop(NAME)), rf"lacks entries {NAME} \(1 in all\)"),
        (edited(lambda arrays: arrays.update(lm_head=arrays[NAME])), "has the foreign entries lm_head"),
        (
            edited(lambda arrays: arrays.update({NAME: np.zeros((3, 8), np.float32)})),
            r"shapes \(3, 8\) and \(24, 2\)",
        ),
        (edited(lambda a: a[NAME].fill(np.nan)), rf"{NAME} holds nan at \[0, 0\], expected finite numbers"),
        (
            edited(lambda a: a.update({NAME: a[NAME].astype(np.int8)})),
            "hold int8 and float32, expected floats",
        ),
        (told(r=4), "r is 4, expected 2"),
        (told(lora_alpha=1), "lora_alpha is 1, expected 6.0"),
        (untold("lora_alpha"), "lora_alpha is 8, expected 6.0"),
        (told(alpha_pattern={"mlp.down": 1}), r"alpha_pattern is \{'mlp.down': 1\}, expected \{\}"),
        (told(init_lora_weights="pissa_niter_4"), "is 'pissa_niter_4', which changed the base, too"),
        (told(alora_invocation_tokens=[5, 9]), r"alora_invocation_tokens is \[5, 9\], expected None"),
        (told(arrow_config={"top_k": 2}), "arrow_config is .*, expected None"),
        (told(use_dora=True), "use_dora is True, expected False"),
        (told(inference_mode=False), "is not what was written: its sha256 is another one"),
        (told(revision="b" * 64), "trained over another base: its content hash is bbb"),
        (
            told(revision=None),
            r"names no base to compare with base_hash = aaa.*: write the files with save_peft\(base_hash=\), or leave",
        ),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"no"), "no adapter that can be read"),
        (lambda folder: (folder / CONFIG).write_text("[]"), "holds a list, expected an object"),
        (
            lambda folder: (folder / CONFIG).write_text("[" * 100_000),
            "no adapter that can be read: .*recursion",
        ),
    ],
)
def test_what_is_no_adapter_of_the_config(folder, spoil, words):
    spoil(folder)
    with pytest.raises(ValueError, match=words) as caught:
        load_peft(folder, CONFIG_OF, base_hash="a" * 64)
    assert "\n" not in str(caught.value)


def test_a_changed_bit_is_an_error(folder):
    for file in (WEIGHTS, CONFIG):
        for bit in flips(folder / file):
            with pytest.raises(ValueError) as caught:
                load_peft(folder, CONFIG_OF, base_hash="a" * 64)
            assert "\n" not in str(caught.value), bit


def test_a_base_may_be_renamed_and_files_of_others_have_no_seal(folder, params):
    told(base_model_name_or_path="org/base")(folder)
    jax.tree.map(np.testing.assert_array_equal, load_peft(folder, CONFIG_OF), split_params(params)[1])
    edited(lambda arrays: None)(folder)
    told(inference_mode=False)(folder)
    jax.tree.map(np.testing.assert_array_equal, load_peft(folder, CONFIG_OF), split_params(params)[1])


def test_files_that_are_missing_or_there(folder, params):
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        save_peft(folder, CONFIG_OF, params)
    (folder / CONFIG).unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_config.json is missing"):
        load_peft(folder, CONFIG_OF)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="have no adapter at stack/"):
        save_peft(folder, CONFIG_OF, split_params(params)[0])
    with pytest.raises(ValueError, match="the config has no adapter"):
        save_peft(folder, MODEL, params)
