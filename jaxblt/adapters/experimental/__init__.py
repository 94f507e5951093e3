"""Forms of adapters that no run of ours showed to win: each is tested, and off unless a config names it."""
