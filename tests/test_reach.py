"""A change reaches the tests whose imports lead to it, and no others."""

import subprocess
from pathlib import Path

import pytest

from tests.reach import OF_THE_TREE, Sources, changed_since, closest, reached

TREE = {
    "jaxblt/__init__.py": "def load():\n    from jaxblt.run import load_run",
    "jaxblt/run.py": "load_run = 1",
    "jaxblt/mixers/__init__.py": "from jaxblt.mixers.gru import GRU\nfrom jaxblt.mixers.lstm import LSTM as Cell",
    "jaxblt/mixers/gru.py": "from jaxblt import layers",
    "jaxblt/mixers/lstm.py": "GATES = 4",
    "jaxblt/layers.py": "",
    "jaxblt/cli/main.py": "COMMANDS = {'train': 'jaxblt.cli.train'}",
    "jaxblt/cli/train.py": "from jaxblt.recipes import demo",
    "configs/__init__.py": "from . import demo",
    "configs/demo.py": "",
    "tests/mixers/conftest.py": "import jaxblt.run",
    "tests/mixers/table.py": "from jaxblt.mixers import GRU",
    "tests/mixers/test_gru.py": "from tests.mixers import table",
    "tests/mixers/test_lstm.py": "from jaxblt.mixers import Cell",
    "tests/test_cli.py": "import jaxblt.cli.main",
    "tests/test_run.py": "import jaxblt\nGUIDE = 'guides/run.md'",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ("jaxblt/mixers/gru.py", {"tests/mixers/test_gru.py"}),
        ("jaxblt/layers.py", {"tests/mixers/test_gru.py"}),
        ("jaxblt/mixers/lstm.py", {"tests/mixers/test_lstm.py"}),
        ("jaxblt/run.py", {"tests/mixers/test_gru.py", "tests/mixers/test_lstm.py", "tests/test_run.py"}),
        ("configs/demo.py", {"tests/test_cli.py"}),
        ("docs/guides/run.md", {"tests/test_run.py"}),
        ("tests/test_cli.py", {"tests/test_cli.py"}),
        ("docs/other.md", set()),
        ("pyproject.toml", {name for name in TREE if "test_" in name}),
    ],
)
def test_what_a_change_reaches(root: Path, changed: str, found: set[str]) -> None:
    of_the_tree = {f"tests/test_{name}.py" for name in OF_THE_TREE}
    assert set(reached(Sources(root), {changed})) - of_the_tree == found


def test_rotating_cases_of_a_changed_module_s_own_tests_run() -> None:
    changed = {"jaxblt/mixers/gru.py", "pallas_kernels/scan/vjp.py", "tests/test_cli.py", "docs/a.md"}
    assert closest(changed) & {"tests/mixers/test_lstm.py", "docs/a.md"} == set()
    assert closest(changed) >= {
        "tests/mixers/test_gru.py",
        "tests/pallas_kernels/scan/test_vjp.py",
        "tests/test_cli.py",
    }


def test_a_change_is_all_since_the_branch_left(root: Path) -> None:
    """Commits of the other branch do not count; moved, deleted and untracked files do."""

    def git(*args: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *args], cwd=root, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "a")
    git("checkout", "-qb", "work")
    git("mv", "jaxblt/run.py", "jaxblt/runs.py")
    git("commit", "-qm", "b")
    git("checkout", "-q", "main")
    (root / "jaxblt" / "layers.py").write_text("x = 1")
    git("commit", "-qam", "c")
    git("checkout", "-q", "work")
    (root / "configs" / "demo.py").unlink()
    (root / "new.py").write_text("")
    assert changed_since("main", root) == {"jaxblt/run.py", "jaxblt/runs.py", "configs/demo.py", "new.py"}


def test_tests_of_the_tree_are_there() -> None:
    assert all((Path(__file__).parent / f"test_{name}.py").exists() for name in OF_THE_TREE)
