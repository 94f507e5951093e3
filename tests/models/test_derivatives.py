"""Derivatives of any order inside `jaxblt.reference_ops`: forward mode, and Hessian-vector products two ways."""

import functools
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from jaxblt.mixers import (
    AttentionConfig,
    ExplicitFilter,
    GatedRecurrenceConfig,
    HyenaConfig,
    ImplicitFilter,
    ModalFilter,
)
from jaxblt.models import BLTConfig, HashConfig, StackConfig
from jaxblt.models.stack import Stack
from jaxblt.parallel import make_mesh
from jaxblt.patching.patches import from_closed
from jaxblt.testing.tolerances import DIFFERENCED, bound, typical
from tests.mixer_table import table

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "curvature.md"
STEP = 0.01
LENGTH, BLOCK = 32, 8
MODAL = ModalFilter(modes=2, max_timescale=16.0)
IMPLICIT = ImplicitFilter(filter_len=600, width=4)
FURTHER = pytest.mark.slow(days=28, group="further properties of mixers")
# Compiling takes the time of these tests: half as long without the compiler's optimisations, for the same sums.
JIT = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
# Products of a Hessian sum over every position, channel and parameter that two derivatives meet in.
TERMS = 4096


def draw(model, *inputs, **options):
    """Parameters of order 1, without compiling `init`: vectors, such as the scales of norms, are about 1."""
    shapes = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), *inputs, **options))
    return jax.tree.map(lambda p, z: z if p.ndim > 1 else 1 + z, shapes, noise(shapes, seed=0))


def noise(tree, seed):
    """As the tree, of deviation 0.3; NumPy's, as JAX would compile a program for each shape."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), jnp.float32), tree)


def stack(pattern, dim):
    heads, hyena = AttentionConfig(dim=dim, num_heads=2), HyenaConfig(dim=dim, filter=MODAL)
    sizes = {"dim": dim, "num_layers": len(pattern), "mlp_dim": 0}
    return StackConfig(
        pattern=pattern,
        mixers=table(attention=heads, hyena=hyena, window=5, R=GatedRecurrenceConfig(dim)),
        **sizes,
    )


def blt_loss():
    """Of a BLT on static patches of 3 bytes, with two documents, holes and padding."""
    config = BLTConfig(
        encoder=stack("W", 8),
        latent=stack("H", 12),
        decoder=stack("R", 8),
        hash=HashConfig(sizes=(3,), table_size=16),
        bridge_heads=2,
        look_back=2,
    )
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (2, LENGTH)), jnp.int32)
    places = np.arange(LENGTH)
    segments = jnp.asarray(np.stack([1 + (places >= 16), places < 27]), jnp.int32)
    closed = jnp.asarray(np.broadcast_to(places % BLOCK % 3 == 2, segments.shape))
    patches = jax.jit(functools.partial(from_closed, block_size=BLOCK, capacity=4))(closed, segments)
    model = config.build()
    params = draw(model, ids, patches=patches, segment_ids=segments)

    def loss(params):
        logits, _ = model.apply(params, ids, patches=patches, segment_ids=segments)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], 2)[..., 0]
        return -jnp.mean(jnp.where(segments[:, 1:] > 0, log_p, 0.0))

    return loss, params


def mixer_loss(config, segments):
    """The mean of a bounded function of one mixer's outputs, or of a stack's."""
    model = Stack(config) if isinstance(config, StackConfig) else config.build()
    x = jax.random.normal(jax.random.key(1), (2, 12, config.dim))
    segments = jnp.asarray(segments, jnp.int32)
    params = draw(model, x, segment_ids=segments)
    return lambda params: jnp.mean(jnp.tanh(model.apply(params, x, segment_ids=segments)[0] + x)), params


HOLES = [[1] * 4 + [-1] * 2 + [1] * 6, [1] * 9 + [0] * 3]
DOCUMENTS = [[1] * 5 + [2] * 7, [1] * 2 + [2] * 8 + [0] * 2]

CASES = {
    "blt": blt_loss,
    "attention_sorted": lambda: mixer_loss(AttentionConfig(dim=8, num_heads=2, packed=False), HOLES),
    "attention_both": lambda: mixer_loss(
        AttentionConfig(dim=8, num_heads=2, num_kv_heads=1, causal=False, window=3), DOCUMENTS
    ),
    "hyena_implicit": lambda: mixer_loss(HyenaConfig(dim=4, filter=IMPLICIT), DOCUMENTS),
    "hyena_explicit": lambda: mixer_loss(HyenaConfig(dim=4, filter=ExplicitFilter(taps=5)), DOCUMENTS),
}

SCANNED = {"hyena": HyenaConfig(dim=8, filter=MODAL), "recurrence": GatedRecurrenceConfig(dim=8)}


def error(actual, expected):
    """Euclidean distance of two trees, as a share of the second's length; infinity where the first is not finite."""
    return typical(
        *(np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (actual, expected))
    )


