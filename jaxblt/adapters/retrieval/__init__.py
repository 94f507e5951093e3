"""Similar text elsewhere, for routers: an index of chunks, exact search, and six features of the result.

The index holds vectors that the frozen base gives chunks of documents. A router's query is the base vector of the chunk
that it reads anyway, so decoding needs no second model and no text. `jaxblt.answers.index` makes an index of a run.
"""

from jaxblt.adapters.retrieval.features import FEATURES, neighbour_features
from jaxblt.adapters.retrieval.index import Index, load_index, make_index, save_index
from jaxblt.adapters.retrieval.neighbours import Neighbours
from jaxblt.adapters.retrieval.search import Found, nearest

__all__ = [
    "FEATURES",
    "Found",
    "Index",
    "Neighbours",
    "load_index",
    "make_index",
    "nearest",
    "neighbour_features",
    "save_index",
]
