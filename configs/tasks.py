"""Small models on tasks that test what a mixer can remember and track.

Name other mixers with --model.stack.pattern. Score a run's answers on the test split with
jaxblt evaluate runs/mqar

`mqar`, `copy` and `parity` are made for CPUs; `listops` and `babi` are of a size for one GPU.
"""

from jaxblt.data.task_data import TaskDataConfig
from jaxblt.evaluation.tasks import MQAR, Babi, Copy, ListOps, Parity
from jaxblt.mixers import (
    AttentionConfig,
    GatedDeltaNetConfig,
    GatedLinearAttentionConfig,
    HyenaConfig,
    ModalFilter,
)
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.objectives import NextByte
from jaxblt.training.optimizer import AdamWConfig
from jaxblt.training.recipe import Recipe, TrainConfig


def _model(
    pattern: str, dim: int, layers: int, *, mlp_dim: int | None = None, dropout: float = 0.0
) -> ByteLMConfig:
    mixers = {
        "A": AttentionConfig(dim=dim, num_heads=dim // 32),
        "H": HyenaConfig(dim=dim, filter=ModalFilter(max_timescale=2048.0)),
        "D": GatedDeltaNetConfig(dim=dim, num_heads=dim // 32),
        "G": GatedLinearAttentionConfig(dim=dim, num_heads=dim // 32),
    }
    stack = StackConfig(
        dim=dim,
        num_layers=layers,
        pattern=pattern,
        mixers=mixers,
        mlp_dim=mlp_dim,
        dropout=dropout,
        scan=False,
    )
    return ByteLMConfig(stack=stack)


def _recipe(
    name: str, model: ByteLMConfig, data: TaskDataConfig, *, steps: int, rate: float = 2e-3
) -> Recipe:
    train = TrainConfig(
        steps=steps, dtype="float32", log_every=50, eval_every=steps, eval_batches=8, checkpoint_every=steps
    )
    return Recipe(
        name=name,
        model=model,
        data=data,
        objective=NextByte(accuracy=True),
        optimizer=AdamWConfig(learning_rate=rate, warmup_steps=50),
        train=train,
    )


def mqar() -> Recipe:
    """Recall of four values by their keys: a short convolution, then attention."""
    data = TaskDataConfig(task=MQAR(symbols=32, pairs=4, positions=32), seq_len=32, batch_size=64)
    return _recipe("mqar", _model("SA", 64, 2, mlp_dim=0), data, steps=300, rate=5e-3)


def copy() -> Recipe:
    """Copies of up to 16 symbols: a short convolution, then attention."""
    data = TaskDataConfig(task=Copy(max_symbols=16), seq_len=33, batch_size=64)
    return _recipe("copy", _model("SA", 64, 2, mlp_dim=0), data, steps=300, rate=5e-3)


def parity() -> Recipe:
    """Parity of every prefix of up to 32 bits by a gated recurrence."""
    data = TaskDataConfig(task=Parity(prefixes=True), seq_len=33, batch_size=64)
    return _recipe("parity", _model("R", 64, 2), data, steps=400)


def listops() -> Recipe:
    """ListOps at Long Range Arena's lengths and set sizes: Hyena with one layer of attention in four."""
    task = ListOps(train_size=96_000, eval_size=2000)
    data = TaskDataConfig(task=task, seq_len=2048, batch_size=32)
    return _recipe("listops", _model("HHAH", 128, 4, dropout=0.1), data, steps=10_000, rate=1e-3)


def babi() -> Recipe:
    """All twenty bAbI tasks jointly, from data/babi: a folder of the release."""
    data = TaskDataConfig(
        task=Babi(path="data/babi", subset="en-10k"), seq_len=1408, batch_size=64, buckets=(64, 128, 256, 640)
    )
    return _recipe("babi", _model("HHAH", 128, 4, dropout=0.1), data, steps=20_000, rate=1e-3)
