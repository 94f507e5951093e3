"""A layer on the bench: its properties are given what they ask for, and their errors measured."""

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np

from jaxblt.testing.conformance import helpers
from jaxblt.testing.conformance.cases import Case, cases
from jaxblt.testing.conformance.properties import Property
from jaxblt.testing.conformance.subject import Layer, Subject
from jaxblt.testing.tolerances import DIFFERENCED, bound, typical, worst
from jaxblt.training.stored.safe_files import one_line


@dataclasses.dataclass(frozen=True)
class Measured:
    """The error of a property in one case, in units of the root mean square of what was expected.

    Attributes:
      error: infinite if the layer raised, or gave something that cannot be compared.
      limit: its tolerance.
      unit: that root mean square, or 1.
      says: what the layer raised or gave instead; else nothing.
    """

    error: float
    limit: float
    unit: float = 1.0
    says: str = ""

    @property
    def holds(self) -> bool:
        """True if the error is within its tolerance."""
        return self.error <= self.limit


@dataclasses.dataclass(frozen=True)
class Bench:
    """A subject and its layer."""

    subject: Subject
    layer: Layer

    def cases(self, prop: Property, length: int) -> list[Case]:
        """Return the cases of a property at a length."""
        return list(cases(prop, length, self.subject.width))

    def given(self, prop: Property, case: Case) -> dict[str, Any]:
        """Return the arguments that a property asks for."""
        call, reference = self.layer.call, self.layer.reference
        known = {
            "call": call,
            "start": self.layer.start or (lambda rows: None),
            "reference": reference or (lambda x: call(x.astype("float32"))[0]),
            "steps": self.steps,
            "host": helpers.host,
            "form": helpers.form,
            "decays": self.subject.decays,
            "dtype": self.subject.dtype,
            "cut": case.cut,
        }
        asked = inspect.signature(prop.check).parameters
        made = {name: known[name] for name in asked if name in known} | {"x": case.inputs()}
        return made | ({"gradient": self.gradient} if "gradient" in asked else {})

    @property
    def steps(self) -> tuple[float, ...]:
        """The steps of differences, larger if they are of results in fp32."""
        return (2e-2, 5e-3, 1e-3, 3e-4) if self.layer.reference is None else (1e-3, 1e-4)

    @functools.cached_property
    def gradient(self) -> Any:
        """Return the function that takes gradients in the layer's framework."""
        y = self.layer.call(Case(1, max(self.subject.lengths), self.subject.width, None).inputs())[0]
        return helpers.torch_gradient if hasattr(y, "new_tensor") else helpers.jax_gradient

    def measure(self, prop: Property, case: Case) -> Measured:
        """Try a property on one input."""
        try:
            actual, expected = prop.check(**self.given(prop, case))
            if isinstance(actual, str):
                says = "" if actual == expected else f"{actual} where {expected} was expected"
                return Measured(float("inf") if says else 0.0, 0.0, says=says)
            actual, expected = helpers.host(actual), helpers.host(expected)
        except Exception as error:
            return Measured(float("inf"), 0.0, says=f"raises {type(error).__name__}: {one_line(error)}")
        if actual.shape != expected.shape:
            says = f"shape {actual.shape} where {expected.shape} was expected"
            return Measured(float("inf"), 0.0, says=says)
        unit = self.unit(prop, case, expected)
        if self.subject.dtype == "float32":
            return Measured(worst(actual, expected), self.limit(prop), unit)
        return Measured(typical(actual, expected) * _size(expected) / unit, self.limit(prop), unit)

    def unit(self, prop: Property, case: Case, expected: np.ndarray) -> float:
        """Return the unit of errors: the root mean square of what was expected.

        In bf16, which rounds within a row, it is that of the row's outputs if this is larger: the products of a token
        whose output nearly vanishes are rounded like the others.
        """
        if self.subject.dtype == "float32" or "gradient" in inspect.signature(prop.check).parameters:
            return _size(expected)
        return max(_size(expected), _size(helpers.host(self.layer.call(case.inputs())[0])))

    def limit(self, prop: Property) -> float:
        """Return the tolerance of a property: its longest sum is over the numbers of the longest row."""
        if prop.differenced and self.subject.dtype == "float32":
            return DIFFERENCED
        return bound(self.subject.dtype, max(self.subject.lengths) * self.subject.width)


def _size(numbers: np.ndarray) -> float:
    """Return the root mean square of some numbers, or 1 if it is zero."""
    return float(np.sqrt(np.mean(numbers**2))) or 1.0
