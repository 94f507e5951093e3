"""neural_memory: the suite over packed rows and states; gradients inside and outside in f64, recall, the delta rule."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._bench import check
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.neural_memory import (
    Chunk,
    MemoryState,
    bench,
    neural_memory,
    read_memory,
    write_memory,
)
from pallas_kernels.neural_memory.shapes import NeuralMemoryShape
from pallas_kernels.neural_memory.two_layers import EPSILON
from pallas_kernels.neural_memory.windows import group_size
from pallas_kernels.runtime import compiling_for
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.linear_state import (
    HOPPER,
    dots,
    equations,
    kept_bytes,
    normal,
    packed,
    training_step,
)
from tests.pallas_kernels.op_suite import OpCase, value_and_grads
from tests.tolerances import assert_close

ROWS, LENGTH, HEADS, WIDTH, HIDDEN = 2, 21, 2, 3, 5
STREAMS = ("q", "k", "v", "theta", "eta", "alpha")
SHARED = ("m1", "m2")


def arrays(length: int = LENGTH, dtype: Any = jnp.float32, *, depth: int = 2) -> dict[str, Any]:
    """Keys of length 1, gates from 0 to 1, weights, and a state that enters."""
    shape, rng = (ROWS, length, HEADS, WIDTH), np.random.default_rng(5)
    found = {name: normal(i, shape, dtype) for i, name in enumerate("qkv")}
    k = np.asarray(found["k"], np.float32)
    found["k"] = (k / np.linalg.norm(k, axis=-1, keepdims=True)).astype(dtype)
    found |= {n: rng.uniform(0, 1, shape[:3]).astype(np.float32) for n in ("theta", "eta", "alpha")}
    sizes = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)] if depth == 2 else [(WIDTH, WIDTH)]
    for i, size in enumerate(sizes):
        found[f"m{i + 1}"] = 0.6 * np.asarray(normal(7 + i, (HEADS, *size)))
        found[f"state{i + 1}"] = 0.6 * np.asarray(normal(9 + i, (ROWS, HEADS, *size)))
        found[f"momentum{i + 1}"] = 0.1 * np.asarray(normal(11 + i, (ROWS, HEADS, *size)))
    return jax.device_put(found)


def call(implementation: Any, chunk_size: int, alignment: int, arrays: dict[str, Any]) -> Any:
    """The op on named arrays, with its final state and trace."""
    named = lambda name: tuple(arrays[n] for n in sorted(arrays) if n[:-1] == name)  # noqa: E731
    state = named("state")
    return neural_memory(
        *(arrays[n] for n in STREAMS),
        named("m"),
        segment_ids=arrays.get("segment_ids"),
        segment_alignment=alignment,
        initial_state=MemoryState(state, named("momentum")) if state else None,
        output_final_state=True,
        output_trace=True,
        chunk_size=chunk_size,
        implementation=implementation,
    )


def case(
    name: str, given: dict[str, Any], ids: Any = None, *, chunk_size: int = 4, alignment: int = 1
) -> OpCase:
    length = given["q"].shape[1]
    given = given | ({} if ids is None else {"segment_ids": ids})
    return OpCase(
        name=name,
        run=partial(call, "xla", chunk_size, alignment),
        reference=partial(call, "reference", chunk_size, alignment),
        arrays=given,
        shared=frozenset(n for n in SHARED if n in given),
        unused={} if ids is None else {n: np.asarray(ids) <= 0 for n in STREAMS},
        silent=None if ids is None else np.asarray(ids) <= 0,
        terms=length * HIDDEN,
        grad_terms=2 * length * HIDDEN,
    )


def on_grid() -> Any:
    """Documents at multiples of 4, one that ends with its chunk, holes, a chunk of holes, padding."""
    places = np.arange(LENGTH)
    first = np.where(places < 8, 1, np.where(places < 15, 2, 0))
    first = np.where((places % 5 == 2) | (places // 4 == 1), -first, first)
    second = np.where(places < 12, 3, np.where(places < 19, 4, 0))
    return jnp.asarray(np.stack([first, second]), jnp.int32)


ANYWHERE = case("documents anywhere, in groups of windows", arrays(), packed(LENGTH), chunk_size=2)
TURNS = pytest.mark.slow(days=28, group="memories and states")
PAIRS = [
    *((ANYWHERE, check) for check in ("reference", "poison")),
    *(pytest.param(ANYWHERE, check, marks=TURNS) for check in ("shard_map", "vmap", "remat")),
    *(
        pytest.param(other, "reference", marks=TURNS)
        for other in (
            case("one matrix on the grid", arrays(depth=1), on_grid(), alignment=8),
            case("bf16, two chunks", arrays(9, jnp.bfloat16)),
            case("less than a chunk", arrays(3), packed(3)),
        )
    ),
]


@pytest.mark.parametrize(("case", "check"), PAIRS, ids=str)
def test_suite(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


def in_f64(given: dict[str, Any]) -> dict[str, Any]:
    """For inside `enable_x64`."""
    return {
        n: jnp.asarray(np.asarray(x), x.dtype if n == "segment_ids" else jnp.float64)
        for n, x in given.items()
    }


@pytest.mark.parametrize("depth", [1, 2])
def test_the_written_out_gradient_is_that_of_the_loss(depth: int) -> None:
    """Over a divisor that the gradients of single tokens give; so the step is at most twice Polyak's."""

    def run(given: dict[str, Any]) -> tuple[Any, ...]:
        k, v = (jnp.moveaxis(given[n], 1, 2) for n in "kv")
        theta = 2 * jnp.moveaxis(given["theta"], 1, 2)
        memory = tuple(given[n] for n in ("state1", "state2") if n in given)

        def losses(memory: Any) -> Any:
            return jnp.sum((read_memory(memory, k, jnp.float64) - v) ** 2, -1) / 2

        def squares(
            gradients: Any,
        ) -> Any:  # of [B, H, 6, B, H, ...], where only a token's own row and head count
            return sum(jnp.sum(g**2, (3, 4, 5, 6)) for g in gradients)

        each, lost = jax.jacrev(losses)(memory), losses(memory)
        # The part of the last matrix is exact, whatever the error.
        curved = squares(each[-1:]) / (2 * lost) + squares(each[:-1]) / (2 * lost + EPSILON)
        divisor = jnp.maximum(1, jnp.sum(theta * curved, -1, keepdims=True))
        total = lambda memory: jnp.sum(theta / divisor * losses(memory))  # noqa: E731
        zero, content = jnp.zeros_like(theta), jnp.ones((ROWS, 6), bool)
        state = MemoryState(memory, jax.tree.map(jnp.zeros_like, memory))
        after, _ = write_memory(state, Chunk(k, v, theta, zero, zero, content), jnp.float64)
        step = sum(jnp.sum(s**2, (2, 3)) for s in after.momentum)
        return divisor, after.momentum, jax.grad(total)(memory), step, jnp.sum(theta / divisor * lost, -1)

    with jax.enable_x64(True):
        divisor, momentum, gradients, step, lost = jax.device_get(
            jax.jit(run)(in_f64(arrays(6, depth=depth)))
        )
    assert np.all(divisor > 1)
    for got, want in zip(momentum, gradients, strict=True):
        assert_close(-got, want, np.float64, 6 * HIDDEN)
    assert np.all(step <= 2 * lost * (1 + 1e-9))


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/neural_memory/test_neural_memory")
@pytest.mark.parametrize("longer", [1, 30])
def test_outer_gradients_are_differences_in_f64(longer: float) -> None:
    """Of memories that enter shorter than the limit of their length, and of longer ones."""
    with jax.enable_x64(True):
        given = in_f64(ANYWHERE.arrays)
        given |= {name: longer * given[name] for name in ("state1", "state2", *SHARED)}
        floats = {n: x for n, x in given.items() if n != "segment_ids"}
        rng = np.random.default_rng(3)
        along = {n: rng.standard_normal(x.shape) for n, x in floats.items()}

        @jax.jit
        def total(floats: Any) -> Any:
            y, final, _ = ANYWHERE.run({**floats, "segment_ids": given["segment_ids"]})
            return sum(
                (x * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum() for x in jax.tree.leaves((y, final))
            )

        gradients = jax.grad(total)(floats)
        for name in floats:
            moved = [total({**floats, name: floats[name] + h * along[name]}) for h in (1e-5, -1e-5)]
            claimed = float(np.sum(gradients[name] * along[name]))
            assert float(moved[0] - moved[1]) / 2e-5 == pytest.approx(claimed, rel=1e-6, abs=1e-7), name


def write(
    k: Any, v: Any, theta: Any, memory: Any, *, eta: float = 0.0, alpha: float = 0.0, steps: int = 1
) -> MemoryState:
    """The state behind `steps` chunks of k and v [B, H, C, K]."""
    gates = (jnp.full(theta.shape, x) for x in (eta, alpha))
    chunk = Chunk(k, v, theta, *gates, jnp.ones((k.shape[0], k.shape[2]), bool))
    state = MemoryState(memory, jax.tree.map(jnp.zeros_like, memory))
    once = jax.jit(lambda state: write_memory(state, chunk, k.dtype)[0])
    for _ in range(steps):
        state = once(state)
    return state


@pytest.mark.parametrize("equal_keys", [False, True])
def test_a_write_never_raises_its_own_chunks_loss(equal_keys: bool) -> None:
    k, v = (normal(i, (50, 2, 4, WIDTH)) for i in range(2))
    k = jnp.broadcast_to(k[:, :, :1], k.shape) if equal_keys else k
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    theta = jnp.asarray(np.random.default_rng(2).uniform(0, 1, k.shape[:3]), jnp.float32)
    memory = (normal(4, (50, 2, WIDTH, WIDTH)),)
    losses = [
        jnp.sum(theta * jnp.sum((read_memory(m, k, jnp.float32) - v) ** 2, -1), -1)
        for m in (memory, write(k, v, theta, memory).weights)
    ]
    assert np.all(losses[1] <= losses[0] * (1 + 1e-6))


@pytest.mark.slow(days=28, group="properties of kernels")
def test_one_pair_is_recalled_exactly() -> None:
    """Among tokens that store nothing, by a key of one coordinate."""
    k = jnp.broadcast_to(jnp.eye(WIDTH)[1], (1, 1, 5, WIDTH))
    v, theta = normal(0, k.shape), jnp.asarray([0.0, 0.0, 1.0, 0.0, 0.0])[None, None]
    memory = write(k, v, theta, (normal(1, (1, 1, WIDTH, WIDTH)),)).weights
    assert_close(read_memory(memory, k[:, :, :1], jnp.float32)[0, 0, 0], v[0, 0, 2], n=WIDTH)


@pytest.mark.slow(days=28, group="properties of kernels")
def test_single_tokens_are_the_delta_rule() -> None:
    """(1 - a) M - theta k^T (k M - v) is the gated rule with beta = theta / (1 - a), values (1 - a) v."""
    given = arrays(depth=1)
    given = {**given, "eta": jnp.zeros_like(given["eta"]), "alpha": 0.5 * given["alpha"]}
    y, (memory, _), _ = jax.jit(partial(call, "xla", 1, 1))(given)
    kept = 1 - given["alpha"]
    o, state = gated_delta_rule(
        *(jnp.roll(given["q"], -1, 1), given["k"], kept[..., None] * given["v"], given["theta"] / kept),
        log_gate=jnp.log(kept),
        initial_state=given["state1"],
        output_final_state=True,
        scale=1.0,
        implementation="reference",
    )
    assert_close(memory[0], state, n=LENGTH * WIDTH)
    assert_close(y[:, 1:], o[:, :-1], n=LENGTH * WIDTH)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("eta", "alpha"), [(0.0, 0.0), (0.9, 0.01), (1.0, 1.0)])
