"""One site: when its product and its update are one call of the op, and that the base's bias is added after both."""

from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.core import subjaxprs

from jaxblt.adapters import AdapterConfig
from jaxblt.adapters.update.products import is_fusable
from jaxblt.adapters.update.site import adapted
from jaxblt.einsums import multiply
from jaxblt.layers import Linear
from jaxblt.models.remat import remat
from jaxblt.parallel import make_mesh
from pallas_kernels._dispatch import compiling_for
from pallas_kernels.runtime import record_choices
from tests.tolerances import assert_close

H200: Any = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
ADAPTER = AdapterConfig(sites=("q",), rank=4, alpha=8.0)
NAMES = ("embed", "heads", "head_dim")


class Site(nn.Module):
    """silu of the queries of some heads, with an adapter: its derivative needs the product."""

    heads: int
    width: int
    dtype: Any = jnp.bfloat16
    bias: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        sizes = {"h": self.heads, "k": self.width}
        with adapted(ADAPTER, self.path, 0, None):
            return nn.silu(Linear("btd,dhk->bthk", sizes, NAMES, self.dtype, self.bias, name="q")(x))


def traced(module: nn.Module, rows: int = 8) -> Any:
    """The program of a loss and its gradient of V and U, and the choices of ops, as they would be on an H200."""
    x = jax.ShapeDtypeStruct((rows, 16_384, 1024), jnp.bfloat16)
    params = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(0), x))["params"]

    def loss(update: Any, kernel: Any, x: Any) -> Any:
        own = {"q": {"kernel": kernel, "adapter": update}}
        return jnp.sum(jnp.square(module.apply({"params": own}, x).astype(jnp.float32)))

    with compiling_for(H200), record_choices() as lines:
        program = jax.make_jaxpr(jax.grad(loss))(params["q"]["adapter"], params["q"]["kernel"], x)
    return program, lines


def kernels(jaxpr: Any) -> list[str]:
    """Names of the kernels of a program."""
    own = [str(e.params["name"]) for e in jaxpr.eqns if e.primitive.name == "mpmd_map"]
    return own + [name for below in subjaxprs(jaxpr) for name in kernels(below)]


def test_product_and_update_are_one_kernel() -> None:
    program, lines = traced(Site(8, 128))
    assert lines == ["routed_lora: mosaic_gpu on NVIDIA H200"]
    assert kernels(program.jaxpr) == ["routed_lora", "routed_lora_dx"]


@pytest.mark.parametrize(("policy", "times"), [("dots", 1), ("full", 2)])
def test_what_the_kernel_made_is_kept_as_that_of_a_matmul(policy: Any, times: int) -> None:
    program, _ = traced(remat(Site, policy)(8, 128))
    assert kernels(program.jaxpr).count("routed_lora") == times


@pytest.mark.parametrize(
    ("mesh", "rows", "fuses"),
    [
        ({"data": 2, "fsdp": 4}, 8, True),
        ({"data": 2, "fsdp": 4}, 2, False),
        ({"data": 2, "seq": 4}, 8, False),
        ({"data": 2, "tensor": 4}, 8, False),
    ],
    ids=str,
)
def test_each_device_takes_its_rows_where_weights_are_whole(
    mesh: dict[str, int], rows: int, fuses: bool
) -> None:
    with jax.set_mesh(make_mesh(**{"data": 1} | mesh)):
        program, (line,) = traced(Site(8, 128), rows)
    assert kernels(program.jaxpr) == ["routed_lora", "routed_lora_dx"] * fuses
    assert fuses or "without w there is nothing to add it to" in line


def drawn(module: Site, x: Any) -> Any:
    rng = np.random.default_rng(0)
    shapes = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(0), x))
    return jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape), s.dtype), shapes)


@pytest.mark.slow(days=28, group="costly")
def test_rows_of_several_devices_have_the_values_and_gradients_of_one() -> None:
    module, x = (
        Site(2, 4, jnp.float32),
        jnp.asarray(np.random.default_rng(1).standard_normal((8, 3, 8)), jnp.float32),
    )
    params, found = drawn(module, x), []
    for mesh in ({"devices": jax.devices()[:1]}, {"data": 2, "fsdp": 4}):
        with jax.set_mesh(make_mesh(**mesh)):
            step = jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(module.apply(p, x))), (0, 1)))
            found.append(jax.tree.leaves(jax.device_get(step(params, x))))
    for one, several in zip(*found, strict=True):
        assert_close(several, one, n=200)


def test_the_bias_comes_after_the_update() -> None:
    module = Site(3, 5, jnp.float32, nn.initializers.ones)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 7, 6)), jnp.float32)
    params = drawn(module, x)
    q = params["params"]["q"]
    weight = q["kernel"] + 2.0 * jnp.einsum("dr,rhk->dhk", q["adapter"]["v"], q["adapter"]["u"])
    expected = jnp.einsum("btd,dhk->bthk", x, weight) + q["bias"][None, None]
    assert_close(jax.jit(module.apply)(params, x), nn.silu(expected), n=10)


@pytest.mark.parametrize(
    ("changes", "fuses"),
    [
        pytest.param({}, True, id="plain"),
        pytest.param({"accumulate": jnp.bfloat16}, True, id="accumulated in its dtype"),
        pytest.param({"accumulate": jnp.float32}, False, id="accumulated wider"),
        pytest.param({"precision": jax.lax.Precision.HIGHEST}, False, id="precision"),
        pytest.param(
            {"product": lambda *args, **kinds: multiply(*args, **kinds)}, False, id="another product"
        ),
        pytest.param({"equation": "btd,dhk->bhkt"}, True, id="channels first in y"),
        pytest.param({"equation": "btd,dhk->bhtk"}, False, id="time between channels in y"),
        pytest.param({"equation": "bdt,dhk->bthk"}, False, id="channels first in x"),
    ],
)
def test_what_is_fused(changes: dict[str, Any], fuses: bool) -> None:
    fields: dict[str, Any] = {"equation": "btd,dhk->bthk", "sizes": {}, "names": NAMES, "dtype": jnp.bfloat16}
    assert is_fusable(Linear(**fields | changes), rows=1) is fuses
