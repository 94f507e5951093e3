"""Patterns of bridges and bridges in turns: their masks, patches ahead, byte by byte, memory."""

from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.layers import FP8, dense
from jaxblt.mixers import AttentionConfig, GatedRecurrenceConfig
from jaxblt.models import BLTConfig, StackConfig
from jaxblt.models.bridge_patterns import count_tiles, patches_around, read_distances
from jaxblt.models.bridge_turns import in_turns
from jaxblt.patching import PatcherConfig
from jaxblt.patching.patches import from_closed
from jaxblt.precision.config import Fp8Config
from jaxblt.precision.sites import first_amax, in_fp8
from pallas_kernels.attention import presets
from tests.parameters import drawn
from tests.tolerances import assert_close, tol

BLOCK, CAPACITY = 16, 8


def test_masks_are_those_of_the_definition():
    dilated = (0, 1, 2, 4, 8, 16, 32, 64)
    assert read_distances("latest", 4, causal=True) is None
    assert read_distances("dilated", 65, causal=True) == dilated
    both = read_distances("dilated", 65, causal=False)
    assert both is not None
    assert set(both) == {sign * d for d in dilated for sign in (1, -1)}
    assert len(both) == 15
    assert read_distances("local_global", 200, causal=True) == (*range(64), 64, 128, 192)
    # The local part is that of the preset on both sides, but for its one key more
    near = [
        d
        for d in range(-63, 64)
        if presets.local_global().sees(np.int32(1000), np.int32(1000 - d)) and (1000 - d) % 64
    ]
    assert set(near) <= set(read_distances("local_global", 100, causal=False) or ())


