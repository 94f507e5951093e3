"""Forms of updates: Kronecker factors, FiLM within bounds, and diagonals, alone and behind a low-rank update."""

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
    attach,
    distill,
    fuse,
    save_peft,
    split_params,
)
from jaxblt.adapters.experimental.diagonal import Diagonal
from jaxblt.adapters.experimental.film import Film
from jaxblt.adapters.experimental.kronecker import Kronecker
from jaxblt.adapters.update.attach import describe_sites
from jaxblt.layers import Linear
from jaxblt.mixers import AttentionConfig, HyenaConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.testing import check_adapter
from jaxblt.training.stored.serialize import from_json, to_json
from tests.parameters import drawn
from tests.tolerances import assert_close

ROUTER = RouterConfig(chunk=4, reads=(ChunkMean(), Prefix(3)), hidden=8)
FORMS = (
    ("mlp/down", Kronecker(inputs=3, outputs=2, terms=4)),
    ("mixer/out", Diagonal()),
    ("mixer/v", Film(shift=0.0)),
)
ADAPTER = AdapterConfig(sites=("mixer/out",), forms=FORMS, rank=2, router=ROUTER)
STACK = StackConfig(
    dim=8, num_layers=2, pattern="A", mixers={"A": AttentionConfig(dim=8, num_heads=4)}, mlp_dim=12
)
MODEL = ByteLMConfig(stack=STACK)
IDS = jnp.zeros((1, 8), jnp.int32)


class Heads(nn.Module):
    """A product of six channels with two heads of three channels and one form."""

    form: Any
    equation: str = "btd,dhk->bthk"
    sites: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x: Any, code: Any = None) -> Any:
        router = None if code is None else ROUTER
        config = AdapterConfig(sites=self.sites, forms=(("q", self.form),), rank=2, router=router)
        with config.inside(self.path, 0, code):
            return Linear(self.equation, {"h": 2, "k": 3}, ("embed", "heads", "head_dim"), name="q")(x)


@pytest.fixture(scope="module")
def rows() -> tuple[Any, Any]:
    """Rows of five tokens, and a code of two numbers for each."""
    rng = np.random.default_rng(0)
    x, code = (jnp.asarray(rng.standard_normal((2, 5, n)), jnp.float32) for n in (6, 2))
    return x, code


