"""English books, author-disjoint train, validation and test: a byte-patched Hyena against a byte Transformer.

The folder data/books holds train/*.txt, validation/*.txt and test/*.txt. The threshold of the patches is calibrated
when `books` starts, from the entropies of the run of `books_entropy`.

Nearly eight passes over 40 MB ask for regularisation: dropout 0.3, weight decay 1, n-gram tables of 3 and 4 bytes
alone, and steps of 64 KB. Chosen among three settings by validation loss; docs/notes/books.md says what the others
reached.
Stacks are not scanned: few blocks compile as fast in a row, and a scan copies what the backward pass needs.
"""

from dataclasses import replace

from jaxblt.data.config import DataConfig
from jaxblt.mixers import AttentionConfig, GatedDeltaNetConfig, HyenaConfig, ImplicitFilter, ModalFilter
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, LevelConfig, StackConfig
from jaxblt.patching import PatcherConfig
from jaxblt.patching.learned import BoundaryConfig
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.train_config import TrainConfig

SEQ_LEN = 8192


def _data(batch_size: int) -> DataConfig:
    return DataConfig(
        paths=("data/books/*/*.txt",),
        split="names",
        validation_names=("*/validation/*",),
        test_names=("*/test/*",),
        seq_len=SEQ_LEN,
        batch_size=batch_size,
        partial="drop",
        eos=False,
    )


def _train(steps: int, minutes: float, evaluations: int = 0) -> TrainConfig:
    return TrainConfig(
        steps=steps,
        log_every=50,
        eval_every=steps // evaluations if evaluations else 0,
        eval_batches=16,
        checkpoint_every=steps,
        max_overflow=0.5,  # at 0.1 one batch that refused 15.8 % ended a run
        time_limit_s=60 * minutes,
    )


