"""jax-linear-attention as the adapters' tests see it: a stand-in without kernels, and the calls of the real one."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module, metadata, util
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels._compat import varying_axes
from pallas_kernels._linear_state import jla
from pallas_kernels.gated_delta_rule.jla import gated_delta_rule_jla
from pallas_kernels.gated_delta_rule.reference import gated_delta_rule_reference
from pallas_kernels.gated_linear_attention.jla import gated_linear_attention_jla
from pallas_kernels.gated_linear_attention.reference import gated_linear_attention_reference
from pallas_kernels.runtime import Device
from tests.pallas_kernels.linear_state import relative_rms, state_case
from tests.pallas_kernels.op_suite import CHECKS, OpCase, random_cotangents, value_and_grads
from tests.pallas_kernels.state_ops import gate_of, op_of, with_gates
from tests.tolerances import assert_close

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
KINDS = {"log_gate": "simple_gla", "log_key_gate": "gla", "beta": "gated_deltanet"}
"""What the package calls the ops, by kind."""
needs_jla = pytest.mark.skipif(util.find_spec("jla") is None, reason="jax-linear-attention is not installed")


@dataclass
class StandIn:
    """Computes the package's ops step by step: all steps are tokens, a document begins where the id changes."""

    kinds: list[str] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)

    def linear_attention(
        self, kind: str, q: Any, k: Any, v: Any, *, impl: str, segment_ids: Any, **options: Any
    ) -> tuple[Any, Any]:
        assert impl == "mosaic_gpu", "anything else may fall to what is slower than XLA"
        given = (x for x in (q, k, v, segment_ids, *options.values()) if isinstance(x, jax.Array))
        assert not any(varying_axes(x) for x in given), "its kernels' results lack their mesh axes"
        self.kinds.append(kind)
        self.given.append({"q": q, "k": k, "v": v, "segment_ids": segment_ids, **options})
        if segment_ids is not None:
            begins = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
            options["segment_ids"] = 1 + jnp.cumsum(begins, 1, dtype=jnp.int32)
        if kind in ("deltanet", "gated_deltanet"):
            gate = {"log_gate": options.pop("g", None), "beta": options.pop("beta")}
            found = gated_delta_rule_reference(q, k, v, **gate, **options)
        else:
            name = {"simple_gla": "log_gate", "gla": "log_key_gate"}[kind]
            found = gated_linear_attention_reference(q, k, v, **{name: options.pop("g")}, **options)
        return found if options["output_final_state"] else (found, None)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Puts a stand-in where the package would be imported from."""
    module, ops = ModuleType("jla.ops"), StandIn()
    module.linear_attention = ops.linear_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jla.ops", module)
    return ops


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package itself, with its chunks in plain JAX in place of its kernels."""
    ops = import_module("jla.ops")
    op = ops.linear_attention
    monkeypatch.setattr(
        ops, "linear_attention", lambda *args, impl, **options: op(*args, impl="chunked", **options)
    )


def installed(monkeypatch: pytest.MonkeyPatch, version: str = jla.VERSION, here: Device = HOPPER) -> None:
    """As if the package were installed, with its version of JAX, on such a machine."""
    others = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == jla.PACKAGE else others(name))
    monkeypatch.setattr(jax, "__version__", jla.JAX)
    monkeypatch.setattr(jla, "this_machine", lambda: here)


def rows(
    length: int, heads: int, key_heads: int, keys: int, values: int, *, batch: int = 2
) -> dict[str, Any]:
    """bf16 streams with keys of length 1, a state, documents with holes and padding: what real kernels take."""
    rng = np.random.default_rng(0)
    shapes = {"q": (key_heads, keys), "k": (key_heads, keys), "v": (heads, values)}
    found = {n: rng.standard_normal((batch, length, *shape)) for n, shape in shapes.items()}
    found["k"] /= np.linalg.norm(found["k"], axis=-1, keepdims=True)
    state = jax.device_put(rng.standard_normal((batch, heads, keys, values)).astype(np.float32))
    return {n: jnp.asarray(x, jnp.bfloat16) for n, x in found.items()} | {"initial_state": state}


@contextlib.contextmanager
def as_others_write() -> Iterator[None]:
    """Without the suite's strictness on dtypes and ranks, which the package's own code does not keep to."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def over_devices(case: OpCase, count: int) -> OpCase:
    """The call inside `shard_map`, its rows spread over so many devices."""
    mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    spec = PartitionSpec("data")
    return replace(case, run=jax.shard_map(case.run, mesh=mesh, in_specs=spec, out_specs=spec))


GPUS = [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu(count=2))]
"""Devices of a mesh; on a mesh of one, arrays name its axis all the same."""

MOST_ERROR = 0.005
"""Root mean square of the error over that of the truth, for values and each gradient in bf16.

Its kernels round what they keep between chunks, so that of two million elements one to three lie further from the truth
than an element may in our own kernels.
"""


def check_errors(case: OpCase) -> None:
    """Values and gradients of a call in bf16 against the reference in fp32, each by its root mean square."""
    wide = {n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in case.arrays.items()}
    found = value_and_grads(case.run, case.arrays)
    cotangents = jax.tree.map(lambda x: x.astype(jnp.float32), random_cotangents(found[0]))
    expected = value_and_grads(case.reference, wide, cotangents)
    errors = jax.tree.map(relative_rms, found, expected)
    assert max(jax.tree.leaves(errors)) <= MOST_ERROR, errors


GPU_CHECKS = CHECKS | {"reference": check_errors}


def reference(kind: str, arrays: dict[str, Any]) -> Any:
    return op_of(kind)(**arrays, output_final_state=True, scale=0.5, implementation="reference")


def adapter(kind: str, arrays: dict[str, Any]) -> Any:
    run: Any = gated_delta_rule_jla if kind == "beta" else gated_linear_attention_jla
    return run(**arrays, output_final_state=True, scale=0.5)


def on_gpu(kind: str, arrays: dict[str, Any]) -> Any:
    return op_of(kind)(**arrays, output_final_state=True, scale=0.5, implementation="jla")


def jla_case(kind: str, run: Any, streams: dict[str, Any], *, gated: bool = True) -> OpCase:
    """Return a case over packed rows with gates; a case's programs are kept by `run`."""
    return state_case(kind, run, partial(reference, kind), with_gates(kind, streams, gated=gated))


def check_strong_decay(calls: StandIn, kind: str, case: OpCase, strong: float) -> None:
    """Check that the package gets finite gates, and that values and gradients are those of the gate that was given."""
    gate = gate_of(kind)
    strong_gates = np.random.default_rng(9).uniform(size=case.arrays[gate].shape) < 0.4
    arrays = {**case.arrays, gate: jnp.where(strong_gates, strong, case.arrays[gate])}
    with jax.disable_jit():  # to look at numbers: the program makes the gates alone
        gates = jax.make_jaxpr(lambda arrays: (adapter(kind, arrays), calls.given[0]["g"])[1])(arrays)
    handed_over = jax.jit(jaxpr_as_fun(gates))(*jax.tree.leaves(arrays))[0]
    assert float(handed_over.min()) >= -88
    actual, expected = (value_and_grads(run, arrays, optimised=True) for run in (case.run, case.reference))
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(got, want, n=case.grad_terms)
