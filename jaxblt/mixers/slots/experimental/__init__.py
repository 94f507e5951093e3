"""Slots that lost to simpler ones in our own runs: memory of slots, managers and compressors of states."""
