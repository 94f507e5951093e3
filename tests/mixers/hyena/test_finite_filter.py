"""Long finite filters: implementations by name, and taps made by groups of channels."""

import functools
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import HyenaConfig, ImplicitFilter
from jaxblt.mixers.driver.marks import mark
from jaxblt.mixers.hyena import finite_filter
from jaxblt.mixers.hyena.finite_filter import LongHistory
from jaxblt.mixers.hyena.implicit_taps import ImplicitTaps
from jaxblt.testing import check_mixer
from jaxblt.testing.subject import Subject
from jaxblt.testing.tolerances import bound, typical
from pallas_kernels.long_conv import TABLE, explain, hopper
from pallas_kernels.runtime import compiling_for
from tests.mixers.in_bfloat16 import check_in_bfloat16
from tests.pallas_kernels.linear_state import HOPPER, equations
from tests.parameters import drawn
from tests.tolerances import assert_close

CHANNELS, LENGTH = 16, 1024
LONG = ImplicitFilter(LENGTH, width=4)
KERNELS = [entry.name for entry in TABLE if "mosaic_gpu" in entry.name]


@functools.cache
def hyena(name: str | None, dtype: Any = jnp.float32) -> Any:
    config = HyenaConfig(dim=4, filter=ImplicitFilter(600, width=4), implementation=name, packed=False)  # pyright: ignore[reportArgumentType]
    x = np.random.default_rng(0).standard_normal((1, 40, 4)).astype(dtype)
    module = config.build(dtype=dtype)
    return jax.jit(lambda x: module.apply(drawn(module, x), x)[0])(x)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("name", [entry.name for entry in TABLE if "mosaic_gpu" not in entry.name])
def test_every_implementation_of_the_op_runs(name: str) -> None:
    assert_close(hyena(name), hyena(None), n=40 * 4)


def test_the_op_is_given_the_gates_of_whole_rows(monkeypatch: Any) -> None:
    """Kernels fuse them; apart they are two passes over three streams each."""
    given = []

    def recorded(*streams: Any, **options: Any) -> Any:
        given.append([options[name] is not None for name in ("pre_gate", "post_gate")])
        return finite_filter.long.long_conv(*streams, **options)

    monkeypatch.setattr(finite_filter, "long_conv", recorded)
    config = HyenaConfig(dim=4, order=3, filter=ImplicitFilter(600, width=4))
    x = np.ones((1, 40, 4), np.float32)
    jax.eval_shape(lambda x: config.build().init_with_output(jax.random.key(0), x), x)
    assert given == [[True, False], [True, True]]


