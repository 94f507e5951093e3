"""A gate that new parameters pass only if they predict known rows as well as those that serve."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxblt.training.experimental.online.ewc import RowLoss
from jaxblt.validation import number


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
