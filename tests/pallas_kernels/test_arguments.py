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
from pallas_kernels import byte_head, patch_attention
from pallas_kernels._arguments import checked
from pallas_kernels.attention import attention, masks
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.linear_scan import linear_scan
from pallas_kernels.neural_memory import neural_memory
from pallas_kernels.routed_lora import routed_lora
from pallas_kernels.runtime import record_choices

HEADS, GATES = jnp.zeros((1, 8, 2, 4)), jnp.zeros((1, 8, 2))
STREAM, TAPS, BLOCKS = jnp.zeros((1, 4, 16)), jnp.zeros((4, 3)), jnp.zeros((1, 2, 3, 2, 4))
IDS, CODE = jnp.zeros((1, 2, 3), int), jnp.zeros((1, 4, 2))
CALLS: dict[str, tuple[Any, ...]] = {
    "blocked_conv": (STREAM, TAPS),
    "gated_delta_rule": (HEADS, HEADS, HEADS, GATES),
    "gated_linear_attention": (HEADS, HEADS, HEADS),
    "hash_embedding": (TAPS, IDS[..., :2]),
    "linear_scan": (STREAM, STREAM),
    "long_conv": (STREAM, TAPS),
    "lookup": (BLOCKS, BLOCKS, BLOCKS, IDS, IDS > 0, jnp.zeros((2, 1))),
    "modal_conv": (STREAM, TAPS, TAPS),
    "neural_memory": (HEADS, HEADS, HEADS, GATES, GATES, GATES, (jnp.zeros((2, 4, 4)),)),
    "norm_dropout": (CODE, jnp.ones(2)),
    "pool": (BLOCKS, BLOCKS, BLOCKS, IDS),
    "routed_lora": (CODE, jnp.zeros((2, 5)), jnp.zeros((2, 4)), jnp.zeros((4, 5)), CODE),
    "short_conv": (STREAM, TAPS),
    "token_product": (jnp.zeros(2), (jnp.zeros((2, 2)),)),
}
"""Arrays of a call of each operation whose `explain` takes them and any options."""


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


@pytest.mark.parametrize("word", ["middle", None, HEADS])
def test_a_word_that_a_literal_does_not_hold_is_refused(word):
    with pytest.raises(ValueError, match="explain: direction must be 'pool' or 'lookup', got "):
        patch_attention.explain(word)
    with pytest.raises(ValueError, match="explain: of must be 'cross_entropy' or 'entropy', got "):
        byte_head.explain(word)


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


def explained_operations() -> list[Callable[..., Any]]:
    """Public functions with implementations, except those whose `explain` takes no options of the call."""
    without = {"attention", "cross_entropy", "entropy"}
    return [
        function
        for function in public_functions()
        if "implementation" in inspect.signature(function).parameters and function.__name__ not in without
    ]


def explain(operation: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What the operation's room says of its call."""
    of = (operation.__name__,) if operation in (patch_attention.pool, patch_attention.lookup) else ()
    return inspect.getmodule(operation).explain(*of, *args, **options)  # type: ignore[union-attr]


def without_values(call: tuple[Any, ...]) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), call)


def bad_options(operation: Callable[..., Any]) -> dict[str, Any]:
    """A value that is refused for each flag and number, and for what every operation has or has not."""
    kinds = {bool: "yes", int: 2.5}
    parameters = inspect.signature(operation).parameters.values()
    found = {p.name: kinds[p.annotation] for p in parameters if p.annotation in kinds}
    return {**found, "implementation": "cuda", "colour": 1}


each_explained = pytest.mark.parametrize("operation", explained_operations(), ids=lambda f: f.__name__)


@each_explained
def test_explain_refuses_what_the_operation_refuses(operation):
    needed = {"look_back": 1} if operation is patch_attention.lookup else {}
    arrays = CALLS[operation.__name__]
    calls = [(arrays, needed | {name: value}) for name, value in bad_options(operation).items()]
    calls += [((None, *arrays[1:]), needed), ((jnp.zeros(3), *arrays[1:]), needed)]
    for args, options in calls:
        with pytest.raises((TypeError, ValueError)) as refused:
            operation(*args, **options)
        assert "implementation" not in options or "unknown implementation 'cuda'" in str(refused.value)
        for given in (args, without_values(args)):
            with pytest.raises(refused.type) as explained:
                explain(operation, *given, **options)
            assert str(explained.value) == str(refused.value)


@each_explained
def test_explain_takes_what_the_operation_takes(operation):
    options = {"look_back": 1} if operation is patch_attention.lookup else {}
    arrays = CALLS[operation.__name__]
    with record_choices() as lines:
        jax.eval_shape(lambda: operation(*arrays, **options))
        jax.eval_shape(lambda: operation(*arrays, implementation="reference", **options))
    for given in (arrays, without_values(arrays)):
        with record_choices() as more:
            found = [
                explain(operation, *given, **options, **asked)
                for asked in ({}, {"implementation": "reference"})
            ]
        assert (found, more) == (lines, [])
