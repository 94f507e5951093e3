"""Mixers and models inside a `shard_map` of the caller's: over `seq`, over `data`, and over one inside the other."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxblt.mixers import (
    GatedRecurrenceConfig,
    GRUConfig,
    MACConfig,
    MAGConfig,
    NeuralMemoryConfig,
    SlotMemoryConfig,
    init_state,
)
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.models.pooling import pool
from jaxblt.parallel import SeqAxis, batch_axes, make_mesh, seq_axis
from jaxblt.patching import PatcherConfig
from tests.mixers.configs import ALL
from tests.parallel.along import alone, expect_same, passes
from tests.parameters import drawn
from tests.sampled import thinned
from tests.tolerances import assert_close

LENGTH = 32
REGIONS: dict[str, tuple[tuple[P, set[str]], ...]] = {
    "all": ((P("data", "seq"), {"data", "fsdp", "seq", "tensor"}),),
    "seq": ((P(None, "seq"), {"seq"}),),
    "data": ((P("data"), {"data"}),),
    "seq in data": ((P(None, "seq"), {"seq"}), (P("data"), {"data"})),
}
"""Specs of arrays [B, T, ...] and the axes that are manual, the inner `shard_map` first."""
MEMORIES = {
    "memory": NeuralMemoryConfig(dim=16, chunk_size=8),
    "mag": MAGConfig(dim=16, window=8, chunk_size=8),
    "mac": MACConfig(dim=16, chunk_size=8, segment_alignment=8),
    "slots": SlotMemoryConfig(dim=16, slots=6, interval=8),
}
MIXERS = ALL | MEMORIES
EACH_DAY = [("attention", "all", True), ("gru", "seq", False)]
CASES = [
    *EACH_DAY,
    *(
        pytest.param(*case, marks=pytest.mark.slow(days=28, group="rings and splits"))
        for case in thinned(list(itertools.product(MIXERS, REGIONS, (True, False))), 28, tuple)
        if case not in EACH_DAY
    ),
]


def in_region(fn: Callable[..., Any], region: str, check_vma: bool, given: Any = None) -> Callable[..., Any]:
    """`fn(params, *sequenced)` in a region; `given` of its results are gradients by parameters and inputs."""
    for spec, axes in REGIONS[region]:
        results = spec if given is None else (spec, (P(), spec))
        fn = jax.shard_map(
            fn,
            in_specs=(P(), *[spec] * (given or 2)),
            out_specs=results,
            axis_names=axes,
            check_vma=check_vma,
        )
    return fn


def differentiated(module: Any, region: str, check_vma: bool) -> Callable[..., Any]:
    """`passes` of a module, derived from outside of its region; inside where JAX 0.11.2 cannot."""
    if len(REGIONS[region]) > 1 and check_vma:
        return in_region(functools.partial(passes, module), region, check_vma, given=3)
    split = in_region(lambda p, x, ids: module.apply(p, x, segment_ids=ids)[0], region, check_vma)

    def run(params: Any, x: Any, ids: Any, dy: Any) -> Any:
        y, back = jax.vjp(lambda p, x: split(p, x, ids), params, x)
        return y, back(dy)

    return run


@pytest.mark.parametrize(("name", "region", "check_vma"), CASES)
def test_mixers_are_what_they_are_on_one_device(name: str, region: str, check_vma: bool) -> None:
    config = MIXERS[name]
    grid = getattr(config, "segment_alignment", 1) > 1
    length, layout = (4 * config.segment_alignment, "whole") if grid else (LENGTH, "holes")
    module, args, expected = alone(config, layout, length)
    with jax.set_mesh(make_mesh(data=2, seq=4)):
        found = jax.device_get(jax.jit(differentiated(module, region, check_vma))(*args))
    expect_same(found, expected, args[2], n=length * config.dim)


def stack(pattern: str) -> StackConfig:
    return StackConfig(dim=8, num_layers=2 * len(pattern), pattern=tuple(pattern), mixers=LAYERS)


LAYERS = {
    "H": ALL["hyena_modal"],
    "R": GatedRecurrenceConfig(dim=8),
    "W": dataclasses.replace(ALL["attention_window"], dim=8),
}
HASH = HashConfig(sizes=(3,), table_size=32)
PATCHER = PatcherConfig(mode="space", block_size=8, capacity=4)
MODELS: dict[str, Callable[[], Any]] = {
    "bytes": ByteLMConfig(stack=stack("HR"), hash=HASH).build,
    "patches": functools.partial(
        BLTConfig(
            encoder=stack("W"), latent=stack("H"), decoder=stack("W"), hash=HASH, bridge_heads=2, look_back=2
        ).build,
        patcher=PATCHER,
    ),
}


@pytest.mark.slow(days=28, group="models over a split axis")
@pytest.mark.parametrize("region", ["all", "seq", "data"])
@pytest.mark.parametrize("name", MODELS)
def test_models_with_scanned_layers_are_too(name: str, region: str) -> None:
    rng, module = np.random.default_rng(0), MODELS[name]()
    ids = jnp.asarray(rng.integers(4, 200, (2, 64)), jnp.int32)
    segments = jnp.asarray(np.where(np.arange(64) < 24, 1, 2) * np.ones((2, 1)), jnp.int32)
    params, weights = drawn(module, ids), rng.standard_normal((2, 64, 260)).astype(np.float32)

    def run(params: Any, ids: Any, segments: Any) -> Any:
        return module.apply(params, ids, segment_ids=segments)[0]

    def derived(fn: Callable[..., Any]) -> Any:
        return jax.jit(jax.value_and_grad(lambda p: jnp.sum(fn(p, ids, segments) * weights)))(params)

    expected = derived(run)
    with jax.set_mesh(make_mesh(data=2, seq=4)):
        found = derived(in_region(run, region, True))
    jax.tree.map(lambda got, want: assert_close(got, want, n=64 * 260), *jax.device_get((found, expected)))


def test_the_axis_is_seen_by_what_varies_over_it() -> None:
    seen = []

    def fn(x: Any, whole: Any) -> Any:
        seen.append((seq_axis(x), seq_axis(whole), seq_axis(), batch_axes()))
        return x

    mesh, own = make_mesh(data=2, seq=4), SeqAxis("seq", 4, manual=True)
    for check_vma in (True, False):
        split = jax.shard_map(
            fn, mesh=mesh, in_specs=(P(None, "seq"), P()), out_specs=P(None, "seq"), check_vma=check_vma
        )
        jax.eval_shape(split, jnp.ones((2, 8)), jnp.ones((2, 8)))
    assert seen == [(own, None, None, ()), (own, own, None, ())]


@pytest.mark.slow(days=28, group="costly")
def test_rows_that_do_not_vary_are_whole() -> None:
    module = GRUConfig(dim=4, num_heads=2).build()
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    params = drawn(module, x)

    def run(params: Any, x: Any) -> Any:
        return module.apply(params, x)[0]

    whole = jax.shard_map(run, mesh=make_mesh(data=1, seq=8), in_specs=P(), out_specs=P())
    assert_close(jax.jit(whole)(params, x), jax.jit(run)(params, x), n=12)


def test_what_needs_whole_rows_says_so() -> None:
    config = GatedRecurrenceConfig(dim=4)
    module, x = config.build(), jnp.ones((2, 8, 4))
    params, state = drawn(module, x), init_state(config, 2, capacity=8)
    calls: dict[str, Callable[..., Any]] = {
        "a call with a state": lambda x: module.apply(params, x, state=state)[0],
        "pooling": lambda x: pool(x, jnp.ones(x.shape[:2], bool), "mean"),
    }
    for what, call in calls.items():
        split = jax.shard_map(
            call, mesh=make_mesh(data=1, seq=8), in_specs=P(None, "seq"), out_specs=P(None, "seq")
        )
        with pytest.raises(ValueError, match=f"^{what} reads whole rows, .* among 8 devices: leave the axis"):
            jax.eval_shape(split, x)
