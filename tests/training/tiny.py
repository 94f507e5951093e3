"""A byte model small enough to train in a test: embedding, place, running mean, dense, head."""

from dataclasses import dataclass, fields
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.data.batch import Batch
from jaxblt.data.config import DataConfig
from jaxblt.data.sources import BytesSource
from jaxblt.data.vocab import OFFSET, VOCAB_SIZE
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.patching import PatcherConfig, make_patches
from jaxblt.side_outputs import sow_price
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.train_config import TrainConfig

MAX_LENGTH = 64


@dataclass(frozen=True)
class TinyConfig:
    """`dropout` acts where a dropout rng is passed; `side` makes the model sow a loss, a price and a metric."""

    dim: int = 16
    causal: bool = True
    dropout: float = 0.0
    side: bool = False
    vocab_size: int = VOCAB_SIZE

    def build(self, *, dtype: Any = jnp.float32, patcher: Any = None, name: str | None = None) -> "Tiny":
        return Tiny(self, dtype, patcher, name=name)


class Tiny(nn.Module):
    config: TinyConfig
    dtype: Any = jnp.float32
    patcher: PatcherConfig | None = None

    @nn.compact
    def __call__(self, ids, *, segment_ids=None, positions=None, entropies=None, patches=None):
        config = self.config
        if patches is None and self.patcher is not None:
            patches = make_patches(self.patcher, ids, segment_ids=segment_ids, entropies=entropies)
        table = nn.with_logical_partitioning(nn.initializers.normal(0.5), ("vocab", "embed"))
        table = self.param("embedding", table, (config.vocab_size, config.dim), jnp.float32).astype(
            self.dtype
        )
        place = nn.with_logical_partitioning(nn.initializers.normal(0.5), (None, "embed"))
        place = self.param("positions", place, (MAX_LENGTH, config.dim), jnp.float32).astype(self.dtype)
        x = jnp.take(table, ids, axis=0) + place[None, : ids.shape[1]]
        segment_ids = jnp.ones(ids.shape, jnp.int32) if segment_ids is None else segment_ids
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids > 0)[:, None]
        if config.causal:
            mask &= jnp.tril(jnp.ones((ids.shape[1],) * 2, bool))[None]
        mask = mask.astype(jnp.float32)
        share = mask / jnp.maximum(mask.sum(-1, keepdims=True), jnp.float32(1))
        mixed = jnp.einsum("bts,bsd->btd", share.astype(self.dtype), x)
        x = jnp.concatenate([x, mixed], -1)
        init = nn.initializers.lecun_normal()
        x = nn.Dense(
            4 * config.dim,
            dtype=self.dtype,
            kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")),
            bias_init=nn.with_logical_partitioning(nn.initializers.zeros, ("mlp",)),
            name="up",
        )(x)
        x = nn.Dropout(config.dropout, deterministic=not self.has_rng("dropout"))(nn.gelu(x))
        if config.side:
            self.sow("losses", "size", 0.1 * jnp.mean(x.astype(jnp.float32) ** 2))
            sow_price(self, "price", jnp.mean(x.astype(jnp.float32) ** 2, (1, 2)))
            self.sow("metrics", "active", jnp.mean((x > 0).astype(jnp.float32)))
        head = nn.with_logical_partitioning(init, ("mlp", "vocab"))
        logits = nn.Dense(config.vocab_size, use_bias=False, dtype=self.dtype, kernel_init=head, name="head")(
            x
        )
        return logits.astype(jnp.float32), patches


def random_batch(seed: int, rows: int = 4, length: int = 32, *, letters: bytes = b"ACGT") -> Batch:
    """Rows of two documents and a tail of padding, of random letters."""
    rng = np.random.default_rng(seed)
    ids = np.frombuffer(letters, np.uint8)[rng.integers(0, len(letters), (rows, length + 1))].astype(np.int32)
    ids = ids + OFFSET
    first, second = length // 2, length - length // 8
    segments = np.zeros((rows, length), np.int32)
    segments[:, :first], segments[:, first:second] = 1, 2
    index = np.arange(length, dtype=np.int32)[None].repeat(rows, 0)
    positions = np.where(segments == 2, index - first, index).astype(np.int32)
    scored = segments > 0
    scored[:, first - 1] = scored[:, second - 1] = False
    inputs = np.where(segments > 0, ids[:, :-1], 3).astype(np.int32)
    return Batch(
        inputs=jax.device_put(inputs),
        targets=jax.device_put(ids[:, 1:]),
        segment_ids=jax.device_put(segments),
        positions=jax.device_put(positions),
        loss_mask=jax.device_put(scored.astype(np.int32)),
    )


def tiny_recipe(*, model=None, data=None, mesh=None, optimizer=None, **options: Any) -> Recipe:
    """24 steps on random letters; `options` are those of `TrainConfig` or else of `Recipe`."""
    names = {f.name for f in fields(TrainConfig)}
    train = {"steps": 24, "dtype": "float32", "log_every": 2, "eval_every": 12, "checkpoint_every": 5}
    train |= {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names}
    return Recipe(
        name="tiny",
        model=TinyConfig() if model is None else model,
        data=DataConfig(seq_len=32, batch_size=8, **(data or {})),
        optimizer=optimizer or AdamWConfig(learning_rate=1e-2, warmup_steps=4),
        mesh=MeshConfig(**(mesh or {})),
        train=TrainConfig(**train),
        **rest,
    )


def split_recipe(steps: int) -> Recipe:
    """The tiny recipe with parameters split over all devices, up to a step of the schedule's 24."""
    schedule = AdamWConfig(learning_rate=1e-2, warmup_steps=4, decay_steps=24)
    return tiny_recipe(steps=steps, optimizer=schedule, mesh={"data": 1, "fsdp": -1})


def patched_recipe(entropy_run: str, **options: Any) -> Recipe:
    """The tiny recipe on patches of three bytes, cut by the entropies of another run's model."""
    patcher = PatcherConfig(mode="entropy", block_size=16)
    return tiny_recipe(patcher=patcher, bytes_per_patch=3.0, entropy_run=entropy_run, **options)


class Letters(BytesSource):
    """4 KB of letters in which each is likely to follow the one before it; `on_read` is called at each read."""

    def __init__(self, on_read=lambda count: None):
        rng = np.random.default_rng(0)
        steps = rng.choice(4, 4096, p=(0.7, 0.1, 0.1, 0.1))
        super().__init__([np.frombuffer(b"ACGT", np.uint8)[np.cumsum(steps) % 4].tobytes()])
        self.on_read, self.count = on_read, 0

    def read(self, document, start, stop):
        self.count += 1
        self.on_read(self.count)
        return super().read(document, start, stop)
