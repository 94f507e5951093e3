"""Prefill with the sequence split and decoding with split caches give what one device gives, and gather nothing."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import (
    AttentionConfig,
    ExplicitFilter,
    GatedRecurrenceConfig,
    HyenaConfig,
    ImplicitFilter,
    MixerConfig,
    ModalFilter,
    init_state,
)
from jaxblt.mixers.driver.sequence import SHORTEST, splits_call
from jaxblt.parallel import make_mesh
from jaxblt.testing.collectives import collectives
from tests.parameters import drawn
from tests.tolerances import assert_close, relative_error

SEQ = 4
SPLIT = SHORTEST * SEQ
CALLS = (SPLIT, SPLIT, 5, 1, 1)
LENGTH = sum(CALLS)
CAPACITY = -(-LENGTH // SEQ) * SEQ + SEQ
WIDE: dict[str, Any] = {"dim": 8, "num_heads": 4, "num_kv_heads": 2}
CONFIGS: dict[str, MixerConfig] = {
    "rope": AttentionConfig(**WIDE),
    "alibi": AttentionConfig(**WIDE, position="alibi"),
    "window": AttentionConfig(**WIDE, window=9),
    "window_beyond_a_stretch": AttentionConfig(**WIDE, window=100, position="none"),
    "window_beyond_the_capacity": AttentionConfig(**WIDE, window=2 * CAPACITY),
    "modal": HyenaConfig(dim=8, filter=ModalFilter(modes=4, max_timescale=64.0)),
    "explicit": HyenaConfig(dim=8, filter=ExplicitFilter(taps=90), short_taps=4),
    "implicit": HyenaConfig(dim=8, filter=ImplicitFilter(filter_len=600, width=5)),
    "recurrence": GatedRecurrenceConfig(dim=8),
}


def packed() -> np.ndarray:
    """Segment ids: documents that cross calls and devices, holes on edges, a row that ends early and goes on."""
    ids = np.ones((2, LENGTH), np.int32)
    ids[0, 30:50], ids[0, 120:140], ids[0, 200:], ids[0, SPLIT + 20 :] = -1, -1, 2, 4
    ids[1, SPLIT - 70 : SPLIT] = 0
    ids[1, SPLIT + 100 : SPLIT + 260], ids[1, SPLIT + 260 :] = 3, 0
    ids[1, -2:] = 3
    return ids


def feed(step: Any, params: Any, x: Any, ids: Any, state: Any) -> Any:
    """Outputs of the calls one after another, and the last state."""
    outputs, begin = [], 0
    for size in CALLS:
        here = slice(begin, begin + size)
        y, state = step(params, x[:, here], segment_ids=None if ids is None else ids[:, here], state=state)
        outputs.append(y)
        begin += size
    return np.concatenate(outputs, 1), state


@functools.cache
def subject(name: str) -> tuple[nn.Module, Any, Any]:
    module = CONFIGS[name].build()
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 8)).astype(np.float32)
    return module, drawn(module, x), x


MESHES = ({"data": 1, "seq": 4}, {"data": 2, "seq": 2})
CASES = [
    ("rope", "packed", 0),
    ("modal", "packed", 0),
    ("recurrence", "packed", 1),
    ("rope", "whole", 1),
    ("alibi", "packed", 1),
    ("window", "packed", 0),
    ("explicit", "packed", 0),
    ("implicit", "whole", 0),
]
TURNS = pytest.mark.slow(days=28, group="decoding")
REST = [
    pytest.param(name, layout, mesh, marks=pytest.mark.slow(days=28, group="rings and splits"))
    for name in CONFIGS
    for layout in ("whole", "packed")
    for mesh in range(len(MESHES))
    if (name, layout, mesh) not in CASES
]


def mesh_of(which: int = 0) -> Any:
    shape = MESHES[which]
    return make_mesh(**shape, devices=jax.devices()[: shape["data"] * shape["seq"]])


@pytest.mark.parametrize(
    ("name", "layout", "mesh"), [*(pytest.param(*case, marks=TURNS) for case in CASES), *REST]
)
def test_prompts_and_tokens_as_on_one_device(name: str, layout: str, mesh: int) -> None:
    """Two prompts of split tokens, a few tokens, and single ones: the parallel pass, and one device's stream."""
    module, params, x = subject(name)
    ids = packed() if layout == "packed" else None
    with jax.set_mesh(mesh_of(mesh)):
        sizes = [splits_call(size) for size in CALLS]
        found, after = feed(jax.jit(module.apply), params, x, ids, start(name))
    assert sizes == [True, True, False, False, False]
    if ids is None:
        assert_close(found, jax.jit(module.apply)(params, x)[0], n=LENGTH * 8)
        return
    expected, state = feed(jax.jit(module.apply), params, x, ids, start(name))
    assert_close(found, expected, n=LENGTH * 8)
    jax.tree.map(functools.partial(assert_close, dtype=jnp.float32, n=LENGTH * 8), after, state)


