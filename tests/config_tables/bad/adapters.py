"""Values of one field that a config refuses: adapters."""

from typing import Any

from jaxblt.adapters import Clamp, Prefix
from jaxblt.adapters.experimental.film import Film
from tests.config_tables.bad.numbers import INF, NAN

ADAPTERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "AdapterConfig": {
        "sites": (("",), ((3, 4),)),
        "gates": (("",),),
        "forms": (("mlp/down",), (("mlp/down", 3),), (("", Film()),)),
        "rank": (0, 2.5),
        "alpha": (0.0, -1.0, NAN),
        "blocks": (0, 1.5, 2),
        "code": ((Clamp(),), Clamp()),
        "key_bias": (1,),
    },
    "AdapterLosses": {
        "entropy": (NAN, INF),
        "balance": (-5.0, NAN),
        "flip": (-0.1, NAN),
        "decorrelation": (-0.1, NAN),
        "orthogonality": (-0.1, NAN),
    },
    "Codebook": {"entries": (1, 2.5), "commitment": (-0.1, NAN), "weight": (0.0, NAN)},
    "Film": {"factor": (0.0, 1.5, NAN), "shift": (-0.1, NAN)},
    "Kronecker": dict.fromkeys(("inputs", "outputs", "terms"), (0, 2.5)),
    "Capacity": {"factor": (0.0, -1.0, NAN), "window": (0, 2.5)},
    "RouterConfig": {
        "level": ("patch",),
        "chunk": (0, 2.5),
        "lag": (0, 1.5),
        "reads": ("prefix", ("prefix",), (Prefix,), (), (Prefix(2), Prefix(3))),
        "hidden": (0, 1.5),
        "fallback": (0.5, NAN),
        "packed": (1,),
        "segment_alignment": (0, 2.5),
        "per": ("site",),
    },
    "Prefix": {"steps": (0, 1.5)},
    "Side": {"features": (0, 1.5)},
    "Neighbours": {"index": ("", 3), "capacity": (0, 7, 2.5), "count": (0, 16385, 2.5)},
    "Mixed": {
        "levels": (("chunk",), ("token", "chunk")),
        "at": ((1.0,), (-1.0,)),
        "prices": ((-1.0,), (0.1,)),
    },
    "Governor": {
        "norm": ("nuclear",),
        "start": (0.0, 9.0, NAN),
        "least": (0.0, NAN),
        "most": (0.5, NAN),
        "low": (-0.1, 0.5, NAN),
        "high": (1.5, NAN),
        "shrink": (0.0, 1.0, NAN),
        "grow": (1.0, NAN),
    },
    "Clamp": {"most": (0.0, NAN)},
    "Confidence": {"start": (0.0, 1.0, NAN)},
    "Ema": {"decay": (-0.1, 1.0, NAN)},
    "Sparse": {"theta": (0.0, NAN)},
    "Sticky": {"tau": (-0.1, 1.0, NAN)},
    "Guess": {"tau": (-1.5, 1.5, NAN)},
    "TopK": {"k": (0, 1.5)},
    "Limits": {
        **dict.fromkeys(("least_entropy", "most_rms"), (-1.0, NAN)),
        **dict.fromkeys(("most_flips", "least_hits", "most_violations"), (-0.1, 1.5, NAN)),
        **dict.fromkeys(("most_p95", "most_p99"), (0.0, -1.0, NAN)),
    },
}
