"""A pipeline: one stage a device, micro-batches in the order of a `Schedule`, loss and gradients of all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxblt.validation import check_bounds, check_fields

IDLE = -1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of forward and backward passes: which stage does what at which tick.

    A tick is one forward or one backward pass of a micro-batch through a stage. S stages and M micro-batches take
    2 (M + S - 1) ticks, of which a stage works in 2 M. The rest is the bubble: (S - 1) / (M + S - 1).

        gpipe, S = 2, M = 3        F0 F1 F2 .. .. B0 B1 B2
                                   .. F0 F1 F2 B0 B1 B2 ..
        1f1b, S = 2, M = 3         F0 F1 .. B0 F2 B1 .. B2
                                   .. F0 B0 F1 B1 F2 B2 ..

    Both take as long. `1f1b` holds as many micro-batches as there are stages, `gpipe` all.

    Attributes:
      stages: S, how many devices a micro-batch passes.
      micro_batches: M.
      kind: "gpipe" runs all forward passes first, "1f1b" one backward pass as soon as there is one.

    Sources: Huang et al., arXiv 1811.06965 (GPipe); Narayanan et al., arXiv 1806.03377 (1F1B).
    """

    stages: int
    micro_batches: int
    kind: Literal["gpipe", "1f1b"] = "1f1b"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "stages", "micro_batches", least=1)

    @property
    def ticks(self) -> int:
        """Ticks from the first forward pass to the last backward pass."""
        return 2 * (self.micro_batches + self.stages - 1)

    def forward_at(self, stage: int, batch: int) -> int:
        """Return the tick of a micro-batch's forward pass through a stage."""
        # Begin at once as long as no backward pass has come back to the stage.
        early = self.kind == "gpipe" or batch < self.stages - stage
        return stage + batch if early else stage + 2 * batch

    def backward_at(self, stage: int, batch: int) -> int:
        """Return the tick of a micro-batch's backward pass: just behind that of the next stage."""
        if self.kind == "gpipe":
            return self.micro_batches + 2 * (self.stages - 1) - stage + batch
        return 2 * self.stages - 1 - stage + 2 * batch

    def forwards(self) -> Int[np.ndarray, "ticks stages"]:
        """Return the micro-batch that goes forward by tick and stage; `IDLE` if none does."""
        return self._table(self.forward_at)

    def backwards(self) -> Int[np.ndarray, "ticks stages"]:
        """Return the micro-batch that goes backward by tick and stage; `IDLE` if none does."""
        return self._table(self.backward_at)

    def arrivals(self) -> Int[np.ndarray, "ticks stages"]:
        """Return the micro-batch whose input came from the stage before by the begin of a tick."""
        came = np.full((self.ticks, self.stages), IDLE)
        came[1:, 1:] = self.forwards()[:-1, :-1]
        return came

    @property
    def bubble(self) -> float:
        """Share of ticks in which a stage is idle, counted."""
        idle = (self.forwards() == IDLE) & (self.backwards() == IDLE)
        return float(idle.mean())

    @property
    def slots(self) -> int:
        """The most inputs that a stage holds at a time: from their arrival to their backward pass."""
        ends = np.cumsum(self.backwards() != IDLE, 0) - (self.backwards() != IDLE)
        return max(1, int((np.cumsum(self.arrivals() != IDLE, 0) - ends)[:, 1:].max(initial=0)))

    def _table(self, at) -> Int[np.ndarray, "ticks stages"]:
        table = np.full((self.ticks, self.stages), IDLE)
        for stage in range(self.stages):
            for batch in range(self.micro_batches):
                table[at(stage, batch), stage] = batch
        return table


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