@pytest.mark.slow(days=28, group="rings and splits")
@pytest.mark.parametrize("name", ["rope", "modal", "explicit"])
def test_in_bf16_a_split_call_errs_as_one_device_does(name: str) -> None:
    """Both against fp32, by the norm; and the two from each other no more than the table allows."""
    _, params, x = subject(name)
    module = CONFIGS[name].build(dtype=jnp.bfloat16)
    call = jax.jit(lambda x, state: module.apply(params, x, state=state)[0])
    exact = jax.jit(subject(name)[0].apply)(params, x[:, :SPLIT])[0]
    one = call(x[:, :SPLIT], start(name, jnp.bfloat16))
    with jax.set_mesh(mesh_of()):
        split = call(x[:, :SPLIT], start(name, jnp.bfloat16))
    assert relative_error(split, exact) < 1.1 * relative_error(one, exact)
    assert_close(split, one)


def start(name: str, dtype: Any = jnp.float32) -> Any:
    return init_state(CONFIGS[name], 2, capacity=CAPACITY, dtype=dtype)


@functools.cache
def compiled(size: int) -> tuple[Any, Any]:
    """A call of the attention with a split cache: the program, and the state that it leaves."""
    module, params, x = subject("rope")
    with jax.set_mesh(mesh_of()):
        args = (params, x[:, :size])
        program = jax.jit(lambda params, x, state: module.apply(params, x, state=state)).lower(
            *args, start("rope")
        )
        program = program.compile()
        return program, program(*args, start("rope"))[1]


@pytest.mark.slow(days=28, group="costly", turn="parallel/test_decoding")
@pytest.mark.parametrize("size", [SPLIT, 1])
def test_a_device_holds_its_part_of_the_cache(size: int) -> None:
    """From the empty state on, and after a prompt or a token."""
    _, after = compiled(size)
    with jax.set_mesh(mesh_of()):
        states = (start("rope"), after)
    for state in states:
        assert state.k.shape == (2, CAPACITY, 2, 2)
        for array in (state.k, state.v, state.times):
            assert {shard.data.shape[1] for shard in array.addressable_shards} == {CAPACITY // SEQ}


def test_a_token_exchanges_no_more_than_its_output() -> None:
    found = collectives(compiled(1)[0])
    assert {c.kind for c in found} == {"all-reduce"}
    output = 2 * WIDE["dim"] * 4
    assert max(c.bytes for c in found) == output, found


def test_a_prompt_gathers_no_row() -> None:
    found = collectives(compiled(SPLIT)[0])
    keys = 2 * 2 * (CAPACITY // SEQ) * 2 * 2 * 4
    assert not [c for c in found if c.kind in ("all-gather", "all-to-all")], found
    assert max(c.bytes for c in found) <= keys, found


@pytest.mark.slow(days=28, group="costly")
def test_a_row_whose_tokens_are_not_in_front_is_nan() -> None:
    """Splitting moves no token, so that what only moving could mend does not pass for a result."""
    module, params, x = subject("recurrence")
    ids = np.ones((2, SPLIT), np.int32)
    ids[0, 10] = 0
    with jax.set_mesh(mesh_of()):
        y, _ = jax.jit(module.apply)(params, x[:, :SPLIT], segment_ids=ids, state=start("recurrence"))
    assert np.isnan(y[0][ids[0] > 0]).all()
    assert np.isfinite(y[1]).all()


@pytest.mark.parametrize(
    ("size", "capacity", "words"),
    [
        (1, CAPACITY + 2, [f"cache of {CAPACITY + 2} slots", "4 devices", f"capacity={CAPACITY + 4}"]),
        (SPLIT, SPLIT - 4, [f"prompt of {SPLIT} tokens", f"cache of {SPLIT - 4}", f"capacity={SPLIT}"]),
        (SPLIT + 1, 2 * SPLIT, [f"T = {SPLIT + 1}", "4 devices", f"pad it to {SPLIT + 4}"]),
    ],
)
def test_what_does_not_fit_is_named_before_compiling(size: int, capacity: int, words: list[str]) -> None:
    module, params, _ = subject("rope")
    state = init_state(CONFIGS["rope"], 2, capacity=capacity)
    with jax.set_mesh(mesh_of()), pytest.raises(ValueError) as caught:
        jax.eval_shape(module.apply, params, jnp.zeros((2, size, 8)), state=state)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_cache_made_on_the_mesh_has_whole_runs_of_slots() -> None:
    with jax.set_mesh(mesh_of()):
        state = init_state(CONFIGS["rope"], 2, capacity=10)
    assert (state.capacity, state.k.shape[1]) == (10, 12)
