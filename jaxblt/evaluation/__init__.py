"""Bits per byte of a model with intervals, and baselines to compare them with."""

from jaxblt.evaluation.arms import compare_arms
from jaxblt.evaluation.bits import BitsPerByte, bits_per_byte, document_bits_per_byte, ratio_interval
from jaxblt.evaluation.boundaries import BoundaryScores, score_boundaries
from jaxblt.evaluation.compressors import compressor_bits_per_byte, compressor_table
from jaxblt.evaluation.markov import MarkovModel, fit_markov
from jaxblt.evaluation.ngram import NgramModel, fit_ngram
from jaxblt.evaluation.planted import Planted, planted
from jaxblt.text_table import format_table

__all__ = [
    "BitsPerByte",
    "BoundaryScores",
    "MarkovModel",
    "NgramModel",
    "Planted",
    "bits_per_byte",
    "compare_arms",
    "compressor_bits_per_byte",
    "compressor_table",
    "document_bits_per_byte",
    "fit_markov",
    "fit_ngram",
    "format_table",
    "planted",
    "ratio_interval",
    "score_boundaries",
]
