"""A HyenaDNA with drawn weights computes here what its definition gives."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxblt
from jaxblt.cli.main import main
from jaxblt.data.vocab import BOS
from jaxblt.inference import SamplingConfig
from jaxblt.interchange.hyena_dna import rows_of_ids, write_hyena_dna
from jaxblt.models import ByteLMConfig
from jaxblt.models.stack import Block
from jaxblt.testing.tolerances import bound, worst
from tests.interchange import hyena_dna_weights as weights
from tests.interchange.hyena_dna_definition import expected

TENSORS = weights.draw()
KEPT = 3
"""Positions at the end of a row whose values are compared."""
IDS = rows_of_ids(weights.ROWS)
HOMES = np.unique(IDS, return_index=True)[1]
"""The id of each of the tokenizer's rows; of [UNK] the first."""
SHARED = np.log(np.bincount(IDS))
"""The logarithm of the number of bytes that share a row."""


def write(folder: Path, tensors: dict[str, np.ndarray], **settings: Any) -> Path:
    """A folder as `save_pretrained` writes it."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(weights.CONFIG | settings))
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hyena_dna")
    main(["import", str(write(folder / "hf", TENSORS)), "--out", str(folder / "run")])
    return folder / "run"


@pytest.fixture(scope="module")
def run(run_dir):
    return jaxblt.load(run_dir)


@pytest.fixture(scope="module")
def answers(run) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """What the model makes of ids: states behind each block, and logits."""
    longest, model = weights.TAPS + 1, run.recipe.model.build()

    @jax.jit
    def compute(params, ids, segment_ids):
        options = {"segment_ids": segment_ids, "capture_intermediates": lambda x, _: isinstance(x, Block)}
        (logits, _), kept = model.apply({"params": params}, ids, **options)
        stack = kept["intermediates"]["stack"]
        blocks = [stack[f"period_{i}"]["block_0"]["__call__"][0][0][0] for i in range(weights.LAYERS)]
        return jnp.stack(blocks), logits[0]

    def answer(ids):
        row = np.zeros((1, longest), np.int32)
        row[0, : len(ids) + 1] = [BOS, *ids]
        states, logits = compute(run.params, row, (np.arange(longest) <= len(ids))[None].astype(np.int32))
        return np.asarray(states)[:, 1 : len(ids) + 1], np.asarray(logits)[1 : len(ids) + 1]

    return answer


NEAR = bound(np.float32, weights.TAPS)
"""For all lengths: an FFT sums over the whole row, however short the document in it is."""


@pytest.mark.slow(days=7, group="files of others")
def test_states_logits_and_likelihoods_are_the_definitions(answers):
    for length in weights.LENGTHS:
        tokens = weights.draw_bases(length)
        states, logits = answers(HOMES[tokens])
        known_states, known_logits, likelihood = expected(length)
        for ours, known in zip(states, known_states, strict=False):
            assert worst(ours[-KEPT:], known[-KEPT:]) < NEAR
        # Bytes of one token share its probability
        by_token = logits[:, HOMES] + SHARED
        assert worst(by_token[-KEPT:], known_logits[-KEPT:]) < NEAR
        logs = np.asarray(jax.nn.log_softmax(by_token))[np.arange(length - 1), tokens[1:]]
        assert worst(logs.sum(), np.float32(likelihood)) < NEAR
        assert worst(np.exp(logits).sum(-1), np.exp(by_token).sum(-1)) < NEAR


LENGTH = 128
TOKENS = weights.draw_bases(LENGTH)
TEXT = weights.to_text(TOKENS)


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_hyena_dna")
def test_a_run_scores(run):
    scores = run.score([TEXT, TEXT[:1]])
    # The model tells nothing of the first byte: it is read behind nothing
    found = scores.log_likelihood[0] - scores.log_likelihood[1] + SHARED[TOKENS[1:]].sum()
    assert worst(found, np.float32(expected(LENGTH)[2])) < NEAR


@pytest.mark.slow(days=28, group="costly")
def test_a_run_embeds_and_generates(run, answers):
    (states,) = run.embed([TEXT], pool="per_byte").arrays
    assert worst(states[-KEPT:], expected(LENGTH)[0][-1][-KEPT:]) < NEAR
    prompt, letters = b"ACGTTGCA", np.frombuffer(b"ACGT", np.uint8)
    options = {"sampling": SamplingConfig(temperature=0.0), "alphabet": b"ACGT"}
    (more,) = run.generate([prompt], max_new_bytes=6, **options)
    logits = answers(np.frombuffer(prompt + more, np.uint8) + 4)[1][len(prompt) - 1 : -1]
    assert more == letters[np.argmax(logits[:, letters + 4], -1)].tobytes()


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_hyena_dna")
def test_what_was_imported_is_exported(run, run_dir, tmp_path):
    file = tmp_path / "model.safetensors"
    main(["export", str(run_dir), "--to", "hyenadna", "--out", str(file)])
    found = load_file(file)
    assert found.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        if name.endswith(("pos_emb.t", "deltas")):
            assert worst(found[name], x) < bound(np.float32)
        else:
            np.testing.assert_array_equal(found[name], x)
    other = replace(run, recipe=replace(run.recipe, model=ByteLMConfig()))
    with pytest.raises(ValueError, match="the run's model is no HyenaDNA"):
        write_hyena_dna(other, tmp_path / "other.safetensors")
    table = run.params["embedding"]["bytes"]
    trained = {**run.params, "embedding": {"bytes": table.at[200].add(1)}}
    with pytest.raises(ValueError, match="trained apart: freeze embedding and head"):
        write_hyena_dna(replace(run, params=trained), tmp_path / "other.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def without(*names: str) -> dict[str, np.ndarray]:
    return {name: x for name, x in TENSORS.items() if name not in names}


FIRST, TABLE = f"{weights.ROOT}layers.0.", f"{weights.ROOT}embeddings.word_embeddings.weight"
FREQ = FIRST + "mixer.filter_fn.implicit_filter.{}.freq"


def test_a_tied_head_and_copies_of_a_frequency_are_read(tmp_path):
    frequency = TENSORS[FREQ.format(1)]
    tensors = without("lm_head.weight", FREQ.format(1)) | {FREQ.format(i): frequency for i in (3, 5)}
    folder = write(tmp_path / "hf", tensors, tie_word_embeddings=True)
    main(["import", str(folder), "--out", str(tmp_path / "run")])
    params: Any = jaxblt.load(tmp_path / "run").params
    np.testing.assert_array_equal(params["head"]["logits"]["kernel"].T, TENSORS[TABLE][IDS])
    block = params["stack"]["period_0"]["block_0"]
    np.testing.assert_array_equal(block["mixer"]["long_0"]["implicit"]["frequency"], frequency[0])


Bad = tuple[dict[str, np.ndarray], dict[str, Any], str]
BAD: dict[str, Callable[[], Bad]] = {
    "missing": lambda: (without("lm_head.weight"), {}, r"missing lm_head\.weight"),
    "surplus": lambda: (
        TENSORS | {"score.weight": np.ones((2, 12), np.float32)},
        {},
        r"unexpected score\.weight",
    ),
    "shape": lambda: (
        TENSORS,
        {"max_seq_len": 600},
        r"wrong shape: .*pos_emb\.z is \(1, 700, 5\), expected \(1, 600",
    ),
    "nan": lambda: (
        TENSORS | {"lm_head.weight": np.full((16, 12), np.nan, np.float32)},
        {},
        "lm_head.weight holds NaN or infinity",
    ),
    "times": lambda: (
        TENSORS | {FIRST + "mixer.filter_fn.pos_emb.t": np.ones((1, 700, 1), np.float32)},
        {},
        r"pos_emb\.t is not the times of its config",
    ),
    "copies": lambda: (
        TENSORS | {FREQ.format(3): np.ones((1, 8), np.float32)},
        {},
        "all sines of a filter have one frequency",
    ),
    "order": lambda: (TENSORS, {"hyena_order": 3}, r"config\.json\.hyena_order is 3, expected 2"),
    "size": lambda: (
        TENSORS,
        {"d_model": "wide"},
        r"config\.json\.d_model is 'wide', expected a whole number",
    ),
    "rows": lambda: (
        TENSORS,
        {"pad_vocab_size_multiple": 4096},
        "pad_vocab_size_multiple is 4096, expected at most",
    ),
    "kind": lambda: (TENSORS, {"model_type": "gpt2"}, "model_type 'gpt2', expected 'blt' or 'hyenadna'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_line_and_nothing_is_written(name, tmp_path):
    tensors, settings, message = BAD[name]()
    folder = write(tmp_path / "hf", tensors, **settings)
    with pytest.raises(ValueError, match=message) as caught:
        main(["import", str(folder), "--out", str(tmp_path / "run")])
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
