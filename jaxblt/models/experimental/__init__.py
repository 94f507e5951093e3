"""Models that lost to simpler ones, or that no trained run has compared: tested, documented, off the defaults."""
