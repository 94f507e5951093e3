"""Shapes of the byte-patch bridge in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PatchShape:
    """B rows of N blocks with S bytes and P slots each; H heads of size K; bytes look W patches back."""

    name: str
    batch: int
    blocks: int
    block_size: int
    capacity: int
    heads: int
    head_dim: int
    look_back: int


SHAPES = (
    # Byte Latent Transformer, 1B: width 1024 in its byte models, 4.5 bytes a patch, slots to spare.
    PatchShape("blt_1b_8k", 8, 2, 4096, 1024, 16, 64, 2),
    PatchShape("blt_1b_64k", 1, 16, 4096, 1024, 16, 64, 2),
    PatchShape("blt_1b_1m", 1, 256, 4096, 1024, 16, 64, 2),
    # Patches of 8 bytes, wide look back.
    PatchShape("blt_8b_64k", 1, 16, 4096, 576, 20, 64, 8),
)
