"""Layers of JAX projects, on the CPU."""

from typing import Any

import numpy as np

from experiments.benchmark.peers.conformance.common import STREAMED
from jaxblt.testing.conformance import Layer, Subject


def mamba2() -> Layer:
    """Make a Mamba-2 model of one layer, without the head."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from mamba2_jax import Mamba2Config, Mamba2Model
    from mamba2_jax.modeling import create_empty_cache

    sizes = {"hidden_size": 16, "state_size": 8, "head_dim": 8, "chunk_size": 16, "num_hidden_layers": 1}
    config = Mamba2Config(vocab_size=8, **sizes)
    graph, parameters = nnx.split(Mamba2Model(config, rngs=nnx.Rngs(0)))
    run = jax.jit(lambda x, cache: nnx.merge(graph, parameters)(inputs_embeds=x, cache=cache))

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        found = run(jnp.asarray(x), state)
        return found["last_hidden_state"], found["cache"]

    def start(rows: int) -> Any:
        return create_empty_cache(config, rows)

    return Layer(call, start=start)


def fa4_attention() -> Layer:
    """Make causal attention of one head of 8 within documents, by fa4-jax's reference backend."""
    import jax.numpy as jnp
    from fa4_jax import document_mask, flash_attn

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        q, k, v = jnp.split(jnp.asarray(x)[:, :, None], 3, -1)
        mask = None if documents is None else document_mask(jnp.asarray(documents, "int32"))
        return flash_attn(q, k, v, causal=True, mask_mod=mask, backend="reference"), None

    def reference(x: Any) -> Any:
        q, k, v = np.split(x, 3, -1)
        scores = np.einsum("btd,bsd->bts", q, k) / 8**0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(x.shape[1])
        return (weights / weights.sum(-1, keepdims=True) @ v)[:, :, None]

    return Layer(call, reference=reference)


subjects = (
    Subject(
        name="mamba2-jax: Mamba2Model",
        make=mamba2,
        width=16,
        promises=STREAMED,
        lengths=(1, 2, 3, 8, 17, 33),
        peer="mamba2-jax",
        called="Mamba2Model(config)(inputs_embeds, cache)",
    ),
    Subject(
        name="fa4-jax: flash_attn, its reference backend",
        make=fa4_attention,
        width=24,
        promises=frozenset(["causal", "lengths", "batch", "documents", "gradients", "dtype", "values"]),
        lengths=(1, 2, 3, 8, 17),
        peer="fa4-jax",
        called='flash_attn(q, k, v, causal=True, mask_mod=document_mask(ids), backend="reference")',
    ),
)
