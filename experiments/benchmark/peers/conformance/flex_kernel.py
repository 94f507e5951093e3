"""PyTorch's FlexAttention, compiled for a GPU."""

from typing import Any

import numpy as np

from jaxblt.testing.conformance import Layer, Subject


def flex_attention() -> Layer:
    """Make causal attention of one head of 64 within documents."""
    import torch
    from torch.nn.attention import flex_attention as flex

    compiled = torch.compile(flex.flex_attention)

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        q, k, v = (z[:, None] for z in torch.as_tensor(x).cuda().bfloat16().split(64, -1))
        ids = torch.tensor(np.ones(x.shape[:2], int) if documents is None else documents).cuda()
        seen = lambda b, h, t, s: (t >= s) & (ids[b, t] == ids[b, s])  # noqa: E731
        mask = flex.create_block_mask(seen, len(x), None, x.shape[1], x.shape[1], device="cuda")
        return compiled(q, k, v, block_mask=mask)[:, 0], None

    def reference(x: Any) -> Any:
        q, k, v = np.split(x, 3, -1)
        scores = np.einsum("btd,bsd->bts", q, k) / 8
        weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(x.shape[1])
        return weights / weights.sum(-1, keepdims=True) @ v

    return Layer(call, reference=reference)


subjects = (
    Subject(
        name="PyTorch: FlexAttention on a GPU",
        make=flex_attention,
        width=192,
        promises=frozenset(["causal", "lengths", "batch", "documents", "gradients", "dtype", "values"]),
        dtype="bfloat16",
        lengths=(130,),
        peer="torch",
        called="torch.compile(flex_attention)(q, k, v, block_mask=create_block_mask(documents))",
        gpu=True,
    ),
)
