"""modal_conv: the suite over lengths, packings and states; equality with its filter; streaming; errors."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.long_conv import long_conv
from pallas_kernels.modal_conv import modal_conv, modal_filter, row_state
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import (
    BATCH,
    CHANNELS,
    STREAMS,
    assert_exact_in_f64,
    assert_packed_is_apart,
    conv_case,
    normal,
    on_grid,
    ragged,
    streams,
    suite,
)
from tests.sampled import thinned
from tests.tolerances import assert_close

MODES = 4


def modes() -> dict[str, Any]:
    """Decays from a few steps to a few thousand."""
    poles = -np.exp(np.random.default_rng(7).uniform(-8, 0, (CHANNELS, MODES)))
    return {"log_poles": jnp.asarray(poles, jnp.float32), "residues": normal(8, (CHANNELS, MODES))}


def case(
    name: str,
    length: int,
    dtype: Any = jnp.float32,
    *,
    ids: Any = None,
    alignment: int = 1,
    state: bool = False,
    gates: bool = True,
    chunk_size: int = 32,
) -> OpCase:
    arrays = streams(length, dtype, gates=gates) | modes()
    if state:
        arrays["initial_state"] = normal(5, (BATCH, CHANNELS, MODES))
    if ids is not None:
        arrays["segment_ids"] = ids

    def call(implementation: Any, arrays: dict[str, Any]) -> Any:
        options = {"segment_alignment": alignment, "chunk_size": chunk_size, "implementation": implementation}
        return modal_conv(**arrays, **options, output_final_state=state)

    return conv_case(name, partial(call, None), partial(call, "reference"), arrays, terms=length)


CASES = [
    case("one step, state", 1, state=True),
    case("11 steps, state", 11, ids=ragged(11), state=True),
    case("prime length", 131, gates=False),
    case("many chunks, state", 331, state=True),
    case("packed, state", 101, ids=ragged(101), state=True),
    case("packed, many chunks, bf16", 300, jnp.bfloat16, ids=ragged(300)),
    case("on the grid, state", 150, ids=on_grid(150, 32), alignment=32, state=True),
]


@pytest.mark.parametrize(
    ("case", "check"), suite(CASES, thorough="on the grid, state", poisoned="packed, state")
)
def test_suite(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


MATRIX = list(
    itertools.product(
        [16, 128],  # chunk_size
        [1, 2, 15, 16, 17, 100, 127, 128, 129, 1031],  # length
        ["none", "ragged", "grid"],  # packing
        [False, True],  # state
    )
)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize(("chunk_size", "length", "packing", "state"), thinned(MATRIX, 28, tuple))
def test_pairs_of_the_full_matrix(length: int, packing: str, state: bool, chunk_size: int) -> None:
    packed = {"none": None, "ragged": ragged(max(length, 2))[:, :length], "grid": on_grid(length, chunk_size)}
    alignment = chunk_size if packing == "grid" else 1
    op_suite.CHECKS["reference"](
        case("", length, ids=packed[packing], alignment=alignment, state=state, chunk_size=chunk_size)
    )


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/modal_conv/test_modal_conv")
def test_in_f64_values_and_gradients_are_those_of_the_reference() -> None:
    arrays = streams(90) | modes() | {"initial_state": normal(5, (BATCH, CHANNELS, MODES))}
    options = {"segment_ids": ragged(90), "chunk_size": 32, "output_final_state": True}
    assert_exact_in_f64(modal_conv, arrays, 180, **options)


def test_filter_is_the_sum_of_exponentials() -> None:
    poles, residues = modes().values()
    t = np.arange(1000, dtype=np.float64)
    exact = np.einsum("dm,dmt->dt", residues, np.exp(np.asarray(poles, np.float64)[:, :, None] * t))
    assert_close(jax.jit(modal_filter, static_argnums=2)(poles, residues, 1000), exact, n=MODES)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/modal_conv/test_modal_conv")
@pytest.mark.parametrize("packed", [False, True])
def test_equals_long_conv_with_its_filter(packed: bool) -> None:
    arrays, (poles, residues) = streams(500), modes().values()
    ids = ragged(500) if packed else None
    modal = jax.jit(modal_conv)(**arrays, log_poles=poles, residues=residues, segment_ids=ids)
    filter = modal_filter(poles, residues, 500)
    assert_close(modal, jax.jit(long_conv)(**arrays, filter=filter, segment_ids=ids), n=500)


@pytest.mark.slow(days=28, group="costly")
def test_packed_documents_are_computed_as_if_apart() -> None:
    arrays = streams(301) | modes() | {"segment_ids": ragged(301)}
    assert_packed_is_apart(partial(modal_conv, chunk_size=32), arrays, n=301)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/modal_conv/test_modal_conv")
@pytest.mark.parametrize("cut", [64, 70])
def test_nan_stays_in_its_document(cut: int) -> None:
    """Also where it lies in the state that a chunk hands on, and the next document begins there or behind."""
    ids = jnp.asarray(1 + (np.arange(150) >= 20) + (np.arange(150) >= cut))[None]
    x = normal(0, (1, CHANNELS, 150))

    @jax.jit
    def squared(x: Any) -> Any:
        y, pull = jax.vjp(lambda x: modal_conv(x, **modes(), segment_ids=ids, chunk_size=32), x)
        return y, pull(y)[0]

    for got, want in zip(squared(x.at[:, :, 22].set(jnp.nan)), squared(x), strict=True):
        assert np.isnan(got[:, :, 22]).all()
        others = np.r_[:20, cut:150]
        assert_close(got[..., others], want[..., others], n=150)


@pytest.mark.slow(days=28, group="properties of kernels")
def test_the_promised_grid_gives_what_no_promise_gives() -> None:
    arrays = streams(330) | modes() | {"segment_ids": on_grid(330, 64)}
    run = jax.jit(partial(modal_conv, chunk_size=32), static_argnames=("segment_alignment",))
    assert_close(run(**arrays, segment_alignment=64), run(**arrays, segment_alignment=1), n=330)


@pytest.mark.parametrize("packed", [False, True])
def test_one_update_per_token_equals_the_parallel_pass(packed: bool) -> None:
    arrays = streams(150) | modes()
    start = normal(5, (BATCH, CHANNELS, MODES))
    # Row 1 ends in padding, which changes no state.
    if packed:
        arrays["segment_ids"] = jnp.asarray(np.where(np.arange(150)[None] < [[150], [83]], [[1], [3]], 0))
    whole = jax.jit(partial(modal_conv, chunk_size=32, output_final_state=True))(
        **arrays, initial_state=start
    )
    fixed = {n: a for n, a in arrays.items() if n not in (*STREAMS, "segment_ids")}
    moving = {n: jnp.moveaxis(a, -1, 0) for n, a in arrays.items() if n not in fixed}

    def step(state: Any, now: Any) -> Any:
        now = {n: a[..., None] for n, a in now.items()}
        y, state = modal_conv(**now, **fixed, initial_state=state, output_final_state=True)
        return state, y[..., 0]

    final, y = jax.jit(lambda moving: lax.scan(step, start, moving))(moving)
    assert_close(jnp.moveaxis(y, 0, -1), whole[0], n=150)
    assert_close(final, whole[1], n=150)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/modal_conv/test_modal_conv")
@pytest.mark.parametrize("chunks", [[7] * 13, [64, 27], [1, 89, 1]])
def test_any_split_with_state_is_the_whole(chunks: list[int]) -> None:
    arrays = streams(91) | modes()
    run = jax.jit(partial(modal_conv, chunk_size=32, output_final_state=True))
    y, final = run(**arrays)
    outputs, state, start = [], jnp.zeros_like(final), 0
    for chunk in chunks:
        now = slice(start, start + chunk)
        part = {n: a[..., now] if n in STREAMS else a for n, a in arrays.items()}
        output, state = run(**part, initial_state=state)
        outputs.append(output)
        start += chunk
    assert_close(jnp.concatenate(outputs, -1), y, n=91)
    assert_close(state, final, n=91)


@pytest.mark.parametrize("length", [1, 9, 40, 70])
def test_padding_changes_no_bit_of_the_state(length: int) -> None:
    arrays = streams(length) | modes()
    state = normal(5, (BATCH, CHANNELS, MODES))
    ids = jnp.zeros((BATCH, length), jnp.int32)
    options = {"segment_ids": ids, "chunk_size": 32, "output_final_state": True}
    _, after = jax.jit(partial(modal_conv, **options))(**arrays, initial_state=state)
    np.testing.assert_array_equal(after, state)


@pytest.mark.slow(days=28, group="costly")
def test_state_is_that_of_the_last_document_and_holes_count_as_time() -> None:
    x = jnp.ones((1, CHANNELS, 40))
    ids = jnp.asarray([[1] * 33 + [2, -2, -2] + [0] * 4])
    poles, residues = modes().values()
    run = jax.jit(partial(modal_conv, chunk_size=32, output_final_state=True))
    _, state = run(x, poles, residues, segment_ids=ids)
    assert_close(state[0], np.exp(2 * np.asarray(poles, np.float64)), np.float32)


@pytest.mark.slow(days=28, group="properties of kernels", every="40")
@pytest.mark.parametrize("length", [1, 40, 96])
def test_a_row_leaves_the_state_that_its_convolution_ends_in(length: int) -> None:
    x, weights = normal(3, (BATCH, CHANNELS, length)), modes()

    def last(x: Any, log_poles: Any) -> Any:
        options = {"output_final_state": True, "chunk_size": 32}
        return modal_conv(x, log_poles, weights["residues"], **options)[1]

    @jax.jit
    def passes(*arrays: Any) -> Any:
        """Of both, the state and its gradients under the one that is expected."""
        out, backward = jax.vjp(lambda *a: row_state(*a, chunk=32), *arrays)
        expected, backward_expected = jax.vjp(last, *arrays)
        return (out, expected), list(zip(backward(expected), backward_expected(expected), strict=True))

    values, gradients = passes(x, weights["log_poles"])
    assert_close(*values, n=length)
    for pair in gradients:
        assert_close(*pair, n=2 * length)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/modal_conv/test_modal_conv")
@pytest.mark.parametrize("packed", [False, True])
def test_an_impulse_arrives_2000_steps_later(packed: bool) -> None:
    """With the exact weight, within its document, and with no trace in the next."""
    length, impulse, next_document = 2300, 57, 2100
    x = jnp.zeros((1, 1, length)).at[0, 0, impulse].set(1.0)
    poles, residues = jnp.asarray([[-1e-3, -1e-4]]), jnp.asarray([[1.0, -0.3]])
    ids = (1 + (jnp.arange(length) >= next_document).astype(jnp.int32))[None] if packed else None
    y = np.asarray(jax.jit(modal_conv)(x, poles, residues, segment_ids=ids))[0, 0]
    t = np.arange(length - impulse)
    exact = np.exp(-1e-3 * t) - 0.3 * np.exp(-1e-4 * t)
    stop = next_document if packed else length
    assert_close(y[impulse:stop], exact[: stop - impulse], np.float32, 2000)
    assert not y[:impulse].any()
    if packed:
        assert not y[next_document:].any()


def test_a_million_steps_away_the_decay_is_still_exact() -> None:
    """Powers are taken by exp: repeated products would be off by thousands of roundings."""
    poles, residues = jnp.asarray([[-1e-6]]), jnp.asarray([[1.0]])
    h = jax.jit(modal_filter, static_argnums=2)(poles, residues, 2**20)
    exact = np.exp(float(poles[0, 0]) * (2**20 - 1))
    assert_close(h[0, -1], np.asarray(exact), n=1)


def test_backward_keeps_inputs_and_little_more() -> None:
    x = normal(0, (BATCH, CHANNELS, 1024), jnp.bfloat16)
    parameters = modes()
    _, backward = jax.vjp(jax.jit(lambda x, p: modal_conv(x, **p)), x, parameters)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(backward))
    assert kept <= x.nbytes + sum(p.nbytes for p in parameters.values()) + 64  # and a few scalars


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 48}, "power of two"),
        ({"log_poles": jnp.ones((5, 4))}, "log_poles must be"),
        ({"residues": jnp.ones((CHANNELS, 2))}, "residues must have shape"),
        ({"initial_state": jnp.ones((2, 4, CHANNELS))}, "initial_state must have shape"),
        ({"segment_alignment": 0}, "segment_alignment"),
        ({"segment_ids": jnp.ones((2, 8))}, "segment_ids must be integers, got float32"),
        ({"residues": jnp.ones((CHANNELS, 3), jnp.int32)}, "residues must be floating point, got int32"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": jnp.ones((2, CHANNELS, 8))} | modes() | change
    with pytest.raises(ValueError, match=message):
        modal_conv(**arguments)
