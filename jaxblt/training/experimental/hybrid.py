"""What trains routers beside the language model's loss, each part with a weight that follows a schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxblt.adapters.code.draw import POLICY, Draw, choices
from jaxblt.adapters.update.attach import stacks_of
from jaxblt.data.batch import Batch
from jaxblt.training.experimental.acting import acting_params
from jaxblt.training.experimental.imitated_labels import label_nats, negative_nats
from jaxblt.training.experimental.policy import PolicyConfig, only_routers, surrogate
from jaxblt.training.metrics import cross_entropy
from jaxblt.training.objectives.objectives import NextByte, Objective
from jaxblt.validation import check_bounds, check_read

Points = tuple[tuple[int, float], ...]
"""(step, weight) pairs with rising steps: a weight is linear between them, and constant before and behind them."""
MEANS = {
    "label_nats": "weight",
    "negative_nats": "weight",
    "reward": "weight",
    "flips": "choices",
    "clipped": "choices",
    "policy_kl": "choices",
}
"""Sums that become figures, and by which sum they are divided."""


@dataclass(frozen=True)
class HybridNextByte(NextByte):
    """Predict each byte, by a loss whose parts have weights by step, sum_i w_i(step) L_i in nats a scored byte.

    With language 0 throughout and no reference, only routers have a gradient. Weight decay moves U and V all the same:
    name them in `Recipe.freeze` to keep them.

    Attributes:
      language: of the loss of `NextByte`. With a policy it is that of the experts that were drawn.
      reference: of `Recipe.reference`, times the weight that it has there: imitation of another run's outputs.
      labels: of -log p[label] with p the shares of each bank before the transforms of its code, and labels those of
        `Batch.labels`, the number of an expert for each byte or row: imitation of known codes. A negative label is for
        none, one above the last expert makes the loss NaN. Where each block has a router, it is summed over blocks.
      negatives: of max(0, margin - log p[label] + log p[hardest]) with the wrong expert whose share is largest: a hard
        negative. Labels are as for `labels`.
      margin: of log shares.
      reinforcement: of the loss of a policy, see `jaxblt.training.experimental.policy`; the bank's code has `Draw`.
      policy: how it learns.
    """

    language: Points = ((0, 1.0),)
    reference: Points = ((0, 1.0),)
    labels: Points = ((0, 0.0),)
    negatives: Points = ((0, 0.0),)
    margin: float = 1.0
    reinforcement: Points = ((0, 0.0),)
    policy: PolicyConfig = PolicyConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in PARTS:
            points = getattr(self, name)
            steps = [step for step, _ in points]
            if not steps or steps[0] < 0 or any(low >= high for low, high in pairwise(steps)):
                raise ValueError(
                    f"HybridNextByte.{name} must be (step, weight) pairs with rising steps from 0 on, got {points}"
                )
            if any(weight < 0 for _, weight in points):
                raise ValueError(f"HybridNextByte.{name} must hold weights of at least 0, got {points}")
        check_bounds(self, "margin", above=0)
        check_read(self, "margin", needed="weights of negatives above 0", is_read=self.has("negatives"))
        check_read(self, "policy", needed="weights of reinforcement above 0", is_read=self.draws)
        if not any(self.has(name) for name in PARTS):
            raise ValueError("HybridNextByte weighs every part by 0 at all steps: nothing would be trained")

    def check(self, recipe: Any) -> None:
        """Check that a recipe has routers of banks to train, and bytes in order."""
        weighed = recipe.reference is not None or not self.has("reference")
        check_read(self, "reference", needed="Recipe.reference", is_read=weighed)
        if not (self.draws or self.is_labelled):
            return
        self._check_banks(recipe)
        if recipe.patcher is not None or recipe.mesh.seq != 1:
            raise ValueError(
                f"HybridNextByte credits bytes to choices in whole rows of bytes, and patcher is {recipe.patcher} with "
                f"mesh.seq = {recipe.mesh.seq}: use a model without patches and mesh.seq = 1"
            )

    def _check_banks(self, recipe: Any) -> None:
        """Check that the model has banks, with an expert for each label, whose experts are drawn if a policy learns."""
        stacks = stacks_of(recipe.model).values()
        banks = [stack.adapter for stack in stacks if stack.adapter is not None and stack.adapter.blocks]
        if not banks:
            raise ValueError(
                "HybridNextByte trains routers of banks, and no stack of the model has one: attach an AdapterConfig "
                "with blocks"
            )
        classes, fewest = getattr(recipe.data, "num_classes", None), min(bank.blocks for bank in banks)
        if self.is_labelled and classes is not None and classes > fewest:
            raise ValueError(
                f"HybridNextByte.labels may be of {classes} classes, and a bank has {fewest} experts: set "
                f"AdapterConfig.blocks = {classes}"
            )
        if self.draws and not any(isinstance(part, Draw) for bank in banks for part in bank.code):
            raise ValueError(
                "HybridNextByte.reinforcement needs a policy, and no bank draws its experts: set AdapterConfig.code = "
                "(Draw(),)"
            )

    def has(self, part: str) -> bool:
        """Return whether a part has a weight above 0 at any step."""
        return any(weight > 0 for _, weight in getattr(self, part))

    @property
    def is_labelled(self) -> bool:
        """Whether routers learn from labels."""
        return self.has("labels") or self.has("negatives")

    @property
    def draws(self) -> bool:
        """Whether experts are drawn."""
        return self.has("reinforcement")

    @property
    def draws_older(self) -> bool:
        """Whether experts are drawn by routers of earlier updates."""
        return self.draws and self.policy.method == "ppo"

    def weight_of(self, part: str, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the weight of a part at a step."""
        return jnp.asarray(make_weight(getattr(self, part))(step), jnp.float32)


