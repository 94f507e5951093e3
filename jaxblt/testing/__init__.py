"""Checks to run on parts of your own."""

from jaxblt.testing.check import PROPERTIES, Property, check_mixer
from jaxblt.testing.subject import Subject

__all__ = ["PROPERTIES", "Property", "Subject", "check_mixer"]
