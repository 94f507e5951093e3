"""Cells that loop over tokens: GRU and LSTM."""
