"""Titans: models whose memory learns while it reads, on tasks that ask for what no window reaches."""

from dataclasses import replace

from jaxblt.data.task_data import TaskDataConfig
from jaxblt.data.tasks import Babilong, GapRecall
from jaxblt.mixers import AttentionConfig
from jaxblt.models import titan
from jaxblt.training.objectives.objectives import NextByte
from jaxblt.training.optimisers.adamw import AdamWConfig
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


def babilong() -> Recipe:
    """Where somebody is, told among 256 to 1,024 bytes of a book; four layers with windows of 128 reach 508 bytes back.

    Longer rows begin with what was learned on shorter ones, in two stages of as many bytes a step. A stage trains for
    seven minutes at most, so that its compilation and evaluations fit into ten:
    --init-from runs/babilong --run-dir runs/babilong_4k --data.task.max-bytes 4096 --data.seq-len 4098
    --data.batch-size 32 --train.steps 2000
    --init-from runs/babilong_4k --run-dir runs/babilong_16k --data.task.max-bytes 16384 --data.seq-len 16386
    --data.batch-size 8 --train.steps 2000

    Windows alone, as large by wider MLPs, to compare with:
    --model.stack.pattern W --model.stack.mlp-dim 1408 --run-dir runs/babilong_windows

    Two facts instead of one: --data.task.task 2 in each stage.
    """
    task = Babilong(path="data/babi", books="data/books", min_bytes=256)
    steps, model = 6000, titan("mag", dim=256, num_layers=4, window=128, chunk_size=128)
    mixers = {**model.stack.mixers, "W": AttentionConfig(dim=256, num_heads=4, window=128)}
    train = TrainConfig(
        steps=steps,
        log_every=100,
        eval_every=steps // 6,
        eval_batches=8,
        checkpoint_every=steps // 6,
        time_limit_s=420,
    )
    return Recipe(
        name="babilong",
        model=replace(model, stack=replace(model.stack, mixers=mixers)),
        data=TaskDataConfig(task=task, seq_len=task.length, batch_size=128),
        objective=NextByte(accuracy=True),
        optimizer=AdamWConfig(learning_rate=1e-3, warmup_steps=steps // 20),
        train=train,
    )