def test_the_kernel_says_where_it_runs() -> None:
    with pytest.raises(
        ValueError, match="'mosaic_gpu_vjp' cannot run here: it is compiled for compute capability"
    ):
        hyena("mosaic_gpu_vjp", jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_of_the_op_runs(name: str) -> None:
    assert_close(hyena(name, jnp.bfloat16), hyena(None), jnp.bfloat16, n=40 * 4)


@pytest.mark.parametrize("name", KERNELS)
def test_a_hyena_takes_kernels_by_name(name: Any) -> None:
    config = HyenaConfig(dim=4, filter=ImplicitFilter(600, width=4), implementation=name, packed=False)
    x, module = jnp.ones((1, 40, 4), jnp.bfloat16), config.build(dtype=jnp.bfloat16)
    with compiling_for(HOPPER):
        program = jax.make_jaxpr(lambda x: module.init_with_output(jax.random.key(0), x)[0][0])(x)
    assert "mpmd_map" in {e.primitive.name for e in equations(program.jaxpr)}


@pytest.mark.parametrize("name", KERNELS)
def test_calls_with_a_state_run_where_a_kernel_is_named(name: Any) -> None:
    """They add history and piece in fp32, which kernels do not take."""
    config = HyenaConfig(dim=4, filter=ImplicitFilter(600, width=4), implementation=name)
    x, module = jnp.ones((1, 40, 4), jnp.bfloat16), config.build(dtype=jnp.bfloat16)
    state = config.init_state(1, capacity=80, dtype=jnp.bfloat16)
    with compiling_for(HOPPER):
        y, after = jax.eval_shape(
            lambda x, s: module.init_with_output(jax.random.key(0), x, state=s)[0], x, state
        )
    assert y.shape == x.shape
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def grouped(monkeypatch: Any, limit: int, causal: bool, channels: int = CHANNELS) -> tuple[Any, Any]:
    """Value and gradients of u and of what makes the taps, and the program's temporary bytes."""
    monkeypatch.setattr(finite_filter, "TAPS_BYTES", limit)
    module = ImplicitTaps(LONG, channels, 1 if causal else 2)
    params = nn.meta.unbox(module.init(jax.random.key(0), 1))
    draw = np.random.default_rng(0).standard_normal
    u, dy = (jnp.asarray(draw((1, channels, LENGTH)), jnp.float32) for _ in range(2))

    def run(params: Any, u: Any, bias: Any) -> Any:
        shared, per_channel = module.apply(params, LENGTH, method="parts")
        core = LongHistory(shared, per_channel, bias, LONG, causal=causal, implementation=None)
        return core.run((u, None, None), mark(None), None)[0]

    def both(params: Any, u: Any, bias: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(run, params, u, bias)
        return y, vjp(dy)

    args = (params, u, jnp.ones(channels), dy)
    program = jax.jit(both).lower(*args).compile()
    return program(*args), program.memory_analysis().temp_size_in_bytes


@pytest.mark.slow(days=28, group="costly", turn="mixers/hyena/test_finite_filter")
@pytest.mark.parametrize("causal", [True, False])
def test_taps_by_groups_of_channels_are_the_same_and_take_less(monkeypatch: Any, causal: bool) -> None:
    whole, most = grouped(monkeypatch, 2**30, causal)
    parts, less = grouped(monkeypatch, 0, causal)
    for got, want in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        assert_close(got, want, n=2 * LENGTH * CHANNELS)
    taps = 4 * CHANNELS * LENGTH * (1 if causal else 2)
    # Beside the streams, which either keeps: all taps and their gradients are gone.
    assert less <= most - 2 * taps


@pytest.mark.parametrize(("limit", "kept"), [(2**30, True), (0, False)])
def test_backward_makes_the_taps_of_a_group_again(monkeypatch: Any, limit: int, kept: bool) -> None:
    """All of them would be as large as a row of the stream."""
    monkeypatch.setattr(finite_filter, "TAPS_BYTES", limit)
    module = ImplicitTaps(LONG, CHANNELS, 1)
    params = jax.eval_shape(lambda key: module.init(key, 1), jax.random.key(0))

    def run(params: Any, u: Any) -> Any:
        made_of = module.apply(params, LENGTH, method="parts")
        core = LongHistory(*made_of, jnp.ones(CHANNELS), LONG, causal=True, implementation=None)
        return core.run((u, None, None), mark(None), None)[0]

    streams = jax.ShapeDtypeStruct((3, CHANNELS, LENGTH), jnp.float32)
    vjp = jax.eval_shape(lambda params, u: jax.vjp(run, params, u)[1], params, streams)
    assert (CHANNELS * LENGTH in {x.size for x in jax.tree.leaves(vjp)}) == kept


@pytest.mark.slow(days=28, group="costly", turn="mixers/hyena/test_finite_filter")
def test_a_prime_number_of_channels_makes_no_more_groups(monkeypatch: Any) -> None:
    """Groups of equally many of 17 channels would be 17 of one channel, one after another."""
    sizes = []

    def recorded(v: Any, *rest: Any, **options: Any) -> Any:
        sizes.append(v.shape[1])
        return finite_filter.long.long_conv(v, *rest, **options)

    monkeypatch.setattr(finite_filter, "long_conv", recorded)
    whole, _ = grouped(monkeypatch, 2**30, True, channels=17)
    parts, _ = grouped(monkeypatch, 0, True, channels=17)
    assert set(sizes) == {17, 3}
    for got, want in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        assert_close(got, want, n=2 * LENGTH * 17)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_dense_products_pass_the_mixers_suite_on_a_gpu(causal: bool) -> None:
    filter = ImplicitFilter(600, width=8)
    config = HyenaConfig(dim=8, order=3, filter=filter, causal=causal, implementation="monarch")
    streamed = ("chunked", "state", "rows_advance_alone", "causal") if causal else ()
    with jax.default_matmul_precision("highest"):  # else projections in fp32 are products in TF32 there
        check_mixer(config, only=("packed", "holes", "gradients", "every_parameter", "bfloat16", *streamed))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_pass_what_the_mixers_suite_asks_in_bfloat16_on_a_gpu(monkeypatch: Any, causal: bool) -> None:
    monkeypatch.setattr(hopper, "TIMED", 1)  # rows of the suite are short, and fp32 goes elsewhere
    config = HyenaConfig(dim=8, order=3, filter=ImplicitFilter(600, width=8), causal=causal)
    streams = jax.ShapeDtypeStruct((2, 8, 40), jnp.bfloat16)
    assert "long_conv: mosaic_gpu_half on " in explain(streams, jax.ShapeDtypeStruct((8, 40), jnp.float32))
    check_mixer(config, only=("bfloat16",))


IN_BFLOAT16 = [
    pytest.param("monarch", 24, marks=pytest.mark.slow(days=28, group="further properties of mixers")),
    *(
        pytest.param(name, length, marks=pytest.mark.gpu)
        for name in ("mosaic_gpu_vjp", "mosaic_gpu_half")
        for length in (24, 600)
    ),
]
"""Rows of one block of a kernel's packed rows, and of more."""


@pytest.mark.parametrize(("name", "length"), IN_BFLOAT16)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_properties_of_the_mixers_suite_in_bfloat16(
    name: Any, length: int, packed: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    filter = ImplicitFilter(600, width=8)
    config = HyenaConfig(dim=8, filter=filter, causal=causal, packed=packed, implementation=name)
    check_in_bfloat16(config, monkeypatch, length=length)


BY_NAME = [
    pytest.param("monarch", marks=pytest.mark.slow(days=28, group="properties of kernels")),
    *(pytest.param(name, marks=pytest.mark.gpu) for name in KERNELS),
]


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_rows_in_bfloat16_are_as_exact_as_those_of_xla(name: Any, causal: bool) -> None:
    """Documents, holes and padding that holds NaN: values and every gradient, beside fp32."""

    def config(implementation: Any) -> HyenaConfig:
        return HyenaConfig(
            dim=8, filter=ImplicitFilter(600, width=8), causal=causal, implementation=implementation
        )

    exact = Subject(config("xla"), length=1100)
    ids = jnp.asarray(exact.with_holes(exact.documents()))
    x = np.where((ids > 0)[..., None], exact.x, np.nan).astype(jnp.bfloat16)
    dy = exact.noise(3, x.shape).astype(jnp.bfloat16)

    def passes(implementation: Any, dtype: Any) -> Any:
        module = config(implementation).build(dtype=dtype)

        @jax.jit
        def both(params: Any, x: Any, dy: Any) -> Any:
            y, vjp = jax.vjp(lambda params, x: module.apply(params, x, segment_ids=ids)[0], params, x)
            return y, vjp(dy)

        return jax.tree.leaves(both(exact.params, x.astype(dtype), dy.astype(dtype)))

    with jax.default_matmul_precision("highest"):  # else projections in fp32 are products in TF32 on a GPU
        truth = passes("xla", jnp.float32)
    limit = bound(jnp.bfloat16, ids.size)
    for want, found, plain in zip(
        truth, passes(name, jnp.bfloat16), passes("xla", jnp.bfloat16), strict=True
    ):
        assert typical(found, want) <= max(1.5 * typical(plain, want), limit)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_future_changes_nothing_in_bfloat16(name: Any) -> None:
    """Beyond what rounding does: a row's steps share one scale."""
    config = HyenaConfig(dim=8, filter=ImplicitFilter(1100, width=8), packed=False)
    given = Subject(config, length=1100)
    module = replace(config, implementation=name).build(dtype=jnp.bfloat16)
    other = np.concatenate([given.x[:, :500], given.noise(4, given.x.shape)[:, 500:]], axis=1)
    run = jax.jit(lambda x: module.apply(given.params, x)[0][:, :500])
    past, same_past = (run(x.astype(jnp.bfloat16)) for x in (given.x, other))
    assert typical(past, same_past) <= bound(jnp.bfloat16, 1100 * 8)
