"""What failed reads leave behind is silenced, and nothing else."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jaxblt.training.stored.quiet import silence_leftovers


def test_ctrl_c_in_a_read_that_goes_on_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's hook repeats an interrupt that Python drops."""
    heard: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    silence_leftovers.__wrapped__()
    names: dict[str, Any] = {}
    exec(compile("async def read(): pass", "orbax/read.py", "exec"), names)
    read = names["read"]()
    for error in (OSError(), KeyboardInterrupt()):
        sys.unraisablehook(SimpleNamespace(exc_value=error, object=read))
    read.close()
    assert [type(each.exc_value) for each in heard] == [KeyboardInterrupt]
