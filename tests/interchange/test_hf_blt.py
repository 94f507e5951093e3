"""Random `BltForCausalLM`s compute here what transformers computed; see make_hf_blt.py."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

import jaxblt
from jaxblt.cli.main import main
from jaxblt.inference import SamplingConfig
from jaxblt.interchange import read_hf_blt, read_patcher, write_hf_blt, write_run
from jaxblt.interchange.hf_blt_entries import model_entries
from jaxblt.interchange.runs import read_run
from jaxblt.patching.logits import entropies_from_logits
from jaxblt.training.stored.resolved import read_resolved
from tests.interchange.make_hf_blt import LENGTHS, MODELS
from tests.models.test_released_blt import CONFIG

FIXTURES = Path(__file__).parent / "hf_blt"
EACH = FIXTURES / "each"


def expected_of(folder: Path) -> dict[str, np.ndarray]:
    """What transformers makes of some bytes."""
    return load_file(folder / "expected.safetensors")


def as_rows(expected: dict[str, np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """The batch, and behind it a row for each beginning of its first one."""
    ids = expected["ids"]
    lengths = np.array([len(ids[0])] * len(ids) + list(LENGTHS))
    rows = np.concatenate([ids, np.tile(ids[:1], (len(LENGTHS), 1))])
    live = np.arange(rows.shape[1])[None] < lengths[:, None]
    return jnp.asarray(rows), jnp.asarray(live.astype(np.int32))


def check_cuts(expected: dict[str, np.ndarray], patches) -> None:
    """Patches of the batch end where those of transformers do."""
    # In a batch transformers lets the last patch of a row with fewer patches end a byte behind the row
    given = np.maximum(expected["patch_lengths"], 0)
    ends = np.minimum(np.cumsum(given, 1), expected["ids"].shape[1])
    for row, own in zip(np.asarray(patches.lengths)[:, 0], ends, strict=False):
        assert np.cumsum(row[row > 0]).tolist() == np.unique(own).tolist()


IN_TURNS = pytest.mark.slow(days=28, group="costly", turn="interchange/test_hf_blt")


@pytest.mark.slow(days=7, group="files of others")
@pytest.mark.parametrize("name", ["once", "each"])
def test_a_whole_model_answers_as_transformers_does(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["import", str(FIXTURES / name), "--out", "run"])
    assert "tensors of" in capsys.readouterr().out
    run, expected = jaxblt.load("run"), expected_of(FIXTURES / name)
    ids, segment_ids = as_rows(expected)

    @jax.jit
    def answer(params, entropy):
        read = run.recipe.entropy_model.build().apply({"params": entropy}, ids, segment_ids=segment_ids)[0]
        entropies = entropies_from_logits(read)
        return (
            read,
            entropies,
            run.model.apply({"params": params}, ids, segment_ids=segment_ids, entropies=entropies),
        )

    read, entropies, (logits, patches) = answer(run.params, run.frozen["entropy"].params)
    batch = len(expected["ids"])
    np.testing.assert_allclose(read[:batch], expected["patcher_logits"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropies[:batch], expected["entropies"], rtol=1e-5)
    check_cuts(expected, patches)
    assert run.patcher is not None
    closed, longest = np.asarray(patches.closed).reshape(len(ids), -1), run.patcher.max_length
    wanted = [*expected["logits"], *(expected[f"logits_{length}"][0] for length in LENGTHS)]
    for own, theirs, ends in zip(np.asarray(logits), wanted, closed, strict=True):
        # With a longest patch transformers forgets that a patch ended with a row's last byte
        size = len(theirs)
        seen = size - (longest is not None and size > 1 and ends[size - 1])
        np.testing.assert_allclose(own[:seen], theirs[:seen], rtol=1e-5, atol=1e-5)

    main(["export", "run", "--to", "blt", "--out", "model.safetensors"])
    written, given = load_file("model.safetensors"), load_file(FIXTURES / name / "model.safetensors")
    assert written.keys() == given.keys()
    for key, array in given.items():
        np.testing.assert_array_equal(written[key], array)


@IN_TURNS
def test_a_whole_model_is_a_run_as_any_other(tmp_path):
    expected = expected_of(FIXTURES / "once")
    read_hf_blt(FIXTURES / "once", tmp_path / "first")
    write_run(jaxblt.load(tmp_path / "first"), tmp_path / "run.safetensors")
    read_run(tmp_path / "run.safetensors", tmp_path / "run")
    run = jaxblt.load(tmp_path / "run")
    prompt = bytes((expected["ids"][0, 1 : LENGTHS[-2]] - 4).tolist())
    (drawn,) = run.generate([prompt], max_new_bytes=8, sampling=SamplingConfig(temperature=0.0))
    assert list(drawn) == (expected["greedy"][0] - 4).tolist()
    text = bytes((expected["ids"][0, 1:] - 4).tolist())
    logits = expected["logits"][0][: len(text)]
    nats = np.take_along_axis(
        logits - np.logaddexp.reduce(logits, 1, keepdims=True), expected["ids"][0, 1:, None], 1
    )
    scores = run.score([text], per_byte=True, window=32).per_byte
    assert scores is not None
    np.testing.assert_allclose(scores[0][: len(text)], nats[:, 0], rtol=1e-5, atol=1e-5)
    states = run.embed([text], pool="per_patch", window=32)
    assert states.arrays[0].shape[1] == run.recipe.model.latent.dim
    assert states.patch_lengths is not None
    assert int(states.patch_lengths[0].sum()) == len(text)


def test_an_entropy_model_alone_is_a_byte_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["import", str(EACH), "--part", "patcher", "--out", "entropy"])
    assert "its patches have threshold 5.13 nats, max_length 5" in capsys.readouterr().out
    assert read_resolved(tmp_path / "entropy").recipe.model == read_patcher(EACH).recipe.model


def copied(
    folder: Path, *, part: str = "patcher_config", drop: str = "", spoil: str = "", **settings
) -> Path:
    """The fixture with other settings of a part, without a weight, or with NaN in one."""
    folder.mkdir()
    config = json.loads((EACH / "config.json").read_text())
    (config[part] if part else config).update(settings)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = load_file(EACH / "model.safetensors")
    arrays.pop(drop, None)
    if spoil:
        arrays[spoil] = arrays[spoil] * np.nan
    half = len(arrays) // 2
    shards = {"a.safetensors": list(arrays)[:half], "b.safetensors": list(arrays)[half:]}
    for file, names in shards.items():
        save_file({name: arrays[name].astype(np.float16) for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_and_half_precision_are_read(tmp_path):
    sharded, one = read_patcher(copied(tmp_path / "a")), read_patcher(EACH)
    assert sharded.recipe == one.recipe
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y.astype(np.float16).astype(np.float32)),
        sharded.params,
        one.params,
    )


NORM = "model.patcher.norm.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"drop": NORM}, f"the model of its config: missing {NORM}"),
        ({"num_hidden_layers": 1}, "unexpected model.patcher.layers.1.input_layernorm.weight, "),
        ({"num_key_value_heads": 2}, r"layers.0.self_attn.k_proj.weight is \(8, 16\), expected \(16, 16\)"),
        ({"hidden_act": "gelu"}, "patcher_config.hidden_act is 'gelu', expected 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn', expected 'default'"),
        ({"rope_parameters": "yarn"}, "has rope_parameters 'yarn', expected settings by name"),
        ({"rms_norm_eps": None}, "patcher_config.rms_norm_eps is None, expected a number"),
        ({"spoil": NORM}, f"{NORM} holds NaN or infinity"),
        ({"hidden_size": "16"}, "patcher_config.hidden_size is '16', expected a whole number"),
        ({"part": "", "patching_threshold": None}, "patching_threshold None, expected a number of nats"),
        ({"part": "", "patching_mode": "space"}, "patching_mode is 'space', expected 'entropy'"),
        ({"part": "", "tie_word_embeddings": True}, "tie_word_embeddings is True, expected False"),
    ],
)
def test_what_does_not_fit_a_patcher_is_named(tmp_path, change, says):
    with pytest.raises(ValueError, match=says):
        read_patcher(copied(tmp_path / "a", **change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"drop": "lm_head.weight"}, "the model of its config: missing lm_head.weight"),
        (
            {"part": "encoder_config", "cross_attn_all_layers": True},
            "missing model.local_encoder.cross_attn_layers.1",
        ),
        (
            {"part": "decoder_config", "cross_attn_all_layers": False},
            "unexpected model.local_decoder.cross_attn_",
        ),
        ({"part": "decoder_config", "cross_attn_all_layers": "no"}, "is 'no', expected true or false"),
        ({"part": "decoder_config", "cross_attn_k": 4}, "decoder_config.cross_attn_k is 4, expected 2"),
        ({"part": "decoder_config", "dropout": 0.1}, "decoder_config.dropout is 0.1, expected 0"),
        ({"part": "", "encoder_hash_byte_group_size": [1]}, "sizes must lie in 2"),
        ({"part": "", "encoder_hash_byte_group_vocab": 17}, r"hash_tok_embedding.weight is \(32, 16\)"),
    ],
)
def test_what_does_not_fit_a_whole_model_is_named_and_nothing_is_written(tmp_path, change, says):
    folder = copied(tmp_path / "a", **change)
    with pytest.raises(ValueError, match=says):
        read_hf_blt(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_folder_may_be_the_one_that_one_stands_in(tmp_path, monkeypatch):
    monkeypatch.chdir(copied(tmp_path / "a", drop="lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        read_hf_blt(".", tmp_path / "run")


def test_a_parameter_without_a_counterpart_is_not_left_out_in_silence(tmp_path):
    part = read_patcher(EACH)
    params = {
        own: x
        for entry in model_entries(CONFIG).values()
        for own, x in zip(entry.params, entry.ours(np.zeros(entry.shape, np.float32)), strict=True)
    }
    recipe = SimpleNamespace(model=CONFIG, entropy_model=part.recipe.model)
    frozen = {"entropy": SimpleNamespace(params=part.params)}
    file = tmp_path / "model.safetensors"
    whole: Any = SimpleNamespace(recipe=recipe, params=unflatten_dict(params, sep="."), frozen=frozen)
    assert write_hf_blt(whole, file).arrays > len(params)
    more = unflatten_dict(params | {"encoder.mixer.out.bias": np.zeros(16)}, sep=".")
    other: Any = SimpleNamespace(recipe=recipe, params=more, frozen=frozen)
    with pytest.raises(ValueError, match=r"has no counterpart of the run's encoder\.mixer\.out\.bias"):
        write_hf_blt(other, file, overwrite=True)


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the folder of a Hugging Face model"):
        read_patcher(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type 'llama', expected 'blt'"):
        read_patcher(tmp_path)


@pytest.mark.slow(days=28, group="long")
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_fixtures_are_what_transformers_makes(tmp_path):
    from tests.interchange import make_hf_blt

    make_hf_blt.main(tmp_path)
    for name in MODELS:
        again = expected_of(tmp_path / name)
        for key, x in expected_of(FIXTURES / name).items():
            np.testing.assert_allclose(again[key], x, rtol=1e-5, atol=1e-5)
