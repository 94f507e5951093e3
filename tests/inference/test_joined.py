"""Adapters' matrices joined once before decoding: the same logits, and no copy of a weight at a byte."""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxblt.adapters import AdapterConfig, ChunkMean, Governor, Prefix, RouterConfig, attach
from jaxblt.inference import Decoder, decode_step, init_decoder
from jaxblt.inference.narrow import narrow_params
from jaxblt.inference.unroll import unroll_params, unrolled
from jaxblt.mixers import AttentionConfig, HyenaConfig
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.patching import PatcherConfig, make_patches
from pallas_kernels.routed_lora import Joined
from tests.parameters import drawn
from tests.tolerances import relative_error

ROWS, LAYERS, DIM = 3, 2, 16
HEADS = AttentionConfig(dim=DIM, num_heads=2)
STACK = StackConfig(dim=DIM, num_layers=LAYERS, pattern="A", mixers={"A": HEADS}, mlp_dim=24)
ADAPTER = AdapterConfig(sites=("mixer/*", "mlp/*"), rank=4, alpha=8.0)
ROUTER = RouterConfig(reads=(ChunkMean(), Prefix(2)), chunk=4, hidden=8)
GROUPS = {"mixer/q/q k v", "mixer/out/out", "mlp/gate/gate up", "mlp/down/down"}
ADAPTERS = {
    "static": ADAPTER,
    "codes": AdapterConfig(sites=ADAPTER.sites, rank=4, router=ROUTER),
    "bank": AdapterConfig(sites=ADAPTER.sites, rank=4, blocks=2, router=ROUTER),
    "governor": AdapterConfig(sites=ADAPTER.sites, rank=4, governor=Governor(start=0.5)),
}
IN_TURNS = pytest.mark.slow(days=28, group="decoding")


def joined_of(params: Any) -> dict[str, Joined]:
    """What was joined, by path, without the layer."""
    leaves = flatten_dict(params.get("prepared", {}).get("model", {}))
    return {"/".join(path).split("block_0/")[-1]: leaf for path, leaf in leaves.items()}


@IN_TURNS
@pytest.mark.parametrize("name", ADAPTERS)
def test_bytes_have_the_logits_of_matrices_apart(name: str) -> None:
    each = GROUPS - {"mixer/q/q k v", "mlp/gate/gate up"} | {f"mixer/{n}/{n}" for n in "qkv"}
    each |= {f"mlp/{n}/{n}" for n in ("gate", "up")}
    check_logits(STACK, ADAPTERS[name], each if name == "governor" else GROUPS)


@IN_TURNS
@pytest.mark.parametrize("name", ["static", "codes"])
def test_channels_first_is_joined_too(name: str) -> None:
    stack = dataclasses.replace(STACK, pattern="H", mixers={"H": HyenaConfig(dim=DIM)})
    check_logits(stack, ADAPTERS[name], {"mixer/in/in", "mlp/gate/gate up", "mlp/down/down"})


def check_logits(stack: StackConfig, adapter: AdapterConfig, groups: set[str]) -> None:
    config = attach(ByteLMConfig(stack=stack), adapter)
    decoder = unrolled(Decoder(config, dtype=jnp.bfloat16))
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (ROWS, 9)), jnp.int32)
    params = unroll_params({"model": drawn(config.build(), ids)["params"]})
    state = other = init_decoder(decoder, ROWS, num_bytes=12)
    given = narrow_params(decoder, ROWS, params, state)
    assert set(joined_of(given)) == groups
    wide = unrolled(Decoder(config))
    exact = init_decoder(wide, ROWS, num_bytes=12)
    run, whole = (jax.jit(partial(decode_step, d)) for d in (decoder, wide))
    errors = []
    for column in ids.T:
        ones = jnp.ones_like(column)
        expected, _, exact = whole(params, column, exact, ones)
        apart, _, state = run(params, column, state, ones)
        found, _, other = run(given, column, other, ones)
        errors.append([relative_error(a, expected) for a in (found, apart)])
    ours, theirs = np.mean(errors, 0)
    assert ours < 1.25 * theirs


def copies(decoder: Decoder, params: Any, state: Any) -> int:
    """Bytes of arrays, as large as a weight, that a step puts side by side."""
    ids = jnp.zeros((1,), jnp.int32)
    program = jax.make_jaxpr(partial(decode_step, decoder))(params, ids, state, ids + 1)
    joined = [e.outvars[0].aval.size for e in _equations(program.jaxpr) if e.primitive.name == "concatenate"]
    return sum(size for size in joined if size > DIM * DIM)


def _equations(jaxpr: Any) -> Any:
    """Of a program, and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for below in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner := getattr(below, "jaxpr", below), "eqns"):
                yield from _equations(inner)


def shapes(config: Any, patcher: Any = None, dtype: Any = jnp.bfloat16) -> tuple[Decoder, Any, Any]:
    """A decoder of layers apart, its parameters and a state, as shapes."""
    decoder, ids = unrolled(Decoder(config, patcher, dtype=dtype)), jnp.ones((1, 16), jnp.int32)
    given = {} if patcher is None else {"patches": jax.eval_shape(partial(make_patches, patcher), ids)}
    made = nn.meta.unbox(jax.eval_shape(decoder.model.build().init, jax.random.key(0), ids, **given))
    state = jax.eval_shape(partial(init_decoder, decoder, 1, num_bytes=16))
    return decoder, {"model": made["params"]}, state


@pytest.mark.slow(days=28, group="costly", turn="inference/test_joined")
def test_stacks_under_a_condition_are_joined_too() -> None:
    """The latent stack of a byte-patched model moves where a patch closes."""
    blt = BLTConfig(STACK, STACK, STACK, hash=None, bridge_heads=2)
    config = attach(blt, ADAPTERS["codes"], stacks=("latent", "decoder"))
    decoder, params, state = shapes(config, PatcherConfig(mode="space", block_size=16, capacity=8))
    given = jax.eval_shape(partial(narrow_params, decoder, 1), params, state)
    assert set(given["prepared"]["model"]) == {"latent", "decoder"}
    assert copies(decoder, given, state) == 0 < copies(decoder, params, state)
    groups = {path for paths in _paths(given) for path in paths}
    kernels = [(path, leaf) for path, leaf in flatten_dict(given["model"]).items() if path[-1] == "kernel"]
    assert all(
        (leaf.dtype == jnp.float32) == (path[:-1] in groups or "router" in path) for path, leaf in kernels
    )


def _paths(given: Any) -> list[set[tuple[str, ...]]]:
    """Of the sites of each group."""
    return [
        {(*path[:-2], name) for name in path[-1].split()} for path in flatten_dict(given["prepared"]["model"])
    ]


@pytest.mark.slow(days=28, group="costly")
def test_products_in_fp32_stay_apart() -> None:
    decoder, params, state = shapes(attach(ByteLMConfig(stack=STACK), ADAPTER), dtype=jnp.float32)
    assert jax.eval_shape(partial(narrow_params, decoder, 1), params, state) == params
