"""Bad command lines of every command, each met with one line that names option, value and what is expected."""

import lzma
import re
import sys
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jaxblt
from experiments.benchmark import __main__ as benchmarks
from jaxblt.cli import patching
from jaxblt.cli.generate import read_prompts
from jaxblt.cli.main import main as jaxblt_main
from jaxblt.cli.parsing import one_line, run
from jaxblt.cli.patch import patch
from jaxblt.data import DataConfig

FASTA = b">first\nACGTACGTAC\n>second\nGGGG\n"
TRAIN = ("train", "demo")
CASES: tuple[tuple[tuple[str, ...], int, str], ...] = (
    # of tyro's box, one line
    ((*TRAIN, "--data.seq-len", "2.5"), 2, "--data.seq-len: expected a whole number, got '2.5'"),
    ((*TRAIN, "--data.seq-len", "abc"), 2, "--data.seq-len: expected a whole number, got 'abc'"),
    ((*TRAIN, "--data.seq-len"), 2, "--data.seq-len: expected a value, got none"),
    ((*TRAIN, "--data.seqlen", "7"), 2, "Unrecognized options: --data.seqlen, 7; perhaps --data.seq-len INT"),
    ((*TRAIN, "--foo", "1"), 2, "Unrecognized options: --foo, 1"),
    ((*TRAIN, "extra"), 2, "Unrecognized options: extra"),
    ((*TRAIN, "--optimizer.clip-norm", "x"), 2, "--optimizer.clip-norm: expected None or FLOAT, got 'x'"),
    ((*TRAIN, "--optimizer.learning-rate", "fast"), 2, "learning-rate: expected a number, got 'fast'"),
    (
        (*TRAIN, "--train.dtype", "f16"),
        2,
        "--train.dtype: expected one of 'bfloat16', 'float16', 'float32', got 'f16'",
    ),
    ((*TRAIN, "--data.eos", "maybe"), 2, "--data.eos: expected one of .*got 'maybe'"),
    ((*TRAIN, "--train.profile-steps", "1"), 2, "--train.profile-steps: expected None or .INT INT., got '1'"),
    ((*TRAIN, "--train.steps", "-1"), 2, "--train: TrainConfig.steps must be at least 1, got -1"),
    (
        (*TRAIN, "--optimizer.learning-rate", "nan"),
        2,
        "AdamWConfig.learning_rate must be a finite number, got nan",
    ),
    (
        (*TRAIN, "--model.encoder.mixers.window.num-heads", "0"),
        2,
        "--model.encoder.mixers.window: AttentionConfig.num_heads must be at least 1, got 0",
    ),
    ((*TRAIN, "--mesh.seq", "0"), 2, "seq=0.*a size is at least 1, or -1"),
    ((*TRAIN, "--name", "a/b"), 1, "name must be a plain word, it names a folder; got 'a/b'"),
    (
        (*TRAIN, "--model.latent.pattern", "HA", "--model.latent.mixers.K.chunk-size=8"),
        1,
        r"--model.latent.mixers.K.chunk-size: model.latent.mixers has hyena, attention, and no .*--from demo\)",
    ),
    (
        (*TRAIN, "--bytes-per-patch", "6", "--patcher.threshold", "1"),
        1,
        "--bytes-per-patch 6 calibrates a threshold, and patcher.threshold is 1.0 already: leave it out, or add --pat",
    ),
    (
        ("train", "demo_entropy", "--bytes-per-patch", "6"),
        1,
        "--bytes-per-patch 6 calibrates a threshold of entropies, and the patcher is None: leave it out",
    ),
    (("train", "no_such_recipe"), 1, "unknown recipe 'no_such_recipe', choose one of: demo_entropy"),
    (("patch",), 2, "Missing from jaxblt patch: STR text or FASTA"),
    (("patch", "x", "y"), 2, "Unrecognized options: y"),
    (("patch", "x", "--mode", "words"), 2, "--mode: expected one of .*got 'words'"),
    (("patch", "x", "--starts", "3"), 2, "perhaps --start INT"),
    (("generate",), 2, "Missing from jaxblt generate: STR folder of the run"),
    (("generate", "r", "--top-k", "few"), 2, "--top-k: expected a whole number, got 'few'"),
    (("evaluate", "r", "--split", "dev"), 2, "--split: expected one of .*got 'dev'"),
    (("plan", "demo", "--context", "0"), 1, "PlanConfig.context must be at least 1, got 0"),
    # of the scripts themselves
    (("plan", "demo", "--mesh", "rack=2"), 1, "'rack=2' is not AXIS=SIZE with an axis of data"),
    (("plan", "demo", "--mesh", "seq=0"), 1, "'seq=0' is not AXIS=SIZE"),
    (("plan", "demo", "--mesh", "seq=2,seq=4"), 1, "seq comes twice"),
    (("plan", "demo", "--gpu", "h900"), 1, "no GPU 'h900' to compile for"),
    (("generate", "no/run"), 1, "no/run holds no run: no/run/config.json does not exist"),
    (("generate", "r", "--max-new-bytes", "0"), 1, "--max-new-bytes must be at least 1, got 0"),
    (("generate", "r", "--seed", "-1"), 1, "--seed must lie in 0..4294967295, got -1"),
    (
        ("generate", "r", "--temperature", "-1"),
        1,
        "SamplingConfig.temperature must lie in 1e-06..1000000.0, got -1",
    ),
    (("generate", "r", "--temperature", "nan"), 1, "temperature must be a finite number, got nan"),
    (("generate", "r", "--top-k", "-1"), 1, "SamplingConfig.top_k must be at least 0, got -1: 0 keeps all"),
    (("generate", "r", "--top-p", "0"), 1, "SamplingConfig.top_p must lie in 1e-06..1, got 0"),
    (("generate", "r", "--beams", "0"), 1, "--beams must lie in 1..256, got 0"),
    (("generate", "r", "--length-exponent", "1"), 1, "--length-exponent 1.0 needs --beams"),
    (
        ("generate", "r", "--beams", "4", "--temperature", "0.5"),
        1,
        "--temperature and --beams .* draws nothing",
    ),
    (("generate", "r", "--beams", "4", "--top-k", "2"), 1, "--top-k and --beams were both given"),
    (
        ("generate", "r", "--beams", "4", "--stream"),
        1,
        "--stream and --beams .* at its end only: leave one out",
    ),
    (("generate", "r", "--beams", "4", "--drafts", "8"), 1, "--drafts and --beams .* guesses no bytes"),
    (("generate", "r", "--drafts", "17"), 1, r"--drafts must .*16, got 17"),
    (("generate", "r", "--drafter", "counts"), 1, "--drafter counts needs --drafts: .* such as --drafts 8"),
    (
        ("generate", "r", "--prompts-hex", "xyz"),
        1,
        "--prompts-hex 'xyz' is not made of pairs .*such as 'ff00'",
    ),
    (("generate", "r", "--prompts-hex", "f"), 1, "--prompts-hex 'f' is not made of pairs"),
    (
        ("generate", "r", "--prompts-file", "no.txt"),
        1,
        "--prompts-file no.txt cannot be read .No such file.*name a file",
    ),
    (
        ("generate", "r", "--prompts-file", "."),
        1,
        "--prompts-file . cannot be read .Is a directory.*name a file",
    ),
    (("generate", "r", "--prompts-file", "-"), 1, "--prompts-file - would be a file of that name"),
    (
        ("score", "r", "a.txt", "--out", "-"),
        1,
        "--out - would be a file of that name, not standard input or output",
    ),
    (("index", "r", "--out", "-"), 1, "--out -/index.safetensors would be a file of that name"),
    (("new", "-"), 1, "FILE - would be a file of that name"),
    (("compile", "r", "--out", "-"), 1, "--out - would be a file of that name"),
    (("serve", "r", "--compiled", "-"), 1, "--compiled - would be a file of that name"),
    (("evaluate", "no/run"), 1, "no/run holds no run"),
    (("evaluate", "r", "--max-batches", "0"), 1, "--max-batches must be at least 1, got 0"),
    (("evaluate", "r", "--seq-len", "0"), 1, "--seq-len must be at least 1, got 0"),
    (("evaluate", "r", "--context", "-1"), 1, "--context must be at least 0, got -1"),
    (("evaluate", "r", "--targets", ""), 1, "--targets is empty: name characters such as ACGT"),
    (("patch", "no_such_file.txt"), 1, "no_such_file.txt"),
    (("patch", "TEXT", "--start", "-5"), 1, "--start must be at least 0, got -5"),
    (("patch", "TEXT", "--length", "-3"), 1, "--length must be at least 1, got -3"),
    (("patch", "TEXT", "--show", "-1"), 1, "--show must be at least 0, got -1"),
    (("patch", "TEXT", "--plot-bytes", "0"), 1, "--plot-bytes must be at least 1, got 0"),
    (("patch", "TEXT", "--start", "9"), 1, r"bytes \[9, 5\) leave .*which has 5 bytes: lower --start"),
    (("patch", "TEXT", "--length", "9"), 1, r"bytes \[0, 9\) leave .*which has 5 bytes"),
    (("patch", "TEXT", "--record", "x"), 1, "--record 'x' is none of the file's 1: perhaps"),
    (("patch", "TEXT", "--plot", "p.png"), 1, "need an entropy model: name a run with --run-dir"),
    (("patch", "TEXT", "--mode", "entropy"), 1, "mode 'entropy' reads entropies: name a run with --run-dir"),
    (("patch", "TEXT", "--patch-size", "0"), 1, "PatcherConfig.patch_size must be at least 1, got 0"),
    (("patch", "FASTA", "--record", "secnd"), 1, "--record 'secnd' is none of the file's 2: perhaps second"),
    (("patch", "FASTA", "--start", "2"), 1, r"has 2: name it with --record \(first, second\)"),
    (("patch", "FASTA", "--record", "second", "--length", "5"), 1, "leave 'second', which has 4 bytes"),
    (("benchmark", "kernels", "--out-dir", "x", "--ops", "none"), 1, "no benchmark of an op 'none'"),
    (
        ("benchmark", "no_such_name"),
        1,
        "unknown benchmark 'no_such_name', choose one of: baselines",
    ),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "a.txt").write_bytes(b"words")
    (folder / "a.fa.xz").write_bytes(lzma.compress(FASTA))
    return {"TEXT": str(folder / "a.txt"), "FASTA": str(folder / "a.fa.xz")}


