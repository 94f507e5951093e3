"""The main job in small, on the embedded English book: minutes on two CPU cores.

jaxblt demo runs both recipes one after the other.
"""

from jaxblt.data.config import DataConfig
from jaxblt.mixers import AttentionConfig, HyenaConfig, ModalFilter
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.patching import PatcherConfig
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.train_config import TrainConfig

SEQ_LEN, BLOCK = 1024, 512
EVAL_EVERY = 55


def _data(batch_size: int) -> DataConfig:
    return DataConfig(
        sample="book", seq_len=SEQ_LEN, stride=SEQ_LEN // 2, batch_size=batch_size, partial="drop"
    )


def _window(dim: int, layers: int, heads: int) -> StackConfig:
    window = AttentionConfig(dim=dim, num_heads=heads, window=64)
    return StackConfig(
        dim=dim, num_layers=layers, pattern=("window",), mixers={"window": window}, dropout=0.1
    )


def entropy() -> Recipe:
    """Return the byte language model whose entropies cut the patches: two windowed layers."""
    return Recipe(
        name="demo_entropy",
        model=ByteLMConfig(stack=_window(64, 2, 4), hash=HashConfig(sizes=(2, 3, 4), table_size=4096)),
        data=_data(8),
        optimizer=AdamWConfig(learning_rate=4e-3, warmup_steps=20),
        train=TrainConfig(steps=110, dtype="float32", log_every=20, eval_every=0, checkpoint_every=110),
    )


def blt() -> Recipe:
    """Return a byte-patched Hyena with one attention layer, on patches of about four bytes."""
    latent = StackConfig(
        dim=96,
        num_layers=4,
        pattern=("hyena", "hyena", "attention", "hyena"),
        mixers={
            "hyena": HyenaConfig(dim=96, filter=ModalFilter(modes=8, max_timescale=2048.0)),
            "attention": AttentionConfig(dim=96, num_heads=4),
        },
        dropout=0.15,
    )
    return Recipe(
        name="demo",
        model=BLTConfig(
            encoder=_window(64, 1, 4),
            latent=latent,
            decoder=_window(64, 1, 4),
            hash=HashConfig(sizes=(2, 3, 4), table_size=4096),
            bridge_heads=4,
        ),
        data=_data(8),
        patcher=PatcherConfig(mode="entropy", block_size=BLOCK),
        bytes_per_patch=4.0,
        entropy_run="runs/demo_entropy",
        optimizer=AdamWConfig(learning_rate=3e-3, warmup_steps=30, weight_decay=0.1, decay_embeddings=True),
        train=TrainConfig(
            steps=220, dtype="float32", log_every=20, eval_every=EVAL_EVERY, checkpoint_every=110
        ),
    )
