"""The tutorials' Python runs, in one folder and on one run: that which `from-pytorch.md` trains."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.compiled import compiled_once_and_quickly
from tests.docs.documents import PAGES, ROOT, blocks, name_of

TUTORIALS = ROOT / "docs" / "tutorials"
TRAINS = "from-pytorch.md"
READ_A_RUN = {"own-text.md": "runs/my_text", "own-genome.md": "runs/genome", "variants.md": "runs/genome"}
WITHOUT_PYTHON = {"million-bytes.md", "promoters.md"}
RUN_ELSEWHERE = {"own-labels.md", "evo2.md"}
"""On the runs of `tests/training/test_finetune.py` and `tests/interchange/test_evo2_run.py`."""


def run_blocks(name: str) -> dict[str, Any]:
    """Names that a tutorial's blocks leave behind, one after the other."""
    names: dict[str, Any] = {}
    for number, text in enumerate(blocks(TUTORIALS / name, "python")):
        exec(compile(text, f"{name}, block {number}", "exec"), names)
    return names


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder that the tutorials talk of, and what training left behind."""
    folder = tmp_path_factory.mktemp("tutorials")
    bases = "".join("ACGT"[i] for i in np.random.default_rng(0).integers(0, 4, 400))
    (folder / "my.fa").write_text(f">one\n{bases[:200]}\n>two\n{bases[200:]}\n")
    (folder / "texts").mkdir()
    (folder / "texts" / "one.txt").write_text("A text of one's own, of few words. " * 40)
    calls = [f"one\t{i}\tv{i}\t{bases[i - 1]}\t{'CATG'['ACGT'.index(bases[i - 1])]}\n" for i in (60, 90, 120)]
    (folder / "calls.vcf").write_text("".join(calls))
    table = ["chromosome\tposition\treference\talt\tfunc.class\n"]
    cells = [line.split("\t") for line in calls]
    kinds = ("LOF", "FUNC", "INT")
    table += [
        "\t".join([*c[:2], c[3], c[4].strip(), kind]) + "\n" for c, kind in zip(cells, kinds, strict=True)
    ]
    (folder / "snvs.tsv").write_text("".join(table))
    devices = jax.devices()
    with compiled_once_and_quickly(str(folder / "compiled")), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(jax, "devices", lambda *backend: devices[:1])
        names = run_blocks(TRAINS)
        for name in set(READ_A_RUN.values()):
            shutil.copytree("runs/first", name)
        yield names


def test_every_tutorial_is_run_here():
    assert {path.name for path in TUTORIALS.glob("*.md")} == {
        TRAINS,
        *READ_A_RUN,
        *WITHOUT_PYTHON,
        *RUN_ELSEWHERE,
    }
    assert not [name for name in WITHOUT_PYTHON if blocks(TUTORIALS / name, "python")]


@pytest.mark.slow(days=28, group="costly", turn="docs/test_tutorials")
def test_from_pytorch_trains_a_run_and_loads_it(trained):
    assert trained["run"].step == trained["recipe"].train.steps
    assert np.isfinite(trained["scores"].log_likelihood).all()
    assert np.isfinite(trained["value"])


@pytest.mark.slow(days=28, group="costly", turn="docs/test_tutorials")
@pytest.mark.parametrize("name", READ_A_RUN)
def test_tutorials_answer(name, trained):
    names = run_blocks(name)
    assert names["run"].step == trained["run"].step
    written = {"own-genome.md": "scores.tsv", "variants.md": "effects.tsv"}.get(name)
    assert written is None or len(Path(written).read_text().splitlines()) > 1


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_every_page_with_python_is_run_by_a_test(page):
    files = [*(ROOT / "tests").rglob("test_*.py"), ROOT / "tests" / "mixers" / "guide.py"]
    texts = [path.read_text(encoding="utf-8") for path in files]
    assert any(f'"{page.name}"' in text for text in texts), (
        f"write a test that runs the blocks of {page.name}"
    )