def outcome(monkeypatch: Any, capsys: Any, main: Any, *args: str) -> tuple[int, str]:
    """Exit status and standard error of a script that fails, in this process."""
    monkeypatch.setattr(sys, "argv", ["script", *args])
    with pytest.raises(SystemExit) as stopped:
        run(main)
    return int(stopped.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(("line", "status", "says"), CASES, ids=[" ".join(line) for line, _, _ in CASES])
def test_a_bad_command_line_is_told_in_one_line(line, status, says, files, monkeypatch, capsys):
    main, args = (benchmarks.main, line[1:]) if line[0] == "benchmark" else (jaxblt_main, line)
    code, said = outcome(monkeypatch, capsys, main, *(files.get(arg, arg) for arg in args))
    assert re.search(says, said)
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert code == status


def test_windows_are_not_asked_of_packed_rows(monkeypatch, capsys):
    recipe = SimpleNamespace(data=DataConfig(packing="first_fit"))
    monkeypatch.setattr(jaxblt, "load", lambda _, step, weights: SimpleNamespace(recipe=recipe))
    code, said = outcome(monkeypatch, capsys, jaxblt_main, "evaluate", "r", "--seq-len", "512")
    assert "--seq-len and --context are of windows, and the run's data.packing is 'first_fit': leave" in said
    assert code == 1


def out_of_memory(argv):
    raise jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory trying to allocate 9 bytes.\nAllocator: ..."
    )


