"""jax-linear-attention's operations in bf16 on a GPU, where `impl="auto"` picks its Mosaic GPU kernels."""

from experiments.benchmark.peers.conformance import jla_ops

subjects = (
    *(jla_ops.subject(kind, "bfloat16", 128) for kind in jla_ops.KINDS),
    jla_ops.attention("bfloat16", 128),
)
