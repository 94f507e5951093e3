"""Properties of a layer by anybody, in JAX, PyTorch or NumPy, and scripts that show where one does not hold.

A layer is called through a bridge of a few lines. It is held to what it promises, and to nothing else.
"""

from jaxblt.testing.conformance.check import Finding, Outcome, check, check_each
from jaxblt.testing.conformance.properties import PROPERTIES, Property
from jaxblt.testing.conformance.subject import PROMISES, Layer, Subject
from jaxblt.testing.conformance.table import format_outcomes

__all__ = [
    "PROMISES",
    "PROPERTIES",
    "Finding",
    "Layer",
    "Outcome",
    "Property",
    "Subject",
    "check",
    "check_each",
    "format_outcomes",
]
