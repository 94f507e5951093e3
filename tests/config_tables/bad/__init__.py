"""Values of one field that a config refuses, by room."""

from tests.config_tables.bad.adapters import ADAPTERS
from tests.config_tables.bad.data import DATA
from tests.config_tables.bad.inference import INFERENCE
from tests.config_tables.bad.mixers import MIXERS
from tests.config_tables.bad.models import MODELS
from tests.config_tables.bad.numbers import INF, NAN
from tests.config_tables.bad.training import TRAINING
from tests.config_tables.good import by_class

__all__ = ["BAD", "INF", "NAN"]

BAD = by_class(ADAPTERS | DATA | INFERENCE | MIXERS | MODELS | TRAINING)
"""Of each class values of its fields, each of which is refused by itself."""
