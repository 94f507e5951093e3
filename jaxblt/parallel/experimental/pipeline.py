"""A pipeline: one stage a device, micro-batches in the order of a `Schedule`, loss and gradients of all."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Float

from jaxblt.parallel.experimental.schedule import IDLE, Schedule

AXIS = "stage"
"""The mesh axis of stages."""

Stage = Callable[[Any, Array], Array]
Loss = Callable[[Array, Any], Array]


def make_stages(count: int, *, devices: Sequence[Any] | None = None) -> Mesh:
    """Make a mesh of `count` stages, by default over the first devices of all.

    Raises:
      ValueError: there are too few devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    if not 1 <= count <= len(devices):
        raise ValueError(f"{count} stages take a device each, there are {len(devices)}: choose fewer stages")
    return jax.make_mesh((count,), (AXIS,), devices=devices[:count], axis_types=(AxisType.Auto,))


class Gradients(NamedTuple):
    """The mean loss of all micro-batches, and its gradients by parameters and by inputs."""

    loss: Float[Array, ""]
    params: Any
    inputs: Float[Array, "M ..."]


class _Held(NamedTuple):
    """The state of a stage between ticks."""

    received: Array
    """What the stage before sent at the last tick."""
    pulled: Array
    """The gradient that the stage behind sent at the last tick."""
    kept: Array
    """Inputs from their arrival to their backward pass."""
    found: Gradients


class _Made(NamedTuple):
    """The results of a tick: messages forward and back, and what the backward pass adds."""

    forward: Array
    backward: Array
    loss: Array
    params: Any


def run_pipeline(
    stage: Stage,
    loss: Loss,
    params: Any,
    inputs: Float[Array, "M ..."],
    targets: Any,
    *,
    mesh: Mesh,
    schedule: Schedule,
) -> Gradients:
    """Return loss and gradients of stages that lie on a device each.

    A stage keeps inputs only: its backward pass runs it again. At each tick it sends one activation on and one gradient
    back. Values equal those of all stages on one device, whatever the schedule.

    Args:
      stage: `(params of a stage, x) -> y`, y like x; the same function for all stages, without collectives.
      loss: `(y of the last stage, target) -> ` mean loss of a micro-batch.
      params: pytree of arrays [S, ...], a stage each.
      inputs: of the first stage, by micro-batch.
      targets: pytree of arrays [M, ...].
      mesh: with the one axis `stage`, see `make_stages`.
      schedule: of as many stages and micro-batches.

    Raises:
      ValueError: mesh, parameters, inputs or targets are not of the schedule's sizes.
    """
    _check_sizes(schedule, mesh, params, inputs, targets)
    run = _Stage(stage, loss, schedule)
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    places: Any = (whole, split, whole)
    # Leave variance unchecked: gradients are made inside, and none goes through this `shard_map`.
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(split, whole, whole),
        out_specs=Gradients(*places),
        check_vma=False,
    )(params, inputs, targets)


class _Stage:
    """The program of one device."""

    def __init__(self, stage: Stage, loss: Loss, schedule: Schedule) -> None:
        self.stage, self.loss, self.schedule = stage, loss, schedule
        count = schedule.stages
        self.onwards = [(i, i + 1) for i in range(count - 1)]
        self.back = [(i + 1, i) for i in range(count - 1)]

    def __call__(self, params: Any, inputs: Array, targets: Any) -> Gradients:
        params = jax.tree.map(lambda x: x[0], params)
        tables = self.schedule.forwards(), self.schedule.backwards(), self.schedule.arrivals()
        own = jnp.asarray(np.stack(tables, -1))[:, lax.axis_index(AXIS)]
        empty = jnp.zeros_like(inputs[0])
        nothing = Gradients(jnp.zeros(()), jax.tree.map(jnp.zeros_like, params), jnp.zeros_like(inputs))
        kept = jnp.zeros((self.schedule.slots, *empty.shape), empty.dtype)

        def tick(held: _Held, turn: Array) -> tuple[_Held, None]:
            return self._tick(held, turn, params, inputs, targets), None

        found = lax.scan(tick, _Held(empty, empty, kept, nothing), own)[0].found
        summed = lax.psum((found.loss, found.inputs), AXIS)
        return Gradients(summed[0], jax.tree.map(lambda x: x[None], found.params), summed[1])

    def _tick(self, held: _Held, turn: Array, params: Any, inputs: Array, targets: Any) -> _Held:
        forward, backward, arrived = turn
        kept = self._keep(held.kept, arrived, held.received)
        batch = jnp.maximum(forward, backward)
        x = jnp.where(lax.axis_index(AXIS) == 0, inputs[batch], kept[batch % self.schedule.slots])
        doing = jnp.where(forward != IDLE, 1, jnp.where(backward != IDLE, 2, 0))
        target = jax.tree.map(lambda t: t[batch], targets)
        made = lax.switch(doing, (self._rest, self._go, self._return), params, x, target, held.pulled)
        found = held.found
        first = (lax.axis_index(AXIS) == 0) & (backward != IDLE)
        by_input = found.inputs.at[batch].add(jnp.where(first, made.backward, 0))
        by_params = jax.tree.map(jnp.add, found.params, made.params)
        return _Held(
            lax.ppermute(made.forward, AXIS, self.onwards),
            lax.ppermute(made.backward, AXIS, self.back),
            kept,
            Gradients(found.loss + made.loss, by_params, by_input),
        )

    def _keep(self, kept: Array, arrived: Array, received: Array) -> Array:
        slot = arrived % self.schedule.slots
        return kept.at[slot].set(jnp.where(arrived != IDLE, received, kept[slot]))

    def _rest(self, params: Any, x: Array, target: Any, pulled: Array) -> _Made:
        return _Made(
            jnp.zeros_like(x), jnp.zeros_like(x), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        )

    def _go(self, params: Any, x: Array, target: Any, pulled: Array) -> _Made:
        return self._rest(params, x, target, pulled)._replace(forward=self.stage(params, x))

    def _return(self, params: Any, x: Array, target: Any, pulled: Array) -> _Made:
        y, pull = jax.vjp(self.stage, params, x)
        value, by_output = jax.value_and_grad(self.loss)(y, target)
        last = lax.axis_index(AXIS) == self.schedule.stages - 1
        share = 1 / self.schedule.micro_batches
        by_params, by_input = pull(jnp.where(last, share * by_output, pulled).astype(y.dtype))
        return _Made(
            jnp.zeros_like(x), by_input, jnp.where(last, share * value, 0.0).astype(jnp.float32), by_params
        )


def _check_sizes(schedule: Schedule, mesh: Mesh, params: Any, inputs: Array, targets: Any) -> None:
    if dict(mesh.shape) != {AXIS: schedule.stages}:
        raise ValueError(
            f"a pipeline of {schedule.stages} stages takes a mesh of one axis {AXIS!r} of that size, got "
            f"{dict(mesh.shape)}"
        )
    leading = {
        "parameters": (schedule.stages, params),
        "inputs": (schedule.micro_batches, inputs),
        "targets": (schedule.micro_batches, targets),
    }
    for what, (count, tree) in leading.items():
        sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}
        if sizes != {(count,)}:
            raise ValueError(f"{what} begin with an axis of {count}, got {sorted(sizes)}: stack them")
