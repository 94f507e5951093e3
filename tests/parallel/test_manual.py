"""Mixers inside a `shard_map` of the caller's: over `seq`, over `data` alone, and over one inside the other."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxblt.mixers import MixerConfig
from jaxblt.parallel import make_mesh
from tests.mixers.configs import ALL
from tests.parallel.along import alone, expect_same, passes

LENGTH = 32
REGIONS: dict[str, tuple[tuple[P, set[str]], ...]] = {
    "all": ((P("data", "seq"), {"data", "fsdp", "seq", "tensor"}),),
    "seq": ((P(None, "seq"), {"seq"}),),
    "data": ((P("data"), {"data"}),),
    "seq in data": ((P(None, "seq"), {"seq"}), (P("data"), {"data"})),
}
"""Specs of arrays [B, T, ...] and the axes that are manual, the inner `shard_map` first."""


def differentiated(config: MixerConfig, region: str, check_vma: bool) -> Callable[..., Any]:
    """`passes` of a mixer in a region, which is derived; of nested ones gradients are taken inside.

    JAX 0.11.2 cannot derive a `shard_map` with `check_vma` inside another.
    """
    module, run = config.build(), passes
    inside = len(REGIONS[region]) > 1 and check_vma
    fn = (
        functools.partial(passes, module)
        if inside
        else lambda p, x, ids: module.apply(p, x, segment_ids=ids)[0]
    )
    for spec, axes in REGIONS[region]:
        given, results = (P(), *[spec] * (3 if inside else 2)), (spec, (P(), spec)) if inside else spec
        fn = jax.shard_map(fn, in_specs=given, out_specs=results, axis_names=axes, check_vma=check_vma)
    if inside:
        return fn

    def run(params: Any, x: Any, ids: Any, dy: Any) -> Any:
        y, back = jax.vjp(lambda p, x: fn(p, x, ids), params, x)
        return y, back(dy)

    return run


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", ALL)
def test_all(name: str, region: str, check_vma: bool) -> None:
    config = ALL[name]
    length, layout = (512, "whole") if "aligned" in name else (LENGTH, "holes")
    _, args, expected = alone(config, layout, length)
    with jax.set_mesh(make_mesh(data=2, seq=4)):
        found = jax.device_get(jax.jit(differentiated(config, region, check_vma))(*args))
    expect_same(found, expected, args[2], n=length * config.dim)
