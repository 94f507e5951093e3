"""The router's network runs once a chunk or a prefix, and gives the codes of one that runs at each token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import (
    AdapterConfig,
    ChunkMean,
    Confidence,
    Prefix,
    RecurrentMemory,
    RouterConfig,
    Side,
    attach,
    check_sites,
)
from jaxblt.adapters.code import router
from jaxblt.adapters.code.experimental.mixed import Mixed
from jaxblt.adapters.code.levels import EVERY
from jaxblt.adapters.code.router import Router, init_router_state
from jaxblt.data.config import DataConfig
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.patching.config import PatcherConfig
from jaxblt.training.packing import promise_rows
from tests.adapters.routing import DOCUMENTS, LENGTH, WIDTH, inputs, params_of, whole, with_holes
from tests.tolerances import assert_close

CHUNK, PREFIX = 5, 7
ROUTER = RouterConfig(level="chunk", chunk=CHUNK, reads=(ChunkMean(), Prefix(PREFIX)), hidden=4)
ADAPTER = AdapterConfig(rank=3, router=ROUTER, code=(Confidence(),))
ALONE = np.stack([np.repeat([1, 0], [LENGTH - 2, 2]), np.repeat([3, 0], [17, LENGTH - 17])]).astype(np.int32)
"""One document a row."""
ALIGNED = np.stack([np.repeat([1, 2, 0], [23, 15, 2]), np.repeat([4, 5, 6], [10, 5, 25])]).astype(np.int32)
ALIGNED[0, 23:25] = 0
"""Documents that start where a chunk may."""
SIDE = np.random.default_rng(3).standard_normal((*ALONE.shape, 2)).astype(np.float32)
MANY = (ChunkMean(), RecurrentMemory(), Side(2), Prefix(PREFIX))
MIXED: Any = {"level": Mixed(("prefix", "chunk"), prices=(0.0, 0.1)), "reads": MANY, "lag": 2}
IN_CHUNKS, IN_ROWS = {"segment_alignment": CHUNK}, {"packed": False}


def record(monkeypatch: Any) -> tuple[list[int], list[int]]:
    """Tokens of a row that each network reads, noted while tracing, and those of each that runs."""
    traced, ran, network = [], [], router.run_network

    def noted(weights: Any, x: Any) -> Any:
        traced.append(x.shape[1])
        jax.debug.callback(lambda: ran.append(x.shape[1]))
        return network(weights, x)

    monkeypatch.setattr(router, "run_network", noted)
    return traced, ran


def read(config: AdapterConfig, params: Any, ids: Any, given: Any) -> Any:
    """The code and the gradient of its squares."""

    def loss(params: Any, x: Any) -> Any:
        code, _ = Router(config).apply({"params": params}, x, segment_ids=ids, **given)
        return jnp.sum(jnp.square(code)), code

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, inputs())


CASES = {
    "chunks where documents are aligned": ({}, IN_CHUNKS, ALIGNED, [8]),
    "chunks of packed rows": ({}, {}, ALONE, [9]),
    "chunks of one document": ({}, IN_ROWS, ALONE, [8]),
    "a prefix": ({"level": "prefix"}, IN_ROWS, ALONE, [1]),
    "prefixes of packed rows": ({"level": "prefix"}, IN_CHUNKS, ALIGNED, [6]),
    "chunks before the prefix ends": (
        {"level": Mixed(("prefix", "chunk")), "reads": (ChunkMean(), Prefix(12))},
        IN_ROWS,
        ALONE,
        [1, 8],
    ),
    "mixed": (MIXED, IN_ROWS, ALONE, [1, 8]),
    "mixed in packed rows": (MIXED, {}, DOCUMENTS, [6, 9]),
}


@pytest.mark.slow(days=28, group="codes and sites of adapters")
@pytest.mark.parametrize("case", CASES)
def test_networks_read_a_token_a_chunk_and_codes_stay(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, promised, ids, expected = CASES[case]
    given = {"side": jnp.asarray(SIDE)} if options.get("reads") == MANY else {}
    config = dataclasses.replace(ADAPTER, router=dataclasses.replace(ROUTER, **options, **promised))
    params, ids = params_of(config, **given), jnp.asarray(with_holes(ids))
    traced, _ = record(monkeypatch)
    found = read(config, params, ids, given)
    assert traced == expected
    monkeypatch.setattr(router, "places_of", lambda *_, **__: EVERY)
    monkeypatch.setattr(router, "are_aligned", lambda *_, **__: False)
    reference = read(config, params, ids, given)
    assert traced[len(expected) :] == [LENGTH] * len(expected)
    leaves = jax.tree_util.tree_leaves_with_path(reference)
    for (path, one), other in zip(leaves, jax.tree.leaves(found), strict=True):
        assert_close(other, one, n=200, what=jax.tree_util.keystr(path))


def edges(ids: np.ndarray) -> dict[str, np.ndarray]:
    """The tokens of a row, holes among them, at which a level has a new code."""
    time = np.zeros(ids.shape, int)
    for i, row in enumerate(np.abs(ids)):
        for document in set(row) - {0}:
            time[i, row == document] = np.arange(np.count_nonzero(row == document))
    return {"prefix": time == PREFIX, "chunk": (time > 0) & (time % CHUNK == 0)}


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_places")
@pytest.mark.parametrize("level", ["prefix", "chunk", "token"])
def test_a_decoded_token_runs_the_network_at_an_edge_alone(
    level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows stand at different steps of their documents: one at an edge is enough."""
    config = dataclasses.replace(ADAPTER, router=dataclasses.replace(ROUTER, level=level))
    params, ids = params_of(config), with_holes(DOCUMENTS)
    code = whole(config, params, inputs(), ids)
    traced, ran = record(monkeypatch)
    step = jax.jit(Router(config).apply)
    state, found = init_router_state(config, len(ids), WIDTH), []
    for i in range(LENGTH):
        given = {"segment_ids": jnp.asarray(ids[:, i : i + 1]), "state": state}
        one, state = step({"params": params}, jnp.asarray(inputs()[:, i : i + 1]), **given)
        found.append(np.asarray(one))
    jax.effects_barrier()
    np.testing.assert_allclose(np.concatenate(found, 1), code, atol=2e-6)
    expected = LENGTH if level == "token" else np.count_nonzero(edges(ids)[level].any(0))
    assert expected == {"prefix": 3, "chunk": 10, "token": LENGTH}[level]
    assert (traced, ran) == ([1], [1] * expected)


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_places")
@pytest.mark.parametrize(("level", "most"), [("prefix", 3), ("chunk", 4)])
def test_longer_calls_run_it_at_each_edge(level: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """17 tokens of two rows, then 4 with an edge of one row; `vmap` over the rows makes these a batch each."""
    config = dataclasses.replace(ADAPTER, router=dataclasses.replace(ROUTER, level=level))
    params, ids, x = params_of(config), with_holes(DOCUMENTS), inputs()
    assert edges(ids)[level][:, 17:21].any(1).sum() >= 1
    traced, _ = record(monkeypatch)

    def call(x: Any, ids: Any, state: Any) -> Any:
        return Router(config).apply({"params": params}, x, segment_ids=ids, state=state)

    start = init_router_state(config, len(ids), WIDTH)
    code, state = jax.jit(call)(x[:, :17], ids[:, :17], start)
    given = jnp.asarray(x[:, 17:21]), jnp.asarray(ids[:, 17:21]), state
    together = jax.jit(call)(*given)
    assert traced == [most, 1]
    apart = jax.jit(jax.vmap(call))(*jax.tree.map(lambda x: x[:, None], given))
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(other[:, 0], one, rtol=1e-5, atol=2e-6)
    found = np.concatenate([code, together[0]], 1)
    np.testing.assert_allclose(found, whole(config, params, x, ids)[:, :21], atol=2e-6)


def test_rows_shorter_than_the_prefix_have_the_fallback() -> None:
    config = dataclasses.replace(
        ADAPTER, router=RouterConfig("prefix", reads=(ChunkMean(), Prefix(LENGTH)), fallback=0.0)
    )
    code, _ = jax.jit(Router(config).apply)({"params": params_of(config)}, inputs())
    np.testing.assert_array_equal(code, 0.0)


def test_routers_are_told_of_the_rows_that_a_recipe_makes() -> None:
    stack = StackConfig(dim=8, num_layers=1, pattern=("recurrence",), mlp_dim=8)
    model = attach(ByteLMConfig(stack=stack), AdapterConfig(router=ROUTER))
    alone = promise_rows(model, DataConfig(packing="buckets"), None)
    assert alone.stack.adapter.router.packed is False
    packed = promise_rows(model, DataConfig(packing="first_fit", alignment=64), None)
    assert packed.stack.adapter.router == dataclasses.replace(ROUTER, segment_alignment=64)


def test_stacks_of_bytes_and_of_patches_may_share_patterns() -> None:
    byte, patch = (
        StackConfig(dim=8, num_layers=1, pattern=p, mlp_dim=8) for p in ("recurrence", "hyena_short")
    )
    adapter = AdapterConfig(sites=("mixer/gate", "mixer/in"), router=ROUTER)
    model = attach(BLTConfig(encoder=byte, latent=patch, decoder=byte), adapter)
    patcher = PatcherConfig(block_size=64, capacity=32)
    packed = promise_rows(model, DataConfig(packing="first_fit", alignment=64), patcher)
    alignments = {s.adapter.router.segment_alignment for s in (packed.encoder, packed.latent)}
    assert len(alignments) == 2
    assert check_sites(packed).keys() == {"encoder", "latent", "decoder"}
