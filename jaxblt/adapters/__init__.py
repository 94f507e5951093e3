"""Low-rank adapters of a frozen model: static (LoRA), or scaled by a code that a small causal router makes.

`AdapterConfig` says what an adapter is, `attach` puts it on the stacks of a model's config. Training a recipe with a
`base_run` then learns the adapters alone. Nothing here trains: recipes and frozen trees are in `jaxblt.training`.
"""

from jaxblt.adapters.code.batch_documents import tell_documents
from jaxblt.adapters.code.config import RouterConfig
from jaxblt.adapters.code.draw import Draw
from jaxblt.adapters.code.losses import AdapterLosses
from jaxblt.adapters.code.prefix import Prefix
from jaxblt.adapters.code.reads import ChunkMean, Read
from jaxblt.adapters.code.recurrent_memory import RecurrentMemory
from jaxblt.adapters.code.side import Side
from jaxblt.adapters.code.sticky import Sticky
from jaxblt.adapters.code.traces import Traces
from jaxblt.adapters.code.transforms import Clamp, Confidence, Ema, Sparse, TopK
from jaxblt.adapters.files.distill import distill, mean_codes
from jaxblt.adapters.files.drift import describe_drift, merge_drift
from jaxblt.adapters.files.merge import fuse
from jaxblt.adapters.files.peft import load_peft, save_peft
from jaxblt.adapters.files.warm_start import warm_start
from jaxblt.adapters.retrieval import Index, Neighbours, load_index
from jaxblt.adapters.update.attach import attach, check_sites, detach, find_sites, retrievals
from jaxblt.adapters.update.config import AdapterConfig
from jaxblt.adapters.update.governor import Governor
from jaxblt.adapters.update.params import join_params, split_params, without_index

__all__ = [
    "AdapterConfig",
    "AdapterLosses",
    "ChunkMean",
    "Clamp",
    "Confidence",
    "Draw",
    "Ema",
    "Governor",
    "Index",
    "Neighbours",
    "Prefix",
    "Read",
    "RecurrentMemory",
    "RouterConfig",
    "Side",
    "Sparse",
    "Sticky",
    "TopK",
    "Traces",
    "attach",
    "check_sites",
    "describe_drift",
    "detach",
    "distill",
    "find_sites",
    "fuse",
    "join_params",
    "load_index",
    "load_peft",
    "mean_codes",
    "merge_drift",
    "retrievals",
    "save_peft",
    "split_params",
    "tell_documents",
    "warm_start",
    "without_index",
]
