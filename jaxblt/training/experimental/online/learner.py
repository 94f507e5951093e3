"""Updates of adapters from rows that were served, each of which has to pass a gate before it serves."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxblt.adapters import join_params
from jaxblt.data.vocab import PAD
from jaxblt.training.metrics import cross_entropy
from jaxblt.validation import check_bounds, check_fields, number, whole

RowLoss = Callable[[Any, Int[Array, "B T"]], Float[Array, "B"]]
"""(parameters, rows of ids) -> nats of each row."""


class Verdict(NamedTuple):
    """The outcome of a gate.

    Attributes:
      accepted: whether the new parameters may serve.
      before, after: mean nats of the canary rows under both.
      why: of a rejection; empty for none.
    """

    accepted: bool
    before: float
    after: float
    why: str = ""


class CanaryGate:
    """Rows that an update must not forget, and what it may lose on them.

    Attributes:
      tolerance: nats by which the mean over the rows may rise.
    """

    def __init__(self, loss: RowLoss, rows: Int[np.ndarray, "B T"], *, tolerance: float = 0.02) -> None:
        """Take rows that those who serve predict well."""
        number("tolerance", tolerance, least=0)
        self.tolerance, self._loss, self._rows = tolerance, loss, np.asarray(rows)

    def judge(self, serving: Any, new: Any) -> Verdict:
        """Return whether the new parameters may take the place of those that serve."""
        before, after = (float(_mean_nats(self._loss, params, self._rows)) for params in (serving, new))
        if not np.isfinite(after):
            return Verdict(False, before, after, f"{after} nats on the canary rows, which is no number")
        if after > before + self.tolerance:
            why = f"{after - before:.4f} nats worse on the canary rows, more than {self.tolerance}"
            return Verdict(False, before, after, why)
        return Verdict(True, before, after)


@partial(jax.jit, static_argnums=0)
def _mean_nats(loss: RowLoss, params: Any, rows: Int[Array, "B T"]) -> Float[Array, ""]:
    return jnp.mean(loss(params, rows))


@flax.struct.dataclass
class Anchor:
    """Parameters to stay near to, and how much each of them matters.

    Attributes:
      params: as they were.
      importance: the diagonal of the Fisher information, for each number.
    """

    params: Any
    importance: Any


def make_anchor(loss: RowLoss, params: Any, rows: Int[Array, "B T"]) -> Anchor:
    """Return an anchor at these parameters; a number matters by its mean square gradient over rows.

    Gradients are those of one row at a time. Those of a batch would cancel between rows.
    """

    def add(total: Any, row: Int[Array, "T"]) -> tuple[Any, None]:
        gradient = jax.grad(lambda params: loss(params, row[None])[0])(params)
        return jax.tree.map(lambda t, g: t + g * g, total, gradient), None

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params)
    total, _ = jax.lax.scan(add, zeros, rows)
    return Anchor(params, jax.tree.map(lambda t: t / len(rows), total))


def ewc_penalty(anchor: Anchor, params: Any) -> Float[Array, ""]:
    """Return half the sum of importance (p - p_0)^2: elastic weight consolidation (Kirkpatrick et al., 1612.00796)."""
    parts = jax.tree.map(lambda p, a, f: jnp.sum(f * (p - a) ** 2), params, anchor.params, anchor.importance)
    return jnp.float32(0.5) * sum(jax.tree.leaves(parts), jnp.float32(0))


class ReplayBuffer:
    """Rows of ids, each kept with equal probability (reservoir sampling, Vitter 1985, algorithm R)."""

    def __init__(self, capacity: int, *, seed: int = 0) -> None:
        """Hold at most `capacity` rows."""
        whole("capacity", capacity, least=1, why=": nothing would be replayed")
        self.capacity = capacity
        self.seen = 0
        self.rows: list[np.ndarray] = []
        self._rng = np.random.default_rng(seed)

    def add(self, rows: Int[np.ndarray, "B T"]) -> None:
        """Offer rows of one length: while there is room all stay, then each takes a random place or none."""
        rows = np.asarray(rows)
        if self.rows and rows.shape[1:] != self.rows[0].shape:
            raise ValueError(
                f"rows have {rows.shape[1:]} ids, and the buffer holds rows of {self.rows[0].shape}: cut or fill them"
            )
        for row in rows:
            self.seen += 1
            if len(self.rows) < self.capacity:
                self.rows.append(row)
            elif (place := int(self._rng.integers(self.seen))) < self.capacity:
                self.rows[place] = row

    def draw(self, count: int) -> Int[np.ndarray, "N T"]:
        """Return so many rows, with repeats if the buffer holds fewer.

        Raises:
          ValueError: it is empty.
        """
        if not self.rows:
            raise ValueError("the buffer is empty: add rows before drawing")
        few = len(self.rows) < count
        return np.stack([self.rows[i] for i in self._rng.choice(len(self.rows), count, replace=few)])


@dataclass(frozen=True)
class OnlineConfig:
    """Settings of updates.

    Attributes:
      rate: of Adam, whose moments each update starts anew.
      steps: of an update.
      rows: new ones a step, drawn from those of the update.
      replayed: earlier ones a step; 0 for none.
      ewc: weight of the price on moving what matters (`ewc_penalty`), beside mean nats; 0 for none.
      capacity: rows that the replay buffer holds.
    """

    rate: float = 1e-3
    steps: int = 8
    rows: int = 8
    replayed: int = 8
    ewc: float = 0.0
    capacity: int = 1024

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "rate", above=0)
        check_bounds(self, "steps", "rows", "capacity", least=1)
        check_bounds(self, "replayed", "ewc", least=0)


def row_nats(config: Any, base: Any) -> RowLoss:
    """Return the mean nats a byte of each row, by a model's trained parameters laid over those of its base.

    Args:
      config: of a model that reads ids alone, such as a `ByteLMConfig`. PAD is not scored.
      base: parameters of the base (`jaxblt.adapters.split_params`).
    """
    model = config.build()

    def loss(trained: Any, ids: Int[Array, "B T"]) -> Float[Array, "B"]:
        logits, _ = model.apply({"params": join_params(base, trained)}, ids)
        targets = ids[:, 1:]
        told = (targets != PAD).astype(jnp.float32)
        nats = cross_entropy(logits[:, :-1], targets) * told
        return jnp.sum(nats, 1) / jnp.maximum(jnp.sum(told, 1), 1)

    return loss


class OnlineLearner:
    """Parameters that serve, and their updates.

    Attributes:
      params: that serve.
      buffer: of rows that were learned before.
      anchor: of the price on moving; None until `remember` makes one.
    """

    def __init__(
        self,
        config: OnlineConfig,
        loss: RowLoss,
        params: Any,
        gate: CanaryGate,
        *,
        mask: Any = None,
        seed: int = 0,
    ) -> None:
        """Compile nothing yet: the first update does.

        Args:
          config: of updates.
          loss: nats of rows, such as `row_nats` returns.
          params: that serve first; those that `loss` reads.
          gate: that updates have to pass.
          mask: of the numbers that updates may move, like `params`; None for all.
          seed: of the rows that are drawn.
        """
        self.config, self.params, self.gate = config, params, gate
        self.buffer, self.anchor = ReplayBuffer(config.capacity, seed=seed), None
        self._rng = np.random.default_rng(seed)
        self._mask = jax.tree.map(jnp.ones_like, params) if mask is None else mask
        self._loss = loss

    def remember(self, rows: Int[np.ndarray, "B T"]) -> None:
        """Keep rows that the parameters know, and what of the parameters matters for them."""
        self.buffer.add(rows)
        self.anchor = _anchored(self._loss, self.params, jnp.asarray(rows))

    def update(self, rows: Int[np.ndarray, "B T"]) -> Verdict:
        """Learn rows; the new parameters serve only if they pass the gate."""
        verdict = self.gate.judge(self.params, new := self.learn(rows))
        if verdict.accepted:
            self.params = new
            self.buffer.add(rows)
        return verdict

    def learn(self, rows: Int[np.ndarray, "B T"]) -> Any:
        """Return parameters behind the steps of an update; those that serve stay."""
        anchor = self.anchor
        if anchor is None:
            anchor = Anchor(self.params, jax.tree.map(jnp.zeros_like, self.params))
        numbers = self.config.rate, self.config.ewc
        return _train(self._loss, self.params, anchor, self._mask, numbers, self._batches(np.asarray(rows)))

    def _batches(self, rows: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "S N T"]:
        """Return the rows of each step."""
        config, steps = self.config, range(self.config.steps)
        fresh = np.stack([rows[self._rng.integers(len(rows), size=config.rows)] for _ in steps])
        if not config.replayed or not self.buffer.rows:
            return fresh
        earlier = np.stack([self.buffer.draw(config.replayed) for _ in steps])
        return np.concatenate([fresh, earlier], 1)


_anchored = jax.jit(make_anchor, static_argnums=0)


@partial(jax.jit, static_argnums=0)
def _train(
    loss: RowLoss, params: Any, anchor: Anchor, mask: Any, numbers: tuple[Any, Any], batches: Any
) -> Any:
    """Return parameters behind a step for each batch; `numbers` are the rate and the weight of the price."""
    rate, weight = numbers
    optimizer = optax.adam(rate)

    def total(params: Any, rows: Int[Array, "B T"]) -> Float[Array, ""]:
        return jnp.mean(loss(params, rows)) + weight * ewc_penalty(anchor, params)

    def step(carry: Any, rows: Int[Array, "B T"]) -> tuple[Any, None]:
        params, state = carry
        gradient = jax.grad(total)(params, rows)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradient, state, params)
        updates = jax.tree.map(jnp.multiply, updates, mask)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), batches)
    return params
