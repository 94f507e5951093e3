"""Updates of adapters from rows that were served, each of which has to pass a gate before it serves."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxblt.adapters import join_params
from jaxblt.data.vocab import PAD
from jaxblt.training.experimental.online.canary import CanaryGate, Verdict
from jaxblt.training.experimental.online.ewc import Anchor, RowLoss, ewc_penalty, make_anchor
from jaxblt.training.experimental.online.replay import ReplayBuffer
from jaxblt.training.metrics import cross_entropy
from jaxblt.validation import check_bounds, check_fields


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
