"""Every command that reads a run takes the step of its best evaluation; no command writes over what is there."""

import sys
from pathlib import Path

import pytest

import jaxblt
from jaxblt.cli.main import main

READERS = {
    "score": ["score", "run", "g.fa", "--out", "OUT"],
    "embed": ["embed", "run", "g.fa", "--out", "OUT"],
    "classify": ["classify", "run", "g.fa", "--out", "OUT"],
    "variants": ["variants", "run", "v.vcf", "g.fa", "--out", "OUT"],
    "index": ["index", "run", "--out", "."],
    "export": ["export", "run", "--out", "OUT"],
    "evaluate": ["evaluate", "run", "--out", "OUT"],
    "generate": ["generate", "run"],
    "memory": ["memory", "run", "g.fa", "--out", "OUT"],
    "patch": ["patch", "g.fa", "--run-dir", "run", "--entropies-out", "OUT"],
}
WRITTEN = {"index": "index.safetensors", "memory": "OUT.png"}
INPUTS = {"variants": ("v.vcf", "g.fa"), "index": (), "export": (), "evaluate": (), "memory": ()}
"""Files that a command reads; the FASTA file where it is not named here."""


class Loaded(Exception):
    """A run was asked for."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("g.fa", "v.vcf"):
        Path(name).write_text(">g\nACGT\n")
    Path("run", "checkpoints").mkdir(parents=True)
    Path("run", "config.json").write_text("{}")

    def load(run_dir, **options):
        raise Loaded(options)

    monkeypatch.setattr(jaxblt, "load", load)
    monkeypatch.setattr(sys.modules["jaxblt.run"], "load", load)


@pytest.mark.parametrize("name", READERS)
def test_the_best_step_is_read(name, here):
    with pytest.raises(Loaded) as asked:
        main([*READERS[name], "--step", "best"])
    assert asked.value.args[0]["step"] == "best"


@pytest.mark.parametrize("name", [name for name in READERS if name != "generate"])
def test_what_is_there_stays_unless_it_may_be_overwritten(name, here):
    written = Path(WRITTEN.get(name, "OUT"))
    written.write_text("mine")
    with pytest.raises(FileExistsError, match=f"{written.name} is there already, and nothing is overwritten"):
        main(READERS[name])
    assert written.read_text() == "mine"
    with pytest.raises(Loaded):
        main([*READERS[name], "--overwrite"])
    for given in (*INPUTS.get(name, ("g.fa",)), "run/config.json"):
        if name not in WRITTEN:
            words = [given if word == "OUT" else word for word in READERS[name]]
            with pytest.raises(ValueError, match="is read by this command"):
                main([*words, "--overwrite"])
