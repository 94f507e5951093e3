"""Diagonal linear recurrence along time, with every state returned."""

from pallas_kernels.linear_scan.api import TABLE, explain, linear_scan
from pallas_kernels.linear_scan.reference import decayed

__all__ = ["TABLE", "decayed", "explain", "linear_scan"]
