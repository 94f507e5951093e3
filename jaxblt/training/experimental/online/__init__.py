"""Updates of adapters while a model serves: replay, a penalty on what matters, a monitor of drift, and a gate.

No run of ours showed that such updates win against training anew. `OnlineLearner` holds the parts together.
"""

from jaxblt.training.experimental.online.canary import CanaryGate, Verdict
from jaxblt.training.experimental.online.drift_monitor import DriftMonitor
from jaxblt.training.experimental.online.ewc import Anchor, ewc_penalty, make_anchor
from jaxblt.training.experimental.online.learner import OnlineConfig, OnlineLearner, row_nats
from jaxblt.training.experimental.online.replay import ReplayBuffer

__all__ = [
    "Anchor",
    "CanaryGate",
    "DriftMonitor",
    "OnlineConfig",
    "OnlineLearner",
    "ReplayBuffer",
    "Verdict",
    "ewc_penalty",
    "make_anchor",
    "row_nats",
]
