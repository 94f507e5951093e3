"""Answers from a trained run: log-likelihoods, hidden states, labels, effects of variants, what an answer rests on.

`jaxblt.load(run_dir)` returns a run; `run.score`, `run.embed`, `run.classify`, `run.variants`, `run.mutagenesis`,
`run.attributions` and `run.generate` call this room. A record is a document of its own: its answer does not depend on
the records beside it. It is read in the case and by the alphabet of the run's data, on one device or a mesh. Decoding
itself is in `jaxblt.inference`, the loss over a split in `jaxblt.training.evaluate`.
"""

from jaxblt.answers.attributions import Attributions, attributions
from jaxblt.answers.classify import classify
from jaxblt.answers.continuations import continuations, search_beams
from jaxblt.answers.embed import Embeddings, Pool, embed
from jaxblt.answers.index import build_index
from jaxblt.answers.mutagenesis import Mutagenesis, mutagenesis
from jaxblt.answers.predictions import Predictions, TaskPredictions
from jaxblt.answers.protocol import TrainedRun
from jaxblt.answers.ranks import Ranks, rank_bytes
from jaxblt.answers.records import Sequences, open_records
from jaxblt.answers.score import BATCH_SIZE, Scores, score
from jaxblt.answers.variants import VariantScores, variants
from jaxblt.answers.vcf import Variant, read_vcf

__all__ = [
    "BATCH_SIZE",
    "Attributions",
    "Embeddings",
    "Mutagenesis",
    "Pool",
    "Predictions",
    "Ranks",
    "Scores",
    "Sequences",
    "TaskPredictions",
    "TrainedRun",
    "Variant",
    "VariantScores",
    "attributions",
    "build_index",
    "classify",
    "continuations",
    "embed",
    "mutagenesis",
    "open_records",
    "rank_bytes",
    "read_vcf",
    "score",
    "search_beams",
    "variants",
]