def test_skipped_tiles_are_counted():
    """Bytes in patches of two, 512 of which fill a block: a band and every 64th, and what a loop counts."""
    latest, valid = np.repeat(np.arange(512), 2)[None] - 1, np.ones((1, 512), bool)
    valid[0, 500:] = False
    for pattern in ("dilated", "local_global"):
        distances = read_distances(pattern, 300, causal=True)
        seen = {
            (byte // 64, (patch - d) // 64)
            for byte, patch in enumerate(latest[0])
            for d in distances
            if patch >= 0 and 0 <= patch - d < 500
        }
        dense = {
            (byte // 64, key // 64)
            for byte, patch in enumerate(latest[0])
            for key in range(min(patch + 1, 500))
        }
        found = count_tiles(latest, valid, distances)
        assert found == (len(seen), len(dense))
        assert found[0] < found[1]


def test_patches_ahead_equal_a_loop():
    rng = np.random.default_rng(0)
    segments = np.array([[1] * 32 + [2] * 25 + [0] * 7], np.int32)
    cuts = rng.random(segments.shape) < 0.3
    z = np.arange(4 * CAPACITY, dtype=np.float32).reshape(1, 4, CAPACITY, 1)

    @jax.jit
    def around(cuts, segments):
        patches = from_closed(cuts, segments, block_size=BLOCK, capacity=CAPACITY)
        return patches, *patches_around(jnp.asarray(z), patches, reach=3)

    patches, keys, latest, valid = jax.device_get(around(cuts, segments))
    real = [(n, p) for n in range(4) for p in range(CAPACITY) if patches.lengths[0, n, p] > 0]
    documents = np.asarray(patches.segment_ids)[0]
    for n in range(4):
        for s in range(BLOCK):
            slot = int(patches.patch_ids[0, n, s])
            if slot == CAPACITY:
                assert int(latest[0, n, s]) == -1
                continue
            own = real.index((n, slot))
            for d in range(-3, 4):
                m = int(latest[0, n, s]) - d
                there = 0 <= own - d < len(real) and documents[real[own - d]] == documents[n, slot]
                assert bool(valid[0, n, m]) == there, (n, s, d)
                if there:
                    assert float(keys[0, n, m, 0]) == float(z[0][real[own - d]][0])


def config_of(**options) -> BLTConfig:
    window = AttentionConfig(dim=16, num_heads=2, window=6)
    local = StackConfig(dim=16, num_layers=1, pattern=("w",), mlp_dim=0, mixers={"w": window}, scan=False)
    latent = replace(local, dim=24, pattern=("r",), mixers={"r": GatedRecurrenceConfig(dim=24)})
    return BLTConfig(
        encoder=local, latent=latent, decoder=local, hash=None, bridge_heads=2, look_back=5, **options
    )


@pytest.mark.slow(days=28, group="decoding")
def test_byte_by_byte_and_piece_by_piece_equal_the_parallel_pass():
    patcher = PatcherConfig(mode="static", patch_size=2, block_size=BLOCK)
    model = config_of(bridge_pattern="dilated", bridge_chunk=1).build(patcher=patcher)
    ids = np.random.default_rng(1).integers(4, 260, (2, 3 * BLOCK)).astype(np.int32)
    params = {"params": drawn(model, ids)["params"]}
    assert params["params"]["down"]["bias"].shape == (2, 4)
    logits = np.asarray(jax.jit(model.apply)(params, ids)[0])
    step, state, out = jax.jit(partial(model.apply, method="step")), model.init_state(2, num_bytes=64), []
    for t in range(ids.shape[1]):
        row, _, state = step(params, ids[:, t], state)
        out.append(np.asarray(row))
    np.testing.assert_allclose(np.stack(out, 1), logits, **tol(jnp.float32, 1024))
    prefill, fed = jax.jit(partial(model.apply, method="prefill")), model.init_state(2, num_bytes=64)
    last, _ = prefill(params, ids, fed, segment_ids=np.ones_like(ids))
    np.testing.assert_allclose(last, logits[:, -1], **tol(jnp.float32, 1024))


@pytest.mark.slow(days=28, group="gradients")
def test_turns_are_exact_and_take_less_memory():
    """Values and gradients of one block at a time equal those of all; what the compiler plans falls with the chunk."""
    patcher = PatcherConfig(mode="static", patch_size=4, block_size=64)
    ids = jnp.asarray(np.random.default_rng(2).integers(4, 260, (2, 1024)), jnp.int32)
    z = jnp.asarray(np.random.default_rng(3).standard_normal((2, 16, 16, 24)), jnp.float32)
    h = jnp.asarray(np.random.default_rng(4).standard_normal((2, 1024, 16)), jnp.float32)
    found, sizes = [], []
    params = None
    for chunk in (None, 4, 1):
        model = config_of(bridge_chunk=chunk).build(patcher=patcher)
        params = drawn(model, np.asarray(ids)) if params is None else params

        def loss(params, h, z, model=model):
            patches = from_closed(
                jnp.arange(1024)[None] % 4 == 3 * jnp.ones((2, 1), int),
                jnp.ones((2, 1024), jnp.int32),
                block_size=64,
                capacity=16,
            )
            up = model.apply(params, h, patches, method="latent_forward")
            down = model.apply(params, h, z, patches, None, method="_read_patches")
            return (up * up).sum() + (down * down).sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(params, h, z).compile()
        found.append(jax.tree.leaves(compiled(params, h, z)))
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert_close(one, two, n=4096)
    assert sizes[2] < sizes[1] < sizes[0], sizes


CONFIG = Fp8Config(scaling="delayed")


class Up(nn.Module):
    """A product of blocks."""

    chunk: int | None

    def setup(self) -> None:
        self.up = dense(16, axes=("embed", "latent"), dtype=jnp.bfloat16, name="up")

    def __call__(self, x: Any) -> Any:
        return in_turns(lambda module, x: module.up(x), self, (x,), chunk=self.chunk)


@pytest.mark.slow(days=28, group="costly", turn="models/test_bridge_turns")
def test_turns_observe_the_largest_entry_of_all() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 4, 3, 16), jnp.bfloat16)
    boxed = Up(None).init(jax.random.key(0), x)["params"]
    amax = jax.tree.map(lambda a: a.at[:, 0].set(3), first_amax(CONFIG, [("up",)], boxed))

    def observed(chunk: int | None) -> Any:
        def loss(amax: Any) -> Any:
            with in_fp8(CONFIG):
                y: Any = Up(chunk).apply({"params": nn.meta.unbox(boxed), FP8: amax}, x)
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jax.grad(loss)(amax)["up"]["amax"]

    np.testing.assert_array_equal(observed(1), observed(None))
