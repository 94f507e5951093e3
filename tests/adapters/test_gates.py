"""Gates: a code that scales groups of a product's heads."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import (
    AdapterConfig,
    ChunkMean,
    Governor,
    Prefix,
    RouterConfig,
    TopK,
    attach,
    distill,
    fuse,
    save_peft,
    split_params,
    warm_start,
)
from jaxblt.adapters.update.attach import describe_sites
from jaxblt.adapters.update.row_adapters import choose_adapters
from jaxblt.layers import Linear
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.testing import check_adapter
from jaxblt.training.stored.serialize import from_json, to_json
from tests.parameters import drawn
from tests.tolerances import assert_close

ROUTER = RouterConfig(chunk=4, reads=(ChunkMean(), Prefix(3)), hidden=8)
GATES = AdapterConfig(sites=(), gates=("mixer/v", "mlp/down"), rank=2, router=ROUTER, code=(TopK(1),))
STACK = StackConfig(
    dim=8, num_layers=2, pattern="A", mixers={"A": AttentionConfig(dim=8, num_heads=4)}, mlp_dim=12
)
MODEL = ByteLMConfig(stack=STACK)
IDS = jnp.zeros((1, 8), jnp.int32)


class Heads(nn.Module):
    """A product with four heads of three channels and a gate."""

    equation: str
    bias: Any = None

    @nn.compact
    def __call__(self, x: Any, code: Any = None) -> Any:
        names, sizes = ("embed", "heads", "head_dim"), {"h": 4, "k": 3}
        with AdapterConfig(sites=(), gates=("q",)).inside(self.path, 0, code):
            return Linear(self.equation, sizes, names, bias=self.bias, name="q")(x)


@pytest.mark.parametrize("result", ["bthk", "bhkt"])
def test_each_group_of_heads_is_scaled_by_its_number(result: str) -> None:
    rng = np.random.default_rng(0)
    x, code = (jnp.asarray(rng.standard_normal((2, 5, n)), jnp.float32) for n in (6, 2))
    code = code.at[..., 1].set(0.0)
    module = Heads(f"btd,dhk->{result}")
    params = drawn(module, x, code)
    q = params["params"]["q"]
    assert q["adapter"]["scale"].shape == (4, 3)
    plain = np.einsum(f"btd,dhk->{result}", x, q["kernel"])
    for given, numbers in ((code, np.repeat(np.asarray(code), 2, -1)), (None, np.ones((1, 1, 4)))):
        factor = np.einsum(f"bthk->{result}", 1 + numbers[..., None] * np.asarray(q["adapter"]["scale"]))
        assert_close(module.apply(params, x, given), plain * factor, n=6)
    base, coded = (module.apply(params, x, c) for c in (jnp.zeros_like(code), code))
    still = np.einsum(f"bthk->{result}", np.broadcast_to(np.arange(4)[:, None] > 1, (2, 5, 4, 3)))
    np.testing.assert_array_equal(coded == base, still)


def test_the_bias_is_not_scaled() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 6)), jnp.float32)
    plain, shifted = Heads("btd,dhk->bthk"), Heads("btd,dhk->bthk", nn.initializers.ones)
    params = drawn(shifted, x)
    added = shifted.apply(params, x) - plain.apply(params, x)  # pyright: ignore[reportOperatorIssue]
    assert_close(added, jnp.broadcast_to(params["params"]["q"]["bias"], added.shape), n=6)


@pytest.mark.slow(days=28, group="costly")
def test_what_a_gate_promises() -> None:
    only = ("start", "merged", "learns", "chunked")
    assert check_adapter(attach(MODEL, GATES).stack, only=only, length=14) == list(only)


def shapes_of(config: Any) -> Any:
    return nn.meta.unbox(jax.eval_shape(config.build().init, jax.random.key(0), IDS))["params"]


def test_the_names_of_the_base_stay_and_gates_are_described() -> None:
    config = attach(MODEL, GATES)
    base, trained = split_params(shapes_of(config))
    assert base == shapes_of(MODEL)
    block = trained["stack"]["periods"]["block_0"]
    assert block["mixer"]["v"]["adapter"]["scale"].shape == (2, 4, 2)
    assert from_json(to_json(config)) == config
    lines = describe_sites(config, 1, 0, 1000)
    assert lines[0] == "gates           stack: A:mixer/v, A:mlp/down"
    mixed = dataclasses.replace(GATES, sites=("mixer/out",), levels=(("mlp/*", "token"),))
    found = describe_sites(attach(MODEL, mixed), 1, 0, 1000)
    assert "adapters        stack, rank 2: A:mixer/out" in found
    assert "levels          stack, token: mlp/down" in found


@pytest.mark.slow(days=28, group="costly")
def test_rows_have_the_logits_of_their_merged_gates() -> None:
    config = attach(MODEL, GATES)
    params = drawn(config.build(), IDS)["params"]
    chosen = jax.tree.map(jnp.asarray, choose_adapters(config, ["base", "static"]))
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (2, 8)), jnp.int32)
    found = np.asarray(jax.jit(config.build().apply)({"params": params, "chosen": chosen}, ids)[0])
    plain = jax.jit(lambda params: MODEL.build().apply({"params": params}, ids)[0])
    for row, code in enumerate((jnp.zeros(2), jnp.ones(2))):
        merged = fuse(config, params, code=code)[1]
        assert_close(found[row], np.asarray(plain(merged))[row], n=96)
    assert not np.allclose(found[1], np.asarray(plain(split_params(params)[0]))[1], atol=1e-2)


def test_a_gate_distilled_is_merged_at_the_same_code() -> None:
    config, code = attach(MODEL, GATES), jnp.asarray([0.3, -0.6])
    params = drawn(config.build(), IDS)["params"]
    merged, distilled = fuse(config, params, code=code)[1], fuse(*distill(config, params, code))[1]
    jax.tree.map(lambda a, b: assert_close(a, b, n=8), distilled, merged)
    down = params["stack"]["periods"]["block_0"]["mlp"]["down"]
    expected = (
        down["kernel"] * (1 + np.repeat(np.asarray(code), 4) * np.asarray(down["adapter"]["scale"]))[:, None]
    )
    assert_close(merged["stack"]["periods"]["block_0"]["mlp"]["down"]["kernel"], expected, n=8)


def gates(**changes: Any) -> Any:
    return attach(MODEL, dataclasses.replace(GATES, **changes))


BANK = AdapterConfig(rank=4, blocks=2, router=ROUTER)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: gates(gates=("mixer/w",)),
            r"pattern 'mixer/w' matches no product; the nearest names are \['mixer/",
        ),
        (lambda: gates(sites=("mixer/*",)), r"site 'mixer/v' of stack 'stack' is given a rank .* and a gate"),
        (
            lambda: gates(rank=3),
            r"site 'mixer/v' of stack 'stack' has 4 heads, and the code 3 numbers, .* set blocks",
        ),
        (lambda: gates(governor=Governor()), r"gates = .* and governor = .*: leave one of them out"),
        (
            lambda: save_peft("none", gates(), {}),
            r"hold LoRA only, and the config's adapter has gates \('mixer/v'",
        ),
        (
            lambda: warm_start(attach(MODEL, BANK), {}, [(gates(router=None, code=()), {})] * 2),
            r"loras\[0\] has an adapter with gates on stack 'stack', expected static LoRA",
        ),
    ],
)
def test_what_is_refused(build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)