def test_equal_keys_and_full_steps_stay_bounded(depth: int, eta: float, alpha: float) -> None:
    k = jnp.broadcast_to(jnp.eye(8)[0], (1, 1, 16, 8))
    v = normal(0, k.shape)
    v = v / jnp.linalg.norm(v, axis=-1, keepdims=True)
    sizes = [(8, 32), (32, 8)] if depth == 2 else [(8, 8)]
    memory = tuple(size[0] ** -0.5 * normal(i, (1, 1, *size)) for i, size in enumerate(sizes))
    state = write(k, v, jnp.ones(k.shape[:3]), memory, eta=eta, alpha=alpha, steps=400)
    assert all(float(jnp.abs(x).max()) < 10 for x in jax.tree.leaves(state))


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("depth", [1, 2])
def test_no_gates_make_a_memory_grow_without_end(depth: int) -> None:
    """Momentum that is never damped, gates that push it as one pushes a swing, keys that change, 6,400 tokens."""
    rng, chunk, length = np.random.default_rng(1), 8, 6400
    k, v = (rng.standard_normal((1, length, 3, WIDTH)).astype(np.float32) for _ in range(2))
    k[:, :, 0] = k[:, :1, 0]
    k, v = (jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True)) for x in (k, v))
    ones = jnp.ones((1, length, 3))
    pushed = jnp.asarray(rng.integers(0, 2, (1, length // chunk, 3)).repeat(chunk, 1), jnp.float32)
    theta, eta = ones.at[..., 2].set(pushed[..., 2]), ones.at[..., 1].set(pushed[..., 1])
    sizes = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)] if depth == 2 else [(WIDTH, WIDTH)]
    weights = tuple(normal(i, (3, *size)) for i, size in enumerate(sizes))
    y, state, trace = jax.jit(
        partial(neural_memory, chunk_size=chunk, output_final_state=True, output_trace=True)
    )(k, k, v, theta, eta, 0 * ones, weights)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((y, state)))
    most = 4 * np.sqrt(sizes[0][1])
    assert np.all(trace.weights <= most * (1 + 1e-5))
    assert np.all(trace.momentum <= 2 * most * (1 + 1e-5))
    assert np.max(trace.weights) > 0.9 * most  # the bound is met


