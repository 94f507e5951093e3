"""Remarks on what does not hold: which sentence promises it, and what holds beside it."""

CACHE = (
    "The documentation of `cache` says that only inputs whose states it lacks are given, of shape `(batch_size, "
    "unprocessed_length)`."
)
NOTES = {
    "transformers: Falcon Mamba": (
        "The documentation of `cache` says that the output is as if the inputs before were given too. Calls of one "
        "token hold. The same was mended for Mamba-2 (transformers issue 46032)."
    ),
    "transformers: Bamba, positions left out": (
        f"{CACHE} `position_ids` are optional, and count from 0 in each call. Given as `generate` gives them, as in "
        "the row `Bamba`, these properties hold."
    ),
    "transformers: MiniMax, positions left out": (
        f"{CACHE} `position_ids` are optional. Given as `generate` gives them, as in the row `MiniMax`, steps of one "
        "token hold."
    ),
    "transformers: MiniMax": f"{CACHE} Calls of one token hold.",
    "transformers: RecurrentGemma": (
        f"{CACHE} Calls of one token hold. The documentation of `attention_mask` says that it masks padding; padding "
        "on the right holds."
    ),
    "transformers: BLT": (
        f"{CACHE} The cache holds states of the local encoder and decoder. One for the global transformer is named as "
        "future work in transformers pull request 42188."
    ),
}
"""By name of the layer."""
