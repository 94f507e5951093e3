"""Seeds of dropout that a stack draws at once are those that its blocks would draw."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.layers import Dropout
from jaxblt.models.stack import Stack, StackConfig

KEY = jax.random.key(3)
X = jnp.ones((1, 8, 16))


def a_stack(**options: Any) -> StackConfig:
    return StackConfig(dim=16, num_layers=3, pattern="HA", scan=False, dropout=0.3, **options)


class Twice(nn.Module):
    """A model that calls its stack again on what it returned."""

    config: StackConfig

    @nn.compact
    def __call__(self, x: Any) -> Any:
        stack = Stack(self.config, name="both")
        return stack(stack(x)[0])[0]


def test_seeds_are_those_of_the_blocks() -> None:
    found: list[tuple[Any, Any]] = []

    def record(call: Any, args: Any, options: Any, context: Any) -> Any:
        if isinstance(context.module, Dropout) and args[1] is not None:
            found.append((args[1], jax.random.bits(context.module.make_rng("dropout"), (2,), jnp.uint32)))
        return call(*args, **options)

    def seeds(params: Any, key: Any) -> Any:
        found.clear()
        with nn.intercept_methods(record):
            model.apply(params, X, rngs={"dropout": key}, mutable=["losses", "metrics"])
        return list(found)

    model = Twice(a_stack())
    params = jax.eval_shape(model.init, KEY, X)
    pairs = jax.jit(seeds)(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params), KEY)
    assert len(pairs) == 2 * 2 * 3
    given, own = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])
    np.testing.assert_array_equal(given, own)
    assert len({tuple(seed) for seed in given.tolist()}) == len(pairs)


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_stack_draws_as_often_whatever_its_depth(remat: Any) -> None:
    def draws(layers: int) -> int:
        stack = Stack(StackConfig(**{**vars(a_stack(remat=remat)), "num_layers": layers}))
        params = jax.eval_shape(stack.init, KEY, X)

        def run(params: Any, key: Any) -> Any:
            return stack.apply(params, X, rngs={"dropout": key}, mutable=["losses", "metrics"])[0][0]

        return str(jax.make_jaxpr(run)(params, KEY)).count("random_bits")

    assert draws(2) == draws(6) == 1


def test_keys_of_another_generator_are_drawn_one_by_one() -> None:
    stack = Stack(a_stack())
    params = jax.eval_shape(stack.init, KEY, X)

    def run(params: Any, key: Any) -> Any:
        return stack.apply(params, X, rngs={"dropout": key}, mutable=["losses", "metrics"])[0][0]

    assert str(jax.make_jaxpr(run)(params, jax.random.key(0, impl="rbg"))).count("random_bits") == 2 * 3


@pytest.mark.parametrize("apart", [True, False])
def test_members_of_a_mapped_stack_draw_as_without_the_batch_of_seeds(apart: bool, monkeypatch: Any) -> None:
    """`nn.vmap` over a stack: members draw apart if their rngs are split, and alike if not."""

    class Members(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            options = {"metadata_params": {nn.PARTITION_NAME: None}, "variable_axes": {"params": 0}}
            splits = {"params": False, "dropout": apart}
            return nn.vmap(lambda stack, x: stack(x)[0], split_rngs=splits, **options)(Stack(a_stack()), x)

    model, x = Members(), jnp.stack([X, X])
    params = model.init(KEY, x)
    apply = partial(model.apply, params, x, rngs={"dropout": KEY}, mutable=["losses", "metrics"])
    given = apply()[0]
    monkeypatch.setattr("jaxblt.models.stack.draw_seeds", lambda *_: None)
    np.testing.assert_array_equal(given, apply()[0])
    assert bool((given[0] == given[1]).all()) is not apart
