"""Stacks: scanned and unrolled share parameters, remat keeps gradients, side outputs arrive, streaming."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxblt.mixers import AttentionConfig
from jaxblt.models import Stack, StackConfig, init_stack_state, stack_periods, unstack_periods
from pallas_kernels.runtime import compiling_for
from tests.adapters.update.test_site import H200
from tests.mixer_table import table
from tests.parameters import drawn
from tests.tolerances import assert_close, tol

ATTENTION = AttentionConfig(dim=16, num_heads=2)


def config(**changes):
    base = {"dim": 16, "num_layers": 5, "pattern": "HA", "mlp_dim": 24, "mixers": table(attention=ATTENTION)}
    return StackConfig(**(base | changes))


def inputs(length=12):
    return jax.random.normal(jax.random.key(1), (2, length, 16), jnp.float32)


@functools.cache
def build(cfg):
    stack = Stack(cfg)
    x = inputs()
    return stack, drawn(stack, x)["params"], x


def plain():
    return build(config())


def loss_of(cfg, x):
    return lambda params: jnp.sum(Stack(cfg).apply({"params": params}, x)[0] ** 2)


@pytest.mark.slow(days=28, group="costly", turn="models/test_stack")
def test_scanned_and_unrolled_share_checkpoints():
    stack, params, x = plain()
    unrolled = unstack_periods(params)
    y, _ = jax.jit(stack.apply)({"params": params}, x)
    z, _ = jax.jit(Stack(config(scan=False)).apply)({"params": unrolled}, x)
    np.testing.assert_allclose(np.asarray(y), np.asarray(z), **tol(jnp.float32, 64))
    assert sorted(unrolled) == ["period_0", "period_1", "rest"]
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
        params,
        stack_periods(unrolled),
    )


@pytest.mark.slow(days=28, group="costly", turn="models/test_stack")
def test_layers_do_not_share_parameters():
    stack = Stack(config(pattern="A", num_layers=2))
    params = nn.meta.unbox(jax.jit(stack.init)(jax.random.key(0), inputs()))["params"]
    kernels = params["periods"]["block_0"]["mlp"]["gate"]["kernel"]
    assert kernels.shape[0] == 2
    assert not np.array_equal(np.asarray(kernels[0]), np.asarray(kernels[1]))


@functools.cache
def plain_gradient():
    _, params, x = plain()
    return jax.jit(jax.value_and_grad(loss_of(config(), x)))(params)


@pytest.mark.slow(days=28, group="stacks and labels")
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_remat_keeps_loss_and_gradients(policy):
    _, params, x = plain()
    value, grads = plain_gradient()
    again, rematted = jax.jit(jax.value_and_grad(loss_of(config(remat=policy), x)))(params)
    np.testing.assert_allclose(float(value), float(again), rtol=1e-6)
    jax.tree.map(lambda a, b: assert_close(a, b, n=512), rematted, grads)


def test_dots_keeps_what_cudnn_returns_and_full_computes_it_again(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    x = jax.ShapeDtypeStruct((1, 64, 64), jnp.bfloat16)

    def passes(policy):
        """Count calls of cuDNN, of the forward and of the backward pass."""
        mixers = table(attention=AttentionConfig(dim=64, num_heads=1))
        cfg = config(dim=64, num_layers=1, pattern="A", mixers=mixers, remat=policy, scan=False)
        stack = Stack(cfg, jnp.bfloat16)
        with compiling_for(H200):
            params = nn.meta.unbox(jax.eval_shape(stack.init, jax.random.key(0), x))
            loss = lambda params, x: jnp.sum(stack.apply(params, x)[0].astype(jnp.float32))  # noqa: E731
            text = str(jax.make_jaxpr(jax.grad(loss))(params, x))
        return [text.count(f"dot_product_attention_{name}") for name in ("fwd", "bwd")]

    assert [passes(policy) for policy in ("none", "dots", "full")] == [[1, 1], [1, 1], [2, 1]]


@pytest.mark.slow(days=28, group="stacks and labels")
@pytest.mark.parametrize(("scan", "num_layers"), [(True, 8), (False, 4)])
def test_full_remat_needs_less_memory(scan, num_layers):
    """Scanned layers share their programs; those of unrolled ones take each its own time to compile."""
    cfg = config(num_layers=num_layers, scan=scan)
    _, params, _ = build(cfg)
    x = inputs(256)
    peaks = [
        jax.jit(jax.grad(loss_of(dataclasses.replace(cfg, remat=policy), x)))
        .lower(params)
        .compile()
        .memory_analysis()
        for policy in ("none", "full")
    ]
    assert peaks[1].temp_size_in_bytes < 0.7 * peaks[0].temp_size_in_bytes


@pytest.mark.slow(days=28, group="costly", turn="models/test_stack")
def test_offload_moves_block_inputs_to_the_host():
    _, params, x = plain()
    text = (
        jax.jit(jax.grad(loss_of(config(remat="offload"), x)))
        .trace(params)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "pinned_host" in text


class Sowing(nn.Module):
    """A mixer that counts in both collections."""

    @nn.compact
    def __call__(self, x, *, segment_ids=None, positions=None, state=None):
        scale = self.param(
            "scale", nn.with_logical_partitioning(nn.initializers.ones, ("norm",)), (x.shape[-1],)
        )
        self.sow("losses", "balance", jnp.mean(x**2))
        self.sow("metrics", "count", jnp.ones(()))
        return x * scale[None, None], state


@dataclasses.dataclass(frozen=True)
class SowingConfig:
    dim: int = 16
    causal: bool = True

    def build(self, *, dtype, name=None):
        return Sowing(name=name)

    def init_state(self, batch_size, *, capacity, dtype):
        return None


@pytest.mark.slow(days=28, group="stacks and labels")
@pytest.mark.parametrize("policy", ["none", "full"])
def test_side_outputs_arrive_through_scan_and_remat(policy):
    cfg = config(pattern="XA", mixers=table(attention=ATTENTION, X=SowingConfig()), remat=policy)
    _, params, x = build(cfg)

    @jax.jit
    @jax.grad
    def total(params):
        _, side = Stack(cfg).apply({"params": params}, x, mutable=["losses", "metrics"])
        losses = jax.tree.leaves(side["losses"])
        counts = jax.tree.leaves(side["metrics"])
        assert sorted(leaf.shape for leaf in losses) == [(), (2,)]
        assert sum(leaf.size for leaf in counts) == 3
        return sum(jnp.sum(leaf) for leaf in losses)

    grads = total(params)
    assert float(jnp.abs(grads["periods"]["block_0"]["mixer"]["scale"][0]).sum()) > 0


@pytest.mark.slow(days=28, group="costly", turn="models/test_stack")
def test_chunks_equal_one_call():
    cfg = config(
        pattern=("H", "W", "A", "recurrence"),
        num_layers=4,
        mlp_dim=0,
        mixers=table(attention=ATTENTION, window=5),
    )
    stack, params, x = build(cfg)
    segments = np.array([[1] * 7 + [2] * 5, [1] * 12], np.int32)
    whole, none = jax.jit(stack.apply)({"params": params}, x, segment_ids=segments)
    assert none is None
    step = jax.jit(lambda p, x, s, state: stack.apply({"params": p}, x, segment_ids=s, state=state))
    state, parts = init_stack_state(cfg, 2, capacity=16), []
    for start in range(0, 12, 4):
        here = slice(start, start + 4)
        y, state = step(params, np.asarray(x)[:, here], segments[:, here], state)
        parts.append(np.asarray(y))
    np.testing.assert_allclose(np.asarray(whole), np.concatenate(parts, 1), **tol(jnp.float32, 256))


@pytest.mark.slow(days=28, group="costly", turn="models/test_stack")
def test_dropout_acts_only_with_an_rng():
    cfg = config(dropout=0.5)
    stack, params, x = build(cfg)
    apply = jax.jit(stack.apply)
    whole, _ = apply({"params": params}, x)
    again, _ = apply({"params": params}, x)
    dropped, _ = apply({"params": params}, x, rngs={"dropout": jax.random.key(3)})
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(again))
    assert not np.allclose(np.asarray(whole), np.asarray(dropped))


@pytest.mark.parametrize(("of", "given"), [(5, 4), (4, 5), (2, 4), (4, 2)])
def test_the_state_of_another_depth_is_refused(of, given):
    """Of blocks, in periods of two: those that it lacks would begin anew at each call."""
    fields = {"dim": 8, "pattern": ("recurrence", "minlstm"), "mlp_dim": 0, "scan": False}
    cfg, other = (StackConfig(num_layers=count, **fields) for count in (of, given))
    state = init_stack_state(other, 2, capacity=8)
    with pytest.raises(
        ValueError, match=f"holds {given // 2} x 2 .* {given % 2} blocks, and the stack has {of // 2} x"
    ):
        jax.eval_shape(Stack(cfg).init, jax.random.key(0), jnp.ones((2, 3, 8)), state=state)


def test_mixers_are_named_by_words_or_short_forms():
    words, letters = StackConfig(pattern=("hyena", "attention")), StackConfig(pattern="HA")
    assert list(words.mixers.values()) == list(letters.mixers.values())
    assert StackConfig(pattern="hyena,attention").pattern == words.pattern
    assert StackConfig(pattern="attention").pattern == ("attention",)
    assert StackConfig(pattern="A", mixers={"attention": ATTENTION}).mixers["A"] == ATTENTION


def test_letters_of_stored_stacks_are_read():
    """With a config for each, as stacks are stored, or without one, as older versions stored them."""
    old = StackConfig.upgrade({"pattern": "SRNB", "mixers": {"R": ATTENTION}})
    assert StackConfig(**old).mixers["R"] == ATTENTION
    assert StackConfig(**old).mixers["S"] == StackConfig(pattern=("hyena_short",)).mixers["hyena_short"]
    assert [type(StackConfig(**old).mixers[c]).__name__ for c in "NB"] == ["NTMConfig", "SlotMemoryConfig"]


@pytest.mark.slow(days=28, group="costly")
def test_a_stack_in_float16_adds_up_beyond_its_largest_number():
    _, params, x = plain()
    whole, half = (
        Stack(config(), d).apply({"params": params}, 1e5 * x)[0] for d in (jnp.float32, jnp.float16)
    )
    assert np.abs(whole).max() > 65_504
    assert_close(half, np.asarray(whole), n=64, dtype=jnp.float16)
