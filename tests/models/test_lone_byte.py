"""A byte of one row through a whole model: sums that stay open between its parts, and what a closed patch keeps."""

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt import layers
from jaxblt.inference import Decoder, init_decoder
from jaxblt.inference.decode import PREPARED
from jaxblt.inference.narrow import narrow_params
from jaxblt.inference.unroll import unroll_params, unroll_state, unrolled
from jaxblt.mixers import AttentionConfig
from jaxblt.mixers.driver.history import next_output
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig, bridge, stack
from jaxblt.models.byte_lm import TURNED, turn_table
from jaxblt.patching import PatcherConfig
from pallas_kernels.modal_conv import modal_conv
from pallas_kernels.token_product import token_product
from tests.mixer_table import table
from tests.tolerances import assert_close

BLOCK = 16
PATCHER = PatcherConfig(mode="static", block_size=BLOCK, patch_size=4)


def small(dim: int = 16) -> BLTConfig:
    """A model whose slots are wider than its bytes."""
    mixers = table(attention=AttentionConfig(dim=dim, num_heads=2), window=6)
    local = StackConfig(dim=dim, num_layers=1, pattern="W", mlp_dim=dim, mixers=mixers, scan=False)
    latent = replace(local, dim=3 * dim // 2, num_layers=2, pattern="HA")
    return BLTConfig(local, latent, local, hash=None, bridge_heads=2, look_back=3)


def drawn(module: Any) -> Any:
    return nn.meta.unbox(module.init(jax.random.key(0), jnp.zeros((1, BLOCK), jnp.int32)))


def decoded(
    config: Any, variables: Any, ids: Any, patcher: PatcherConfig | None = None, dtype: Any = jnp.float32
) -> Any:
    """Return logits behind each byte, and the state behind them."""
    module = config.build(patcher=patcher, dtype=dtype)
    step = jax.jit(lambda ids, state: module.apply(variables, ids, state, method="step"))
    state, found = module.init_state(len(ids), num_bytes=2 * BLOCK), []
    for t in range(ids.shape[1]):
        logits, _, state = step(ids[:, t], state)
        found.append(logits)
    return jnp.stack(found, 1), state


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let one row take the kernels' path, and return the list of its launches."""
    launches: list[Any] = []

    def count(*given: Any, **options: Any) -> Any:
        launches.append(given)
        return token_product(*given, **options)

    for module in (stack, bridge, layers):
        monkeypatch.setattr(module, "is_lone_token", lambda x: x.shape[:2] == (1, 1))
    monkeypatch.setattr(layers, "token_product", count)
    return launches


@pytest.mark.parametrize("kind", ["bytes", "patches"])
def test_parts_of_a_model_leave_their_sums_open(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = small() if kind == "patches" else ByteLMConfig(small().decoder)
    patcher = PATCHER if kind == "patches" else None
    params = drawn(config.build(patcher=patcher))
    ids = jax.random.randint(jax.random.key(1), (1, 7), 4, 260)
    apart, before = decoded(config, params, ids, patcher)
    launches = count_launches(monkeypatch)
    columns = turn_table(params["params"]["embedding"]["bytes"])
    joined, after = decoded(config, {**params, PREPARED: {"head": {TURNED: columns}}}, ids, patcher)
    # Four of each block, and the head. Of the bridge a byte's keys, query and output, and where a patch closes its
    # query, output, vector and keys
    assert len(launches) == {"bytes": 4 + 1, "patches": 2 * 4 + 1 + 3 + 4 + 2 * 4}[kind]
    assert sum(given[1][0].shape == columns.shape for given in launches) == 1
    assert_close(np.asarray(joined), np.asarray(apart), n=256)
    for found, known in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        assert_close(np.asarray(found, np.float32), np.asarray(known, np.float32), n=256)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_a_gpu_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(256)
    params = drawn(config.build(patcher=PATCHER))
    ids = jax.random.randint(jax.random.key(1), (1, 2 * BLOCK - 1), 4, 260)
    columns = turn_table(params["params"]["embedding"]["bytes"].astype(jnp.bfloat16))
    given = {**params, PREPARED: {"head": {TURNED: columns}}}
    joined, _ = decoded(config, given, ids, PATCHER, jnp.bfloat16)
    for module in (stack, bridge, layers):
        monkeypatch.setattr(module, "is_lone_token", lambda x: False)
    monkeypatch.setattr(layers, "token_product", None)
    apart, _ = decoded(config, params, ids, PATCHER, jnp.bfloat16)
    assert_close(np.asarray(joined), np.asarray(apart), n=4096, dtype=jnp.bfloat16)


def test_a_state_has_the_keys_of_its_latest_patches() -> None:
    """They are made where a patch closes, by whichever call closes it, and rows without a byte keep theirs."""
    config = small()
    module = config.build(patcher=PATCHER)
    params, ids = drawn(module), jax.random.randint(jax.random.key(1), (2, BLOCK), 4, 260)
    _, state = decoded(config, params, ids[:, :9], PATCHER)
    options = {"segment_ids": jnp.array([[1] * 7, [0] * 7])}
    _, streamed = module.apply(params, ids[:, 9:], state, **options, method="stream")
    fresh = module.init_state(2, num_bytes=2 * BLOCK)
    _, read = module.apply(params, ids, fresh, segment_ids=jnp.ones_like(ids), method="prefill")
    rows = jnp.array([[1] * BLOCK, [0] * BLOCK])
    _, kept = module.apply(params, ids, read, segment_ids=rows, method="prefill")
    for held in (state, streamed, read, kept):
        keys = module.apply(params, held.recent, method=lambda model, z: model.down.keys(z))
        for found, known in zip((held.read_keys, held.read_values[:, 0]), keys, strict=True):
            seen = np.asarray(held.recent_valid)
            assert seen.any(1).all()
            assert_close(np.asarray(found)[seen], np.asarray(known)[seen], n=64)
    for name in ("read_keys", "read_values"):
        np.testing.assert_array_equal(getattr(streamed, name)[1], getattr(state, name)[1])
        np.testing.assert_array_equal(getattr(kept, name)[1], getattr(read, name)[1])


@pytest.mark.parametrize("rows", [1, 2])
def test_the_head_of_one_row_is_turned_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    decoder = Decoder(config, PATCHER, dtype=jnp.bfloat16)
    params = {"model": drawn(config.build(patcher=PATCHER))["params"]}
    monkeypatch.setattr("jaxblt.inference.narrow.is_one_launch", lambda dtype: True)
    state = unroll_state(init_decoder(decoder, rows, num_bytes=2 * BLOCK))
    made = narrow_params(unrolled(decoder), rows, unroll_params(params), state).get(PREPARED, {})
    if rows > 1:
        assert not made
        return
    columns = made["model"]["head"][TURNED]
    known = params["model"]["embedding"]["bytes"].T.astype(jnp.bfloat16)
    assert columns.shape == (16, 320)
    np.testing.assert_array_equal(np.asarray(columns[:, :260]), np.asarray(known))
    assert not np.asarray(columns[:, 260:]).any()


@pytest.mark.parametrize("taps", [1, 3, 7])
def test_taps_of_one_row_are_summed_as_those_of_several(taps: int) -> None:
    past = jax.random.normal(jax.random.key(0), (3, 5, taps))
    weights = jax.random.normal(jax.random.key(1), (5, taps + 1))
    apart = jnp.concatenate([next_output(past[i : i + 1], weights) for i in range(3)])
    assert_close(np.asarray(apart), np.asarray(next_output(past, weights)), n=taps)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_modes_of_one_row_are_summed_as_those_of_several(implementation: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    x, state = jax.random.normal(keys[0], (3, 5, 1)), jax.random.normal(keys[1], (3, 5, 6))
    poles, residues = -jnp.exp(jax.random.normal(keys[2], (5, 6))), jax.random.normal(keys[3], (5, 6))

    def run(x: Any, state: Any) -> Any:
        options = {"initial_state": state, "output_final_state": True, "implementation": implementation}
        return modal_conv(x, poles, residues, **options)

    apart = [run(x[i : i + 1], state[i : i + 1]) for i in range(3)]
    for found, known in zip(zip(*apart, strict=True), run(x, state), strict=True):
        assert_close(np.concatenate(found), np.asarray(known), n=6)
