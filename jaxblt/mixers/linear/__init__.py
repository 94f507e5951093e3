"""Linear recurrences and linear attention: gated recurrences, GLA, Gated DeltaNet, Mamba-2, dual decays."""