def dot(a, b):
    return sum(jax.tree.leaves(jax.tree.map(np.vdot, *jax.device_get((a, b)))))


def difference(f, params, direction):
    """The derivative of a tree along a direction, by differences of fourth order."""
    params, direction = jax.device_get((params, direction))
    places = [
        jax.tree.map(lambda p, d, h=np.float32(n * STEP): jnp.asarray(p + h * d), params, direction)
        for n in (-2, -1, 1, 2)
    ]
    at = jax.device_get([f(place) for place in places])
    return jax.tree.map(lambda a, b, c, d: (8 * (c - b) - (d - a)) / (12 * STEP), *at)


@pytest.mark.slow(days=28, group="stacks and labels")
@pytest.mark.parametrize("name", CASES)
def test_both_modes_and_differences_agree(name):
    loss, params = CASES[name]()
    direction, plain = noise(params, seed=1), JIT(jax.value_and_grad(loss))

    @JIT
    def derivatives(params):
        grad_traced_once = jax.jit(jax.grad(loss))
        value, slope = jax.jvp(loss, (params,), (direction,))
        gradient, forward = jax.jvp(grad_traced_once, (params,), (direction,))
        (backward,) = jax.vjp(grad_traced_once, params)[1](direction)
        return value, gradient, slope, forward, backward

    with jaxblt.reference_ops():
        value, gradient, slope, forward, backward = derivatives(params)
    limit = bound(jnp.float32, TERMS)
    assert error((value, gradient), plain(params)) <= limit
    assert error(slope, dot(gradient, direction)) <= limit
    assert error(forward, backward) <= limit
    assert error(forward, difference(lambda p: plain(p)[1], params, direction)) <= DIFFERENCED


def second_order(mixers):
    """The Hessian of a loss of scanned layers, times a vector, by two reverse passes; and its argument."""
    layers = StackConfig(dim=8, num_layers=2 * len(mixers), mlp_dim=0, pattern=tuple(mixers), mixers=mixers)
    loss, params = mixer_loss(layers, DOCUMENTS)
    direction = noise(params, seed=1)
    return lambda params: jax.vjp(jax.grad(loss), params)[1](direction), params


@FURTHER
def test_scanned_layers_are_derived_twice_in_reverse():
    """To trace it raised an IndexError of JAX; see `pallas_kernels._compat.same_value`."""
    backward, params = second_order(SCANNED)
    found = jax.eval_shape(backward, params)[0]
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params)


@FURTHER
@pytest.mark.parametrize("name", SCANNED)
def test_scanned_layers_have_the_second_derivatives_of_definitions(name):
    backward, params = second_order({name: SCANNED[name]})
    found = JIT(backward)(params)
    with jaxblt.reference_ops():
        expected = JIT(backward)(params)
    assert error(found, expected) <= bound(jnp.float32, TERMS)


def test_a_ring_is_refused_before_it_is_traced():
    model = AttentionConfig(dim=8, num_heads=2, context_parallel="ring").build()
    x = jax.ShapeDtypeStruct((1, 16, 8), jnp.float32)
    message = r"over 8 devices has first derivatives only, .* use mode='all_to_all'"
    with (
        jax.set_mesh(make_mesh(data=1, seq=8)),
        jaxblt.reference_ops(),
        pytest.raises(ValueError, match=message),
    ):
        jax.eval_shape(model.init, jax.random.key(0), x)


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_guide_s_example_runs():
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names = {"__name__": "guide"}
    exec(compile(block, str(GUIDE), "exec"), names)
    assert np.isfinite(names["curvature"])
