"""Every entry of every table of implementations is first for some call, on some device, or is the reference."""

from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import _dispatch, _jax_triton, byte_head
from pallas_kernels._dispatch import Device, Implementation
from pallas_kernels._linear_state import jla
from pallas_kernels.token_product import token_product
from pallas_kernels.token_product.split import split_rows
from tests.pallas_kernels.jla import installed
from tests.pallas_kernels.table_calls import CALLS, Call, like, model_calls

BLACKWELL, CPU = Device("gpu", (10, 0), "NVIDIA B200"), Device("cpu")
DEVICES = (
    Device("gpu", (9, 0), "NVIDIA H200"),
    Device("gpu", (9, 0), "NVIDIA H100"),
    Device("gpu", (8, 0), "NVIDIA A100"),
    BLACKWELL,
    Device("tpu", None, "TPU v5e"),
    CPU,
)


def find_tables() -> dict[str, tuple[Implementation, ...]]:
    """Return the tables of all modules that make an `Implementation`, by module and name."""
    root, found = Path(pallas_kernels.__file__).parent, {}
    for path in sorted(root.glob("*/*.py")):
        if "Implementation(" in path.read_text(encoding="utf-8"):
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
                    if entry.name not in found and entry.name.startswith(("mosaic_gpu", "triton")):
                        assert "this is cpu" in (entry.cannot_run(CPU, *args, **options) or ""), entry.name
                    if entry.name not in found and entry.name.startswith("mosaic_gpu"):
                        said = entry.cannot_run(BLACKWELL, *args, **options) or ""
                        assert "9.0 exactly (H100, H200), this is NVIDIA B200" in said, entry.name
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


def adapted(call: Call) -> list[Any]:
    """Return what the outputs of `routed_lora` are like: one a site, channels first on request."""
    x, w, *_ = call.args
    rows, sizes = x.shape[:1], (x.shape[1], w[0].shape[1])
    return [like(*rows, *(sizes[::-1] if call.options["channels_first"] else sizes))] * len(w)


def multiplied(call: Call) -> Any:
    """Return what the outputs of `token_product` are like."""
    x, kernels = call.args
    widths = [kernel.shape[1] for kernel in kernels]
    return x, like(split_rows(kernels[0].shape[0], widths).parts, sum(widths), dtype=jnp.float32)


LIKE = {
    "blocked_conv.api.TABLE": lambda call: call.args[0],
    "byte_head.api.CROSS_ENTROPY_TABLE": lambda call: like(*call.args[0].shape[:2], dtype=jnp.float32),
    "byte_head.api.ENTROPY_TABLE": lambda call: like(*call.args[0].shape[:2], dtype=jnp.float32),
    "gated_delta_rule.api.TABLE": lambda call: call.args[2],
    "gated_linear_attention.api.TABLE": lambda call: call.args[2],
    "hash_embedding.api.TABLE": lambda call: like(*call.args[1].shape[:2], call.args[0].shape[1]),
    "linear_scan.api.TABLE": lambda call: like(*call.args[0].shape, dtype=jnp.float32),
    "long_conv.api.TABLE": lambda call: call.args[0],
    "modal_conv.api.TABLE": lambda call: call.args[0],
    "neural_memory.api.TABLE": lambda call: call.args[0],
    "norm_dropout.api.TABLE": lambda call: call.args[0],
    "routed_lora.api.TABLE": adapted,
    "short_conv.api.TABLE": lambda call: call.args[0],
    "token_product.api.TABLE": multiplied,
}
"""What the outputs of calls that reach a table are like."""


@pytest.mark.slow(days=28, group="properties of kernels", every="long_conv.api.TABLE")
@pytest.mark.parametrize("table", LIKE)
def test_calls_of_real_models_run_and_are_explained(table: str) -> None:
    module = import_module(f"pallas_kernels.{table.partition('.')[0]}")
    for call in model_calls(table):
        static = {name: x for name, x in call.options.items() if not isinstance(x, jax.ShapeDtypeStruct)}
        arrays = {name: x for name, x in call.options.items() if name not in static}
        found = jax.eval_shape(partial(call.op, **static), *call.args, **arrays)
        outputs = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(found)]
        assert outputs == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(LIKE[table](call))], call.name
        if module is not byte_head:
            said = module.explain(*call.args, **call.options)
            anywhere = "reference" if call.op is token_product else "xla"
            assert said.startswith(f"{call.op.__name__}: {anywhere} on "), call.name
