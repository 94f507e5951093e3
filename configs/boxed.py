"""The runs that come with jaxblt: `jaxblt.load("english")`. A command trains each again: `jaxblt train english`.

The folder data/english holds train/*.txt, validation/*.txt and test/*.txt: public-domain English books, authors of the
three parts apart. The folders data/genes and data/proteins are written by `python -m experiments.genes`: genes of
microbes and their proteins, families of the three parts apart.
"""

from dataclasses import replace

from jaxblt.data.config import DataConfig
from jaxblt.mixers import AttentionConfig, ExplicitFilter, HyenaConfig, ModalFilter
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.patching import PatcherConfig
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.train_config import TrainConfig

SEQ_LEN, BLOCK = 4096, 512
BOOK_LEN, BOOK_STEPS = 1024, 16


def _data(batch_size: int) -> DataConfig:
    return DataConfig(
        paths=("data/english/*/*.txt",),
        split="names",
        validation_names=("*/validation/*",),
        test_names=("*/test/*",),
        seq_len=SEQ_LEN,
        batch_size=batch_size,
        partial="drop",
    )


def _window(dim: int, layers: int, window: int) -> StackConfig:
    attention = AttentionConfig(dim=dim, num_heads=dim // 64, window=window)
    return StackConfig(dim=dim, num_layers=layers, pattern="W", mixers={"W": attention}, scan=False)


def _train(steps: int, seconds: float) -> TrainConfig:
    return TrainConfig(
        steps=steps,
        log_every=100,
        eval_every=steps // 4,
        eval_batches=16,
        checkpoint_every=steps,
        max_overflow=0.5,
        time_limit_s=seconds,
    )


def english_entropy() -> Recipe:
    """Return the byte model whose entropies cut patches of `english_patches`: three windowed layers."""
    return Recipe(
        name="english_entropy",
        model=ByteLMConfig(stack=_window(128, 3, 128)),
        data=_data(32),
        optimizer=AdamWConfig(learning_rate=3e-3, warmup_steps=100),
        train=_train(1200, 90.0),
    )


def _bytes() -> StackConfig:
    """Return nine layers, a third each of short filters, of modal ones and of attention: 7.3 million parameters."""
    dim = 256
    return StackConfig(
        dim=dim,
        num_layers=9,
        pattern=("hyena_short", "hyena", "attention"),
        mixers={
            "hyena_short": HyenaConfig(dim=dim, filter=ExplicitFilter(taps=7)),
            "hyena": HyenaConfig(dim=dim, filter=ModalFilter(max_timescale=2048.0)),
            "attention": AttentionConfig(dim=dim, num_heads=dim // 64),
        },
        scan=False,
    )


def english() -> Recipe:
    """Return a byte Hyena of 7.3 million parameters, ahead of patches at equal seconds (docs/notes/books.md)."""
    return Recipe(
        name="english",
        model=ByteLMConfig(stack=_bytes()),
        data=_data(32),
        optimizer=AdamWConfig(learning_rate=2e-3, warmup_steps=200, floor=0.02, weight_decay=0.1),
        train=_train(7600, 280.0),
    )


def english_patches() -> Recipe:
    """Return a BLT-Hyena as large as `english`, over patches of about four bytes: what `make demo` starts from."""
    dim = 256
    latent = StackConfig(
        dim=dim,
        num_layers=6,
        pattern="HHA",
        mixers={
            "H": HyenaConfig(dim=dim, filter=ModalFilter(max_timescale=4096.0)),
            "A": AttentionConfig(dim=dim, num_heads=dim // 64),
        },
        scan=False,
    )
    return Recipe(
        name="english_patches",
        model=BLTConfig(
            encoder=_window(192, 1, 128),
            latent=latent,
            decoder=_window(192, 2, 128),
            hash=HashConfig(sizes=(3, 4), table_size=1536),
            bridge_heads=4,
        ),
        data=_data(32),
        patcher=PatcherConfig(mode="entropy", block_size=BLOCK),
        bytes_per_patch=4.0,
        entropy_run="runs/english_entropy",
        optimizer=AdamWConfig(learning_rate=3e-3, warmup_steps=200, floor=0.02, weight_decay=0.1),
        train=_train(10_744, 280.0),
    )


def _letters(name: str, scored: str, seq_len: int, batch_size: int, steps: int) -> Recipe:
    """Return a byte Hyena of 7.2 million parameters over records whose names begin with their part."""
    return Recipe(
        name=name,
        model=ByteLMConfig(stack=_bytes()),
        data=DataConfig(
            paths=(f"data/{name}/*.fa",),
            kind="fasta",
            split="names",
            validation_names=("validation/*",),
            test_names=("test/*",),
            packing="sequential",
            seq_len=seq_len,
            batch_size=batch_size,
            scored=scored,
        ),
        optimizer=AdamWConfig(learning_rate=2e-3, warmup_steps=200, floor=0.02, weight_decay=0.1),
        train=_train(steps, 280.0),
    )


def genes() -> Recipe:
    """Return a model of the genes of bacteria, archaea and viruses, read along their own strand."""
    return _letters("genes", "ACGT", 2048, 64, 3600)


def proteins() -> Recipe:
    """Return a model of the proteins of the same genes."""
    return _letters("proteins", "ACDEFGHIKLMNPQRSTVWY", 1024, 128, 2400)


def english_book() -> Recipe:
    """Continue `english_patches` on the embedded book: one pass in minutes on two CPU cores; what `make demo` runs."""
    return replace(
        english_patches(),
        name="english_book",
        data=DataConfig(sample="book", seq_len=BOOK_LEN, stride=BOOK_LEN // 2, batch_size=8, partial="drop"),
        init_from="english_patches",
        optimizer=AdamWConfig(learning_rate=5e-4, warmup_steps=4, weight_decay=0.1),
        train=TrainConfig(
            steps=BOOK_STEPS,
            dtype="float32",
            log_every=4,
            eval_every=BOOK_STEPS // 2,
            checkpoint_every=BOOK_STEPS // 2,
        ),
    )
