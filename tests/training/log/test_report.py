import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.patching import PatcherConfig, make_patches
from jaxblt.training.log.meter import Cost, Meter, peak_memory
from jaxblt.training.log.report import model_cost
from jaxblt.training.start.step_ahead import op_choices
from jaxblt.training.step import Task
from tests.mixer_table import table
from tests.training.tiny import TinyConfig


def shapes(model, *inputs):
    return nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"])


def test_cost_of_a_byte_model_by_hand():
    dim, length = 16, 32
    model = TinyConfig(dim=dim).build()
    params = shapes(model, jnp.zeros((1, length), jnp.int32))
    forward = 2 * length * dim + 2 * (2 * dim) * (4 * dim) + 2 * (4 * dim) * 260
    assert model_cost(Task(model), params, length) == Cost(byte=3 * forward, patch=0.0)


class OnPatches(nn.Module):
    """A product for each byte, and two for each slot."""

    patcher: PatcherConfig

    @nn.compact
    def __call__(self, ids, *, entropies=None):
        patches = make_patches(self.patcher, ids, entropies=entropies)
        x = jnp.zeros((*ids.shape, 4))
        z = jnp.zeros((*patches.lengths.shape, 8))
        sums = nn.Dense(5, name="byte")(x).sum() + nn.Dense(8, name="a")(nn.Dense(8, name="b")(z)).sum()
        return sums, patches


@pytest.mark.parametrize("capacity", [None, 6, 7])
def test_cost_of_patches_does_not_depend_on_empty_slots(capacity):
    patcher = PatcherConfig(mode="space", block_size=16, capacity=capacity)
    model = OnPatches(patcher)
    cost = model_cost(Task(model), shapes(model, jnp.zeros((1, 64), jnp.int32)), 64)
    assert cost.byte == pytest.approx(3 * 2 * 4 * 5)
    assert cost.patch == pytest.approx(3 * 2 * (64 + 64))
    assert cost.per_byte(4.0) == pytest.approx(3 * 2 * 4 * 5 + 3 * 2 * 128 / 4)


@pytest.mark.parametrize("pattern", ["A", "W", "H"])
def test_cost_of_a_byte_lm_is_near_six_a_parameter_plus_mixing(pattern):
    length, dim = 512, 128
    config = ByteLMConfig(
        stack=StackConfig(
            dim=dim,
            num_layers=2,
            pattern=pattern,
            mixers=table(attention=AttentionConfig(dim=dim), window=128),
        )
    )
    model = config.build()
    params = shapes(model, jnp.zeros((1, length), jnp.int32))
    weights = sum(x.size for x in jax.tree.leaves(params) if x.ndim >= 2)
    cost = model_cost(Task(model), params, length).byte
    assert 5.5 * weights < cost < 6 * weights + 2 * 12 * dim * length


@pytest.mark.slow(days=28, group="costly")
def test_ops_of_a_patched_model_are_explained_for_this_machine():
    small = StackConfig(dim=32, num_layers=2, pattern="HA")
    window = StackConfig(
        dim=32, num_layers=1, pattern="W", mixers=table(attention=AttentionConfig(dim=32), window=16)
    )
    config = BLTConfig(encoder=window, latent=small, decoder=window, hash=None)
    model, ids = (
        config.build(patcher=PatcherConfig(mode="static", block_size=32)),
        jnp.zeros((1, 64), jnp.int32),
    )
    params = shapes(model, ids)
    lines = op_choices(jax.jit(lambda p: model.apply({"params": p}, ids)[0]), params)
    named = {line.split(":")[0]: line for line in lines}
    assert {"attention", "short_conv", "modal_conv", "patch_attention.pool", "patch_attention.lookup"} <= set(
        named
    )
    assert "xla on cpu" in named["attention"]
    assert "not cudnn: it needs an NVIDIA GPU" in named["attention"]
    assert len(lines) == len(set(lines))


def test_meter_counts_time_and_leaves_pauses_out(monkeypatch):
    clock = [7.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    meter = Meter(Cost(byte=100.0, patch=1000.0), peak=1e6, seconds=50.0)
    clock[0] += 0.5
    meter.add(1000, waited=0.125)
    paused = clock[0]
    clock[0] += 2.0
    meter.pause(paused)
    found = meter.read({"bytes_per_patch": 4.0})
    assert found["bytes_per_second"] == 2000.0
    assert found["data_wait"] == 0.25
    assert found["mfu"] == pytest.approx((100 + 1000 / 4) * 2000 / 1e6)
    assert found["seconds"] == 52.5
    again = meter.read({})
    assert "bytes_per_second" not in again


def test_no_peak_no_utilisation():
    meter = Meter(Cost(1.0), peak=None)
    meter.add(10, 0.0)
    assert "mfu" not in meter.read({})


def test_memory_where_the_platform_tells(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"peak_bytes_in_use": 7}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(), Device()])
    assert peak_memory() == {"peak_memory_bytes": 7.0}
