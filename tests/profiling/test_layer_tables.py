"""Pictures of routing and attention: values of the layers' own pass, and a file that holds the same."""

import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import AttentionConfig, StateEngineConfig
from jaxblt.mixers.driver.recording import COLLECTION, kept_tables, record_tables
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.profiling.memory_picture import plot_memory
from tests.parameters import drawn
from tests.profiling.test_memory_picture import TEXT, shown, written

DIM = 8
MIXERS: dict[str, Any] = {
    "engine": StateEngineConfig(DIM, 2, num_slots=3),
    "attention": AttentionConfig(DIM, 2),
}
MODEL = ByteLMConfig(stack=StackConfig(DIM, 4, ("engine", "attention"), MIXERS, mlp_dim=0)).build()


@pytest.fixture(scope="module")
def params() -> Any:
    return drawn(MODEL, jnp.zeros((1, 8), jnp.int32))["params"]


@pytest.mark.slow(days=28, group="costly", turn="profiling/test_layer_tables")
@pytest.mark.parametrize(("what", "layers"), [("routing", [0, 2]), ("attention", [1, 3])])
def test_picture_and_file_hold_what_the_layers_did(
    params: Any, what: Any, layers: Any, tmp_path: Any
) -> None:
    picture = plot_memory(MODEL, TEXT, params=params, what=what, out=tmp_path / "picture")
    values = json.loads((tmp_path / "picture.json").read_text(encoding="utf-8"))
    assert [layer["layer"] for layer in values["layers"]] == layers
    assert shown(picture.figure) == written(values)
    if what == "attention":
        for layer in values["layers"]:
            weights = np.array(layer["weights"]).reshape(2, len(TEXT) + 1, -1)
            np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
            assert not np.triu(weights, 1).any()
        return
    ids = jnp.asarray(values["ids"], jnp.int32)[None]
    _, sown = jax.jit(lambda p: MODEL.apply({"params": p}, ids, mutable=["metrics"]))(params)
    logged = sown["metrics"]["stack"]["periods"]["block_0"]["mixer"]
    for period, layer in enumerate(values["layers"]):
        reads, routes = (np.array(layer[name]).mean(1) for name in ("reads", "routes"))
        np.testing.assert_allclose(reads, logged["state_read_mass"][0].value[period], rtol=1e-5)
        by_head = routes.reshape(2, 3).mean(0)
        np.testing.assert_allclose(by_head, logged["state_route_mass"][0].value[period], rtol=1e-5)


def test_weights_times_values_are_the_output() -> None:
    """With a window, rotary phases, shared keys and a head as wide as a third of the keys."""
    mixer = AttentionConfig(DIM, 4, num_kv_heads=2, window=5).build()
    x = jax.random.normal(jax.random.key(0), (1, 7, DIM))

    @jax.jit
    def run(key: Any) -> Any:
        params = nn.meta.unbox(mixer.init(key, x))["params"]
        with record_tables("attention"):
            (y, _), kept = mixer.apply({"params": params}, x, mutable=[COLLECTION])
        return params, y, kept

    params, y, kept = run(jax.random.key(1))
    weights = np.asarray(kept_tables(kept[COLLECTION])["weights"])
    v = np.repeat(np.einsum("btd,dgk->btgk", x, params["v"]["kernel"]), 2, axis=2)
    expected = np.einsum("bthz,bzhk,hkd->btd", weights, v, params["out"]["kernel"])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert (weights[0, 6, :, :2] == 0).all()
    assert (weights[0, 6, :, 2:] > 0).all()


def test_what_cannot_be_tabled_is_refused(params: Any) -> None:
    plain = ByteLMConfig(stack=StackConfig(DIM, 1, "recurrence", mlp_dim=0)).build()
    own = drawn(plain, jnp.zeros((1, 8), jnp.int32))["params"]
    with pytest.raises(
        ValueError, match="no layer of this ByteLM shows routing: give its stack StateEngineConfig"
    ):
        plot_memory(plain, TEXT, params=own, what="routing")
    with pytest.raises(ValueError, match="at most 512 ids, got 601: draw a shorter passage"):
        plot_memory(MODEL, b"a" * 600, params=params, what="attention")