def _attention(dim: int) -> AttentionConfig:
    return AttentionConfig(dim=dim, num_heads=dim // 64)


def _hyena(dim: int) -> HyenaConfig:
    return HyenaConfig(dim=dim, filter=ModalFilter(max_timescale=8192.0))


def _adamw(decay_tables: bool = False) -> AdamWConfig:
    return AdamWConfig(
        learning_rate=7e-4, warmup_steps=100, floor=0.02, weight_decay=1.0, decay_embeddings=decay_tables
    )


def _window(dim: int, layers: int, dropout: float) -> StackConfig:
    return StackConfig(
        dim=dim,
        num_layers=layers,
        pattern=("window",),
        mixers={"window": replace(_attention(dim), window=512)},
        dropout=dropout,
        scan=False,
    )


def entropy() -> Recipe:
    """Return the entropy model: four windowed layers, a minute of training."""
    return Recipe(
        name="books_entropy",
        model=ByteLMConfig(stack=_window(256, 4, 0.1)),
        data=_data(16),
        optimizer=AdamWConfig(learning_rate=2e-3, warmup_steps=50),
        train=_train(500, 1.0),
    )


def blt() -> Recipe:
    """Return BLT-Hyena: three Hyena layers to one of attention, patches of about 4.5 bytes."""
    latent = StackConfig(
        dim=1024,
        num_layers=8,
        pattern=("hyena", "hyena", "attention", "hyena"),
        mixers={"hyena": _hyena(1024), "attention": _attention(1024)},
        dropout=0.3,
        scan=False,
    )
    return Recipe(
        name="books",
        model=BLTConfig(
            encoder=_window(512, 1, 0.3),
            latent=latent,
            decoder=_window(512, 3, 0.3),
            hash=HashConfig(sizes=(3, 4), table_size=30_000),
            bridge_heads=8,
        ),
        data=_data(8),
        patcher=PatcherConfig(mode="entropy"),
        bytes_per_patch=4.5,
        entropy_run="runs/books_entropy",
        optimizer=_adamw(decay_tables=True),
        train=_train(4800, 7.0, evaluations=4),
    )


def learned() -> Recipe:
    """Return `books` with patches that the model's own loss cuts, of the same mean length; no entropy model is needed.

    A byte is scored by how little the encoder's output resembles that of the byte before (H-Net, 2507.07955). The head
    has a table of its own: one that it shares with the embedding makes all bytes resemble each other early on. The
    encoder has no dropout, which would make neighbours differ in training alone. The warm-up is longer, as the rate of
    cuts swings in the first hundred steps, and refused boundaries end no run then.
    """
    base = blt()
    model = replace(
        base.model,
        encoder=replace(base.model.encoder, dropout=0.0),
        router=BoundaryConfig(),
        features_enter="output",
        tie_head=False,
    )
    return replace(
        base,
        name="books_learned",
        model=model,
        patcher=PatcherConfig(mode="learned"),
        entropy_run=None,
        optimizer=replace(base.optimizer, warmup_steps=400),
        train=replace(base.train, max_overflow=0.9),
    )


def with_level(model: BLTConfig) -> BLTConfig:
    """Return a model of `learned` with patches grouped in twos: two of the latent layers go to the level.

    The level's encoder has no dropout, as the model's own.
    """
    latent = model.latent
    ends = [
        replace(_window(latent.dim, 1, dropout), pattern=("hyena",), mixers={"hyena": latent.mixers["hyena"]})
        for dropout in (0.0, latent.dropout)
    ]
    level = LevelConfig(encoder=ends[0], decoder=ends[1])
    return replace(model, latent=replace(latent, num_layers=latent.num_layers - 2), level=level)


def learned_levels() -> Recipe:
    """Return `books_learned` with a second level: the latent stack runs over groups of two patches."""
    base = learned()
    return replace(base, name="books_levels", model=with_level(base.model))


def pulse() -> Recipe:
    """Return `books` with Gated DeltaNet for Hyena in the latent stack, for as many steps."""
    base = blt()
    latent = base.model.latent
    delta = GatedDeltaNetConfig(dim=latent.dim, num_heads=latent.dim // 128)
    latent = replace(
        latent,
        pattern=("gated_delta_net", "gated_delta_net", "attention", "gated_delta_net"),
        mixers={"gated_delta_net": delta, "attention": latent.mixers["attention"]},
    )
    return replace(base, name="books_pulse", model=replace(base.model, latent=latent))


def blt_32k() -> Recipe:
    """Continue the BLT-Hyena of `books` at four times the length, on as many bytes a step.

    Convolutions and windows read any length; attention over patches reads four times as many at a quarter of its
    rotary frequencies.
    """
    base, factor = blt(), 4
    latent = base.model.latent
    attention = replace(latent.mixers["attention"], rope_scale=float(factor))
    latent = replace(latent, mixers={**latent.mixers, "attention": attention})
    return replace(
        base,
        name="books_32k",
        model=replace(base.model, latent=latent),
        data=replace(base.data, seq_len=factor * SEQ_LEN, batch_size=base.data.batch_size // factor),
        optimizer=AdamWConfig(learning_rate=2e-4, warmup_steps=20),
        train=_train(150, 4.0),
        init_from="runs/books",
    )


def transformer() -> Recipe:
    """Return the byte Transformer of the same size, for the same wall time.

    Hash tables do not count in its size.
    """
    stack = StackConfig(
        dim=1024,
        num_layers=9,
        pattern=("attention",),
        mixers={"attention": _attention(1024)},
        dropout=0.2,
        scan=False,
    )
    return Recipe(
        name="books_transformer",
        model=ByteLMConfig(stack=stack),
        data=_data(8),
        optimizer=_adamw(),
        train=_train(1640, 7.0, evaluations=4),
    )


def hyena() -> Recipe:
    """Return the byte Hyena of the same size, for as many steps as the Transformer."""
    stack = StackConfig(
        dim=1024, num_layers=9, pattern=("hyena",), mixers={"hyena": _hyena(1024)}, dropout=0.2, scan=False
    )
    return Recipe(
        name="books_hyena",
        model=ByteLMConfig(stack=stack),
        data=_data(8),
        optimizer=_adamw(),
        train=_train(1640, 7.0, evaluations=4),
    )


def implicit_hyena() -> Recipe:
    """Return `books_hyena` with implicit filters: 8,192 taps of any shape.

    It has them instead of sums of exponentials.
    """
    base = hyena()
    mixer = HyenaConfig(dim=1024, filter=ImplicitFilter(SEQ_LEN))
    stack = replace(base.model.stack, mixers={"hyena": mixer})
    return replace(base, name="books_hyena_implicit", model=replace(base.model, stack=stack))


def small() -> Recipe:
    """Return a byte Transformer of width 512 in rows of 4,096, six minutes.

    It is the base that adapters are tried on. The stack is scanned, as every adapter of the benchmark `routed_lora`
    compiles a program of its own.
    """
    stack = StackConfig(
        dim=512, num_layers=8, pattern=("attention",), mixers={"attention": _attention(512)}, dropout=0.1
    )
    return Recipe(
        name="books_512",
        model=ByteLMConfig(stack=stack),
        data=replace(_data(16), seq_len=4096),
        optimizer=replace(_adamw(), learning_rate=1e-3),
        train=_train(4800, 6.0),
    )
