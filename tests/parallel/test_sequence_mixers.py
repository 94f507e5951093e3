"""Linear mixers over a split sequence give what they give on one device, and gather nothing."""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxblt.mixers import (
    ExplicitFilter,
    GatedDeltaNetConfig,
    GatedLinearAttentionConfig,
    GatedRecurrenceConfig,
    HyenaConfig,
    ImplicitFilter,
    Mamba2Config,
    MixerConfig,
    ModalFilter,
    NeuralMemoryConfig,
    StateEngineConfig,
)
from jaxblt.parallel import make_mesh
from jaxblt.testing.collectives import collectives, spanning
from tests.pallas_kernels.jla import as_others_write
from tests.pallas_kernels.linear_state import relative_rms
from tests.parallel.along import alone, along, expect_same, passes
from tests.sampled import thinned

LENGTH = 8 * 11
MODAL = ModalFilter(modes=4, max_timescale=64.0)
IMPLICIT = ImplicitFilter(filter_len=600, width=5)
CONFIGS: dict[str, MixerConfig] = {
    "modal": HyenaConfig(dim=8, filter=MODAL),
    "modal_order3": HyenaConfig(dim=8, order=3, filter=MODAL),
    "modal_both": HyenaConfig(dim=8, filter=MODAL, causal=False),
    "modal_alone": HyenaConfig(dim=8, filter=MODAL, packed=False),
    "explicit": HyenaConfig(dim=8, filter=ExplicitFilter(taps=5), short_taps=4),
    "explicit_far": HyenaConfig(dim=8, filter=ExplicitFilter(taps=30), short_taps=1),
    "explicit_both": HyenaConfig(dim=8, filter=ExplicitFilter(taps=30), causal=False),
    "implicit": HyenaConfig(dim=8, filter=IMPLICIT),
    "implicit_both": HyenaConfig(dim=8, filter=IMPLICIT, causal=False),
    "recurrence": GatedRecurrenceConfig(dim=8),
    "delta": GatedDeltaNetConfig(dim=8, num_heads=2, head_dim=8, value_head_dim=4, chunk_size=4),
    "gated": GatedLinearAttentionConfig(dim=8, num_heads=2, gate_rank=3, chunk_size=4),
    "mamba2": Mamba2Config(dim=8, head_dim=8, state_dim=6, chunk_size=4),
    "engine": StateEngineConfig(dim=8, num_heads=2, num_slots=6, chunk_size=4),
}
FAR = ImplicitFilter(filter_len=4096)
OF_KERNELS: dict[str, MixerConfig] = {
    "implicit": HyenaConfig(dim=128, filter=FAR),
    "implicit_both": HyenaConfig(dim=128, filter=FAR, causal=False),
    "delta": GatedDeltaNetConfig(dim=128, num_heads=2),
    "gated": GatedLinearAttentionConfig(dim=128, num_heads=2),
    "mamba2": Mamba2Config(dim=128),
    "engine": StateEngineConfig(dim=128, num_heads=2, num_slots=64),
    "memory": NeuralMemoryConfig(dim=256, num_heads=4, head_dim=256, chunk_size=512),
}
"""Of sizes that GPU kernels take."""
LAYOUTS = ("whole", "crossing", "inside", "padded", "holes")
MESHES = ({"seq": 2}, {"seq": 4}, {"seq": 8}, {"seq": 4, "data": 2})
CASES = [
    ("modal", "crossing", 2),
    ("explicit", "holes", 1),
    ("implicit", "crossing", 2),
    ("recurrence", "inside", 3),
    ("delta", "holes", 1),
    ("gated", "crossing", 1),
    ("modal", "padded", 1),
    ("modal_both", "inside", 1),
    ("modal_alone", "whole", 3),
    ("explicit_far", "inside", 2),
    ("explicit_both", "padded", 2),
    ("implicit", "whole", 1),
    ("recurrence", "padded", 2),
]
TURNS = pytest.mark.slow(days=28, group="mixers and layouts over a sequence")
MATRIX = [
    (name, layout, mesh)
    for name, layout, mesh in itertools.product(CONFIGS, LAYOUTS, range(len(MESHES)))
    if not (name == "modal_alone" and layout in ("crossing", "inside"))
]


@functools.cache
def run(name: str, layout: str, mesh: int, length: int = LENGTH) -> tuple[Any, Any]:
    module, (params, *sequenced), _ = alone(CONFIGS[name], layout, length)
    return along(functools.partial(passes, module), params, sequenced, **MESHES[mesh])


@pytest.mark.parametrize(
    ("name", "layout", "mesh"),
    [pytest.param(*case, marks=TURNS) for case in dict.fromkeys((*CASES, *thinned(MATRIX, 28, tuple)))],
)
def test_split_equals_whole_forward_and_backward(name: str, layout: str, mesh: int) -> None:
    _, (_, _, ids, _), expected = alone(CONFIGS[name], layout, LENGTH)
    found, compiled = run(name, layout, mesh)
    expect_same(found, expected, ids, n=LENGTH * CONFIGS[name].dim)
    whole_rows = ("all-gather", "all-to-all") if not name.startswith("implicit") else ("all-gather",)
    gathered = spanning(collectives(compiled), LENGTH, kinds=whole_rows)
    # a device that convolves whole rows of its channels needs their documents, one integer a position
    assert not [c for c in gathered if c.dtype != "s32" or not name.startswith("implicit")], gathered


