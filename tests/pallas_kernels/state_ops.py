"""Calls of both ops with a matrix of state per head, by kind: a gate of linear attention, or "beta", the delta rule."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.gated_linear_attention import gated_linear_attention
from tests.pallas_kernels.linear_state import (
    heads,
    log_gates,
    packed,
    state_case,
)
from tests.pallas_kernels.op_suite import OpCase, reference_and_grads, value_and_grads
from tests.tolerances import assert_close

LENGTH = 21
GATES = ("log_gate", "log_key_gate", "log_value_gate")
KINDS = (*GATES, "beta")


def op_of(kind: str) -> Any:
    return gated_delta_rule if kind == "beta" else gated_linear_attention


def gate_of(kind: str) -> str:
    return "log_gate" if kind == "beta" else kind


def call(kind: str, implementation: Any, chunk_size: int, arrays: dict[str, Any]) -> Any:
    options = {"chunk_size": chunk_size, "implementation": implementation}
    return op_of(kind)(**arrays, **options, output_final_state=True)


def with_gates(kind: str, streams: dict[str, Any], *, gated: bool = True) -> dict[str, Any]:
    """Packed rows of these streams: with beta up to 2 for the delta rule, and with gates or without."""
    k, v = streams["k"], streams["v"]
    arrays = streams | {"segment_ids": packed(v.shape[1])}
    if kind == "beta":
        beta = np.random.default_rng(5).uniform(0, 2, v.shape[:3])
        arrays["beta"] = jax.device_put(beta.astype(np.float32))
    if gated:
        shapes = {"log_gate": v.shape[:3], "log_key_gate": k.shape, "log_value_gate": v.shape}
        arrays[gate_of(kind)] = log_gates(4, shapes[gate_of(kind)])
    return arrays


def case(
    kind: str, length: int = LENGTH, dtype: Any = jnp.float32, *, gated: bool = True, chunk_size: int = 4
) -> OpCase:
    runs = (partial(call, kind, name, chunk_size) for name in ("xla", "reference"))
    arrays = with_gates(kind, heads(length, dtype), gated=gated)
    return state_case(f"{kind}, {length} steps, {jnp.dtype(dtype).name}", *runs, arrays)


CASES = {kind: case(kind) for kind in KINDS}


def check_with(case: OpCase, change: dict[str, Any]) -> None:
    """Values and gradients of a case with other arrays; its programs are compiled already."""
    arrays = {**case.arrays, **change}
    actual, expected = value_and_grads(case.run, arrays), reference_and_grads(case, arrays)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(got, want, n=case.grad_terms)


def long_arrays(
    kind: str,
    length: int,
    heads: int = 1,
    width: int = 2,
    decay: tuple[int, int] = (-9, 0),
    most: float = 1.0,
) -> dict[str, Any]:
    """A row of bf16 streams, gates of -e^u with u of `decay`; for "beta" keys of length 1 and beta up to `most`."""
    rng, shape = np.random.default_rng(0), (1, length, heads, width)
    arrays = {n: rng.standard_normal(shape) for n in ("q", "k", "v")}
    if kind == "beta":
        arrays["k"] /= np.linalg.norm(arrays["k"], axis=-1, keepdims=True)
    streams = {n: jnp.asarray(x, jnp.bfloat16) for n, x in arrays.items()}
    if kind == "beta":
        streams["beta"] = jnp.asarray(rng.uniform(0, most, shape[:3]), jnp.float32)
    gates = rng.uniform(*decay, shape[:3] if gate_of(kind) == "log_gate" else shape)
    return streams | {gate_of(kind): -jnp.exp(jnp.asarray(gates, jnp.float32))}