PARTS = ("language", "reference", "labels", "negatives", "reinforcement")
"""Names of what is weighed."""


def make_weight(points: Points) -> optax.Schedule:
    """Make the weight by step: optax's linear schedules, joined at the points."""
    first, last = points[0], points[-1]
    pieces = [optax.constant_schedule(first[1])]
    for (begin, low), (end, high) in pairwise(points):
        pieces.append(optax.linear_schedule(low, high, end - begin))
    pieces.append(optax.constant_schedule(last[1]))
    schedule = optax.join_schedules(pieces, [step for step, _ in points])
    return lambda count: schedule(jnp.asarray(count, jnp.float32))


def without_weights(objective: Objective) -> Objective:
    """Return an objective without what trains routers beside it."""
    if not isinstance(objective, HybridNextByte):
        return objective
    return NextByte(objective.label_smoothing, objective.accuracy)


@dataclass(frozen=True)
class Hybrid:
    """A recipe's `HybridNextByte` as a step knows it.

    Attributes:
      config: the weights.
      base: the model without its adapters, whose nats rewards are measured from.
    """

    config: HybridNextByte
    base: Any


Run = Callable[..., tuple[Float[Array, "B T V"], Any, Any]]
"""A pass: (params, model=None, rngs={}, experts=None, collections=...) -> logits, patches, what was sown."""


@dataclass(frozen=True)
class Drawn:
    """Experts of a batch.

    Attributes:
      experts: the collection "policy", which makes passes take them.
      old: their `Choice`s under the routers that drew them.
    """

    experts: Any
    old: Any


def draw(hybrid: Hybrid | None, run: Run, params: Any, opt_state: Any, key: PRNGKeyArray) -> Drawn | None:
    """Draw experts by the routers that act; None where no policy learns."""
    if hybrid is None or not hybrid.config.draws:
        return None
    acting = acting_params(opt_state, params, hybrid.config.policy.refresh)
    _, _, side = run(jax.lax.stop_gradient(acting), rngs={POLICY: key}, collections=("intermediates", POLICY))
    return Drawn(side[POLICY], jax.lax.stop_gradient(choices(side)))


def routed_parts(
    hybrid: Hybrid, run: Run, params: Any, logits: Float[Array, "B T V"], drawn: Drawn | None, batch: Batch
) -> tuple[dict[str, Float[Array, ""]], dict[str, Float[Array, ""]]]:
    """Return the losses of routers beside the language model's, summed over the batch, and sums to report.

    Each of them has a gradient for routers alone.

    Args:
      hybrid: the weights.
      run: a pass of the model.
      params: that are trained.
      logits: of the pass with the experts that were drawn.
      drawn: the experts.
      batch: the rows.

    Raises:
      ValueError: labels are imitated, and the batch brings none.
    """
    parts, sums = {}, {}
    if not (hybrid.config.draws or hybrid.config.is_labelled):
        return parts, sums
    experts = None if drawn is None else drawn.experts
    _, _, side = run(only_routers(params), experts=experts, collections=("intermediates",))
    if hybrid.config.has("labels"):
        parts["labels"] = sums["label_nats"] = label_nats(side, batch)
    if hybrid.config.has("negatives"):
        margin = hybrid.config.margin
        parts["negatives"] = sums["negative_nats"] = negative_nats(side, batch, margin)
    if drawn is not None:
        base, _, _ = run(jax.lax.stop_gradient(params), model=hybrid.base)
        nats, base_nats = (cross_entropy(x, batch.targets) for x in (logits, base))
        gain = (base_nats - nats) * batch.loss_mask.astype(jnp.float32)
        parts["reinforcement"], found = surrogate(
            hybrid.config.policy, choices(side), drawn.old, gain, batch.segment_ids
        )
        sums |= found
    return parts, sums


def combined(
    hybrid: Hybrid | None, parts: dict[str, Float[Array, ""]], step: Int[Array, ""]
) -> Float[Array, ""]:
    """Add up the weighted parts; without a `Hybrid` each weighs 1. A part that never has a weight is left out."""
    if hybrid is None:
        return sum(parts.values(), jnp.float32(0))
    live = {name: part for name, part in parts.items() if hybrid.config.has(name)}
    return sum((hybrid.config.weight_of(name, step) * part for name, part in live.items()), jnp.float32(0))


def hybrid_figures(sums: Any) -> dict[str, Float[Array, ""]]:
    """Return nats a scored byte of imitated labels and of rewards, and shares of choices."""
    return {name: sums[name] / jnp.maximum(sums[below], 1) for name, below in MEANS.items() if name in sums}
