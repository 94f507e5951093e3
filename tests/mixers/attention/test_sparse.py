"""Sparse attention against a loop over tokens in float64, its metric, its state, and rows over eight devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.mixers import SparseAttentionConfig
from jaxblt.mixers.attention.branches import Stream, _asking
from jaxblt.mixers.attention.pooled import NEVER, Queries, choose_blocks, find_all_ends, find_ends
from jaxblt.mixers.attention.pooled import Pooled as Blocks
from jaxblt.testing import Subject
from jaxblt.testing.parallel import check_sequence
from jaxblt.training.stored.serialize import decode, encode
from pallas_kernels import _jax_triton
from pallas_kernels.attention import api, masks
from pallas_kernels.attention.chosen import select
from pallas_kernels.runtime import Device, Implementation, compiling_for
from tests.mixers.attention.test_attention import turn
from tests.parameters import drawn
from tests.tolerances import assert_close

CONFIG = SparseAttentionConfig(
    dim=12, num_heads=4, num_kv_heads=2, head_dim=4, block=3, top_k=1, window=3, predictor=None
)
PREDICTED = dataclasses.replace(CONFIG, predictor=5)
BOTH = dataclasses.replace(CONFIG, causal=False)


def _soft(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = k @ q / np.sqrt(len(q))
    p = np.exp(scores - scores.max())
    return p @ v / p.sum()


def _shares(asks: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Shares of blocks by their keys [M, K], summed over queries [R, K]."""
    scores = asks @ keys.T / np.sqrt(keys.shape[1])
    p = np.exp(scores - scores.max(1, keepdims=True))
    return (p / p.sum(1, keepdims=True)).sum(0)


def _learned(w: dict, name: str, x: np.ndarray) -> np.ndarray:
    """Queries or keys of the predictor, of those of the layer."""
    return x + np.maximum(x @ w[f"predictor_{name}_in"], 0) @ w[f"predictor_{name}_out"]


