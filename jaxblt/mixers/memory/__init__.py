"""Neural long-term memory (Titans): the layer, as context (MAC) and beside windows (MAG)."""
