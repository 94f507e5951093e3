"""Diagonal linear recurrence along time, with every state returned."""

from pallas_kernels.linear_scan.api import TABLE, explain, linear_scan

__all__ = ["TABLE", "explain", "linear_scan"]
