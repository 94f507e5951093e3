"""The neural Turing machine, which lost to simpler mixers in our own runs."""
