"""Shapes of attention layers in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """One layer: B rows of T tokens, H query heads and G key heads of size K; `documents` in each row."""

    name: str
    batch: int
    tokens: int
    heads: int
    groups: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    documents: int = 1


SHAPES = (
    # Byte Latent Transformer, 1B: the entropy model; the latent model at 4.5 bytes a patch; the byte decoder.
    AttentionShape("blt_entropy_8k", 8, 8192, 12, 12, 64, window=512),
    AttentionShape("blt_1b_latent", 8, 1824, 16, 16, 128),
    AttentionShape("blt_1b_decoder_8k", 8, 8192, 16, 16, 64, window=512),
    AttentionShape("blt_1b_decoder_8k_packed", 8, 8192, 16, 16, 64, window=512, documents=40),
    # Llama 3 8B.
    AttentionShape("llama3_8b_8k", 2, 8192, 32, 8, 128),
    AttentionShape("llama3_8b_8k_packed", 2, 8192, 32, 8, 128, documents=8),
    AttentionShape("llama3_8b_128k", 1, 131072, 32, 8, 128),
    # The attention layers of StripedHyena 2 (Evo 2, 7B).
    AttentionShape("evo2_7b_32k", 1, 32768, 32, 32, 128),
    # Protein encoder, ESM-2 650M.
    AttentionShape("esm2_650m", 16, 1024, 20, 20, 64, causal=False),
)
