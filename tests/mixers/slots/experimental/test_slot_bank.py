"""Rules of a slot bank by hand: writes, addresses, reads, ageing and pruning; compression and what it loses."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import SlotMemoryConfig, reconstruction_error
from jaxblt.mixers.slots.experimental.slot_bank import (
    Candidates,
    SlotBank,
    free,
    read_slots,
    unused,
    write_candidates,
)
from jaxblt.mixers.slots.experimental.slot_compression import compress, count_latents, kept_latents
from tests.tolerances import assert_close

RULES = SlotMemoryConfig(dim=3, num_heads=1, slots=4, novelty=-1.0, top_k=1, rate=0.9)
RUN = {
    op: jax.jit(op, static_argnums=at) for op, at in ((write_candidates, 3), (read_slots, 3), (compress, 5))
}


def run(op: Callable[..., Any], *given: Any) -> Any:
    """Return what a compiled operation gives, on the host."""
    return jax.tree.map(np.asarray, RUN[op](*given))


write = partial(run, write_candidates)


def bank(
    slots: Any, usage: Any = (0, 0, 0, 0), age: Any = (0, 0, 0, 0), valid: Any = (1, 1, 1, 1)
) -> SlotBank:
    """A bank of one row and head."""
    given = ((slots, np.float32), (usage, np.float32), (age, np.int32), (valid, bool))
    return SlotBank(*(jax.device_put(np.asarray(x, dtype)[None, None]) for x, dtype in given))


def offer(content: Any, query: Any = None, kept: Any = None) -> Candidates:
    """Candidates [L, M], compared by themselves if no queries are given."""
    content = np.asarray(content, np.float32)[:, None, None]
    query = content if query is None else np.asarray(query, np.float32)[:, None, None]
    kept = np.ones(content.shape[:3], bool) if kept is None else np.asarray(kept, bool)[:, None, None]
    return Candidates(*map(jax.device_put, (content, query, kept)), None)


def at_rest(b: SlotBank) -> Any:
    return jnp.zeros_like(b.usage)


THREE = ([[1, 0, 0], [0, 2, 0], [0, 0, 3], [0, 0, 0]], (0, 0, 0, 0), (5, 1, 2, 0), (1, 1, 1, 0))


@pytest.mark.parametrize("n", [1, 4, 8])
def test_equal_writes_approach_what_is_written(n: int) -> None:
    c, start = np.array([4.0, 1.0, 0.0]), bank(*THREE)
    kept, rules = np.arange(8) < n, dataclasses.replace(RULES, balance=0.0)
    after, chosen = write(start, at_rest(start), offer(np.tile(c, (8, 1)), kept=kept), rules)
    assert chosen[:, 0, 0].sum(0).tolist() == [n, 0, 0, 0]
    expected = RULES.rate**n * np.array([1.0, 0, 0]) + (1 - RULES.rate**n) * c
    assert_close(after.slots[0, 0, 0], expected, n=8)
    assert after.slots[0, 0, 1:].tobytes() == np.asarray(start.slots)[0, 0, 1:].tobytes()
    assert after.age[0, 0].tolist() == [0, 2, 3, 0]
    assert after.valid[0, 0].tolist() == [True, True, True, False]


def test_a_candidate_is_shared_out_among_the_top_slots() -> None:
    rules, start = dataclasses.replace(RULES, top_k=2), bank(*THREE)
    w, s = np.array([0.1, 0.4, 0.5]), np.array([1.0, 1.0, 1.0])
    after, _ = write(start, at_rest(start), offer([s], [w]), rules)
    old = np.asarray(start.slots)[0, 0]
    a = np.exp(old[1:3] @ w / np.sqrt(3))
    a = a / a.sum()
    assert_close(after.slots[0, 0, 1:3], old[1:3] + 0.1 * a[:, None] * (s - old[1:3]), n=8)
    assert_close(after.usage[0, 0], [0, *a, 0], n=8)
    assert after.slots[0, 0, ::3].tobytes() == old[::3].tobytes()


def test_new_candidates_take_free_slots_then_the_least_used() -> None:
    rules, start = dataclasses.replace(RULES, novelty=0.7), bank(*THREE)
    start = start.replace(usage=jnp.asarray([[[0.5, 0.2, 0.9, 0.0]]]))
    new = np.array([[-1.0, -1, -1], [1, -1, -1]])
    after, chosen = write(start, at_rest(start), offer(new), rules)
    assert np.argmax(chosen[:, 0, 0], -1).tolist() == [3, 1]
    assert_close(after.slots[0, 0, 3], new[0], n=8)  # a free slot takes it whole
    assert_close(after.slots[0, 0, 1], 0.9 * np.array([0, 2, 0]) + 0.1 * new[1], n=8)
    # Usage decays by .9 first, and a write counts as a use.
    assert_close(after.usage[0, 0], [0.45, 0.18 + 1, 0.81, 1], n=8)


def test_usage_counts_reads_and_balances_addresses() -> None:
    start = bank([[1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]], usage=(1.0, 0.5, 0, 0), valid=(1, 1, 0, 0))
    reads = jnp.asarray([[[0.0, 0.6, 0.0, 0.0]]])
    after, chosen = write(start, reads, offer([[1.0, 0, 0]]), RULES)
    # .9 + 0 against .45 + .6: the first is used less now, and equally near.
    assert np.argmax(chosen[0, 0, 0]) == 0
    assert_close(after.usage[0, 0], [0.9 + 1, 1.05, 0, 0], n=8)


def test_candidates_that_are_not_kept_write_nothing() -> None:
    start = bank(*THREE)
    after, chosen = write(start, at_rest(start), offer([[1.0, 0, 0]], kept=[False]), RULES)
    assert not np.any(chosen)
    assert after.slots.tobytes() == np.asarray(start.slots).tobytes()
    assert after.age[0, 0].tolist() == [6, 2, 3, 0]


def test_pruning_needs_little_use_and_age() -> None:
    rules = dataclasses.replace(RULES, prune_below=0.1, prune_after=3)
    start = bank(THREE[0], usage=(0.05, 0.05, 0.2, 0), age=(4, 3, 9, 0), valid=(1, 1, 1, 0))
    gone = unused(start, rules)
    assert gone[0, 0].tolist() == [True, False, False, False]
    after = free(start, gone)
    assert after.valid[0, 0].tolist() == [False, True, True, False]
    assert not np.any(after.slots[0, 0, 0])


def test_reads_are_attention_over_valid_slots_and_the_sink() -> None:
    rng = np.random.default_rng(0)
    slots, q, sink = (rng.standard_normal(s).astype(np.float32) for s in ((4, 3), (5, 3), (2, 3)))
    held = bank(slots, valid=(1, 0, 1, 1))
    o, weights = run(read_slots, held, jax.device_put(q[None, None]), jax.device_put(sink[None]), jnp.float32)
    there = [0, 2, 3]
    p = np.exp(q @ np.concatenate([sink[:1], slots[there]]).T / np.sqrt(3))
    p = p / p.sum(-1, keepdims=True)
    assert_close(o[0, 0], p @ np.concatenate([sink[1:], slots[there]]), n=8)
    assert_close(weights[0, 0][:, there], p[:, 1:], n=8)
    assert not np.any(weights[0, 0, :, 1])


def test_counts_of_latents_are_exact() -> None:
    assert count_latents(0.25, 8) == (0, 1, 1, 1, 1, 2, 2, 2, 2)
    assert count_latents(0.5, 8) == (0, 1, 1, 2, 2, 3, 3, 4, 4)
    assert count_latents(0.55, 20)[-1] == 11
    assert [
        SlotMemoryConfig(dim=8, interval=n, ratio=r).latents for n, r in ((8, 0.3), (7, 1.0), (1, 0.1))
    ] == [3, 7, 1]


def drawn(latents: int) -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(1)
    queries, k, u = (
        rng.standard_normal(s).astype(np.float32) for s in ((1, 8, 6), (2, 1, 8, 6), (2, 1, 8, 6))
    )
    u[1] = u[1, :, :1]  # all tokens of the second row are alike
    content = np.ones((2, 8), bool)
    content[0, 5] = False
    places = 4.0 * np.eye(8, dtype=np.float32)[None]
    given = jax.device_put((queries[:, :latents], places[:, :latents], k, u, content))
    return RUN[compress](*given, jnp.float32), given[2], given[3], given[4]


def test_holes_are_not_compressed() -> None:
    s, k, u, content = drawn(3)
    k, u = (x.at[0, :, 5].set(100.0) for x in (k, u))
    rng = np.random.default_rng(1)
    queries = jnp.asarray(rng.standard_normal((1, 8, 6)).astype(np.float32)[:, :3])
    places = jnp.asarray(4.0 * np.eye(8, dtype=np.float32)[None, :3])
    assert_close(run(compress, queries, places, k, u, content, jnp.float32), s, n=8)


def test_error_of_reconstruction_falls_with_the_latents() -> None:
    error = jax.jit(reconstruction_error)
    errors = {n: np.asarray(error(*drawn(n)[::2], drawn(n)[3])) for n in (2, 8)}
    assert_close(errors[8][..., :2], errors[2], n=64)
    complex_, simple = errors[8][0, 0], errors[8][1, 0]
    assert np.all(np.diff(complex_[:6]) < -1e-3)
    assert complex_[0] > 0.5
    assert complex_[5] < 1e-5  # six directions are all there are
    assert np.all(simple < 1e-5)  # one candidate says all
    s, _, u, content = drawn(2)
    basis = np.asarray(s, np.float64)[0, 0].T
    tokens = np.asarray(u, np.float64)[0, 0][np.asarray(content)[0]]
    left = tokens.T - basis @ np.linalg.lstsq(basis, tokens.T, rcond=None)[0]
    assert_close(errors[2][0, 0, 1], np.sum(left**2) / np.sum(tokens**2), np.float32, n=64)


def test_arrays_that_are_not_of_one_compression_are_refused() -> None:
    s, _, u, content = drawn(2)
    told = r"reconstruction_error takes candidates \[B, H, L, M\], u \[B, H, N, M\] and content \[B, N\]"
    for given in ((s, u, content[:, 1:]), (s[..., 1:], u, content), (s, content, u), (None, u, content)):
        with pytest.raises(ValueError, match=told):
            reconstruction_error(*given)
    with pytest.raises(ValueError, match=r"got NoneType, \(2, 1, 8, 6\), \(2, 8\)"):
        reconstruction_error(None, u, content)


def test_simple_intervals_keep_fewer_candidates_at_equal_error() -> None:
    s, _, u, content = drawn(8)
    error, counts = reconstruction_error(s, u, content), jnp.asarray([7, 8])
    kept = np.asarray(kept_latents(error, counts, 8, 0.3))[:, 0]
    assert kept[1] == 1
    assert 1 < kept[0] < 7
    found = [float(error[row, 0, kept[row] - 1]) for row in range(2)]
    assert max(found) <= 0.3 < float(error[0, 0, kept[0] - 2])
    assert np.asarray(kept_latents(error, counts, 8, None))[:, 0].tolist() == [7, 8]
    assert np.asarray(kept_latents(error, jnp.asarray([2, 0]), 8, 1e-9))[:, 0].tolist() == [2, 0]
