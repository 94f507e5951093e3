"""A block that decodes one token: norms, products, gates and sums in few launches."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt import layers
from jaxblt.mixers import AttentionConfig
from jaxblt.mixers.attention import attention
from jaxblt.mixers.attention.attention import Attention
from jaxblt.mixers.driver.base import start_clock
from jaxblt.models import Stack, StackConfig, init_stack_state, stack
from jaxblt.parallel.attention import plan
from pallas_kernels.attention import token_attention
from pallas_kernels.token_product import token_product
from tests.parameters import drawn
from tests.tolerances import assert_close

CONFIG = StackConfig(
    dim=32,
    num_layers=4,
    pattern=("other", "window", "hyena", "hyena"),
    mixers={"other": AttentionConfig(32, num_heads=4, num_kv_heads=2, out_bias=True)},
    scan=False,
)
SEGMENTS = {"content": [1] * 6, "padding": [1] * 3 + [0] * 3, "holes and documents": [1, 1, -1, 1, 2, 2]}


class Doubled(Attention):
    """A mixer of somebody else, whose call takes no norm."""

    def __call__(self, x: Any, *, segment_ids: Any = None, positions: Any = None, state: Any = None) -> Any:
        y, state = super().__call__(x, segment_ids=segment_ids, positions=positions, state=state)
        return 2 * y, state


@dataclass(frozen=True)
class DoubledConfig(AttentionConfig):
    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> Doubled:
        return Doubled(self, dtype, name=name)


def decoded(params: Any, x: Any, rows: Any, config: StackConfig = CONFIG) -> Any:
    """Return, for each row of segment ids, what each token gives and the state behind them."""
    model = Stack(config, x.dtype)
    step = jax.jit(lambda x, ids, state: model.apply(params, x, segment_ids=ids, state=state))
    begin = jax.jit(lambda: init_stack_state(config, 1, capacity=8, dtype=x.dtype))

    def of_row(ids: Any) -> Any:
        state, found = begin(), []
        for t in range(len(ids)):
            token = jax.device_put((np.asarray(x)[:, t : t + 1], ids[None, t : t + 1]))
            y, state = step(*token, state)
            found.append(y)
        return np.concatenate(found, 1), state

    return [of_row(ids) for ids in np.asarray(rows, np.int32)]


def assert_same(joined: Any, apart: Any) -> None:
    for found, known in zip(jax.tree.leaves(joined), jax.tree.leaves(apart), strict=True):
        assert_close(np.asarray(found, np.float32), np.asarray(known, np.float32), n=256)


def test_blocks_with_joined_products_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, rows = jax.random.normal(jax.random.key(0), (1, 6, 32)), list(SEGMENTS.values())
    params = drawn(Stack(CONFIG), x)
    apart, launches = decoded(params, x, rows), []

    def count(*given: Any, **options: Any) -> Any:
        launches.append(options)
        return token_product(*given, **options)

    monkeypatch.setattr(stack, "is_lone_token", lambda x: x.shape[:2] == (1, 1))
    monkeypatch.setattr(layers, "token_product", count)
    assert_same(decoded(params, x, rows), apart)
    # Two for each MLP, and two for each mixer but the one with a bias
    assert len(launches) == 4 * 2 + 3 * 2
    assert sum("scale" in options for options in launches) == 7


def test_a_token_that_is_written_where_it_attends_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of four slots, shared key heads, and a layer without positions."""
    mixers = {
        "ring": AttentionConfig(32, num_heads=4, num_kv_heads=2, window=4),
        "whole": AttentionConfig(32, num_heads=2, position="none"),
    }
    config = StackConfig(32, 2, pattern=("ring", "whole"), mixers=mixers, scan=False)
    x, rows, launches = jax.random.normal(jax.random.key(0), (1, 6, 32)), list(SEGMENTS.values()), []
    params = drawn(Stack(config), x)
    apart = decoded(params, x, rows, config)

    def count(*given: Any, **options: Any) -> Any:
        launches.append(options)
        return token_attention(*given, **options)

    monkeypatch.setattr(stack, "is_lone_token", lambda x: x.shape[:2] == (1, 1))
    monkeypatch.setattr(plan, "skips_empty_slots", lambda q, k: True)
    monkeypatch.setattr(attention, "writes_token", lambda q, k: True)
    monkeypatch.setattr(attention, "token_attention", count)
    assert_same(decoded(params, x, rows, config), apart)
    assert [options["window"] for options in launches] == [4, None]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name", SEGMENTS)
