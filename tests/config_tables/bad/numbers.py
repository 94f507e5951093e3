"""Numbers that are not finite."""

NAN, INF = float("nan"), float("inf")
