"""Kernels called through jax-triton, interpreted on the CPU where triton is installed."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.pallas_kernels.short_conv import interpreted


@contextmanager
def interpreting(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """Import modules of kernels anew inside the block, to be interpreted; ranges may end at what a kernel loaded."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # Before Triton is imported, whose own functions are kernels.
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=interpreted.triton_call))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(name)
    yield
    for name in names:
        del sys.modules[name]
