"""The Hopper kernel of partial attention: simulated on the CPU, whole on a GPU, and what they refuse."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.core import subjaxprs

from jaxblt.parallel import make_mesh
from jaxblt.parallel.attention.context import context_attention
from jaxblt.testing.tolerances import typical
from pallas_kernels._dispatch import Device, compiling_for
from pallas_kernels.attention import (
    EMPTY_LSE,
    Partial,
    attention,
    masks,
    merge_partials,
    partial_attention,
    partial_attention_backward,
    reference,
)
from pallas_kernels.attention.hopper import why_not
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.mosaic_gpu_partial import attention_with_lse
from pallas_kernels.attention.partial import BACKWARD, FORWARD, _choose, merges_in_kernel
from pallas_kernels.attention.rules import Interval
from tests.pallas_kernels.attention.cases import Call
from tests.tolerances import assert_close

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
H200 = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind=HOPPER.kind)
SMALL = {"heads": 1, "groups": 1, "head_dim": 64, "dtype": jnp.bfloat16}
WIDE = SMALL | {"heads": 3, "head_dim": 128}
# The last fills places again: two with four tiles of keys.
SMALL_CALLS = (
    (Call(name="odd", queries=333, scale=0.3, **SMALL), False),
    (Call(name="gqa_into", queries=192, **SMALL | {"heads": 2}), True),
    (Call(name="wide_cross_into", queries=72, keys=401, causal=False, **WIDE), True),
)
LARGE_CALLS = tuple(
    (Call(name=f"{queries}_{keys}_{width}_{causal}_{accumulator}", queries=queries, keys=keys, causal=causal,
          heads=8, groups=2, head_dim=width, dtype=jnp.bfloat16), accumulator)
    for queries, keys, causal in ((2048, 2048, True), (2048, 1024, False), (777, 777, True), (1001, 515, False))
    for width in (64, 128)
    for accumulator in (False, True)
)  # fmt: skip


@partial(jax.jit, static_argnums=(0, 1))
def before(call: Call, batch: int) -> Partial:
    """What other keys might have given the queries of a call; none of them those of the last of several rows."""
    keys = jax.random.split(jax.random.key(7))
    o = jax.random.normal(keys[0], (batch, call.queries, call.heads, call.head_dim))
    lse = jax.random.normal(keys[1], (batch, call.heads, call.queries)) + 3
    seen = jnp.arange(batch) < max(1, batch - 1)
    return Partial(jnp.where(seen[:, None, None, None], o, 0), jnp.where(seen[:, None, None], lse, EMPTY_LSE))


def masked(call: Call, lengths: Any = None) -> Mask:
    mask = masks.band(call.causal)
    return mask if lengths is None else mask & masks.key_lengths(jnp.asarray(lengths, jnp.int32))


def check(run: Any, call: Call, joined: bool, lengths: Any = None) -> Partial:
    """`run` against the reference, merged into the same."""
    batch = 1 if lengths is None else len(lengths)
    arrays = call.arrays(batch)
    mask = masked(call, lengths)
    accumulator = before(call, batch) if joined else None
    found = Partial(*run(**arrays, mask=mask, accumulator=accumulator, scale=call.scale))
    want = Partial(*jax.jit(partial(reference.attention_with_lse, scale=call.scale))(**arrays, mask=mask))
    want = want if accumulator is None else merge_partials(accumulator, want)
    assert found.o.dtype == found.lse.dtype == jnp.float32
    assert_close(found.o, want.o, call.dtype, call.keys or call.queries, "output")
    assert_close(found.lse, want.lse, jnp.float32, call.keys or call.queries, "log-sum-exp")
    return found


@pytest.mark.slow(days=28, group="simulated kernels")
@pytest.mark.parametrize(("call", "joined"), SMALL_CALLS, ids=lambda x: str(x) if isinstance(x, Call) else "")
def test_simulated(call: Call, joined: bool, simulation: Any) -> None:
    check(partial(attention_with_lse, interpret=simulation), call, joined)


def check_cast_output(run: Any, call: Call) -> None:
    """Rounding changes nothing but the dtype."""
    arrays, options = call.arrays(1), {"mask": masked(call), "accumulator": before(call, 1)}
    (o, lse), (narrow, same) = (run(**arrays, **options, cast_output=cast) for cast in (False, True))
    np.testing.assert_array_equal(narrow, o.astype(call.dtype))
    assert narrow.dtype == call.dtype
    np.testing.assert_array_equal(same, lse)


@pytest.mark.slow(days=28, group="simulated kernels")
def test_simulated_cast_output(simulation: Any) -> None:
    check_cast_output(partial(attention_with_lse, interpret=simulation), SMALL_CALLS[0][0])


def check_lengths(run: Any, call: Call, lengths: list[int]) -> None:
    """Of the rows without a visible key the first keeps what it was merged into, the last has nothing."""
    found = check(run, call, True, lengths)
    np.testing.assert_array_equal(found.lse[0], before(call, len(lengths)).lse[0])
    np.testing.assert_array_equal(found.lse[-1], np.float32(EMPTY_LSE))
    assert not found.o[-1].any()


@pytest.mark.slow(days=28, group="simulated kernels")
def test_simulated_lengths(simulation: Any) -> None:
    run = partial(attention_with_lse, interpret=simulation)
    check_lengths(run, Call(name="lengths", queries=140, **SMALL), [0, 130, 0])


@pytest.mark.slow(days=28, group="simulated kernels")
def test_simulated_rows_that_share_keys(simulation: Any) -> None:
    call = Call(name="shared", queries=40, keys=136, causal=False, **SMALL)
    arrays, lengths = call.arrays(4), jnp.asarray([7, 0, 136, 130], jnp.int32)
    mask, twice = masks.key_lengths(lengths), [jnp.repeat(arrays[name][:2], 2, 0) for name in "kv"]
    k, v = arrays["k"][:2], arrays["v"][:2]
    found = attention_with_lse(arrays["q"], k, v, mask, interpret=simulation)
    want = reference.attention_with_lse(arrays["q"], *twice, mask)
    assert_close(found[0], want[0], call.dtype, 136)
    assert_close(found[1], want[1], jnp.float32, 136)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/attention/test_mosaic_gpu")
def test_merged_into_another_implementation() -> None:
    call = Call(name="xla", queries=30, head_dim=16)
    arrays, accumulator = call.arrays(), before(call, 2)
    options: dict[str, Any] = {"mask": masks.CAUSAL, "implementation": "xla"}
    want = merge_partials(accumulator, partial_attention(*arrays.values(), **options))
    merged = partial_attention(*arrays.values(), accumulator=accumulator, **options)
    for found, expected in zip(merged, want, strict=True):
        np.testing.assert_array_equal(found, expected)
    narrow = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    wide, cast = (
        partial_attention(**narrow, accumulator=accumulator, cast_output=cast_output, **options)
        for cast_output in (False, True)
    )
    assert (wide.o.dtype, cast.o.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(cast.o, wide.o.astype(jnp.bfloat16))
    short = Partial(accumulator.o[:, :3], accumulator.lse[..., :3])
    with pytest.raises(ValueError, match=r"accumulator must be of the same queries, o \(2, 30, 2, 16\)"):
        partial_attention(*arrays.values(), accumulator=short, **options)


@pytest.mark.slow(days=28, group="simulated kernels")
def test_runs_of_queries_with_lengths_of_their_own() -> None:
    call = Call(name="runs", queries=60, keys=30, causal=False, heads=2, groups=1, head_dim=16)
    arrays, accumulator = call.arrays(), before(call, 2)
    reaches = jnp.asarray([[0, 13, 30], [30, 1, 2]], jnp.int32)
    found = partial_attention(*arrays.values(), masks.key_lengths(reaches), accumulator=accumulator)
    for run, at in enumerate((slice(0, 20), slice(20, 40), slice(40, 60))):
        q, k, v = arrays.values()
        mask = masks.key_lengths(reaches[:, run])
        want = Partial(*reference.attention_with_lse(q[:, at], k, v, mask))
        want = merge_partials(Partial(accumulator.o[:, at], accumulator.lse[..., at]), want)
        assert_close(found.o[:, at], want.o, jnp.float32, 30)
        assert_close(found.lse[..., at], want.lse, jnp.float32, 30)
    with pytest.raises(ValueError, match=r"\(2, 7\) are of 2 rows and 7 equal runs"):
        partial_attention(*arrays.values(), masks.key_lengths(jnp.zeros((2, 7), jnp.int32)))
    mask = masks.band(True, 3) & masks.key_lengths(reaches)
    with pytest.raises(ValueError, match=r"go with no other mask, got Interval\(before=2, after=0\)"):
        partial_attention(arrays["q"][:, :30], arrays["k"], arrays["v"], mask)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "bfloat16 and float16 alone, not float32"),
        ({"width": 96}, "of size 64 or 128, not 96"),
        ({"mask": masks.band(True, 8)}, "causal masks and lengths of keys alone"),
        ({"mask": masks.FULL & Interval(after=-1)}, "causal masks and lengths of keys alone"),
        ({"mask": masks.query_lengths(jnp.ones(1, jnp.int32))}, "causal masks and lengths of keys alone"),
        ({"scale": -1.0}, "positive scales alone, not -1.0"),
        ({"keys": 0}, "one query and one key at least, these are (1, 100, 4, 64) and (1, 0, 4, 64)"),
        ({"queries": 0}, "one query and one key at least, these are (1, 0, 4, 64) and (1, 80, 4, 64)"),
        ({"rows": 0}, "one query and one key at least, these are (0, 100, 4, 64) and (0, 80, 4, 64)"),
        ({}, "it can run"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call = {"device": HOPPER, "dtype": jnp.bfloat16, "width": 64, "mask": masks.CAUSAL, "scale": None}
    call |= {"queries": 100, "keys": 80, "rows": 1} | change
    q, k = (
        jax.ShapeDtypeStruct((call["rows"], call[n], 4, call["width"]), call["dtype"])
        for n in ("queries", "keys")
    )
    assert reason in (why_not(call["device"], q, k, k, call["mask"], scale=call["scale"]) or "it can run")


@pytest.mark.parametrize(
    ("change", "forward"),
    [
        ({}, "mosaic_gpu"),
        ({"runs": 2}, "mosaic_gpu"),
        ({"width": 64}, "cudnn"),
        ({"dtype": jnp.float16}, "cudnn"),
        ({"runs": 1}, "cudnn"),
        ({"width": 64, "keys": 125}, "mosaic_gpu"),  # cuDNN takes even lengths alone
        ({"width": 96, "keys": 125}, "xla"),
    ],
    ids=str,
)
def test_goes_first_where_it_was_faster(change: dict[str, Any], forward: str) -> None:
    call = {"width": 128, "dtype": jnp.bfloat16, "keys": 256, "runs": 0} | change
    shapes = ((max(1, call["runs"]), 250), (1, call["keys"]))
    q, k = (jax.ShapeDtypeStruct((*shape, 4, call["width"]), call["dtype"]) for shape in shapes)
    mask = masks.key_lengths(jnp.ones(call["runs"], jnp.int32)) if call["runs"] else masks.FULL
    with compiling_for(H200):
        assert _choose("partial_attention", FORWARD, q, k, k, mask, None, None).name == forward
        assert merges_in_kernel(q, k, k) == (forward == "mosaic_gpu" or call["runs"] == 1)
        backward = _choose("partial_attention_backward", BACKWARD, q, k, k, masks.FULL, None, None).name
        assert backward == ("cudnn" if k.shape[1] % 2 == 0 else "xla")


def test_is_refused_where_it_cannot_run() -> None:
    q = jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="this is cpu"):
        partial_attention(q, q, q, masks.CAUSAL, implementation="mosaic_gpu")


def traced(run: Callable[..., Any], *shapes: Any) -> tuple[Any, Counter[str]]:
    """Shapes and dtypes of the result on an H200, and how often each kernel is called for it."""

    def kernels(jaxpr: Any) -> Iterator[str]:
        yield from (eqn.params["name"] for eqn in jaxpr.eqns if eqn.primitive.name == "mpmd_map")
        for inner in subjaxprs(jaxpr):
            yield from kernels(inner)

    with compiling_for(H200):
        jaxpr, result = jax.make_jaxpr(run, return_shape=True)(*shapes)
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), result), Counter(kernels(jaxpr.jaxpr))


def like(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


Q, K = like(2, 256, 4, 64, dtype=jnp.bfloat16), like(2, 256, 2, 64, dtype=jnp.bfloat16)
MERGED = Partial(like(*Q.shape), like(2, 4, 256))
PARTIAL = Partial((Q.shape, "float32"), ((2, 4, 256), "float32"))


@pytest.mark.parametrize(
    "given",
    [{}, {"accumulator": MERGED}, {"accumulator": MERGED, "lengths": like(2, 2, dtype=jnp.int32)}],
    ids=sorted,
)
def test_it_is_one_kernel(given: dict[str, Any]) -> None:
    def run(q: Any, k: Any, v: Any, given: Any) -> Partial:
        mask = masks.key_lengths(given["lengths"]) if "lengths" in given else masks.CAUSAL
        return partial_attention(
            q, k, v, mask, implementation="mosaic_gpu", accumulator=given.get("accumulator")
        )

    assert traced(run, Q, K, K, given) == (PARTIAL, {"partial_attention": 1})


FORWARD_ONLY = "'mosaic_gpu' runs forward only: leave implementation None, .* or name 'cudnn' or 'xla'"


def test_gradients_name_what_has_them() -> None:
    run = partial(partial_attention_backward, mask=masks.CAUSAL, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match=FORWARD_ONLY):
        traced(run, Q, K, K, MERGED, Q)


@pytest.mark.parametrize(
    ("options", "calls"),
    # Causal: of the other device's keys half of the queries see all, or all see half, in one call. In rows with holes
    # each half has a length of its own, and the later one sees the earlier one too.
    [({"causal": False}, 2), ({"causal": True}, 2), ({"causal": True, "packed": False}, 4)],
    ids=str,
)
def test_a_ring_of_two_has_values_and_no_gradients(options: dict[str, Any], calls: int) -> None:
    def run(q: Any, k: Any, v: Any, ids: Any) -> Any:
        ids = None if options.get("packed", True) else ids
        return context_attention(q, k, v, ids, mode="ring", implementation="mosaic_gpu", **options)

    def gradient(q: Any, *others: Any) -> Any:
        return jax.grad(lambda q: run(q, *others).astype(jnp.float32).sum())(q)

    ids = like(2, 256, dtype=jnp.int32)
    with jax.set_mesh(make_mesh(seq=2, devices=jax.devices()[:2])):
        assert traced(run, Q, K, K, ids) == ((Q.shape, "bfloat16"), {"partial_attention": calls})
        with pytest.raises(ValueError, match=FORWARD_ONLY):
            traced(gradient, Q, K, K, ids)


@pytest.mark.gpu
@pytest.mark.parametrize(("call", "joined"), LARGE_CALLS, ids=lambda x: str(x) if isinstance(x, Call) else "")
def test_on_a_gpu(call: Call, joined: bool) -> None:
    check(attention_with_lse, call, joined)


@pytest.mark.gpu
@pytest.mark.parametrize("call", [call for call, joined in LARGE_CALLS if joined], ids=str)
def test_cast_output_on_a_gpu(call: Call) -> None:
    check_cast_output(attention_with_lse, call)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_lengths_on_a_gpu(width: int) -> None:
    call = Call(name="lengths", queries=1000, **SMALL | {"heads": 4, "head_dim": width})
    check_lengths(attention_with_lse, call, [0, 1, 127, 128, 513, 1000, 0])
    alone = check(attention_with_lse, call, False, [1000, 0])
    np.testing.assert_array_equal(alone.lse[1], np.float32(EMPTY_LSE))
    assert not alone.o[1].any()


@pytest.mark.gpu
def test_chunks_are_as_exact_as_one_call() -> None:
    """Four chunks of the keys, merged: at most 1.05 times the error of one call, and of cuDNN's call."""
    call = Call(name="exact", queries=4096, causal=False, heads=4, groups=4, head_dim=128, dtype=jnp.bfloat16)
    q, k, v = call.arrays(1).values()
    floats = (np.asarray(x, np.float64)[0].swapaxes(0, 1) for x in (q, k, v))
    want = dense(*floats).swapaxes(0, 1)[None]
    merged = None
    for keys, values in zip(jnp.split(k, 4, 1), jnp.split(v, 4, 1), strict=True):
        merged = partial_attention(
            q, keys, values, masks.FULL, accumulator=merged, implementation="mosaic_gpu"
        )
    assert merged is not None
    error = typical(merged.o.astype(q.dtype), want)
    alone = partial_attention(q, k, v, masks.FULL, implementation="mosaic_gpu").o.astype(q.dtype)
    assert error <= 1.05 * typical(alone, want)
    assert error <= 1.05 * typical(attention(q, k, v, masks.FULL, implementation="cudnn"), want)


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of all heads, in the precision of its arguments."""
    scores = q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p @ v / p.sum(-1, keepdims=True)
