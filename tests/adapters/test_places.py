"""The router's network runs once a chunk or a prefix where rows tell where these are, and gives the same codes."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, Confidence, Mixed, RouterConfig, attach, check_sites
from jaxblt.adapters.router import Router
from jaxblt.data.config import DataConfig
from jaxblt.layers import Linear
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.patching.config import PatcherConfig
from jaxblt.training.packing import promise_rows
from tests.adapters.routing import LENGTH, inputs, params_of, with_holes
from tests.tolerances import assert_close

CHUNK, PREFIX = 5, 7
ROUTER = RouterConfig(level="chunk", chunk=CHUNK, prefix=PREFIX, hidden=4)
ADAPTER = AdapterConfig(rank=3, router=ROUTER, code=(Confidence(),))
ALONE = np.stack([np.repeat([1, 0], [LENGTH - 2, 2]), np.repeat([3, 0], [17, LENGTH - 17])]).astype(np.int32)
"""One document a row."""
ALIGNED = np.stack([np.repeat([1, 2, 0], [23, 15, 2]), np.repeat([4, 5, 6], [10, 5, 25])]).astype(np.int32)
ALIGNED[0, 23:25] = 0
"""Documents that start where a chunk may."""
SIDE = np.random.default_rng(3).standard_normal((*ALONE.shape, 2)).astype(np.float32)
MIXED: Any = {"level": Mixed(("prefix", "chunk"), prices=(0.0, 0.1)), "memory": "gru", "side": 2, "lag": 2}
IN_CHUNKS, IN_ROWS = {"segment_alignment": CHUNK}, {"packed": False}


def read(config: AdapterConfig, params: Any, ids: Any, given: Any) -> tuple[dict[str, int], Any]:
    """Tokens that each network reads, and the code with the gradient of its squares."""
    tokens: dict[str, int] = {}

    def record(call: Any, args: Any, options: Any, context: Any) -> Any:
        if isinstance(context.module, Linear) and context.method_name == "weights":
            tokens[context.module.name] = args[0].shape[1]
        return call(*args, **options)

    def loss(params: Any, x: Any) -> Any:
        code, _ = Router(config).apply({"params": params}, x, segment_ids=ids, **given)
        return jnp.sum(jnp.square(code)), code

    with nn.intercept_methods(record):
        return tokens, jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, inputs())


CASES = {
    "chunks of packed rows": ({}, IN_CHUNKS, ALIGNED, {"hidden": 8, "code": 8}),
    "chunks of one document": ({}, IN_ROWS, ALONE, {"hidden": 8, "code": 8}),
    "a prefix": ({"level": "prefix"}, IN_ROWS, ALONE, {"hidden": 1, "code": 1}),
    "prefixes of packed rows": ({"level": "prefix"}, IN_CHUNKS, ALIGNED, {"hidden": LENGTH, "code": LENGTH}),
    "chunks before the prefix ends": (
        {"level": Mixed(("prefix", "chunk")), "prefix": 12},
        IN_ROWS,
        ALONE,
        {"hidden_prefix": 1, "hidden_chunk": 8},
    ),
    "mixed": (MIXED, IN_ROWS, ALONE, {"hidden_prefix": 1, "hidden_chunk": 8, "code_chunk": 8, "gate": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_networks_read_a_token_a_chunk_and_codes_stay(case: str) -> None:
    options, promised, ids, expected = CASES[case]
    given = {"side": jnp.asarray(SIDE)} if options.get("side") else {}
    each = dataclasses.replace(ADAPTER, router=dataclasses.replace(ROUTER, **options))
    once = dataclasses.replace(each, router=dataclasses.replace(each.router, **promised))
    params = params_of(each, **given)
    ids = jnp.asarray(with_holes(ids))
    tokens, found = read(once, params, ids, given)
    assert {name: tokens[name] for name in expected} == expected
    tokens, reference = read(each, params, ids, given)
    assert {tokens[name] for name in expected} == {LENGTH}
    leaves = jax.tree_util.tree_leaves_with_path(reference)
    for (path, one), other in zip(leaves, jax.tree.leaves(found), strict=True):
        assert_close(other, one, n=200, what=jax.tree_util.keystr(path))


def test_rows_shorter_than_the_prefix_have_the_fallback() -> None:
    config = dataclasses.replace(ADAPTER, router=RouterConfig("prefix", prefix=LENGTH, fallback=0.0))
    code, _ = jax.jit(Router(config).apply)({"params": params_of(config)}, inputs())
    np.testing.assert_array_equal(code, 0.0)


def test_routers_are_told_of_the_rows_that_a_recipe_makes() -> None:
    stack = StackConfig(dim=8, num_layers=1, pattern="R", mlp_dim=8)
    model = attach(ByteLMConfig(stack=stack), AdapterConfig(router=ROUTER))
    alone = promise_rows(model, DataConfig(packing="buckets"), None)
    assert alone.stack.adapter.router.packed is False
    packed = promise_rows(model, DataConfig(packing="first_fit", alignment=64), None)
    assert packed.stack.adapter.router == dataclasses.replace(ROUTER, segment_alignment=64)


def test_stacks_of_bytes_and_of_patches_may_share_patterns() -> None:
    byte, patch = (StackConfig(dim=8, num_layers=1, pattern=p, mlp_dim=8) for p in "RS")
    adapter = AdapterConfig(sites=("mixer/gate", "mixer/in"), router=ROUTER)
    model = attach(BLTConfig(encoder=byte, latent=patch, decoder=byte), adapter)
    patcher = PatcherConfig(block_size=64, capacity=32)
    packed = promise_rows(model, DataConfig(packing="first_fit", alignment=64), patcher)
    alignments = {s.adapter.router.segment_alignment for s in (packed.encoder, packed.latent)}
    assert len(alignments) == 2
    assert check_sites(packed).keys() == {"encoder", "latent", "decoder"}
