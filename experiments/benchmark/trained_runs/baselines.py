"""The baselines of a recipe: python -m experiments.benchmark baselines RECIPE [--alphabet dna] --out FILE."""

from typing import Annotated, Any, Literal

import tyro

import configs
from experiments.benchmark.figures.saved import save
from jaxblt.data.config import DataConfig, apply_split, open_source
from jaxblt.data.sources import read_document


def split_bytes(data: DataConfig, split: Literal["train", "validation", "test"]) -> bytes:
    """Return all bytes of a split, document after document."""
    part = apply_split(data, open_source(data), split)
    return b"".join(read_document(part, i) for i in range(len(part)))


def baselines(
    recipe: Annotated[str, tyro.conf.Positional],
    out: str,
    alphabet: Literal["bytes", "dna"] = "bytes",
    order: int = 5,
) -> dict[str, Any]:
    """Score an order-k model counted on the training split, and compressors, on the test split.

    Args:
      recipe: name of a recipe, for its data.
      out: JSON file to write.
      alphabet: bytes for an interpolated Kneser-Ney model beside gzip, bzip2 and xz; dna for a Markov model of both
        strands over A, C, G, T.
      order: bytes of context.
    """
    from jaxblt.evaluation import compressor_table, fit_markov, fit_ngram

    data = configs.get(recipe).data
    train, test = (split_bytes(data, split) for split in ("train", "test"))
    if alphabet == "dna":
        figures = {f"order-{order} Markov": fit_markov(train, order=order).bits_per_base(test)}
    else:
        figures = {f"order-{order} bytes": fit_ngram(train, order=order).bits_per_byte(test)}
        figures |= compressor_table(test)
    found = {
        "data_of": recipe,
        "train_bytes": len(train),
        "test_bytes": len(test),
        "bits_per_byte": figures,
    }
    save("baselines", out, found)
    return found
