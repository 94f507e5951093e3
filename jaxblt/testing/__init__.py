"""Checks to run on parts of your own."""

from jaxblt.testing.adapters import check_adapter
from jaxblt.testing.check import PROPERTIES, Property, check_mixer
from jaxblt.testing.subject import Subject

__all__ = ["PROPERTIES", "Property", "Subject", "check_adapter", "check_mixer"]