@pytest.mark.slow(days=28, group="long")
@pytest.mark.parametrize("depth", [1, 2])
def test_values_and_outer_gradients_are_finite_over_a_million_tokens(depth: int) -> None:
    """In chunks of 2,048, with a gradient from the last tokens to the first ones."""
    length, rng = 1 << 20, np.random.default_rng(0)
    drawn = {name: rng.standard_normal((1, length, 1, WIDTH)) for name in "qkv"}
    drawn["k"] /= np.linalg.norm(drawn["k"], axis=-1, keepdims=True)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in drawn.values())
    gates = {n: jnp.asarray(rng.uniform(0, 1, (1, length, 1)), jnp.float32) for n in ("theta", "eta")}
    sizes = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)] if depth == 2 else [(WIDTH, WIDTH)]
    given = {"q": q, "k": k, "v": v, **gates, "alpha": 0.01 * gates["eta"]}
    given |= {f"m{i + 1}": 0.6 * normal(i, (1, *size)) for i, size in enumerate(sizes)}
    (y, final, _), gradients = value_and_grads(partial(call, "xla", 2048, 1), given, optimised=True)
    leaves = jax.tree.leaves((y, final, gradients))
    assert all(np.all(np.isfinite(np.asarray(x, np.float32))) for x in leaves)
    for name in ("k", "v", "theta"):
        assert np.any(np.asarray(gradients[name][:, :2048], np.float32)), name


