"""Titans: models whose memory learns while it reads, on tasks that ask for what no window reaches."""

from jaxblt.data.task_data import TaskDataConfig
from jaxblt.evaluation.tasks import GapRecall
from jaxblt.models import titan
from jaxblt.training.objectives import NextByte
from jaxblt.training.optimizer import AdamWConfig
from jaxblt.training.recipe import Recipe, TrainConfig


def recall() -> Recipe:
    """Recall of four values over gaps of 16 to 24 symbols, for CPUs: one layer with a window of 8, which reaches 7."""
    steps, task = 400, GapRecall(symbols=8, fillers=4, pairs=4, min_gap=16, gap=24)
    model = titan("mag", dim=32, num_layers=1, window=8, chunk_size=8, num_heads=1, mlp_dim=0)
    train = TrainConfig(
        steps=steps, dtype="float32", log_every=50, eval_every=steps, eval_batches=8, checkpoint_every=steps
    )
    return Recipe(
        name="titan_recall",
        model=model,
        data=TaskDataConfig(task=task, seq_len=task.length, batch_size=64),
        objective=NextByte(accuracy=True),
        optimizer=AdamWConfig(learning_rate=5e-3, warmup_steps=50),
        train=train,
    )
