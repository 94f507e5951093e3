"""The guide's commands and examples run in the order in which they stand."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

import jaxblt
from jaxblt.cli.main import main
from tests.interchange.test_hyena_dna import TENSORS, write

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "import-export.md"
FIXTURE = Path(__file__).parent / "hf_blt" / "each"


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_commands_and_examples_run(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(files / "bytes", tmp_path / "runs" / "mine")
    shutil.copytree(FIXTURE, tmp_path / "blt")
    write(tmp_path / "hyenadna", TENSORS)
    (tmp_path / "records.fa").write_text(">a\nACGTTGCAAC\n")
    (tmp_path / "books.txt").write_text("Call me Ishmael.")
    namespace = {"jaxblt": jaxblt}
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == [
        "",
        "python",
        "python",
        "",
        "python",
        "",
        "python",
        "",
        "",
        "",
    ]
    for kind, text in blocks:
        if kind == "python":
            exec(compile(text, GUIDE.name, "exec"), namespace)
        else:
            for line in text.splitlines():
                program, *words = shlex.split(line)
                assert program == "jaxblt"
                main(words)
    made = {"mine.safetensors", "half.safetensors", "score.bin", "score.xla", "runs", "scores.tsv"}
    made |= {"model.safetensors", "books.txt", "books.tsv", "blt.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == made | {
        "blt",
        "hyenadna",
        "records.fa",
        "records.fa.fai",
    }
    runs = {"mine", "again", "half", "blt", "blt_entropy", "hyenadna"}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == runs
    assert "wrote score.bin: score of records of up to 511 bytes, for cpu, cuda, " in capsys.readouterr().out
    assert namespace["answers"]["nats"].shape == (2, 512)
