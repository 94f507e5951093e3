"""What `make gpu-compile` takes for a change: code and versions of what it compiles, wherever they are imported."""

from pathlib import Path

import pytest

from tests.gpu_compile import sources
from tests.gpu_compile.sources import ROOT, digest, modules

FILES = {
    "programs.py": "from ops import api\n",
    "ops/__init__.py": "",
    "ops/api.py": "def choose():\n    from ops.kernels import kernel\n    return kernel\n",
    "ops/kernels/__init__.py": '"""Kernels."""\n',
    "ops/kernels/kernel.py": "from .tiles import SIZE\nfrom . import shapes\n\ndef run():\n    return SIZE\n",
    "ops/kernels/tiles.py": "import ops.names as names\nSIZE = 128\n",
    "ops/kernels/shapes.py": "",
    "ops/names.py": "NAME = 'kernel'\n",
    "ops/other.py": "OTHER = 1\n",
    "constraints.txt": "jax==0.11.2\n",
    "pallas_kernels/op/tuned/h200.json": "{}",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", [name for name in FILES if name != "ops/other.py"])
def test_what_is_compiled_changes_it(name: str, root: Path) -> None:
    before = digest(root, ["programs"])
    with (root / name).open("a", encoding="utf-8") as file:
        file.write("MORE = 1\n")
    assert digest(root, ["programs"]) != before
    (root / name).write_text(FILES[name], encoding="utf-8")
    assert digest(root, ["programs"]) == before


def test_what_is_not_imported_and_comments_do_not(root: Path) -> None:
    before = digest(root, ["programs"])
    (root / "ops/other.py").write_text("OTHER = 2\n", encoding="utf-8")
    said = '"""Tiles."""\nimport ops.names as names  # names\n\nSIZE = 128\n'
    (root / "ops/kernels/tiles.py").write_text(said, encoding="utf-8")
    assert digest(root, ["programs"]) == before
    (root / "ops/kernels/tiles.py").write_text(said.replace("128", "64"), encoding="utf-8")
    assert digest(root, ["programs"]) != before


def test_a_module_that_is_gone_or_new_changes_it(root: Path) -> None:
    found = {digest(root, ["programs"])}
    (root / "ops/kernels/shapes.py").unlink()
    found.add(digest(root, ["programs"]))
    (root / "pallas_kernels/op/tuned/a100.json").write_text("{}", encoding="utf-8")
    found.add(digest(root, ["programs"]))
    assert len(found) == 3


@pytest.mark.slow(days=28, group="costly", turn="gpu_compile/test_sources")
def test_every_kernel_and_the_compiler_of_steps_are_among_them() -> None:
    found = {str(path.relative_to(ROOT)) for path in modules(ROOT, sources.PROGRAMS)}
    kernels = {str(path.relative_to(ROOT)) for path in ROOT.glob("pallas_kernels/*/*_gpu*.py")}
    assert kernels
    assert not kernels - found
    assert {"tests/gpu_compile/programs.py", "tests/training/tiny.py", "jaxblt/training/step.py"} <= found
    assert {"pallas_kernels/_compat.py", "jaxblt/parallel/attention/ring.py", "jaxblt/layers.py"} <= found


@pytest.mark.parametrize("argument", [None, "--accept"])
def test_it_has_nothing_to_do_only_after_all_was_accepted(
    argument: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["sources", *arguments])
        return sources.main()

    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "ACCEPTED", tmp_path / "accepted_sources.json")
    monkeypatch.setattr(sources, "digest", lambda: "one")
    assert status() == 1
    assert status("--write") == 0
    assert "commit accepted_sources.json" in capsys.readouterr().out
    assert status(*filter(None, [argument])) == (1 if argument else 0)
    assert ("nothing changed" in capsys.readouterr().out) == (argument is None)
    monkeypatch.setattr(sources, "digest", lambda: "another")
    assert status() == 1
