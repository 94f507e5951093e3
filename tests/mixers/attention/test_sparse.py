"""Sparse attention against a loop over tokens in float64, its metric, its state, and rows over eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import SparseAttentionConfig, init_state
from jaxblt.mixers.attention.pooled import NEVER, choose_blocks, find_ends
from jaxblt.mixers.attention.pooled import Pooled as Blocks
from jaxblt.testing import Subject
from jaxblt.testing.parallel import check_sequence
from tests.mixers.attention.test_attention import turn
from tests.parameters import drawn
from tests.tolerances import assert_close

CONFIG = SparseAttentionConfig(dim=12, num_heads=4, num_kv_heads=2, head_dim=4, block=3, top_k=1, window=3)


def _soft(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = k @ q / np.sqrt(len(q))
    p = np.exp(scores - scores.max())
    return p @ v / p.sum()


def _naive_document(config: SparseAttentionConfig, w: dict, x: np.ndarray, content: np.ndarray) -> np.ndarray:
    """One document, one token and one key head at a time."""
    q, k, v, gates = (np.einsum("td,dhk->thk", x, w[name]) for name in ("q", "k", "v", "gate"))
    q, k = (turn(a, config.rope_theta, 1.0) for a in (q, k))
    gates, shared, out = 1 / (1 + np.exp(-gates)), config.num_heads // config.groups, np.zeros(x.shape)
    blocks = [
        (j, np.flatnonzero(content[j * config.block :][: config.block]) + j * config.block)
        for j in range(len(x) // config.block)
    ]
    for t in np.flatnonzero(content):
        there = [(j, tokens) for j, tokens in blocks if j < t // config.block and len(tokens)]
        window = [s for s in range(max(0, t - config.window + 1), t + 1) if content[s]]
        for g in range(config.groups):
            heads = range(g * shared, (g + 1) * shared)
            pooled = np.array([[k[tokens, g].mean(0), v[tokens, g].mean(0)] for _, tokens in there])
            shares = np.zeros(len(there))
            for h in heads:
                if there:
                    scores = pooled[:, 0] @ q[t, h] / np.sqrt(config.width)
                    p = np.exp(scores - scores.max())
                    shares += p / p.sum()
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


def test_equals_the_loop() -> None:
    subject = Subject(CONFIG, length=23)
    w = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in subject.params["params"].items()}
    ids = subject.with_holes(subject.documents())
    y, expected = subject.run(ids=ids), np.zeros(subject.x.shape)
    for row, document in [(r, s) for r in range(len(ids)) for s in np.unique(np.abs(ids[r])) if s]:
        span = np.flatnonzero(np.abs(ids[row]) == document)
        x = np.where(ids[row, span, None] > 0, subject.x[row, span], 0).astype(np.float64)
        expected[row, span] = _naive_document(CONFIG, w, x, ids[row, span] > 0)
    live = ids > 0
    assert_close(y[live], expected[live], jnp.float32, n=subject.length * CONFIG.dim)


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


def test_blocks_end_where_documents_say() -> None:
    times = jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 0, 1, 0]], jnp.int32)
    live = jnp.asarray([[True] * 9 + [False]])
    np.testing.assert_array_equal(find_ends(times, live, 2), [[1, 3, 5, 8, NEVER]])


def test_queries_choose_what_their_heads_want_together() -> None:
    """Two heads of a group: the block that both like a little loses to the one that one head likes much."""
    k = jnp.asarray([[[[4.0, 0]], [[0, 4.0]], [[1.0, 1.0]]]])
    pooled = Blocks(k, k, jnp.ones((1, 3), jnp.int32), jnp.asarray([[0, 1, 2]], jnp.int32))
    q = jnp.asarray([[[[5.0, 0], [3.0, 0]], [[0, 5.0], [0, 5.0]], [[5.0, 5.0], [0, 0]]]])
    ids, times = jnp.ones((1, 3), jnp.int32), jnp.asarray([[6, 7, 1]], jnp.int32)
    chosen = choose_blocks(q, pooled, ids, times, 2, 2)
    np.testing.assert_array_equal(chosen[0, :2, 0, 0], [0, 1])
    np.testing.assert_array_equal(chosen[0, 2, 0], [-1, -1])


def test_the_state_of_other_blocks_is_refused() -> None:
    other = SparseAttentionConfig(dim=12, num_heads=2, block=4, window=4)
    x, module = jnp.zeros((1, 1, 12)), CONFIG.build()
    state = init_state(other, 1, capacity=8)
    with pytest.raises(ValueError, match="block = 4, and the config of 3"):
        jax.eval_shape(module.init, jax.random.key(0), x, state=state)


@pytest.mark.slow(days=28, group="further properties of mixers")
def test_rows_over_eight_devices() -> None:
    check_sequence(Subject(CONFIG, length=48), counts=(8,))
