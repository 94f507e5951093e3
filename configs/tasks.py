"""Small models on tasks that test what a mixer can remember and track.

Name other mixers with --model.stack.pattern. Score a run's answers on the test split with
jaxblt evaluate runs/mqar

`mqar`, `copy`, `repeat_copy`, `pattern`, `parity` and `language_pairs` are made for CPUs; `listops`, `imdb` and `babi`
are of a size for one GPU.
"""

from dataclasses import replace

from jaxblt.data.task_data import TaskDataConfig
from jaxblt.data.tasks import (
    MQAR,
    Babi,
    Copy,
    ListOpsFiles,
    Parity,
    PatternMatching,
    RepeatCopy,
    TextLabels,
    TextPairs,
)
from jaxblt.mixers import (
    AttentionConfig,
    GatedDeltaNetConfig,
    GatedLinearAttentionConfig,
    HyenaConfig,
    ModalFilter,
)
from jaxblt.models import ByteClassifierConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.training.objectives.objectives import Classify, NextByte
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.train_config import TrainConfig

PIECE_S = 540
"""Seconds of a piece of training: with its start and its compilation it fits into ten minutes."""


def _stack(
    pattern: tuple[str, ...], dim: int, layers: int, *, mlp_dim: int | None = None, dropout: float = 0.0
) -> StackConfig:
    mixers = {
        "attention": AttentionConfig(dim=dim, num_heads=dim // 32),
        "hyena": HyenaConfig(dim=dim, filter=ModalFilter(max_timescale=2048.0)),
        "gated_delta_net": GatedDeltaNetConfig(
            dim=dim, num_heads=dim // 64
        ),  # GPU kernels take heads of 64 and more
        "gated_linear_attention": GatedLinearAttentionConfig(dim=dim, num_heads=dim // 64),
    }
    return StackConfig(
        dim=dim,
        num_layers=layers,
        pattern=pattern,
        mixers=mixers,
        mlp_dim=mlp_dim,
        dropout=dropout,
        scan=False,
    )


def _classifier(
    name: str,
    stack: StackConfig,
    data: TaskDataConfig,
    *,
    classes: int = 2,
    hash: HashConfig | None = None,
    steps: int,
    rate: float,
    pieces: int = 1,
) -> Recipe:
    """Return a classifier that reads both ways.

    It trains for at most as many pieces of nine minutes.
    """
    model = ByteClassifierConfig(stack=replace(stack, causal=False), num_classes=classes, hash=hash)
    train = TrainConfig(
        steps=steps,
        log_every=100,
        eval_every=steps // 12,
        eval_batches=32,
        checkpoint_every=steps // 4,
        keep_best=1,
        time_limit_s=PIECE_S * pieces,
    )
    return Recipe(
        name=name,
        model=model,
        data=data,
        objective=Classify(causal=False),
        optimizer=AdamWConfig(learning_rate=rate, warmup_steps=steps // 20, weight_decay=0.05),
        train=train,
    )


def _recipe(name: str, stack: StackConfig, data: TaskDataConfig, *, steps: int, rate: float = 2e-3) -> Recipe:
    train = TrainConfig(
        steps=steps, dtype="float32", log_every=50, eval_every=steps, eval_batches=8, checkpoint_every=steps
    )
    return Recipe(
        name=name,
        model=ByteLMConfig(stack=stack),
        data=data,
        objective=NextByte(accuracy=True),
        optimizer=AdamWConfig(learning_rate=rate, warmup_steps=50),
        train=train,
    )


def mqar() -> Recipe:
    """Train recall of four values by their keys: a short convolution, then attention."""
    data = TaskDataConfig(task=MQAR(symbols=32, pairs=4, positions=32), seq_len=32, batch_size=64)
    return _recipe("mqar", _stack(("hyena_short", "attention"), 64, 2, mlp_dim=0), data, steps=300, rate=5e-3)


def copy() -> Recipe:
    """Train copies of up to 16 symbols: a short convolution, then attention."""
    data = TaskDataConfig(task=Copy(max_symbols=16), seq_len=33, batch_size=64)
    return _recipe("copy", _stack(("hyena_short", "attention"), 64, 2, mlp_dim=0), data, steps=300, rate=5e-3)


def repeat_copy() -> Recipe:
    """Train copies of up to 5 symbols, up to 4 times.

    The model is a short convolution, then attention, twice.
    """
    task = RepeatCopy(symbols=8, max_symbols=5, max_repeats=4)
    data = TaskDataConfig(task=task, seq_len=task.length, batch_size=64)
    return _recipe(
        "repeat_copy", _stack(("hyena_short", "attention"), 64, 4, mlp_dim=0), data, steps=600, rate=3e-3
    )


def pattern() -> Recipe:
    """Train to find two symbols in the 8 before them: a short convolution, then attention."""
    task = PatternMatching(symbols=8, text=8, pattern=2)
    data = TaskDataConfig(task=task, seq_len=task.length, batch_size=256)
    return _recipe("pattern", _stack(("hyena_short", "attention"), 64, 2), data, steps=1200, rate=3e-3)


def parity() -> Recipe:
    """Train parity of every prefix of up to 32 bits by a gated recurrence."""
    data = TaskDataConfig(task=Parity(prefixes=True), seq_len=33, batch_size=64)
    return _recipe("parity", _stack(("recurrence",), 64, 2), data, steps=400)


def listops() -> Recipe:
    """Train ListOps at Long Range Arena's lengths and set sizes, read both ways.

    `jaxblt data fetch listops` draws the files. Each training expression is shown in 32 orders of its arguments, or the
    model learns them by heart. In three pieces: --train.time-limit-s 540, then 1080, then 1620. A Transformer of equal
    size: --model.stack.pattern attention --model.pooling mean --optimizer.learning-rate 1e-3
    --run-dir runs/listops_transformer
    Causal, as a language model reads: --model.stack.causal --objective.causal
    """
    data = TaskDataConfig(
        task=ListOpsFiles(path="data/listops", orders=32),
        seq_len=2048,
        batch_size=64,
        buckets=(1024, 1536),
        max_tokens=65_536,
        labels="symbol",
    )
    recipe = _classifier(
        "listops", _stack(("hyena",), 256, 6), data, classes=10, steps=60_000, rate=2e-3, pieces=3
    )
    return replace(recipe, model=replace(recipe.model, pooling="last"))


def imdb() -> Recipe:
    """Train to tell from its bytes whether a film review is for or against.

    data/imdb holds train*.tsv and test*.tsv.
    """
    data = TaskDataConfig(
        task=TextLabels(path="data/imdb", max_bytes=4094),
        seq_len=4096,
        batch_size=64,
        buckets=(1024, 2048),
        max_tokens=65_536,
        labels="digit",
    )
    hash = HashConfig(sizes=(3, 4, 5), table_size=30_000)
    return _classifier(
        "imdb", _stack(("hyena",), 128, 4, dropout=0.3), data, hash=hash, steps=6000, rate=1e-3
    )


def language_pairs() -> Recipe:
    """Train to tell whether two excerpts are of one language. `jaxblt data fetch language_pairs` draws the pairs.

    Long Range Arena's Retrieval: --data.task.path data/aan --data.task.max-bytes 4000 --data.seq-len 8003
    --data.batch-size 16
    """
    task = TextPairs(path="data/language_pairs", max_bytes=62)
    data = TaskDataConfig(task=task, seq_len=128, batch_size=64, labels="digit")
    hash = HashConfig(sizes=(2, 3), table_size=4096)
    stack = _stack(("hyena", "attention"), 64, 2)
    return _classifier("language_pairs", stack, data, hash=hash, steps=400, rate=2e-3)


def babi() -> Recipe:
    """Train all twenty bAbI tasks jointly, by a delta rule, then attention.

    data/babi is a folder of the release. In three pieces: --train.time-limit-s 540, then 1080, then 1620. A Transformer
    of equal size: --model.stack.pattern attention --run-dir runs/babi_transformer
    """
    data = TaskDataConfig(
        task=Babi(path="data/babi", subset="en-10k"),
        seq_len=1408,
        batch_size=256,
        buckets=(64, 128, 256, 640),
    )
    recipe = _recipe(
        "babi", _stack(("gated_delta_net", "attention"), 256, 6, dropout=0.1), data, steps=24_000, rate=1e-3
    )
    train = replace(
        recipe.train,
        dtype="bfloat16",
        eval_every=2000,
        eval_batches=16,
        checkpoint_every=2000,
        time_limit_s=3 * PIECE_S,
    )
    return replace(recipe, train=train)