def backends():
    raise AssertionError


def unknown_backend(argv):
    raise RuntimeError("Unable to initialize backend 'cuda': no GPU\n(set JAX_PLATFORMS='')")


@pytest.mark.parametrize(
    ("main", "says"),
    [
        (out_of_memory, "Out of memory trying.*jaxblt plan.*train.accumulate.*remat.*data.batch_size"),
        (lambda argv: backends(), "no device for JAX_PLATFORMS='cuda' here: unset it.*or set it to cpu"),
        (unknown_backend, "no device for JAX_PLATFORMS='cuda' here"),
    ],
    ids=["out of memory", "no GPU", "no plugin"],
)
def test_what_jax_says_of_devices_is_told_in_one_line(main, says, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    code, said = outcome(monkeypatch, capsys, main)
    assert re.search(says, said)
    assert said.count("\n") == 1
    assert code == 1


def test_another_assertion_is_a_fault_of_the_program(monkeypatch):
    def main(argv: Any) -> None:
        raise AssertionError("a fault")

    monkeypatch.setattr(sys, "argv", ["script"])
    with pytest.raises(AssertionError, match="a fault"):
        run(main)


def test_prompts_may_be_any_bytes(tmp_path):
    (tmp_path / "prompt").write_bytes(b"\x00\xfe")
    # what Python makes of the byte ff in an argument
    found = read_prompts(("é", "\udcff"), ("ff00", ""), (str(tmp_path / "prompt"),))
    assert found == ["é".encode(), b"\xff", b"\xff\x00", b"", b"\x00\xfe"]
    assert read_prompts((), (), ()) == [b""]


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, [b"ACGTACGTAC", b"GGGG"]),
        ({"record": "second"}, [b"GGGG"]),
        ({"record": "first", "start": 2, "length": 3}, [b"GTA"]),
    ],
)
def test_patch_reads_every_record_or_the_one_that_is_named(options, seen, files, monkeypatch, capsys):
    read: list[bytes] = []
    monkeypatch.setattr(patching, "segment", lambda config, ids, entropies: read.append(bytes(ids[1:] - 4)))
    monkeypatch.setattr(patching, "report", lambda *_, **__: "figures")
    monkeypatch.setattr(patching, "warn_of_refusals", lambda *_: None)
    patch(files["FASTA"], **options)
    assert [np.frombuffer(ids, np.int32).astype(np.uint8).tobytes() for ids in map(bytes, read)] == seen
    named = re.findall("record (.*)", capsys.readouterr().out)
    assert named == (["first", "second"] if len(seen) > 1 else [])


def test_a_box_with_a_frame_is_read_as_one_without():
    box = "╭─ Value error ──╮\n│ Error parsing --a: invalid literal for int() with base 10: 'x' │\n│ ──── │\n╰────╯\n"
    assert one_line(box) == "--a: expected a whole number, got 'x'"
    assert one_line("something else") == "something else"
