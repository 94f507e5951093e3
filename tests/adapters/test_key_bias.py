"""Biases of logits by the codes of keys."""

import dataclasses
from functools import reduce
from itertools import pairwise
from operator import getitem
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, RouterConfig, attach, distill, fuse, split_params
from jaxblt.adapters.update.attach import describe_sites
from jaxblt.mixers import AttentionConfig
from jaxblt.mixers.attention.key_bias import BY_CODE, KEY_BIAS, BiasedAttentionConfig
from jaxblt.models import ByteLMConfig, Stack, StackConfig
from jaxblt.models.stack import init_stack_state
from tests.parameters import drawn
from tests.tolerances import assert_close

CHUNK, LENGTH, CALL = 3, 12, 4
ADAPTER = AdapterConfig(
    sites=("mixer/*",),
    rank=2,
    key_bias=True,
    router=RouterConfig(chunk=CHUNK, reads=(ChunkMean(),), hidden=4),
)
ATTENTION = AttentionConfig(dim=8, num_heads=4, num_kv_heads=2, packed=False)
STACK = StackConfig(
    dim=8, num_layers=1, pattern="A", mixers={"A": ATTENTION}, mlp_dim=0, scan=False, adapter=ADAPTER
)


@pytest.mark.slow(days=28, group="costly")
def test_a_softmax_has_the_bias_of_each_key() -> None:
    rng = np.random.default_rng(0)
    x, code, dy = jax.device_put([rng.standard_normal((2, 6, n)).astype(np.float32) for n in (8, 2, 8)])
    config = dataclasses.replace(ATTENTION, position="none")
    biased = ADAPTER.mixer(config)
    assert isinstance(biased, BiasedAttentionConfig)

    def attend(params, x):
        with ADAPTER.inside((), 0, code):
            return biased.build().apply(params, x)[0]

    @jax.jit
    def attend_by_hand(params, x):
        own = params["params"]
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, own[n]["kernel"], precision="highest") for n in "qkv")
        bias = code @ own["key_bias"][BY_CODE]
        k, v, bias = (jnp.repeat(a, 2, 2) for a in (k, v, bias))
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / 2**0.5 + jnp.moveaxis(bias, 2, 1)[:, :, None]
        p = jax.nn.softmax(jnp.where(jnp.tri(6, dtype=bool), scores, -jnp.inf))
        return jnp.einsum("bhts,bshk,hkd->btd", p, v, own["out"]["kernel"], precision="highest")

    with ADAPTER.inside((), 0, code):
        params = drawn(biased.build(), x)

    @jax.jit
    def run(params):
        y, back = jax.vjp(attend, params, x)
        return y, back(dy)[0]["params"]["key_bias"][BY_CODE]

    y, slope = jax.device_get(run(params))
    assert_close(y, attend_by_hand(params, x), n=8)
    still = jax.tree_util.tree_map_with_path(lambda p, a: 0 * a if p[-1].key == BY_CODE else a, params)
    own = {name: params["params"][name] for name in ("q", "k", "v", "out")}
    plain = np.asarray(jax.jit(config.build().apply)({"params": own}, x)[0])
    assert_close(run(still)[0], plain, n=8)
    assert np.abs(y - plain).max() > 0.05
    assert np.abs(slope).min() > 1e-3


IDS = np.array([[1, 1, -1, 1, 1, 1, -1, -1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]], np.int32)
"""Segment ids of a row with holes, which such attention would sort behind the tokens, and of two documents."""


@pytest.mark.slow(days=28, group="costly")
def test_calls_are_whole_rows_and_no_entry_of_the_cache_is_written_again() -> None:
    x, ids = (
        jnp.asarray(np.random.default_rng(0).standard_normal((2, LENGTH, 8)), jnp.float32),
        jnp.asarray(IDS),
    )
    module, state = Stack(STACK), init_stack_state(STACK, 2, capacity=LENGTH)
    params = drawn(module, x)
    apply = jax.jit(module.apply)
    y, _ = apply(params, x, segment_ids=ids)
    found, written = [], []
    for at in range(0, LENGTH, CALL):
        part = slice(at, at + CALL)
        out, state = apply(params, x[:, part], segment_ids=ids[:, part], state=state)
        found.append(out)
        written.append(np.asarray(state.periods[0][0].k))
    for before, after in pairwise(written):
        old = np.any(before, (2, 3))[0]
        np.testing.assert_array_equal(after[0][old], before[0][old])
    keys = written[-1]
    assert_close(jnp.concatenate(found, 1), y, n=LENGTH)
    assert keys.shape[-1] == 2 + 8
    bias = np.where(IDS[0] == 1, keys[0, :, 0, 2], np.nan).reshape(-1, CHUNK)
    assert np.all(np.nanmax(bias, 1) == np.nanmin(bias, 1)), "a chunk has one"
    assert len(np.unique(np.nanmin(bias, 1))) == LENGTH // CHUNK, "chunks have others"
    assert not keys[..., 3:].any()


def test_at_one_code_there_is_no_bias() -> None:
    config = attach(ByteLMConfig(stack=dataclasses.replace(STACK, adapter=None)), ADAPTER)
    lines = describe_sites(config, 2, 1, 100)
    assert "key bias        stack: A" in lines
    params = drawn(config.build(), jnp.zeros((1, 8), jnp.int32))["params"]
    base, trained = split_params(params)
    mixer = "period_0", "block_0", "mixer"
    has = [KEY_BIAS in at(tree["stack"], mixer) for tree in (params, base, trained)]
    assert has == [True, False, True]
    code = jnp.asarray([0.5, -1.0])
    for made, tree in (fuse(config, params, code=code), distill(config, params, code)):
        assert KEY_BIAS not in at(tree["stack"], mixer)
        assert made.stack.adapter is None or not made.stack.adapter.key_bias


def at(tree: Any, path: tuple[str, ...]) -> Any:
    """Return what lies at a path."""
    return reduce(getitem, path, tree)


def test_tokens_stay_beside_their_codes() -> None:
    """Rows of one document with holes were sorted inside attention, where other tokens met the codes."""
    assert all(
        dataclasses.replace(ADAPTER, key_bias=biased).mixer(ATTENTION).packed for biased in (False, True)
    )
    assert AdapterConfig().mixer(ATTENTION) is ATTENTION


def test_a_stack_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="key_bias = True is of AttentionConfig, and the stack has"):
        dataclasses.replace(STACK, pattern="recurrence", mixers={})
