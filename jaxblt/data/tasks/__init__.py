"""Task sets: examples that train and test sequence mixers, drawn or read from released files.

A task is a frozen config (`jaxblt.data.TaskSource`). `jaxblt.data.TaskDataConfig` makes rows of its examples, of which
`loss_mask` scores only the answers. `jaxblt.evaluation.tasks` scores them.
"""

from jaxblt.data.tasks.babi import Babi
from jaxblt.data.tasks.babilong import Babilong
from jaxblt.data.tasks.copying import Copy, RepeatCopy
from jaxblt.data.tasks.gap_recall import GapRecall
from jaxblt.data.tasks.generated import GeneratedTask, part_of
from jaxblt.data.tasks.listops import ListOps
from jaxblt.data.tasks.listops_files import ListOpsFiles
from jaxblt.data.tasks.matching import PatternMatching
from jaxblt.data.tasks.pairs import TextPairs
from jaxblt.data.tasks.parity import Parity
from jaxblt.data.tasks.pg19 import pg19
from jaxblt.data.tasks.pixels import Pathfinder, PixelClasses
from jaxblt.data.tasks.recall import MQAR
from jaxblt.data.tasks.reviews import TextLabels

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
    "Pathfinder",
    "PatternMatching",
    "PixelClasses",
    "RepeatCopy",
    "TextLabels",
    "TextPairs",
    "part_of",
    "pg19",
]
