"""Runs that were never trained: models small enough to compile in a test, one of them with probabilities by hand."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.data import DataConfig
from jaxblt.data.vocab import OFFSET, VOCAB_SIZE
from jaxblt.mixers import AttentionConfig, ExplicitFilter, HyenaConfig, ModalFilter
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.patching import PatcherConfig
from jaxblt.run import Run
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.setup import make_task
from jaxblt.training.state import freeze_entropy
from jaxblt.training.train_config import TrainConfig
from tests.mixer_table import table

SEQ_LEN, BLOCK, ROWS = 64, 16, 8
HEADS = AttentionConfig(dim=16, num_heads=2)
HYENA = HyenaConfig(dim=16, filter=ModalFilter(modes=4, max_timescale=64.0))
SHORT_HYENA = HyenaConfig(dim=16, filter=ExplicitFilter(taps=3))
NEAR = StackConfig(dim=16, num_layers=1, pattern="S", mlp_dim=24, mixers={"S": SHORT_HYENA})
LOCAL = StackConfig(dim=16, num_layers=1, pattern="W", mlp_dim=24, mixers=table(attention=HEADS, window=8))
BYTES = ByteLMConfig(
    stack=StackConfig(
        dim=16, num_layers=2, pattern="HA", mlp_dim=24, mixers=table(attention=HEADS, hyena=HYENA)
    )
)
LATENT = StackConfig(dim=24, num_layers=1, pattern="H", mlp_dim=24, mixers=table(hyena=HYENA))
PATCHES = BLTConfig(NEAR, LATENT, NEAR, hash=None, bridge_heads=2, look_back=3)


def random_records(*lengths: int) -> list[bytes]:
    """Of so many bytes."""
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(0, 256, n).astype(np.uint8).tobytes() for n in lengths]


SHORT = random_records(13, 29, 1, 16, 22, 62, 40)
LONG = random_records(66, 70, 150, 179)
PATCHER = PatcherConfig(mode="entropy", threshold=2.0, block_size=BLOCK, capacity=14)


@dataclass(frozen=True)
class MarkovConfig:
    """p(byte t | byte t - 1), as a table of logits that is the one parameter."""

    causal: bool = True
    vocab_size: int = VOCAB_SIZE

    def build(self, *, dtype: Any = jnp.float32, patcher: Any = None) -> "Markov":
        return Markov(self)


class Markov(nn.Module):
    config: MarkovConfig
    patcher = None

    @nn.compact
    def __call__(self, ids, *, segment_ids=None, positions=None, entropies=None, patches=None):
        logits = self.param("logits", nn.initializers.zeros, (VOCAB_SIZE, VOCAB_SIZE), jnp.float32)
        return jnp.take(logits, ids, axis=0), None


def make_run(model: Any, *, params: Any = None, entropy: Any = None, data: Any = None, **fields: Any) -> Run:
    """A run of `model` with random parameters, larger than at the start, on text unless `data` says otherwise."""
    recipe = Recipe(
        name="tiny",
        model=model,
        entropy_model=entropy,
        data=DataConfig(**{"seq_len": SEQ_LEN, "batch_size": 8, **(data or {})}),
        train=TrainConfig(dtype="float32"),
        **fields,
    )
    frozen = {} if entropy is None else freeze_entropy(drawn(entropy.build()))
    built = model.build(patcher=recipe.patcher)
    return Run(recipe, 0, make_task(recipe), drawn(built) if params is None else params, frozen)


def drawn(model: Any) -> Any:
    """Parameters of unit gain, drawn by NumPy: compiling an `init` takes seconds."""
    ids = jnp.zeros((1, BLOCK), jnp.int32)
    options = {} if model.patcher is None else {"entropies": jnp.zeros(ids.shape)}
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), ids, **options))
    rng = np.random.default_rng(0)

    def draw(path: Any, shape: Any) -> jax.Array:
        noise = rng.normal(size=shape.shape).astype(np.float32)
        if path[-1].key == "scale":
            noise = 1 + 0.1 * noise
        if path[-1].key == "kernel":
            noise /= np.float32(shape.shape[-2] ** 0.5)
        # Put on the device: jnp.asarray compiles a program for each shape
        return jax.device_put(noise.astype(np.float32))

    return jax.tree_util.tree_map_with_path(draw, nn.meta.unbox(shapes)["params"])


def patched_run(**data: Any) -> Run:
    return make_run(PATCHES, entropy=ByteLMConfig(stack=LOCAL), patcher=PATCHER, data=data)


def markov_run(probabilities: np.ndarray, **data: Any) -> Run:
    """Of ids after ids."""
    params = {"logits": jnp.log(jnp.asarray(probabilities, jnp.float32))}
    return make_run(MarkovConfig(), params=params, data=data)


def random_probabilities(seed: int = 0) -> np.ndarray:
    p = np.random.default_rng(seed).random((VOCAB_SIZE, VOCAB_SIZE)) + 0.01
    return p / p.sum(-1, keepdims=True)


def ids_of(text: bytes) -> list[int]:
    return [byte + OFFSET for byte in text]
