"""Models of 1.2 and 1.4 B parameters on the books of `books`: a byte Transformer, a BLT-Hyena and its entropy model.

Rows are those of `books`. A hundredth of the bytes that models of this size want is there: the recipes show how such a
model trains, not what it reaches. Blocks are unrolled: a scan of the Transformer costs a sixth of the step.
`--train.precision fp8` runs the products of the stacks in FP8.
"""

from dataclasses import replace

from jaxblt.mixers import AttentionConfig, HyenaConfig, ModalFilter
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.models.remat import Remat
from jaxblt.patching import PatcherConfig
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.train_config import TrainConfig

from . import books

HEAD = 128
"""Channels of a head, those that attention kernels run fastest with."""


def _attention(dim: int, window: int | None = None) -> AttentionConfig:
    return AttentionConfig(dim=dim, num_heads=dim // HEAD, window=window)


def _window(dim: int, layers: int, remat: Remat = "none") -> StackConfig:
    mixers = {"window": _attention(dim, 512)}
    return StackConfig(
        dim=dim, num_layers=layers, pattern=("window",), mixers=mixers, remat=remat, scan=False
    )


def _train(steps: int) -> TrainConfig:
    return TrainConfig(
        steps=steps, log_every=50, eval_every=steps, eval_batches=16, checkpoint_every=steps, max_overflow=0.5
    )


def entropy() -> Recipe:
    """Return the entropy model of `books_1b`: 14 windowed layers of width 768."""
    base = books.entropy()
    return replace(
        base,
        name="books_1b_entropy",
        model=ByteLMConfig(stack=_window(768, 14)),
        optimizer=AdamWConfig(learning_rate=1e-3, warmup_steps=100),
        train=_train(1500),
    )


def transformer() -> Recipe:
    """Return a byte Transformer of 24 layers of width 2,048: 1.2 B parameters."""
    stack = StackConfig(
        dim=2048, num_layers=24, pattern=("attention",), mixers={"attention": _attention(2048)}, scan=False
    )
    return replace(
        books.transformer(),
        name="books_1b_transformer",
        model=ByteLMConfig(stack=stack),
        optimizer=AdamWConfig(learning_rate=3e-4, warmup_steps=200),
        train=replace(_train(1500), accumulate=2),
    )


def blt() -> Recipe:
    """Return a BLT-Hyena of 25 latent layers of width 2,048: 1.4 B parameters, and those of its hash tables.

    Its encoder has one layer and its decoder nine, of width 1,024. With remat "dots" 8 rows of 8,192 bytes fit in
    80 GB. On an H200 `--preset h200` turns remat off.
    """
    latent = StackConfig(
        dim=2048,
        num_layers=25,
        pattern=("hyena", "hyena", "attention", "hyena"),
        mixers={
            "hyena": HyenaConfig(dim=2048, filter=ModalFilter(max_timescale=float(books.SEQ_LEN))),
            "attention": _attention(2048),
        },
        remat="dots",
        scan=False,
    )
    base = books.blt()
    return replace(
        base,
        name="books_1b",
        model=BLTConfig(
            encoder=_window(1024, 1, "dots"),
            latent=latent,
            decoder=_window(1024, 9, "dots"),
            hash=HashConfig(sizes=(3, 4), table_size=30_000),
            bridge_heads=8,
        ),
        patcher=PatcherConfig(mode="entropy"),
        entropy_run="runs/books_1b_entropy",
        optimizer=AdamWConfig(learning_rate=3e-4, warmup_steps=200),
        train=_train(1500),
    )
