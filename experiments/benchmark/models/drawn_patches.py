"""Byte-patched models with drawn parameters whose rows close patches each at bytes of its own, and their floors."""

from typing import Any, Literal

import configs
from experiments.benchmark.models.books_model import split_model

Sizes = Literal["books", "books_1b"]
"""Recipes whose models are drawn."""

BYTES_PER_PATCH = 4.5
"""The mean length of patches for which the threshold is calibrated."""

PEAKED = 4.0
"""The factor of logits beside which EOS, whose logit is 0, is hardly ever drawn."""


def drawn_patches(size: Sizes, pattern: str, tiny: bool) -> tuple[Any, dict[str, Any]]:
    """Return a decoder with entropy patches of 4.5 bytes in the mean, and drawn parameters.

    Entropies of a drawn model say nothing of a text, and differ from byte to byte as those of a trained one do.

    Args:
      size: the recipe of the model, and with "_entropy" of its entropy model.
      pattern: of the latent stack.
      tiny: models that a CPU compiles.
    """
    from dataclasses import replace

    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxblt.data.vocab import EOS
    from jaxblt.inference import Decoder
    from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
    from jaxblt.patching import PatcherConfig, calibrate_threshold
    from jaxblt.patching.logits import entropies_from_logits

    small = StackConfig(dim=16, num_layers=1, pattern="W", mlp_dim=16)
    model = BLTConfig(small, small, small, hash=None) if tiny else split_model(pattern, "none", size)
    reader = ByteLMConfig(stack=small) if tiny else configs.get(f"{size}_entropy").model
    # Heads of 64 channels: kernels of the bridge read no others, and XLA would read all bytes of a block for each patch
    model = replace(model, bridge_heads=max(4, model.encoder.dim // 64))
    reader = replace(reader, stack=replace(reader.stack, scan=True))
    static, dtype = PatcherConfig(mode="static"), jnp.bfloat16
    ids = np.random.default_rng(0).integers(4, 260, (4, static.block_size)).astype(np.int32)
    modules = {"model": model.build(dtype=dtype, patcher=static), "entropy": reader.build(dtype=dtype)}
    params = {
        name: nn.meta.unbox(jax.jit(module.init)(jax.random.key(i), ids[:1]))["params"]
        for i, (name, module) in enumerate(modules.items())
    }
    embedding, norm = params["model"]["embedding"], params["model"]["head"]["norm"]
    table = embedding["bytes"]
    norm["scale"] *= PEAKED / (jnp.std(table) * table.shape[1] ** 0.5)
    embedding["bytes"] = table.at[EOS].set(0.0)
    logits, _ = jax.jit(modules["entropy"].apply)({"params": params["entropy"]}, ids)
    patcher = PatcherConfig(mode="entropy", capacity=static.block_size // 2)
    threshold = calibrate_threshold(entropies_from_logits(logits), BYTES_PER_PATCH, config=patcher)
    return Decoder(model, replace(patcher, threshold=threshold), reader, dtype), params


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
