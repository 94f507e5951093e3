"""Programs that were compiled once are taken from their folder."""

import jax
import pytest

import jaxblt
from jaxblt.cli.compile_run import compile_run
from jaxblt.cli.main import main
from jaxblt.models import ByteLMConfig
from tests.answers.runs import make_run
from tests.inference.server.conftest import ONE


@pytest.mark.slow(days=28, group="costly", turn="inference/test_stored_programs")
def test_a_second_start_compiles_nothing(monkeypatch, tmp_path, capsys):
    run = make_run(ByteLMConfig(stack=ONE))
    monkeypatch.setattr(jaxblt, "load", lambda *args, **options: run)
    said, before = [], jax.config.values["jax_compilation_cache_dir"]
    for _ in range(2):
        jax.clear_caches()
        assert main(["compile", "runs/tiny", "--out", str(tmp_path), "--lanes", "2x64", "--beams", "2"]) == 0
        said.append(capsys.readouterr().out)
    compiled, taken = (int(part.split()[0]) for part in said[0].split(": ")[1].split(", "))
    assert compiled > 4
    # Weights for two rows and for two beams are one program
    count = compiled + taken
    assert said[1] == f"{tmp_path}: 0 programs compiled, {count} taken from the folder\n"
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_no_folder_is_made_in_a_run_or_beside_it(monkeypatch, tmp_path):
    """A folder named as a run that comes with jaxblt would hide the run."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match="programs of a CPU are kept only where you say: name a folder by --out"
    ):
        compile_run("english")
    with pytest.raises(FileNotFoundError, match="holds no run"):
        compile_run("missing", out=tmp_path / "programs")
    assert not list(tmp_path.iterdir())
