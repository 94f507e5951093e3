"""Values of one field that a config refuses: generation, the engine and servers."""

from typing import Any

from tests.config_tables.bad.numbers import INF, NAN

INFERENCE: dict[str, dict[str, tuple[Any, ...]]] = {
    "Drafts": {"count": (-1, 17, 2.5), "drafter": ("model", None), "order": (0, 17)},
    "SamplingConfig": {
        "temperature": (-1, NAN, INF, 1e-40, 9e-7, 1.1e6, "hot"),
        "top_k": (-1, 2.5, NAN, None),
        "top_p": (0.0, 1e-40, -0.1, 1.01, NAN, None),
    },
    "EngineConfig": {
        "lanes": ((), (8,)),
        "max_waiting": (0, 2.5),
        "piece_bytes": (0, 2.5),
        "prefix_bytes": (-1, 2.5),
        "drafts": (8, True),
        "beams": (-1, 257, 2.5),
    },
    "Lane": {"slots": (0, 2.5, 10**6), "capacity": (1, 2.5)},
    "Request": {
        "prompt": ("text", None),
        "max_new_bytes": (0, 2.5),
        "deadline_s": (0, -1.0, NAN, INF),
        "max_unread": (0, 2.5),
        "sampling": (None,),
        "adapter": (-1, 2.5),
    },
    "Sampling": {
        "temperature": (-1, NAN, INF),
        "top_k": (-1, 2.5),
        "top_p": (0.0, 1.5, NAN),
        "seed": (-1, 2.5, 2**70),
        "stop": ((b"",), ("text",)),
        "alphabet": (b"", "text"),
        "frequency_penalty": (NAN, INF, 1e6),
        "presence_penalty": (NAN, INF, -1e6),
    },
    "Decoder": {"model": (None, "books"), "patcher": ("space",)},
}