def test_a_gpu_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring and a whole cache, by the kernels that a decoded token takes and without them."""
    mixers = {
        "ring": AttentionConfig(256, num_heads=4, num_kv_heads=2, window=4),
        "whole": AttentionConfig(256, num_heads=4),
    }
    config = StackConfig(256, 2, pattern=("ring", "whole"), mixers=mixers, scan=False)
    x, ids = jax.random.normal(jax.random.key(0), (1, 6, 256), jnp.bfloat16), [SEGMENTS[name]]
    params = drawn(Stack(config), x)
    joined, written = decoded(params, x, ids, config), []
    monkeypatch.setattr(attention, "token_attention", lambda *_, **__: written.append(1))
    monkeypatch.setattr(stack, "is_lone_token", lambda x: False)
    apart = decoded(params, x, ids, config)
    assert not written
    for found, known in zip(jax.tree.leaves(joined), jax.tree.leaves(apart), strict=True):
        found, known = np.asarray(found, np.float32), np.asarray(known, np.float32)
        assert_close(found, known, n=1024, dtype=jnp.bfloat16)


def test_a_mixer_that_is_derived_from_one_with_joined_products_takes_no_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = StackConfig(32, 1, pattern=("doubled",), mixers={"doubled": DoubledConfig(32)})
    x = jax.random.normal(jax.random.key(0), (1, 2, 32))
    params = drawn(Stack(config), x)
    ((apart, _),) = decoded(params, x, [[1, 1]], config)
    monkeypatch.setattr(stack, "is_lone_token", lambda x: x.shape[:2] == (1, 1))
    ((joined, _),) = decoded(params, x, [[1, 1]], config)
    assert_close(joined, apart, n=256)


@pytest.mark.parametrize("by", ["intercept_methods", "capture_intermediates"])
def test_a_caller_that_sees_methods_sees_those_of_one_token(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined products would call neither norms nor `Linear.products`."""
    config = StackConfig(32, 1, pattern=("hyena",), scan=False)
    x, ids = jax.random.normal(jax.random.key(0), (1, 1, 32)), jnp.ones((1, 1), jnp.int32)
    model, state = Stack(config), init_stack_state(config, 1, capacity=8, dtype=x.dtype)
    params = drawn(model, x)
    seen: list[set[str]] = []

    def watch(call: Any, args: Any, options: Any, context: Any) -> Any:
        seen[-1].add(f"{'/'.join(context.module.path)}:{context.method_name}")
        return call(*args, **options)

    for lone in (False, True):
        monkeypatch.setattr(stack, "is_lone_token", lambda x, lone=lone: lone)
        seen.append(set())
        if by == "intercept_methods":
            with nn.intercept_methods(watch):
                jax.eval_shape(partial(model.apply, segment_ids=ids), params, x, state=state)
        else:
            options = {"segment_ids": ids, "capture_intermediates": True, "mutable": ["intermediates"]}
            _, held = jax.eval_shape(partial(model.apply, **options), params, x, state=state)
            seen[-1].update(jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(held))
    assert any("norm" in name for name in seen[0])
    assert seen[0] == seen[1]


def test_large_channels_in_float16_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined products are of channels times scales, which are divided by their norm behind the product."""
    config = StackConfig(32, 1, pattern=("hyena",))
    x = jnp.full((1, 1, 32), 20_000.0, jnp.float16)
    params = drawn(Stack(config, x.dtype), x)
    norm = params["params"]["periods"]["block_0"]["mixer_norm"]
    norm["scale"] = 4 * norm["scale"]
    ((apart, _),) = decoded(params, x, [[1]], config)
    monkeypatch.setattr(layers, "is_one_launch", lambda dtype: dtype in (jnp.bfloat16, jnp.float16))
    ((joined, _),) = decoded(params, x, [[1]], config)
    assert_close(joined, apart, n=256)


def test_all_blocks_read_the_clock_of_the_first() -> None:
    """XLA then counts tokens once for all blocks of a stack."""
    config = StackConfig(32, 3, pattern=("window", "hyena"), scan=False)
    x, ids = jax.random.normal(jax.random.key(0), (1, 3, 32)), jnp.ones((1, 3), jnp.int32)
    params = drawn(Stack(config), x)
    ((_, state),) = decoded(params, x[:, :2], [[1, 1]], config)
    others = [replace(block, clock=start_clock(1)) for block in (state.periods[0][1], *state.rest)]
    without = replace(state, periods=((state.periods[0][0], others[0]),), rest=tuple(others[1:]))
    step = jax.jit(lambda state: Stack(config).apply(params, x[:, 2:], segment_ids=ids[:, 2:], state=state))
    for found, known in zip(jax.tree.leaves(step(without)), jax.tree.leaves(step(state)), strict=True):
        np.testing.assert_array_equal(found, known)