@pytest.mark.parametrize(
    "devices",
    [pytest.param(count, marks=pytest.mark.gpu(count=count)) for count in (2, 4)],
)
@pytest.mark.parametrize("name", OF_KERNELS)
@pytest.mark.parametrize("layout", ["whole", "crossing"])
def test_gpus_are_as_exact_as_one(layout: str, name: str, devices: int) -> None:
    """In bf16 and at a length that the kernels take: at most 1.3 times the error of one GPU, against fp32."""
    with as_others_write():
        check_devices(OF_KERNELS[name], layout, 4096, devices)


def check_devices(config: MixerConfig, layout: str, length: int, devices: int) -> None:
    """Outputs and every gradient, each by the root mean square of its error."""
    _, (params, x, ids, dy), _ = alone(config, layout, length)
    given = jnp.asarray(x, jnp.bfloat16), ids, jnp.asarray(dy, jnp.bfloat16)
    run = functools.partial(passes, config.build(dtype=jnp.bfloat16))
    wide = (given[0].astype(jnp.float32), ids, given[2].astype(jnp.float32))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(passes, config.build()))(params, *wide)
    single = jax.jit(run)(params, *given)
    found, _ = along(run, params, given, seq=devices)
    for (path, want), one, split in zip(
        jax.tree.leaves_with_path(expected), *(jax.tree.leaves(x) for x in (single, found)), strict=True
    ):
        assert relative_rms(split, want) <= 1.3 * relative_rms(one, want), jax.tree_util.keystr(path)


@pytest.mark.slow(days=28, group="rings and splits")
@pytest.mark.parametrize("layout", ["whole", "crossing"])
def test_chunks_within_a_shard_and_a_carry_between(layout: str) -> None:
    length = 600
    module, (params, *sequenced), expected = alone(CONFIGS["modal"], layout, length)
    found, compiled = along(functools.partial(passes, module), params, sequenced, seq=2)
    expect_same(found, expected, sequenced[1], n=length * 8)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    summed = [c for c in collectives(compiled) if c.kind == "all-reduce"]
    assert summed
    assert all(c.bytes <= largest for c in summed), (
        "a gradient is summed over devices before it is over chunks"
    )


def kinds(name: str, layout: str, mesh: int) -> set[str]:
    return {c.kind for c in collectives(run(name, layout, mesh)[1])}


@pytest.mark.slow(days=28, group="costly")
def test_each_filter_talks_in_its_own_way() -> None:
    assert "all-to-all" in kinds("implicit", "whole", 1)
    for name, layout, mesh in (
        ("modal", "crossing", 2),
        ("explicit_far", "inside", 2),
        ("recurrence", "padded", 2),
    ):
        assert "all-to-all" not in kinds(name, layout, mesh)
    assert "all-gather" not in kinds("explicit_far", "inside", 2)


@pytest.mark.slow(days=28, group="rings and splits")
@pytest.mark.parametrize(("name", "carry"), [("modal", 8 * 4), ("recurrence", 8), ("delta", 2 * 8 * 8)])
def test_what_is_carried_is_of_the_state_s_size(name: str, carry: int) -> None:
    """A summary holds a state and a decay or counts, for each of 2 rows and 8 devices, whatever the length."""
    layout, mesh = {"modal": ("crossing", 2), "recurrence": ("padded", 2), "delta": ("holes", 1)}[name]
    gathers = [c for c in collectives(run(name, layout, mesh)[1]) if c.kind == "all-gather"]
    assert gathers
    assert all(c.bytes <= 8 * 2 * carry * 4 for c in gathers), gathers


@pytest.mark.slow(days=28, group="costly")
def test_taps_of_an_implicit_filter_are_made_where_they_are_used() -> None:
    """No device holds the taps of all 8 channels, nor rows as long as the sequence of all of them."""
    text = run("implicit", "whole", 1)[1].as_text()
    shapes = {tuple(dims.split(",")) for dims in re.findall(r"[a-z][0-9]+\[([0-9,]+)\]", text)}
    assert any(str(LENGTH) in shape for shape in shapes)
    assert not [shape for shape in shapes if str(LENGTH) in shape and {"8", "16", "24"} & set(shape)]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (HyenaConfig(dim=6, filter=IMPLICIT), ["6 channels", "4 devices", "ModalFilter"]),
        (HyenaConfig(dim=8, filter=MODAL), ["T = 90", "4 devices", "92"]),
    ],
)
def test_what_does_not_divide_is_named_before_compiling(config: HyenaConfig, words: list[str]) -> None:
    x = jnp.zeros((1, 90 if config.dim == 8 else LENGTH, config.dim))
    params = jax.eval_shape(config.build().init, jax.random.key(0), x)
    with jax.set_mesh(make_mesh(data=2, seq=4)), pytest.raises(ValueError) as caught:
        jax.eval_shape(config.build().apply, params, jnp.concatenate([x, x]))
    assert all(word in str(caught.value) for word in words), str(caught.value)
