"""Calls with a rule: the property suite in small blocks, what is not visited, what runs them, what is refused."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _jax_triton
from pallas_kernels.attention import Chosen, attention, blocks, explain, masks, presets
from pallas_kernels.attention.rules import Custom, Global, Interval, PrefixLM, Strided
from pallas_kernels.runtime import Device
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.attention.cases import RULE_CALLS, RuleCall
from tests.sampled import thinned
from tests.tolerances import assert_close

MATRIX = list(itertools.product(RULE_CALLS, sorted(set(op_suite.CHECKS) - {"reference"})))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CPU_BLOCK", 16)


@pytest.mark.slow(days=28, group="properties of kernels", every=("chosen_documents", "prefix_score"))
@pytest.mark.parametrize("call", RULE_CALLS, ids=str)
def test_values_and_gradients(call: RuleCall) -> None:
    op_suite.check_reference(call.case())


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize(("call", "check"), thinned(MATRIX, 28, tuple), ids=str)
def test_every_property(call: RuleCall, check: str) -> None:
    op_suite.CHECKS[check](call.case())


def test_nan_at_holes_and_padding_is_not_read() -> None:
    op_suite.check_poison(next(call for call in RULE_CALLS if call.name == "chosen_documents").case())


def _given(tokens: int = 64, heads: int = 2) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((1, tokens, heads, 8)), jnp.float32) for _ in range(3)]


def test_blocks_that_no_query_sees_are_not_read() -> None:
    """NaN in them reaches neither the output nor a gradient."""
    q, k, v = _given()
    rule = Interval(before=15) & Custom(lambda q, k: (k < 16) | (k >= 32))
    hidden = (jnp.arange(64) >= 16) & (jnp.arange(64) < 32)
    poisoned = [jnp.where(hidden[None, :, None, None], jnp.nan, x) for x in (k, v)]

    @jax.jit
    def passes(k: jax.Array, v: jax.Array) -> tuple:
        o, back = jax.vjp(lambda *x: attention(*x, masks.CAUSAL & rule, implementation="xla"), q, k, v)
        return o, *back(jnp.ones_like(o))

    for found, expected in zip(passes(*poisoned), passes(k, v), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow(days=28, group="properties of kernels")
def test_a_query_that_sees_nothing_gives_zero() -> None:
    q, k, v = _given()
    mask = masks.CAUSAL & (Interval(before=-1) | Global(first=0, every=32, rows=False))
    mask &= masks.FULL & Custom(lambda q, k: q % 2 == 0)
    for implementation in ("xla", "reference"):
        run = partial(attention, k=k, v=v, mask=mask, implementation=implementation)
        o, dq = jax.jit(lambda q, run=run: (run(q), jax.grad(lambda q: jnp.sum(run(q) ** 2))(q)))(q)
        assert not np.asarray(o)[:, 1::2].any()
        assert np.asarray(o)[:, ::2].all()
        assert np.isfinite(dq).all()


@pytest.mark.slow(days=28, group="properties of kernels")
def test_large_scores_keep_gradients_finite_where_the_last_block_is_padded() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 40, 1, 8))

    def gradients(implementation: str) -> tuple[jax.Array, ...]:
        given = {
            "score": lambda s, h, q, k: s + jnp.maximum(12 * (q - 39), 0).astype(s.dtype),
            "implementation": implementation,
        }
        total = lambda *qkv: (attention(*qkv, masks.CAUSAL, **given) ** 2).sum()  # noqa: E731
        return jax.jit(jax.grad(total, (0, 1, 2)))(x, x, x)

    for found, expected in zip(gradients("xla"), gradients("reference"), strict=True):
        assert_close(found, expected, jnp.float32, n=40)


@pytest.mark.slow(days=28, group="properties of kernels")
def test_memory_is_linear_in_length() -> None:
    """Neither a dense mask nor dense scores are made, whatever the rule is."""
    mask = masks.CAUSAL & (Interval(63) | Custom(lambda q, k: k % 512 == q % 512))

    def temporary(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        grad = jax.grad(lambda q, k, v: attention(q, k, v, mask, implementation="xla").sum())
        return jax.jit(grad).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(1024), temporary(4096)
    assert long < 4 * short * 1.2


def test_a_rule_is_run_by_xla_and_explain_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: None)
    x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.bfloat16)
    hopper = Device("gpu", (9, 0), "NVIDIA H200")
    assert explain(x, x, masks.CAUSAL, device=hopper).startswith("attention: cudnn")
    said = explain(x, x, masks.CAUSAL & presets.bigbird(), device=hopper)
    assert said.startswith("attention: xla on NVIDIA H200 (not cudnn: it visits all blocks")
    assert "not triton: triton and jax_triton not found" in said


def _lists(*shape: int, fill: int = 0) -> Chosen:
    return Chosen(jnp.full(shape, fill, jnp.int32), 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mask": masks.CAUSAL & _lists(1, 2, 63, 1)},
            r"lists of Chosen must have shape .* T / block_q = 64",
        ),
        ({"mask": masks.CAUSAL & _lists(1, 3, 64, 1)}, r"G = 2 .* got \(1, 3, 64, 1\)"),
        (
            {"mask": masks.CAUSAL & _lists(1, 2, 64, 1, fill=4)},
            r"name block 4, and 64 keys have 4 blocks of 16",
        ),
        ({"q": jnp.zeros((1, 1, 2, 8)), "mask": masks.FULL & Strided(4)}, "add masks.positions"),
        ({"mask": masks.FULL & PrefixLM(4), "implementation": "cudnn"}, "needs an NVIDIA GPU"),
        ({"score": lambda s, h, q, k: s.sum(-1)}, "one fp32 number for each score"),
        ({"score": lambda s, h, q, k: s > 0}, "one fp32 number for each score"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    q, k, v = _given()
    with pytest.raises(ValueError, match=message):
        attention(**{"q": q, "k": k, "v": v, "mask": masks.CAUSAL, **change})
