"""Streams and packed rows that the tests of all convolution ops share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase
from tests.tolerances import assert_close

BATCH, CHANNELS = 2, 3
STREAMS = ("x", "pre_gate", "post_gate")


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    # Cast on the host and put on the device: jnp.asarray compiles a program for each shape
    z = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(z.astype(np.float32).astype(dtype))


def ragged(length: int) -> Any:
    """Documents that start anywhere, one of a single token, with holes inside and padding behind."""
    ids = np.zeros((BATCH, length), np.int32)
    for row in ids:
        rng = np.random.default_rng(length + row.size)
        cuts = np.sort(rng.choice(np.arange(1, length), min(4, length - 1), replace=False))
        cuts = np.unique(np.append(cuts, min(cuts[0] + 1, length - 1)))
        row[:] = 1 + np.searchsorted(cuts, np.arange(length), side="right")
    ids[1] = ids[1, ::-1].max() + 1 - ids[1, ::-1]
    inside = (np.arange(length) % 11 == 5)[None]
    ids = np.where(inside, -ids, ids)
    ids[0, length - length // 7 :] = 0
    return jax.device_put(ids)


def on_grid(length: int, grid: int) -> Any:
    """Documents that start at multiples of `grid`: some end before the next start, one spans several."""
    block = np.arange(length) // grid
    first = 1 + block
    second = 1 + (block >= 2)
    gap = np.arange(length) % grid > grid // 2
    second = np.where(gap & (block == 1), 0, second)
    second = np.where(gap & (block == block[-1]), 0, second)
    ids = np.stack([first, second]).astype(np.int32)
    ids[0] = np.where(np.arange(length) % 13 == 7, -ids[0], ids[0])
    return jax.device_put(ids)


def streams(length: int, dtype: Any = jnp.float32, *, gates: bool = True) -> dict[str, Any]:
    """x, and if asked for both gates and the skip weights."""
    shape = (BATCH, CHANNELS, length)
    arrays = {"x": normal(0, shape, dtype)}
    if gates:
        arrays |= {"pre_gate": normal(1, shape, dtype), "post_gate": normal(2, shape, dtype)}
        arrays |= {"bias": normal(3, (CHANNELS,))}
    return arrays


def not_tokens(arrays: dict[str, Any]) -> dict[str, Any]:
    """Where each stream holds nothing: at holes and padding."""
    empty = no_token(arrays)
    return {name: empty for name in STREAMS if name in arrays} if empty is not None else {}


def no_token(arrays: dict[str, Any]) -> Any:
    """Where a result is zero, at holes and padding; None where there are none."""
    if "segment_ids" not in arrays:
        return None
    return np.broadcast_to(np.asarray(arrays["segment_ids"])[:, None] <= 0, arrays["x"].shape)


def conv_case(name: str, run: Any, reference: Any, arrays: dict[str, Any], *, terms: int) -> OpCase:
    """Return a case of a convolution, whose filters have no batch."""
    return OpCase(
        name=name,
        run=run,
        reference=reference,
        arrays=arrays,
        shared=frozenset({"taps", "filter", "log_poles", "residues", "bias"}) & set(arrays),
        unused=not_tokens(arrays),
        silent=no_token(arrays),
        terms=terms,
        grad_terms=2 * arrays["x"].shape[2],
    )


def filter_case(
    op: Callable[..., Any],
    name: str,
    length: int,
    taps: int,
    dtype: Any,
    *,
    terms: int,
    causal: bool = True,
    ids: Any = None,
    alignment: int = 1,
    gates: bool = True,
    implementation: str | None = None,
) -> OpCase:
    """Return a case of an operation whose filter is given by its taps."""
    arrays = streams(length, dtype, gates=gates)
    arrays["filter"] = normal(4, (CHANNELS, taps if causal else 2 * taps - 1))
    if ids is not None:
        arrays["segment_ids"] = ids

    def call(implementation: Any, arrays: dict[str, Any]) -> Any:
        options = {"causal": causal, "segment_alignment": alignment, "implementation": implementation}
        return op(**arrays, **options)

    return conv_case(name, partial(call, implementation), partial(call, "reference"), arrays, terms=terms)


def assert_exact_in_f64(op: Callable[..., Any], arrays: dict[str, Any], n: int, **options: Any) -> None:
    """Values and gradients of the XLA form in f64 are those of the reference, and f64."""
    with jax.enable_x64(True):
        arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
        runs = [partial(op, **options, implementation=name) for name in ("xla", "reference")]
        ours, theirs = (op_suite.value_and_grads(lambda a, run=run: run(**a), arrays) for run in runs)
        for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert got.dtype == np.float64
            assert_close(got, want, np.float64, n)


def suite(cases: list[OpCase], *, thorough: str, poisoned: str) -> list[Any]:
    """(case, check) pairs: every case against the reference, the one named `thorough` by every other check.

    Each run compares `thorough` with the reference, and poisons `poisoned` if it is the same case, whose program is
    there. The rest takes turns.
    """
    rest = sorted(set(op_suite.CHECKS) - {"reference", "poison"})
    wanted = [(case, "reference") for case in cases]
    wanted += [(case, "poison") for case in cases if case.name == poisoned]
    wanted += [(case, check) for case in cases if case.name == thorough for check in rest]
    daily = {(thorough, "reference")} | {(thorough, "poison")} & {(poisoned, "poison")}
    turns = pytest.mark.slow(days=28, group="properties of kernels")
    return [
        pytest.param(case, check, id=f"{case}-{check}", marks=() if (case.name, check) in daily else turns)
        for case, check in wanted
    ]


def alone(arrays: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[int, slice]]]:
    """Each document of packed rows in a row of its own, from its first step on, holes and the rest zero.

    Returns:
      the streams, one row per document and without segment ids, and (row, slice) of where each was taken from.
    """
    ids = np.asarray(arrays["segment_ids"])
    places = []
    for b, row in enumerate(np.abs(ids)):
        for document in np.unique(row[row > 0]):
            at = np.flatnonzero(row == document)
            places.append((b, slice(at[0], at[-1] + 1)))
    rows = {n: a for n, a in arrays.items() if n != "segment_ids"}
    for name in STREAMS:
        # As JAX's, each slice would compile a program
        given = np.asarray(arrays[name])
        full = np.zeros((len(places), *given.shape[1:]), np.float32)
        for i, (b, at) in enumerate(places):
            full[i, :, : at.stop - at.start] = np.where(ids[b, at] > 0, given[b, :, at], 0)
        rows[name] = full
    return rows, places


def assert_packed_is_apart(op: Callable[..., Any], arrays: dict[str, Any], n: int) -> None:
    """op on packed rows gives each document what op gives it in a row of its own."""
    rows, places = alone(arrays)
    packed, apart = jax.device_get((jax.jit(op)(**arrays), jax.jit(op)(**rows)))
    empty = np.asarray(arrays["segment_ids"])[:, None] <= 0
    assert not np.any(np.where(empty, packed, 0)), "holes and padding must come out as zeros"
    for i, (b, at) in enumerate(places):
        expected = np.where(empty[b, :, at], 0, apart[i, :, : at.stop - at.start])
        assert_close(packed[b, :, at], expected, n=n, what=f"row {b}, steps {at.start} to {at.stop}")


def assert_gradients_are_apart(
    op: Callable[..., Any], arrays: dict[str, Any], n: int, *, dy_size: Any = 1
) -> None:
    """Gradients of op on packed rows are those of each document in a row of its own, of shared arrays their sums.

    Cotangents are random numbers times `dy_size`, which broadcasts against x.
    """
    dy, ids = normal(9, arrays["x"].shape, arrays["x"].dtype) * dy_size, arrays["segment_ids"]
    floats = {name: z for name, z in arrays.items() if name != "segment_ids"}
    rows, places = alone(arrays)
    dy_of_rows = alone(arrays | {"x": dy})[0]["x"]

    @jax.jit
    def gradients(floats: dict[str, Any], dy: Any, **ids: Any) -> dict[str, Any]:
        y, vjp = jax.vjp(lambda floats: op(**floats, **ids), floats)
        return vjp(dy.astype(y.dtype))[0]

    packed, apart = jax.device_get((gradients(floats, dy, segment_ids=ids), gradients(rows, dy_of_rows)))
    empty, dtype = np.asarray(ids)[:, None] <= 0, dy.dtype
    for name, found in packed.items():
        if name not in STREAMS:
            assert_close(found, apart[name], dtype, n, f"gradient of {name}")
            continue
        assert not np.any(np.where(empty, found, 0)), (
            f"{name}: holes and padding must have a gradient of zero"
        )
        for i, (b, at) in enumerate(places):
            expected = np.where(empty[b, :, at], 0, apart[name][i, :, : at.stop - at.start])
            what = f"gradient of {name}, row {b}, steps {at.start} to {at.stop}"
            assert_close(found[b, :, at], expected, dtype, n, what)


def documents(length: int) -> Any:
    """Two rows: many documents in a chunk, then some that span chunks, on their grid too, and tiles; holes, padding."""
    rng = np.random.default_rng(length)
    short = np.cumsum(rng.integers(1, 20, 40))
    cuts = np.concatenate(
        [
            short,
            [100, 103, 704, 705, 832, 1000, 1200],
            short[-1] + np.cumsum(rng.integers(64, 900, length // 900)),
        ]
    )
    ids = 1 + np.searchsorted(np.unique(cuts), np.arange(length), side="right")
    ids = np.where(np.arange(length) % 11 == 5, -ids, ids)
    ids[100:103] = ids[-99:] = ids[1000:1200] = 0
    return jnp.asarray(np.stack([ids, ids[::-1]]), jnp.int32)


def assert_documents_keep_to_themselves(op: Callable[..., Any], arrays: dict[str, Any]) -> None:
    """NaN in the tokens and cotangents of every second document changes nothing in the others: values, gradients."""

    @jax.jit
    def run(streams: dict[str, Any], dy: Any, rest: dict[str, Any]) -> Any:
        y, vjp = jax.vjp(lambda streams: op(**streams, **rest), streams)
        return y, vjp(dy)[0]

    clean = {name: z for name, z in arrays.items() if name in STREAMS}
    rest = {name: z for name, z in arrays.items() if name not in STREAMS}
    dy = normal(9, arrays["x"].shape, arrays["x"].dtype)
    other = np.asarray(arrays["segment_ids"])[:, None]
    other = np.broadcast_to((other > 0) & (other % 2 == 0), dy.shape)
    poisoned = jax.tree.map(lambda z: jnp.where(other, jnp.nan, z).astype(z.dtype), (clean, dy))
    found, wanted = run(*poisoned, rest), run(clean, dy, rest)
    assert np.isnan(np.asarray(found[0], np.float32)[other]).any(), "nothing was poisoned"
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.where(other, 0, got), np.where(other, 0, want))


def assert_row_keeps_to_itself(op: Callable[..., Any], arrays: dict[str, Any], row: tuple[int, int]) -> None:
    """NaN in all other rows changes no bit of one, values and gradients, though rows may share chunks or a tile."""

    @jax.jit
    def run(arrays: dict[str, Any], dy: Any) -> Any:
        y, vjp = jax.vjp(lambda arrays: op(**arrays), arrays)
        return {"y": y} | vjp(dy)[0]

    dy = normal(9, arrays["x"].shape, arrays["x"].dtype)
    other = np.ones(dy.shape, bool)
    other[row] = False
    clean = {name: z for name, z in arrays.items() if name in STREAMS}
    poisoned = jax.tree.map(lambda z: jnp.where(other, jnp.nan, z).astype(z.dtype), (clean, dy))
    found, wanted = run(arrays | poisoned[0], poisoned[1]), run(arrays, dy)
    for name in ("y", *clean):
        np.testing.assert_array_equal(found[name][row], wanted[name][row])
        assert np.isnan(np.asarray(found[name], np.float32)[other]).all(), "nothing was poisoned"