@pytest.mark.slow(days=28, group="costly")
def test_pieces_are_one_stream() -> None:
    given, run = jax.device_get(arrays(20)), jax.jit(partial(call, "xla", 4, 1))
    timed = {n: given[n] for n in STREAMS}
    rest = {n: x for n, x in given.items() if n not in STREAMS}
    y, final, _ = run(given)
    found = []
    for piece in (slice(0, 8), slice(8, 20)):
        part, state, _ = run({**rest, **{n: x[:, piece] for n, x in timed.items()}})
        found.append(part)
        for name, leaves in (("state", state.weights), ("momentum", state.momentum)):
            rest |= {f"{name}{i + 1}": leaf for i, leaf in enumerate(leaves)}
    assert_close(jnp.concatenate(found, 1), y, n=20 * HIDDEN)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(final), strict=True):
        assert_close(got, want, n=20 * HIDDEN)


def test_rows_without_a_token_keep_their_state() -> None:
    ids = ANYWHERE.arrays["segment_ids"].at[0].set(0).at[1].set(-3)
    (y, final, _), _ = value_and_grads(ANYWHERE.run, {**ANYWHERE.arrays, "segment_ids": ids})
    for i, name in enumerate(("weights", "momentum")):
        for j, leaf in enumerate(final[i]):
            np.testing.assert_array_equal(leaf, ANYWHERE.arrays[f"{('state', 'momentum')[i]}{j + 1}"], name)
    assert not np.any(y)


