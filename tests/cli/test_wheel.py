"""The wheel alone is enough: installed in an environment of its own, from a folder that is no checkout.

The environment sees the packages that jaxblt depends on where they are installed already, so that no network is needed.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("jaxblt", "pallas_kernels", "configs", "experiments", "pyproject.toml", "README.md", "LICENSE")
COLUMNS = 70


def call(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with jaxblt from its wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, copy = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    call(*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", folder, cwd=folder / "source")
    call(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    (wheel,) = folder.glob("jaxblt-*.whl")
    python = folder / "env" / "bin" / "python"
    call(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "outer.pth").write_text("\n".join(sorted(outer)) + "\n", encoding="utf-8")
    return folder / "env" / "bin"


@pytest.mark.slow(days=28, group="long", turn="wheel")
def test_the_wheel_holds_the_library_and_its_recipes_alone(environment):
    (packages,) = (environment.parent / "lib").glob("python*/site-packages")
    tops = {path.name for path in packages.iterdir() if not path.name.endswith((".dist-info", ".pth"))}
    assert tops == {"jaxblt", "pallas_kernels"}
    assert {path.name for path in (packages / "jaxblt" / "recipes").glob("*.py")} >= {"books.py", "ecoli.py"}
    program = "import jaxblt, jaxblt.recipes; print(jaxblt.__file__, len(jaxblt.recipes.RECIPES))"
    said = call(environment / "python", "-c", program, cwd=environment)
    assert str(packages / "jaxblt") in said


@pytest.mark.slow(days=28, group="long", turn="wheel")
def test_the_wheel_alone_trains_on_a_fasta_of_ones_own(environment, tmp_path):
    jaxblt = environment / "jaxblt"
    assert "train" in call(jaxblt, "--help", cwd=tmp_path)
    assert "all is well" in call(jaxblt, "doctor", cwd=tmp_path)
    assert "62 English books" in call(jaxblt, "data", "--help", cwd=tmp_path)
    call(jaxblt, "new", "genome.py", "--from", "ecoli", cwd=tmp_path)
    recipe = tmp_path / "genome.py"
    text = recipe.read_text(encoding="utf-8")
    for old, new in (("384", "32"), ("num_heads=6", "num_heads=2"), ("data/ecoli/*.fa.xz", "mine.fa")):
        assert old in text
        text = text.replace(old, new)
    recipe.write_text(text, encoding="utf-8")
    bases = "".join(np.random.default_rng(0).choice(list("ACGT"), 8000))
    lines = [">mine", *(bases[i : i + COLUMNS] for i in range(0, len(bases), COLUMNS))]
    (tmp_path / "mine.fa").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = ("--data.seq-len", "256", "--data.stride", "128", "--data.batch-size", "2")
    said = call(jaxblt, "train", "genome.py:genome", "--train.steps", "3", *rows, cwd=tmp_path)
    assert "optimizer.warmup_steps clipped from 100 to 1, to fit --train.steps 3" in said
    assert "bits_per_byte" in call(jaxblt, "evaluate", "runs/genome", cwd=tmp_path)
    call(jaxblt, "export", "runs/genome", "--out", "genome.safetensors", cwd=tmp_path)
    assert (tmp_path / "genome.safetensors").stat().st_size > 10_000
    call(jaxblt, "import", "genome.safetensors", "--out", "runs/again", cwd=tmp_path)
    assert "bits_per_byte" in call(jaxblt, "evaluate", "runs/again", cwd=tmp_path)
    assert not list(tmp_path.rglob("*.partial*"))
