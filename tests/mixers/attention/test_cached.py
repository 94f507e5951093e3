"""Calls of many tokens, or of few with a long cache: what they see, what runs it, and what they read."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxblt.mixers import AttentionConfig, init_state
from jaxblt.mixers.attention.kv_cache import AttentionState
from jaxblt.parallel import make_mesh
from jaxblt.parallel.attention.plan import Asked, Call
from pallas_kernels._dispatch import compiling_for
from pallas_kernels.attention import blocks, xla
from tests.parameters import drawn
from tests.tolerances import assert_close

WINDOW = 5
FIRST, MANY, LAST = 7, 21, 6
LENGTH = FIRST + MANY + LAST
CAPACITY = 64
STRETCH = 3
COSTLY = pytest.mark.slow(days=28, group="costly", turn="mixers/attention/test_cached")
H200 = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")


def ids(seed: int) -> np.ndarray:
    """Documents with holes inside and non-tokens anywhere, in two rows over the end of the first call.

    There the last row has a hole, whose slot holds what is out of the window.
    """
    rng = np.random.default_rng(seed)
    documents = np.cumsum(rng.random((4, LENGTH)) < 0.15, 1) + 1
    documents[1, FIRST - 3 : FIRST + 4] = documents[1, FIRST]
    kind = rng.choice([1, -1, 0], (4, LENGTH), p=(0.7, 0.15, 0.15))
    documents[2, : FIRST + 4], kind[2, : FIRST + 4] = documents[2, 0], [1, 1, 1, 1, 1, -1, 1, 1, 0, 1, -1]
    return (documents * kind).astype(np.int32)


@pytest.mark.slow(days=28, group="decoding")
@pytest.mark.parametrize(
    ("window", "position", "dtype", "axes"),
    [
        (WINDOW, "rope", jnp.float32, ()),
        (WINDOW, "alibi", jnp.float32, ()),
        (WINDOW, "rope", jnp.bfloat16, ("data", "seq")),
        (None, "rope", jnp.float32, ()),
        (2 * CAPACITY, "none", jnp.bfloat16, ("data",)),
    ],
)
def test_many_tokens_see_what_they_would_one_by_one(
    window: int | None, position: Any, dtype: Any, axes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a mesh splits rows, and would split longer calls along the sequence."""
    monkeypatch.setattr("jaxblt.parallel.attention.plan.LARGEST_MASK", 0)
    config = AttentionConfig(dim=8, num_heads=2, num_kv_heads=1, window=window, position=position)
    module = config.build(dtype=dtype)
    x = np.random.default_rng(0).standard_normal((4, LENGTH, 8)).astype(np.float32)
    params = drawn(module, x)
    call = jax.jit(module.apply)

    def fed(seed: int, ends: list[int]) -> np.ndarray:
        state, outputs = init_state(module.config, 4, capacity=CAPACITY, dtype=dtype), []
        for begin, end in zip([0, *ends], ends, strict=False):
            here = slice(begin, end)
            y, state = call(params, x[:, here], segment_ids=ids(seed)[:, here], state=state)
            outputs.append(y)
        return np.concatenate(outputs, 1)

    one_by_one = list(range(1, LENGTH + 1))
    mesh = make_mesh(**{"data": 1} | dict.fromkeys(axes, 2), devices=jax.devices()[: 2 ** len(axes)])
    for seed in range(4):
        expected = fed(seed, one_by_one)
        with jax.set_mesh(mesh):
            y = fed(seed, [WINDOW, FIRST, FIRST + MANY, *one_by_one[FIRST + MANY :]])
        assert_close(y, expected, dtype, n=LENGTH)


def test_scores_grow_with_the_call_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[blocks.Blocks] = []
    plain = blocks.choose_blocks

    def choose(*args: Any, **options: Any) -> blocks.Blocks:
        chosen.append(plain(*args, **options))
        return chosen[-1]

    monkeypatch.setattr(xla.cut, "choose_blocks", choose)
    module = AttentionConfig(dim=8, num_heads=1, window=128).build()
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    params = jax.eval_shape(module.init, jax.random.key(0), shape(1, 1, 8))
    state = jax.eval_shape(lambda: init_state(module.config, 1, capacity=1 << 20))
    scores = []
    for tokens in (1024, 4096):
        chosen.clear()
        jax.eval_shape(lambda p, x, s: module.apply(p, x, state=s), params, shape(1, tokens, 8), state)
        scores.append(sum(b.count() * b.block_q * b.block_k for b in chosen))
    assert 0 < scores[1] < 5 * scores[0]
    assert scores[1] < 4096 * 128 * 3


