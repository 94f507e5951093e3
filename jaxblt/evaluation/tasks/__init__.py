"""Tasks that train and test sequence mixers: where their rows come from, and how answers are scored.

A task is a frozen config (`jaxblt.data.TaskSource`). `jaxblt.data.TaskDataConfig` makes rows of its examples, of which
`loss_mask` scores the answers alone. `jaxblt.evaluation.tasks.evaluate` scores runs. Models are not made here.
"""

from jaxblt.evaluation.tasks.babi import Babi
from jaxblt.evaluation.tasks.babilong import Babilong
from jaxblt.evaluation.tasks.baseline import majority_baseline
from jaxblt.evaluation.tasks.copying import Copy, RepeatCopy
from jaxblt.evaluation.tasks.gap_recall import GapRecall
from jaxblt.evaluation.tasks.generated import GeneratedTask, part_of
from jaxblt.evaluation.tasks.listops import ListOps
from jaxblt.evaluation.tasks.listops_files import ListOpsFiles
from jaxblt.evaluation.tasks.matching import PatternMatching
from jaxblt.evaluation.tasks.pairs import TextPairs
from jaxblt.evaluation.tasks.parity import Parity
from jaxblt.evaluation.tasks.pg19 import pg19
from jaxblt.evaluation.tasks.recall import MQAR
from jaxblt.evaluation.tasks.reviews import TextLabels
from jaxblt.evaluation.tasks.scores import TaskScores, count_answers, predict_ids, score

__all__ = [
    "MQAR",
    "Babi",
    "Babilong",
    "Copy",
    "GapRecall",
    "GeneratedTask",
    "ListOps",
    "ListOpsFiles",
    "Parity",
    "PatternMatching",
    "RepeatCopy",
    "TaskScores",
    "TextLabels",
    "TextPairs",
    "count_answers",
    "majority_baseline",
    "part_of",
    "pg19",
    "predict_ids",
    "score",
]
