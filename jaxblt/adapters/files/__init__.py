"""Adapters that leave a run: PEFT files, merging, distilling, warm starts, serving."""