def test_products_and_memory_of_a_training_step() -> None:
    """Seven products a chunk, forward; bf16 operands, fp32 sums; the backward pass keeps about 2 sqrt(N) states."""
    chunk, count, width, hidden = 8, 64, 16, 32
    streams = {n: jnp.zeros((1, chunk * count, 1, width), jnp.bfloat16) for n in "qkv"}
    streams |= {n: jnp.zeros((1, chunk * count, 1), jnp.float32) for n in ("theta", "eta", "alpha")}
    weights = (jnp.zeros((1, width, hidden)), jnp.zeros((1, hidden, width)))

    def op(**given: Any) -> Any:
        weights = tuple(given.pop(n) for n in SHARED)
        return neural_memory(**given, weights=weights, chunk_size=chunk)

    given = {**streams, **dict(zip(SHARED, weights, strict=True))}
    jaxpr = jax.make_jaxpr(lambda given: op(**given))(given)
    assert str(jaxpr).count("dot_general") == 7
    found = training_step(op, given)
    # Tensor cores sum in fp32 whatever the result. What goes into M and S is never rounded before it is added.
    assert set(dots(found)) == {("bfloat16", "bfloat16", result) for result in ("bfloat16", "float32")}
    with compiling_for(HOPPER):
        forward = equations(jax.make_jaxpr(lambda given: op(**given))(given).jaxpr)
    made = [e.outvars[0].aval for e in forward if e.primitive.name == "dot_general"]
    assert all((x.dtype == jnp.bfloat16) == (x.shape[-2:] == (chunk, hidden)) for x in made)
    state = 4 * 2 * 2 * width * hidden
    kept = kept_bytes(op, given) - 2 * sum(x.nbytes for x in given.values())
    assert kept <= 2.5 * np.sqrt(count) * state


def test_groups_divide_the_chunks_where_they_can() -> None:
    assert [group_size(n) for n in (1, 8, 16, 32, 36, 64)] == [1, 8, 4, 4, 6, 8]
    assert all(-n % group_size(n) <= n / 10 for n in range(10, 200))


def test_the_reference_has_second_derivatives() -> None:
    given = arrays(5)
    total = lambda x: call("reference", 2, 1, x)[0].sum()  # noqa: E731
    norm = lambda x: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(total)(x)))  # noqa: E731
    found = jax.eval_shape(jax.grad(norm), given)
    assert jax.tree.map(lambda x: x.shape, found) == jax.tree.map(lambda x: x.shape, given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"theta": jnp.ones((2, 6, 1))}, r"theta must have shape \(2, 6, 2\)"),
        ({"v": jnp.ones((2, 6, 2, 4))}, r"v must have the shape of k, \(2, 6, 2, 3\), got \(2, 6, 2, 4\)"),
        ({"weights": (jnp.ones((2, 3, 4)),)}, r"weights must be \(M,\) of \(2, 3, 3\)"),
        ({"weights": ()}, r"got shapes \(\)"),
        ({"weights": (jnp.ones((2, 3, 3), jnp.int32),)}, "weights must be floats, got int32: cast them"),
        ({"segment_ids": jnp.ones((2, 5), jnp.int32)}, "segment_ids must be integers of shape"),
        ({"chunk_size": 0}, "chunk_size must be at least 1 token, got 0"),
        ({"segment_alignment": 0}, "at least 1, got 0"),
        (
            {"initial_state": MemoryState((jnp.ones((2, 2, 3, 5)),), (jnp.ones((2, 2, 3, 5)),))},
            "was it made by another config",
        ),
        (
            {
                "initial_state": MemoryState(
                    (jnp.ones((2, 2, 3, 3), jnp.bfloat16),), (jnp.ones((2, 2, 3, 3)),)
                )
            },
            "must be float32 for v of float32, got bfloat16, float32: cast it",
        ),
        ({"initial_state": 3}, "initial_state must be a MemoryState, .* got int"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    x, gate = jnp.ones((2, 6, 2, 3)), jnp.ones((2, 6, 2))
    given = {"q": x, "k": x, "v": x, "theta": gate, "eta": gate, "alpha": gate}
    with pytest.raises((ValueError, TypeError), match=message):
        neural_memory(**{**given, "weights": (jnp.ones((2, 3, 3)),), **change})


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_benchmark_passes_its_gate() -> None:
    shape = NeuralMemoryShape("tiny", 1, 16, 1, 4, 8, 4)
    assert set(check(bench.plan(shape), jax.random.key(0))) == {"plain", "xla"}


def test_the_benchmark_prints_times_and_shares_of_the_peak() -> None:
    seconds = {"xla": {"median": 0.004}, "plain": {"median": 0.008}}
    passes = [{"pass": "forward", "flops": 2e12, "seconds": seconds}]
    report = {"ceilings": {"flops_per_second": 1e15}, "shapes": {"tiny": {"passes": passes}}}
    lines = [line.split() for line in bench.table(report).splitlines()]
    assert lines[1:] == [
        ["tiny", "forward", "xla", "4.00", "50.0%"],
        ["tiny", "forward", "plain", "8.00", "25.0%"],
    ]
