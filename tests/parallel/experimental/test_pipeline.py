"""Pipelines: order and bubble of schedules, values and gradients of one device, inputs that are held."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.parallel.experimental import Schedule, make_stages, run_pipeline
from jaxblt.parallel.experimental.schedule import IDLE
from jaxblt.testing.collectives import collectives
from tests.tolerances import assert_close

SIZES = [(stages, batches) for stages in (1, 2, 3, 5) for batches in (1, 2, 4, 9)]
KINDS = ("gpipe", "1f1b")
WIDTH, ROWS = 8, 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_possible_and_the_bubble_is_the_papers(kind: Any) -> None:
    for stages, batches in SIZES:
        schedule = Schedule(stages=stages, micro_batches=batches, kind=kind)
        forwards, backwards = schedule.forwards(), schedule.backwards()
        assert not np.any((forwards != IDLE) & (backwards != IDLE))
        for table in (forwards, backwards):
            assert [sorted(column[column != IDLE]) for column in table.T] == [[*range(batches)]] * stages
        for batch in range(batches):
            there = [schedule.forward_at(stage, batch) for stage in range(stages)]
            back = [schedule.backward_at(stage, batch) for stage in reversed(range(stages))]
            assert np.all(np.diff(there) > 0)
            assert back == [*range(back[0], back[0] + stages)]  # each takes the gradient as it comes
            assert back[0] > there[-1]
        assert schedule.bubble == pytest.approx((stages - 1) / (batches + stages - 1))


def test_1f1b_holds_as_many_inputs_as_stages_and_gpipe_all() -> None:
    for stages, batches in SIZES[4:]:
        held = {kind: Schedule(stages=stages, micro_batches=batches, kind=kind).slots for kind in KINDS}
        assert held == {"gpipe": batches, "1f1b": min(stages, batches)}


def stage(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ params["w"] + jnp.expand_dims(params["b"], range(x.ndim - 1)))


def loss(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((y - target) ** 2)


@functools.cache
def drawn(stages: int, batches: int) -> tuple[Any, jax.Array, jax.Array]:
    draw = np.random.default_rng(0)
    params = {
        "w": 0.3 * draw.standard_normal((stages, WIDTH, WIDTH)),
        "b": draw.standard_normal((stages, WIDTH)),
    }
    x, target = draw.standard_normal((2, batches, ROWS, WIDTH)).astype(np.float32)
    return jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params), jnp.asarray(x), jnp.asarray(target)


def on_one_device(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    y = jax.lax.scan(lambda x, own: (stage(own, x), None), inputs, params)[0]
    return loss(y, targets)


@pytest.mark.slow(days=3)
@pytest.mark.parametrize(("kind", "stages", "batches"), [("gpipe", 4, 6), ("1f1b", 4, 6), ("1f1b", 3, 2)])
def test_values_and_gradients_are_those_of_one_device(kind: Any, stages: int, batches: int) -> None:
    arguments = drawn(stages, batches)
    schedule = Schedule(stages=stages, micro_batches=batches, kind=kind)
    program = jax.jit(
        functools.partial(run_pipeline, stage, loss, mesh=make_stages(stages), schedule=schedule)
    )
    compiled = program.lower(*arguments).compile()
    assert sum(c.kind == "collective-permute" for c in collectives(compiled)) == 2  # in a loop over ticks
    found = compiled(*arguments)
    value, (by_params, by_inputs) = jax.value_and_grad(on_one_device, (0, 1))(*arguments)
    n = batches * ROWS * WIDTH
    assert_close(found.loss, value, n=n)
    jax.tree.map(lambda a, b: assert_close(a, b, n=n), (found.params, found.inputs), (by_params, by_inputs))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"stages": 3}, "of 3 stages takes a mesh of one axis 'stage' of that size, got {'stage': 2}"),
        ({"micro_batches": 5}, r"inputs begin with an axis of 5, got \[\(4,\)\]"),
    ],
)
def test_other_sizes_are_refused(sizes: dict[str, int], said: str) -> None:
    schedule = Schedule(**({"stages": 2, "micro_batches": 4} | sizes))
    with pytest.raises(ValueError, match=said):
        run_pipeline(stage, loss, *drawn(2, 4), mesh=make_stages(2), schedule=schedule)


def test_more_stages_than_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="9 stages take a device each, there are 8"):
        make_stages(9)
