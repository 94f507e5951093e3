"""The quality of a model on the task sets of `jaxblt.data.tasks`: scores of answers, and the baseline.

`jaxblt.evaluation.tasks.evaluate` scores runs. Models are not made here.
"""

from jaxblt.evaluation.tasks.baseline import majority_baseline
from jaxblt.evaluation.tasks.scores import TaskScores, count_answers, predict_ids, score

__all__ = ["TaskScores", "count_answers", "majority_baseline", "predict_ids", "score"]
