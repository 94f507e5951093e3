"""Every entry of every table of implementations is first for some call, on some device, or is the reference."""

import ast
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pallas_kernels
from pallas_kernels import _dispatch, _jax_triton
from pallas_kernels._dispatch import Device, Implementation
from pallas_kernels._linear_state import jla
from tests.pallas_kernels.jla import installed
from tests.pallas_kernels.table_calls import CALLS

DEVICES = (
    Device("gpu", (9, 0), "NVIDIA H200"),
    Device("gpu", (9, 0), "NVIDIA H100"),
    Device("gpu", (8, 0), "NVIDIA A100"),
    Device("gpu", (10, 0), "NVIDIA B200"),
    Device("tpu", None, "TPU v5e"),
    Device("cpu"),
)


def find_tables() -> dict[str, tuple[Implementation, ...]]:
    """Return the tables of all modules that make an `Implementation`, by module and name."""
    root, found = Path(pallas_kernels.__file__).parent, {}
    for path in sorted(root.glob("*/*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if any(
            isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Implementation" for node in nodes
        ):
            module = f"{path.parent.name}.{path.stem}"
            for name, value in vars(import_module(f"pallas_kernels.{module}")).items():
                if isinstance(value, tuple) and value and isinstance(value[0], Implementation):
                    found[f"{module}.{name}"] = value
    return found


TABLES = find_tables()


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what is optional: Triton and jax-linear-attention."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(jla.metadata, "version", version)
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: None)


def with_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that both are here."""
    installed(monkeypatch)
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: SimpleNamespace(name=name))


def first_calls(table: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the first call that reaches each entry; the walk ends when all have one but the reference."""
    wanted, found = {entry.name for entry in TABLES[table]} - {"reference"}, {}

    def walk(op: str, entries: Any, _: Any, *args: Any, **options: Any) -> str:
        """Take the place of `explain`, once a call: an op has checked and arranged its arguments by then."""
        assert entries is TABLES[table], f"{op} chooses from another table"
        for prepare in (with_packages, without_packages):
            with monkeypatch.context() as patched:
                prepare(patched)
                for device in DEVICES:
                    entry = next(e for e in entries if e.passed_over(device, *args, **options) is None)
                    found.setdefault(entry.name, f"{call.name}, {device.kind}, {prepare.__name__}")
        return ""

    monkeypatch.setattr(_dispatch, "explain", walk)
    for call in CALLS[table]():
        _dispatch.explain_call(call.op, None, *call.args, **call.options)
        if found.keys() >= wanted:
            break
    return found


def test_every_table_has_calls() -> None:
    assert TABLES.keys() == CALLS.keys()


@pytest.mark.parametrize("table", TABLES)
def test_every_entry_is_first_somewhere(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that no call reaches is dead: delete it, or add the call that reaches it to `table_calls`."""
    found = first_calls(table, monkeypatch)
    print(table, *(f"  {entry}: {call}" for entry, call in found.items()), sep="\n")
    lost = [entry.name for entry in TABLES[table] if entry.name not in found and entry.name != "reference"]
    assert not lost, f"{table}: no call reaches {', '.join(lost)}"
