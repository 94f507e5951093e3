"""Byte-patched models with drawn parameters whose rows close patches each at bytes of its own, and their floors."""

from typing import Any, Literal

import configs
from experiments.benchmark.models.books_model import split_model
from experiments.benchmark.models.drawn_text import (
    BYTES_PER_PATCH,
    draw_words,
    find_threshold,
    mark_ends,
    write_text,
)

Sizes = Literal["books", "books_1b"]
"""Recipes whose models are drawn."""


def drawn_patches(size: Sizes, pattern: str, tiny: bool, dtype: Any = None) -> tuple[Any, dict[str, Any]]:
    """Return a decoder with entropy patches of 4.5 bytes in the mean, and drawn parameters.

    Entropies of a drawn model say nothing of a text, and differ from byte to byte as those of a trained one do. The
    model writes the text of `drawn_text`.

    Args:
      size: the recipe of the model, and with "_entropy" of its entropy model.
      pattern: of the latent stack.
      tiny: models that a CPU compiles.
      dtype: to compute in; None for bf16.
    """
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import replace

    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxblt.data.vocab import OFFSET
    from jaxblt.inference import Decoder
    from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
    from jaxblt.patching import PatcherConfig
    from jaxblt.patching.logits import entropies_from_logits

    small = StackConfig(dim=256, num_layers=1, pattern="W", mlp_dim=1024)
    latent, reads = replace(small, dim=16, mlp_dim=16), replace(small, dim=64, mlp_dim=16)
    model = BLTConfig(small, latent, small, hash=None) if tiny else split_model(pattern, "none", size)
    reader = ByteLMConfig(stack=reads) if tiny else configs.get(f"{size}_entropy").model
    # Heads of 64 channels: kernels of the bridge read no others, and XLA would read all bytes of a block for each patch
    model = replace(model, bridge_heads=max(4, model.encoder.dim // 64))
    reader = replace(reader, stack=replace(reader.stack, scan=True))
    dtype = jnp.bfloat16 if dtype is None else dtype
    modules = model.build(dtype=dtype, patcher=PatcherConfig(mode="static")), reader.build(dtype=dtype)
    with ThreadPoolExecutor(2) as pool:
        drawn, read = pool.map(_drawn, range(2), modules)
    write_text(drawn)
    mark_ends(read)
    ids = OFFSET + np.resize(draw_words()[0], (1, 1024)).astype(np.int32)
    logits, _ = jax.jit(modules[1].apply)({"params": read}, ids)
    threshold = find_threshold(entropies_from_logits(logits), ids)
    patcher = PatcherConfig(mode="entropy", threshold=threshold)
    patcher = replace(patcher, capacity=patcher.block_size // 2)
    return Decoder(model, patcher, reader, dtype), {"model": drawn, "entropy": read}


def _drawn(seed: int, module: Any) -> dict[str, Any]:
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    # Shapes of parameters do not depend on the bytes of a row: few are traced soonest
    found = jax.jit(module.init)(jax.random.key(seed), jnp.zeros((1, 128), jnp.int32))
    return nn.meta.unbox(found)["params"]


def count_read_bytes(decoder: Any, params: dict[str, Any], rows: int, filled: int) -> dict[str, int]:
    """Count the bytes of weights and states that a byte of all rows reads, in the latent stack and beside it.

    Weights have 16 bits. Of caches the filled slots count, and neither tables of n-grams nor open patches.

    Args:
      decoder, params: of the model.
      rows: that decode together.
      filled: bytes of a row so far.
    """
    import jax

    from jaxblt.inference import init_decoder
    from jaxblt.mixers.attention.kv_cache import AttentionState

    def held(tree: Any, tokens: float) -> int:
        def size(leaf: Any) -> float:
            if not isinstance(leaf, AttentionState):
                return leaf.size * leaf.dtype.itemsize
            slots = leaf.times.shape[-1]
            return min(1.0, tokens / slots) * sum(x.size * x.dtype.itemsize for x in (leaf.k, leaf.v))

        leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, AttentionState))
        return int(sum(map(size, leaves)))

    def weights(tree: dict[str, Any]) -> int:
        paths = jax.tree_util.tree_leaves_with_path(tree)
        return sum(2 * leaf.size for path, leaf in paths if path[-1].key != "hash_ngrams")

    state = jax.eval_shape(lambda: init_decoder(decoder, rows, num_bytes=2 * filled))
    latent = weights(params["model"]["latent"])
    beside = sum(map(weights, params.values())) - latent
    caches = held((state.entropy, state.model.encoder, state.model.decoder), filled)
    return {"latent": latent + held(state.model.latent, filled / BYTES_PER_PATCH), "beside": beside + caches}