def dense_update(form: Any, own: Any, code: Any) -> np.ndarray:
    """Return dW at each token, [B, T, K, N]."""
    if isinstance(form, Diagonal):
        return np.einsum("bte,en,kn->btkn", code, own["scale"], np.eye(6))
    terms = np.stack([np.kron(v, u) for v, u in zip(own["v"], own["u"], strict=True)])
    return np.einsum("bte,ekn->btkn", np.repeat(code, len(terms) // code.shape[-1], -1), terms)


@pytest.mark.parametrize("form", [Kronecker(inputs=3, outputs=2, terms=4), Diagonal()], ids=lambda f: f.name)
@pytest.mark.parametrize("result", ["bthk", "bhkt"])
def test_a_linear_form_is_its_dense_update(form: Any, result: str, rows: Any) -> None:
    """(V ⊗ U) x is the explicit Kronecker product; a code scales the terms."""
    x, code = rows
    module = Heads(form, f"btd,dhk->{result}")
    params = drawn(module, x, code)["params"]
    assert set(params["q"]) == {"kernel", "form"}
    update = dense_update(form, jax.tree.map(np.asarray, params["q"]["form"][form.name]), np.asarray(code))
    kernel = np.asarray(params["q"]["kernel"]).reshape(6, 6) + update
    expected = np.einsum("btk,btkn->btn", x, kernel).reshape(2, 5, 2, 3)
    assert_close(module.apply({"params": params}, x, code), np.einsum(f"bthk->{result}", expected), n=24)


def test_low_rank_plus_diagonal_is_the_sum_of_both(rows: Any) -> None:
    x, _ = rows
    params = drawn(Heads(Diagonal(), sites=("q",)), x)["params"]
    q = jax.tree.map(np.asarray, params["q"])
    low_rank = 8.0 * np.einsum("kr,rhd->khd", q["adapter"]["v"], q["adapter"]["u"]).reshape(6, 6)
    kernel = q["kernel"].reshape(6, 6) + low_rank + np.diag(q["form"]["diagonal"]["scale"][0])
    found = Heads(Diagonal(), sites=("q",)).apply({"params": params}, x)
    assert_close(found, np.einsum("btk,kn->btn", x, kernel).reshape(2, 5, 2, 3), n=24)


def test_film_keeps_its_bounds_whatever_the_code(rows: Any) -> None:
    """With numbers a thousand times too large factors and shifts stand at their bounds; gradients stay finite."""
    x, code = rows
    module, form = Heads(Film(factor=0.2, shift=0.1)), Film(factor=0.2, shift=0.1)
    params = drawn(module, x, code)["params"]
    own, plain = params["q"]["form"]["film"], Heads(Diagonal()).apply({"params": _off(params)}, x)
    factor, shift = (np.tanh(np.asarray(code) @ np.asarray(own[n])) for n in ("scale", "shift"))
    expected = np.asarray(plain).reshape(2, 5, 6) * (1 + 0.2 * factor) + 0.1 * shift
    run = jax.jit(lambda params, code: module.apply({"params": params}, x, code))
    assert_close(run(params, code).reshape(2, 5, 6), expected, n=6)
    one, zero = jnp.ones((2, 5, 6)), jnp.zeros((2, 5, 6))
    large = form.change(own, one, zero, 1e3 * code), form.change(own, one, one, 1e3 * code)
    assert 0.099 < np.abs(large[0]).max() <= 0.1
    factors = np.asarray(large[1] - large[0])
    assert 0.799 < factors.min() < 0.81
    assert 1.19 < factors.max() <= 1.2 + 1e-6
    gradient = jax.jit(jax.grad(lambda code: jnp.sum(run(params, code))))(1e3 * code)
    assert np.isfinite(gradient).all()


class Out(nn.Module):
    """A Hyena whose last product, in fp32 if the rest is in float16, has all forms."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        forms = Film(), Diagonal(), Kronecker(inputs=2, outputs=2)
        config = AdapterConfig(sites=(), forms=tuple(("mixer/out", form) for form in forms))
        with config.inside(self.path, 0, None):
            return HyenaConfig(dim=6).build(dtype=self.dtype, name="mixer")(x)[0]


def test_forms_of_a_product_that_is_wider_than_its_layer(rows: Any) -> None:
    x, _ = rows
    params = drawn(Out(jnp.float32), x)
    known, found = (jax.jit(Out(dtype).apply)(params, x) for dtype in (jnp.float32, jnp.float16))
    assert_close(found, np.asarray(known), jnp.float16, n=36)


def _off(params: Any) -> Any:
    """Return a product's parameters with a diagonal of zeros, which changes nothing."""
    return {"q": {**params["q"], "form": {"diagonal": {"scale": jnp.zeros((1, 6))}}}}


@pytest.fixture(scope="module")
def model() -> tuple[Any, Any]:
    """A model's config with all forms, and its parameters."""
    config = attach(MODEL, ADAPTER)
    return config, drawn(config.build(), IDS)["params"]


@pytest.mark.slow(days=28, group="costly")
def test_a_form_is_off_until_it_is_named_and_on_once_it_is_trained(model: Any) -> None:
    """The base has no parameter of it; with its zeros the output is the base's, and with numbers it is not."""
    config, params = model
    base, trained = split_params(params)
    block = trained["stack"]["periods"]["block_0"]
    assert jax.tree.map(jnp.shape, base) == jax.tree.map(jnp.shape, drawn(MODEL.build(), IDS)["params"])
    assert set(block["mlp"]["down"]) == set(block["mixer"]["v"]) == {"form"}
    assert set(block["mixer"]["out"]) == {"adapter", "form"}
    assert from_json(to_json(config)) == config
    lines = describe_sites(config, 1, 0, 1000)
    assert "forms           stack, film: A:mixer/v" in lines
    code = jnp.asarray([0.3, -0.6])
    merged = [fuse(config, params, code=c)[1] for c in (0 * code, code)]
    jax.tree.map(np.testing.assert_array_equal, merged[0], base)
    kernels = [tree["stack"]["periods"]["block_0"]["mlp"]["down"]["kernel"] for tree in merged]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-2


@pytest.mark.slow(days=28, group="costly")
def test_forms_distilled_are_merged_at_the_same_code(model: Any) -> None:
    config, params = model
    code = jnp.asarray([0.3, -0.6])
    merged, static = fuse(config, params, code=code)[1], distill(config, params, code)
    jax.tree.map(lambda a, b: assert_close(a, b, n=24), fuse(*static)[1], merged)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), static[1])
    summed = fuse(static[0], narrow)[1]["stack"]["periods"]["block_0"]["mlp"]["down"]["kernel"]
    assert summed.dtype == jnp.float32


@pytest.mark.slow(days=28, group="costly", turn="adapters/experimental/test_forms")
def test_what_forms_promise() -> None:
    only = ("merged", "learns", "chunked")
    assert check_adapter(attach(MODEL, ADAPTER).stack, only=only, length=14) == list(only)


def formed(*forms: Any, **changes: Any) -> Any:
    return attach(MODEL, dataclasses.replace(ADAPTER, forms=forms, **changes))


def merge_a_shift() -> None:
    config = formed(("mixer/v", Film()), router=None)
    fuse(config, drawn(config.build(), IDS)["params"])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: formed(("mlp/down", Kronecker(5, 2))),
            r"site 'mlp/down', which has 12 inputs and 8 outputs: use div",
        ),
        (lambda: formed(("mlp/down", Kronecker(3, 2, 3))), r"terms = 3 at site .* 2 numbers: use a multiple"),
        (lambda: formed(("mlp/down", Diagonal())), "12 inputs and 8 outputs: name square products"),
        (lambda: formed(("mixer/w", Film())), r"pattern 'mixer/w' matches no product"),
        (lambda: formed(("mixer/v", Film()), ("mixer/*", Film(0.1))), "given two forms called 'film'"),
        (lambda: formed(("mixer/v", Film)), r"got \('mixer/v', <class .*Film'>\): call it, Film\(...\)"),
        (lambda: formed(("mixer/v", Film()), governor=Governor()), "forms = .* and governor = .*: leave one"),
        (lambda: save_peft("none", formed(("mixer/v", Film())), {}), "hold LoRA only, .* has forms"),
        (merge_a_shift, r"product 'mixer/v' has no bias, .* such as Film\(shift=0.0\)"),
    ],
)
def test_what_is_refused(build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)
