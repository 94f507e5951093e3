"""The cost of searching an adapter's index on a CPU: python -m experiments.benchmark index_search --out FILE."""

from functools import partial
from typing import Any

TRIALS = 20
"""The trials of each size."""


def index_search(
    out: str,
    chunks: tuple[int, ...] = (16_384, 102_400),
    dim: int = 512,
    queries: int = 64,
    neighbours: int = 8,
) -> dict[str, Any]:
    """Time an exact search by the size of the index, and report the bytes that it needs.

    Bytes are those that the compiler plans.

    Args:
      out: file for the figures as JSON.
      chunks: of an index, multiples of 1,024: others are copied first.
      dim: width of their vectors.
      queries: of a search; a row has one a chunk, so 64 for 4,096 bytes in chunks of 64.
      neighbours: that are looked for.
    """
    import jax

    from experiments.benchmark.figures.programs import time_program
    from experiments.benchmark.figures.saved import save
    from jaxblt.adapters.retrieval import nearest

    search = jax.jit(partial(nearest, k=neighbours))
    asked, searches = jax.random.normal(jax.random.key(0), (queries, dim)), []
    for count in chunks:
        vectors = jax.random.normal(jax.random.key(1), (count, dim))
        searches.append({"chunks": count} | time_program(search, (asked, vectors), TRIALS)[0])
    found = {"dim": dim, "queries": queries, "neighbours": neighbours, "searches": searches}
    save("index_search", out, found)
    return found
