"""Operations refuse lists for arrays, nothing for what they need, 2.0 for 2 and "yes" for True, by name."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import pallas_kernels
from pallas_kernels._arguments import checked
from pallas_kernels.attention import attention, masks
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.linear_scan import linear_scan
from pallas_kernels.neural_memory import neural_memory
from pallas_kernels.routed_lora import routed_lora

HEADS, GATES = jnp.zeros((1, 8, 2, 4)), jnp.zeros((1, 8, 2))


@checked
def operation(
    x: Float[Array, "T"],
    some: Float[Array, "T"] | tuple[Float[Array, "T"], ...],
    bias: Float[Array, "T"] | None = None,
    *,
    chunk: int = 1,
    flag: bool = False,
    name: str | None = None,
) -> str:
    """Says what it is."""
    return f"{type(some).__name__} {chunk} {flag} {name}"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: operation([1.0], HEADS), "operation: x must be an array, got list: make it by jnp.asarray"),
        (lambda: operation(None, HEADS), "operation: x must be an array, got None: it cannot be left out"),
        (lambda: operation(HEADS, 1.0), "operation: some must be an array, got float"),
        (lambda: operation(HEADS, HEADS, bias=2), "operation: bias must be an array, got int"),
        (lambda: operation(HEADS, HEADS, chunk=2.0), "operation: chunk must be a whole number, got 2.0"),
        (lambda: operation(HEADS, HEADS, chunk=True), "operation: chunk must be a whole number, got True"),
        (
            lambda: operation(HEADS, HEADS, flag=np.array(True)),
            r"operation: flag must be True or False, got array\(True\): pass a bool",
        ),
        (lambda: operation(HEADS, HEADS, flag=None), "operation: flag must be True or False, got None"),
        (lambda: operation(HEADS, HEADS, flag=1), "operation: flag must be True or False, got 1"),
        (lambda: operation(HEADS), "missing a required argument: 'some'"),
        (lambda: linear_scan([1.0], [1.0]), "linear_scan: a must be an array"),
        (
            lambda: gated_delta_rule(HEADS, HEADS, HEADS, None),
            "gated_delta_rule: beta must be an array, got None",
        ),
        (
            lambda: gated_delta_rule(HEADS, HEADS, HEADS, GATES, chunk_size=2.0),
            "gated_delta_rule: chunk_size must be a whole number, got 2.0",
        ),
        (
            lambda: neural_memory(HEADS, HEADS, HEADS, GATES, GATES, GATES, (), segment_alignment=0.5),
            "neural_memory: segment_alignment must be a whole number, got 0.5",
        ),
        (lambda: attention(HEADS, HEADS, [1.0], masks.band(True, None)), "attention: v must be an array"),
        (
            lambda: routed_lora(HEADS[0], HEADS[0, 0], [1.0], (HEADS,)),
            "routed_lora: v must be an array, got list",
        ),
    ],
)
def test_what_an_annotation_does_not_name_is_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_what_an_annotation_names_is_let_through():
    assert operation(np.zeros(3), (HEADS,), None, chunk=np.int64(2), name="a") == "tuple 2 False a"
    assert operation(HEADS, HEADS, flag=np.True_).endswith("1 True None")
    assert jax.jit(lambda x: jnp.float32(len(operation(x, x))))(HEADS) > 0
    assert jax.jit(lambda flag: jnp.float32(len(operation(HEADS, HEADS, flag=flag))))(True) > 0
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert operation(shape, shape).startswith("ShapeDtypeStruct 1")
    assert operation.__doc__ == "Says what it is."


def public_functions() -> list[Callable[..., Any]]:
    """Those of every `api.py`."""
    names = [module.name for module in pkgutil.iter_modules(pallas_kernels.__path__) if module.ispkg]
    rooms = [
        importlib.import_module(f"pallas_kernels.{name}.api") for name in names if not name.startswith("_")
    ]
    return [
        function
        for room in rooms
        for name, function in inspect.getmembers(room, inspect.isfunction)
        if function.__module__ == room.__name__ and not name.startswith("_")
    ]


def flags() -> list[tuple[Callable[..., Any], str]]:
    """Each public function of an operation with each of its flags: annotated as a bool, or one by default."""
    return [
        (function, p.name)
        for function in public_functions()
        for p in inspect.signature(function).parameters.values()
        if p.annotation is bool or isinstance(p.default, bool)
    ]


@pytest.mark.parametrize(
    ("function", "flag"),
    flags(),
    ids=lambda x: x if isinstance(x, str) else f"{x.__module__.split('.')[1]}.{x.__name__}",
)
def test_every_flag_refuses_text(function, flag):
    parameters = inspect.signature(function).parameters.values()
    needed = [HEADS for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    message = f"{function.__name__}: {flag} must be True or False, got 'yes': pass a bool"
    with pytest.raises(TypeError, match=message):
        function(*needed, **{flag: "yes"})
