"""Linear attention that overwrites: the delta rule with a gate per head."""

from pallas_kernels.gated_delta_rule.api import TABLE, explain, gated_delta_rule
from pallas_kernels.gated_delta_rule.summary import gated_delta_rule_adjoint, gated_delta_rule_summary

__all__ = ["TABLE", "explain", "gated_delta_rule", "gated_delta_rule_adjoint", "gated_delta_rule_summary"]
