import json
import re
from importlib import metadata
from pathlib import Path

import jax
import pytest

from jaxblt.profiling import provenance as module
from jaxblt.profiling.provenance import git_commit, package_versions, provenance


def test_it_is_json_and_says_what_runs() -> None:
    found = json.loads(json.dumps(provenance()))
    assert found["versions"]["jax"] == jax.__version__ == metadata.version("jax")
    assert found["devices"]["count"] == jax.device_count()
    assert found["devices"]["platform"] == jax.default_backend()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["time"])
    assert found["argv"]
    assert "/" not in found["argv"][0]
    assert set(found) == set(module.ORIGIN)


def test_the_commit_is_that_of_this_checkout() -> None:
    head = Path(__file__).resolve().parents[2] / ".git" / "HEAD"
    found = git_commit()
    if head.exists():
        assert re.fullmatch(r"[0-9a-f]{40}", found["commit"])
        assert isinstance(found["dirty"], bool)


def test_outside_a_checkout_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "site" / "jaxblt" / "profiling.py"))
    monkeypatch.delenv("JAXBLT_COMMIT", raising=False)
    assert git_commit() == {"commit": None, "dirty": None}


def test_a_copy_without_git_carries_its_commit_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "site" / "jaxblt" / "profiling.py"))
    monkeypatch.setenv("JAXBLT_COMMIT", "0123456789abcdef")
    assert git_commit() == {"commit": "0123456789abcdef", "dirty": None}


def test_absent_packages_are_left_out() -> None:
    assert package_versions(("no-such-package", "numpy")) == {"numpy": metadata.version("numpy")}