def _naive_document(config: SparseAttentionConfig, w: dict, x: np.ndarray, content: np.ndarray) -> np.ndarray:
    """One document, one token and one key head at a time."""
    q, k, v, gates = (np.einsum("td,dhk->thk", x, w[name]) for name in ("q", "k", "v", "gate"))
    q, k = (turn(a, config.rope_theta, 1.0) for a in (q, k))
    asks, keys = (_learned(w, name, a) for name, a in (("q", q), ("k", k))) if config.predictor else (q, k)
    gates, shared, out = 1 / (1 + np.exp(-gates)), config.num_heads // config.groups, np.zeros(x.shape)
    count = len(x) // config.block
    if not config.causal:
        count = -(-len(x) // config.block) if len(x) > config.block else 0
    spans = [np.arange(j * config.block, min((j + 1) * config.block, len(x))) for j in range(count)]
    blocks = [(j, span[content[span]]) for j, span in enumerate(spans)]
    for t in np.flatnonzero(content):
        there = [(j, tokens) for j, tokens in blocks if len(tokens)]
        there = [(j, tokens) for j, tokens in there if not config.causal or j < t // config.block]
        last = t if config.causal else min(len(x) - 1, t + config.window - 1)
        window = [s for s in range(max(0, t - config.window + 1), last + 1) if content[s]]
        own = [t] if config.causal else next((b for j, b in there if j == t // config.block), [t])
        for g in range(config.groups):
            heads = range(g * shared, (g + 1) * shared)
            pooled = np.array([[k[tokens, g].mean(0), v[tokens, g].mean(0)] for _, tokens in there])
            shares = np.zeros(0)
            if there:
                wanted = asks[own][:, heads].mean(0)
                shares = _shares(wanted, np.array([keys[tokens, g].mean(0) for _, tokens in there]))
            best = np.argsort(-shares, kind="stable")[: config.top_k]
            chosen = [s for i in best for s in there[i][1]]
            for h in heads:
                branches = [np.zeros(config.width)] * 3
                if there:
                    branches[0] = _soft(q[t, h], pooled[:, 0], pooled[:, 1])
                    branches[1] = _soft(q[t, h], k[chosen, g], v[chosen, g])
                branches[2] = _soft(q[t, h], k[window, g], v[window, g])
                out[t] += sum(a * b for a, b in zip(gates[t, h], branches, strict=True)) @ w["out"][h]
    return out


@pytest.mark.slow(days=28, group="costly", turn="mixers/attention/test_sparse", every="pooled")
@pytest.mark.parametrize("config", [CONFIG, PREDICTED, BOTH], ids=["pooled", "predicted", "both"])
def test_equals_the_loop(config: SparseAttentionConfig) -> None:
    subject = Subject(config, length=23)
    w = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in subject.params["params"].items()}
    ids = subject.with_holes(subject.documents())
    y, expected = subject.run(ids=ids), np.zeros(subject.x.shape)
    for row, document in [(r, s) for r in range(len(ids)) for s in np.unique(np.abs(ids[r])) if s]:
        span = np.flatnonzero(np.abs(ids[row]) == document)
        x = np.where(ids[row, span, None] > 0, subject.x[row, span], 0).astype(np.float64)
        expected[row, span] = _naive_document(config, w, x, ids[row, span] > 0)
    live = ids > 0
    assert_close(y[live], expected[live], jnp.float32, n=subject.length * config.dim)


@pytest.mark.slow(days=28, group="further properties of mixers")
@pytest.mark.parametrize(("config", "length"), [(CONFIG, 24), (BOTH, 23)], ids=["causal", "both"])
def test_rows_without_ids_are_those_of_one_document(config: SparseAttentionConfig, length: int) -> None:
    """In values and in gradients: indices say where the blocks of such rows lie."""
    subject, module = Subject(config, length=length), config.build()
    x, ids = jnp.asarray(subject.x), jnp.ones(subject.x.shape[:2], jnp.int32)

    def both(ids: jax.Array | None) -> tuple:
        run = lambda params, x: jnp.sum(jnp.sin(module.apply(params, x, segment_ids=ids)[0]))  # noqa: E731
        return jax.jit(jax.value_and_grad(run, (0, 1)))(subject.params, x)

    for found, expected in zip(*(jax.tree.leaves(both(given)) for given in (None, ids)), strict=True):
        assert_close(found, expected, jnp.float32, n=length * config.dim)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("causal", [True, False], ids=["", "both"])
def test_branches_run_on_triton(packed: bool, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, without windows and pooled blocks with a small mask: there cuDNN is faster."""
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: name)
    ran: dict[str, str] = {}

    def stub(entry: Implementation) -> Implementation:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: masks.Mask, **_: Any) -> jax.Array:
            ran[type(mask.rule).__name__] = entry.name
            return q

        def choose(q: jax.Array, keys: jax.Array, *_: Any, count: int) -> jax.Array:
            ran["choose"] = entry.name
            return jnp.zeros((*q.shape[:2], keys.shape[2], count), jnp.int32)

        return dataclasses.replace(entry, run=choose if entry in select.TABLE else attend)

    tables = [(table, tuple(map(stub, table.TABLE))) for table in (api, select)]
    for table, entries in tables:
        monkeypatch.setattr(table, "TABLE", entries)
    module = SparseAttentionConfig(dim=128, num_heads=2, num_kv_heads=1, causal=causal).build(
        dtype=jnp.bfloat16
    )
    x, ids = jnp.zeros((1, 4096, 128), jnp.bfloat16), jnp.ones((1, 4096), jnp.int32) if packed else None
    with compiling_for(Device("gpu", (9, 0), "NVIDIA H200")):
        jax.eval_shape(lambda: module.init(jax.random.key(0), x, segment_ids=ids))
    assert ran["choose"] == ran["Chosen"] == "triton"
    assert ran.get("BlocksBefore") == ("triton" if causal and not packed else None)


@pytest.mark.slow(days=28, group="costly")
def test_the_share_that_is_kept_is_reported() -> None:
    """It is all of it where a token chooses all blocks."""
    x = jax.random.normal(jax.random.key(0), (2, 40, 8))
    few, all_blocks = (
        SparseAttentionConfig(dim=8, num_heads=2, block=4, top_k=top_k, window=4).build() for top_k in (1, 10)
    )

    @jax.jit
    def kept(params: dict) -> list[jax.Array]:
        reports = (module.apply(params, x, mutable=["metrics"])[1] for module in (few, all_blocks))
        return [found["metrics"]["kept"][0].value for found in reports]

    share, whole = kept(drawn(few, x))
    assert 0.2 < share < 0.99
    assert float(whole) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow(days=28, group="costly", turn="mixers/attention/test_sparse")
@pytest.mark.parametrize(
    "config", [PREDICTED, dataclasses.replace(PREDICTED, causal=False)], ids=["causal", "both"]
)
def test_a_predictor_learns_the_masses_of_dense_attention(config: SparseAttentionConfig) -> None:
    """Its loss is the divergence that a loop finds; the tokens and the rest of the layer get no gradient of it."""
    subject = Subject(config, length=16)
    module, ids = config.build(), jnp.asarray([[1] * 9 + [2] * 7] * 3)

    def loss(params: dict, x: jax.Array) -> jax.Array:
        _, found = module.apply(params, x, segment_ids=ids, mutable=["losses"])
        return found["losses"]["predictor"][0]

    value, (by_params, by_x) = jax.jit(jax.value_and_grad(loss, (0, 1)))(subject.params, subject.x)
    w = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in subject.params["params"].items()}
    x = np.asarray(subject.x, np.float64)
    away = [_away(config, w, x[row, span]) for row in range(3) for span in (slice(0, 9), slice(9, 16))]
    np.testing.assert_allclose(value, np.concatenate(away).mean(), rtol=1e-4)
    reached = {name for name, leaf in by_params["params"].items() if np.any(leaf["kernel"])}
    assert reached == {f"predictor_{name}_{side}" for name in "qk" for side in ("in", "out")}
    assert not np.any(by_x)


def test_a_predictor_learns_from_the_longest_queries() -> None:
    """Few tokens of a long row may look for anything; the token that is asked for lies between even samples."""
    q = jnp.ones((1, 1000, 2, 4)).at[0, 777, 1].set(9.0).at[0, 778].set(99.0)
    ids = jnp.ones((1, 1000), jnp.int32).at[0, 778].set(0)
    asking = _asking(Stream(q, None, None, None, None, ids, None))[0]
    assert 777 in asking
    assert 778 not in asking
    assert set(np.linspace(0, 999, 16).astype(int)) <= set(np.asarray(asking).tolist())


def test_a_config_from_before_predictors_has_none() -> None:
    stored = encode(CONFIG)
    del stored["predictor"]
    assert decode(stored) == CONFIG


@pytest.mark.slow(days=28, group="learning")
def test_a_predictor_keeps_more_than_pooled_keys_do() -> None:
    """Sharp attention among drawn tokens; a half, a quarter and a tenth of 32 blocks are chosen."""
    config = SparseAttentionConfig(
        dim=32, num_heads=4, num_kv_heads=2, head_dim=8, block=4, top_k=8, window=4, predictor=16
    )
    rows = jax.random.normal(jax.random.key(1), (304, 8, 128, 32))
    start = jax.jit(config.build().init)(jax.random.key(0), rows[0])
    sharp = {name: jax.tree.map(lambda w: 5 * w, start["params"][name]) for name in "qk"}
    start = {"params": start["params"] | sharp}
    optimizer = optax.adam(1e-2)

    def loss(params: dict, x: jax.Array) -> jax.Array:
        return config.build().apply(params, x, mutable=["losses"])[1]["losses"]["predictor"][0]

    def step(carry: tuple, x: jax.Array) -> tuple:
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = optimizer.update(jax.grad(loss)(carry[0], x), carry[1])
        return (optax.apply_updates(carry[0], updates), moments), None

    @jax.jit
    def kept(params: dict) -> list[jax.Array]:
        modules = (dataclasses.replace(config, top_k=top_k).build() for top_k in (16, 8, 3))
        found = [
            module.apply(params, rows[300:].reshape(-1, 128, 32), mutable=["metrics"])[1]
            for module in modules
        ]
        return [each["metrics"]["kept"][0].value for each in found]

    (learned, _), _ = jax.jit(
        lambda params: jax.lax.scan(step, (params, optimizer.init(params)), rows[:300])
    )(start)
    before, after = np.asarray(kept(start)), np.asarray(kept(learned))
    assert np.all(after > before), (before, after)


def _away(config: SparseAttentionConfig, w: dict, x: np.ndarray) -> np.ndarray:
    """KL(dense || predicted) of each token and key head of a document that has blocks to choose from."""
    q, k = (turn(np.einsum("td,dhk->thk", x, w[name]), config.rope_theta, 1.0) for name in "qk")
    asks, by = _learned(w, "q", q), _learned(w, "k", k)
    size, found = config.block, []
    ends = range(size, len(x) + 1, size) if config.causal else [*range(size, len(x), size), len(x)]
    for t in range(len(x)):
        spans = [
            slice((end - 1) // size * size, end)
            for end in ends
            if not config.causal or end <= t // size * size
        ]
        for g in range(config.groups if spans else 0):
            seen = slice(0, t + 1 if config.causal else len(x))
            heads = range(g * 2, g * 2 + 2)
            dense = sum(_soft(q[t, h], k[seen, g], np.eye(len(k[seen]))) for h in heads)
            mass = np.array([dense[span].sum() for span in spans])
            mass /= mass.sum()
            predicted = _shares(asks[t, heads], np.array([by[span, g].mean(0) for span in spans])) / 2
            found.append(np.sum(mass * np.log(mass / predicted)))
    return np.array(found)


def test_blocks_end_where_documents_say() -> None:
    times = jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 0, 1, 0]], jnp.int32)
    live = jnp.asarray([[True] * 9 + [False]])
    np.testing.assert_array_equal(find_ends(times, live, 2), [[1, 3, 5, 8, NEVER]])


def test_short_blocks_end_with_their_documents() -> None:
    """A document of a block or less has none."""
    times = jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 4, 0, 0]], jnp.int32)
    document = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 2, 3, 0]], jnp.int32)
    ends = find_all_ends(times, document, 2)[0]
    np.testing.assert_array_equal(ends[:6], [1, 2, 4, 6, 7, NEVER])
    assert len(ends) == 10


def test_queries_choose_what_their_heads_want_together() -> None:
    """Two heads of a group: the block that both like a little loses to the one that one head likes much."""
    k = jnp.asarray([[[[4.0, 0]], [[0, 4.0]], [[1.0, 1.0]]]])
    pooled = Blocks(k, k, None, jnp.ones((1, 3), jnp.int32), jnp.asarray([[0, 1, 2]], jnp.int32))
    q = jnp.asarray([[[[5.0, 0], [3.0, 0]], [[0, 5.0], [0, 5.0]], [[5.0, 5.0], [0, 0]]]])
    ids, times = jnp.ones((1, 3), jnp.int32), jnp.asarray([[6, 7, 1]], jnp.int32)
    chosen = choose_blocks(Queries(q, ids, times // 2), pooled, 2)
    np.testing.assert_array_equal(chosen[0, :2, 0, 0], [0, 1])
    np.testing.assert_array_equal(chosen[0, 2, 0], [-1, -1])


@pytest.mark.slow(days=28, group="further properties of mixers")
def test_rows_over_eight_devices() -> None:
    check_sequence(Subject(CONFIG, length=48), counts=(8,))