@pytest.mark.parametrize(("slots", "calls"), [(1 << 10, 1), (1 << 18, 2)])
def test_a_long_cache_leaves_attention_to_cudnn(
    slots: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call with the mask as an array, or one for the call's own tokens and one for the cache."""
    text = lowered_for_h200(AttentionConfig(dim=128, num_heads=2), 512, slots, monkeypatch)
    assert len(re.findall(r"@__cudnn\$fmha\w*Softmax\(", text)) == calls


def test_one_token_writes_no_cache_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of arrays of a cache's size a call makes two, keys and values with the token put into them in place."""
    config = AttentionConfig(dim=128, num_heads=2, position="alibi")
    text, cache = lowered_for_h200(config, 1, 255, monkeypatch), "tensor<3x256x2x64xbf16>"
    made = [line for line in text.splitlines() if line.endswith(cache) and "return" not in line]
    assert "@__cudnn$fmha" in text
    assert len(made) == 2, made


@pytest.mark.parametrize(
    ("tokens", "slots", "options"),
    [(1, 256, {}), (1, 64, {"window": 64}), (1, 8192, {}), (9, 8192, {"num_kv_heads": 1})],
    ids=str,
)
def test_few_tokens_read_a_cache_by_one_kernel(
    tokens: int, slots: int, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without cuDNN. Arrays of the cache's size are only keys and values with the tokens put into them."""
    config = AttentionConfig(dim=128, num_heads=2, **options)
    text = str(traced_for_h200(config, tokens, max(slots, 256), monkeypatch).jaxpr)
    made = re.findall(rf":bf16\[3,{slots},{config.groups},64\] = (\w+)", text)
    assert "name=prefix_attention" in text
    assert "cudnn" not in text
    assert [name for name in made if name not in ("jit", "optimization_barrier")] == ["scatter"] * 2, made


@pytest.mark.parametrize(
    ("dtype", "expected"), [(jnp.bfloat16, True), (jnp.float32, True), (jnp.float8_e4m3fn, False)], ids=str
)
def test_that_kernel_is_planned_for_caches_of_its_types(dtype: Any, expected: bool) -> None:
    config = AttentionConfig(dim=128, num_heads=2)
    state = jax.eval_shape(lambda: init_state(config, 1, capacity=8192, dtype=dtype))
    asked = Asked(heads=2, groups=2, width=64, causal=True, window=None, alibi=False)
    call = Call(asked, 1, 1, jnp.bfloat16, has_ids=True, axis=None, split=False, cache=state.shape)
    with compiling_for(H200):
        assert call.reads_prefix == expected


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("jaxblt.mixers.attention.cached", "jaxblt.parallel.attention.plan"):
        monkeypatch.setattr(f"{room}.STRETCH", STRETCH)


@pytest.mark.slow(days=28, group="decoding")
@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize(
    ("use", "options", "dtype", "axes"),
    [
        ("filled", {}, jnp.float32, ()),
        ("filled", {"position": "alibi"}, jnp.bfloat16, ("data",)),
        ("prefix", {}, jnp.float32, ("data",)),
        ("prefix", {"window": 7}, jnp.float32, ("data",)),
    ],
    ids=str,
)
def test_few_tokens_see_as_far_as_it_is_filled_what_the_whole_cache_shows(
    use: str, options: Any, dtype: Any, axes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In unequal rows of several documents, one by one and in calls that cross stretches; beyond the capacity too."""
    config = AttentionConfig(dim=8, num_heads=2, num_kv_heads=1, **options)
    module = config.build(dtype=dtype)
    x = np.random.default_rng(0).standard_normal((4, LENGTH, 8)).astype(np.float32)
    params = drawn(module, x)
    state = init_state(config, 4, capacity=32, dtype=dtype)
    mesh = make_mesh(**{"data": 1} | dict.fromkeys(axes, 2), devices=jax.devices()[: 2 ** len(axes)])

    def program() -> Any:
        return jax.jit(lambda x, ids, state: module.apply(params, x, segment_ids=ids, state=state))

    def fed(call: Any, rows: np.ndarray, ends: list[int]) -> np.ndarray:
        held, outputs = state, []
        for begin, end in zip([0, *ends], ends, strict=False):
            here = slice(begin, end)
            y, held = call(x[:, here], rows[:, here], held)
            outputs.append(y)
        return np.concatenate(outputs, 1)

    documents, one_by_one = [ids(0), ids(1), np.ones((4, LENGTH), np.int32)], list(range(1, LENGTH + 1))
    with monkeypatch.context() as whole:
        whole.setattr("jaxblt.parallel.attention.plan.FEW", 0)
        plain = program()
        expected = [fed(plain, rows, one_by_one) for rows in documents]
    monkeypatch.setattr("jaxblt.parallel.attention.plan.skips_empty_slots", lambda q, k: use == "prefix")
    call = program()
    with jax.set_mesh(mesh):
        for rows, outputs in zip(documents, expected, strict=True):
            y = fed(call, rows, [*one_by_one[:10], 15, 20, 25, 30, *one_by_one[30:]])
            assert_close(y, outputs, dtype, n=LENGTH)


def long_state(config: AttentionConfig, times: list[int], capacity: int) -> AttentionState:
    """Return rows that stand at these times, of drawn keys and values."""
    state, now = init_state(config, len(times), capacity=capacity), jnp.asarray(times, jnp.int32)
    slots = jnp.arange(state.times.shape[1], dtype=jnp.int32)[None]
    k, v = (jax.random.normal(jax.random.key(seed), state.k.shape) for seed in (1, 2))
    clock = dataclasses.replace(state.clock, time=now, position=now, last_segment=jnp.ones_like(now))
    return dataclasses.replace(state, clock=clock, k=k, v=v, times=jnp.where(slots < now[:, None], slots, -1))


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize("tokens", [1, pytest.param(3, marks=COSTLY)])
def test_a_row_is_the_same_bit_for_bit_however_long_others_are(tokens: int) -> None:
    config = AttentionConfig(dim=8, num_heads=2)
    module = config.build()
    x = jax.random.normal(jax.random.key(0), (2, tokens, 8))
    params = drawn(module, x)
    call: Any = jax.jit(lambda state, ids: module.apply(params, x, segment_ids=ids, state=state)[0][0])
    for time in range(9):
        rows = [
            call(long_state(config, [time, other], 38), np.ones((2, tokens), np.int32)) for other in (0, 31)
        ]
        idle = call(long_state(config, [time, 31], 38), np.repeat([[1], [0]], tokens, 1).astype(np.int32))
        for row in (rows[1], idle):
            np.testing.assert_array_equal(row, rows[0])
    assert call._cache_size() == 1


@COSTLY
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_few_tokens_copy_no_cache_and_read_what_is_filled(tokens: int) -> None:
    """Calls in a loop, the state given away; slots beyond the filled ones are never read."""
    config = AttentionConfig(dim=16, num_heads=2)
    module = config.build()
    x = jax.random.normal(jax.random.key(0), (3, 2, tokens, 16))
    params = drawn(module, x[0])

    def step(state: AttentionState, x: jax.Array) -> tuple[AttentionState, Any]:
        y, after = module.apply(params, x, state=state)
        return cast(AttentionState, after), y

    state = long_state(config, [3, 700], 16_384)
    compiled = jax.jit(lambda state: jax.lax.scan(step, state, x), donate_argnums=0).lower(state).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < state.k.nbytes / 4
    broken = dataclasses.replace(state, v=state.v.at[:, 2048:].set(jnp.nan))
    _, expected = compiled(jax.tree.map(jnp.copy, state))
    np.testing.assert_array_equal(compiled(jax.tree.map(jnp.copy, broken))[1], expected)
    assert np.isfinite(expected).all()


def traced_for_h200(
    config: AttentionConfig, tokens: int, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Trace a call with a state, in three rows."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    module = config.build(dtype=jnp.bfloat16)
    x, ids = (
        jax.ShapeDtypeStruct((3, tokens, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((3, tokens), jnp.int32),
    )
    params = jax.eval_shape(module.init, jax.random.key(0), x)
    state = jax.eval_shape(lambda: init_state(config, 3, capacity=capacity, dtype=jnp.bfloat16))
    call = jax.jit(lambda params, x, ids, state: module.apply(params, x, segment_ids=ids, state=state))
    with compiling_for(H200):
        return call.trace(params, x, ids, state)


def lowered_for_h200(
    config: AttentionConfig, tokens: int, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Return the program of such a call."""
    with compiling_for(H200):
        traced = traced_for_h200(config, tokens, capacity, monkeypatch)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
