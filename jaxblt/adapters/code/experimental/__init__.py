"""Codes that lost to simpler ones in our own runs: guesses of the next code, mixtures of levels."""
