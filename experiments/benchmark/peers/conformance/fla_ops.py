"""flash-linear-attention's operations, whose kernels are in Triton; they need a GPU.

Each is called as the example in its docstring: streams in bf16, decays as logarithms, packed rows by `cu_seqlens`, for
which the batch has one row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.benchmark.peers.conformance.common import STREAMED
from jaxblt.testing.conformance import Layer, Subject

PROMISES = STREAMED | {"documents", "values"}


def gated_linear_attention() -> Layer:
    """Make one head of 16 with a decay for each key channel."""
    import torch
    from fla.ops.gla import chunk_gla

    def streams(x: Any) -> Any:
        *qkv, g = torch.as_tensor(x).cuda()[:, :, None].split(16, -1)
        return *qkv, -torch.nn.functional.softplus(g)

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        cut = None if documents is None else np.flatnonzero(np.diff(documents[0], prepend=0, append=0))
        given = streams(torch.as_tensor(x).cuda().bfloat16())
        cut = None if cut is None else torch.tensor(cut).cuda()
        return chunk_gla(*given, initial_state=state, output_final_state=True, cu_seqlens=cut)

    def reference(x: Any) -> Any:
        q, k, v, g = streams(x)
        s, y = 0, []
        for t in range(x.shape[1]):
            s = s * g[:, t, ..., None].exp() + k[:, t, ..., None] * v[:, t, :, None]
            y.append((q[:, t, ..., None] * s).sum(-2) / 4)
        return torch.stack(y, 1)

    return Layer(call, reference=reference)


def simple_gated_linear_attention() -> Layer:
    """Make one head of 16 with one decay, as Mamba-2's."""
    import torch
    from fla.ops.simple_gla import chunk_simple_gla

    def streams(x: Any) -> Any:
        *qkv, g = torch.as_tensor(x).cuda()[:, :, None].split([16, 16, 16, 1], -1)
        return *qkv, -torch.nn.functional.softplus(g[..., 0])

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        cut = None if documents is None else np.flatnonzero(np.diff(documents[0], prepend=0, append=0))
        given = streams(torch.as_tensor(x).cuda().bfloat16())
        cut = None if cut is None else torch.tensor(cut).cuda()
        return chunk_simple_gla(*given, initial_state=state, output_final_state=True, cu_seqlens=cut)

    def reference(x: Any) -> Any:
        q, k, v, g = streams(x)
        s, y = 0, []
        for t in range(x.shape[1]):
            s = s * g[:, t, :, None, None].exp() + k[:, t, ..., None] * v[:, t, :, None]
            y.append((q[:, t, ..., None] * s).sum(-2) / 4)
        return torch.stack(y, 1)

    return Layer(call, reference=reference)


def gated_delta_rule() -> Layer:
    """Make one head of 16; keys and queries are normalised by the kernel."""
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def streams(x: Any) -> Any:
        *qkv, g, beta = torch.as_tensor(x).cuda()[:, :, None].split([16, 16, 16, 1, 1], -1)
        return *qkv, -torch.nn.functional.softplus(g[..., 0]), beta[..., 0].sigmoid()

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        cut = None if documents is None else np.flatnonzero(np.diff(documents[0], prepend=0, append=0))
        options = {} if cut is None else {"cu_seqlens": torch.tensor(cut).cuda()}
        options |= {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return chunk_gated_delta_rule(*streams(torch.as_tensor(x).cuda().bfloat16()), **options)

    def reference(x: Any) -> Any:
        q, k, v, g, beta = streams(x)
        q, k = (z / (z.square().sum(-1, True) + 1e-6).sqrt() for z in (q, k))
        s, y = 0 * k[:, 0, ..., None] * v[:, 0, :, None], []
        for t in range(x.shape[1]):
            s = s * g[:, t, :, None, None].exp()
            new = beta[:, t, :, None] * (v[:, t] - (k[:, t, ..., None] * s).sum(-2))
            s = s + k[:, t, ..., None] * new[:, :, None]
            y.append((q[:, t, ..., None] * s).sum(-2) / 4)
        return torch.stack(y, 1)

    return Layer(call, reference=reference)


def kimi_delta_attention() -> Layer:
    """Make one head of 16 with a decay for each key channel; the kernel normalises keys and queries."""
    import torch
    from fla.ops.kda import chunk_kda

    def streams(x: Any) -> Any:
        *qkv, g, beta = torch.as_tensor(x).cuda()[:, :, None].split([16, 16, 16, 16, 1], -1)
        return *qkv, -torch.nn.functional.softplus(g), beta[..., 0].sigmoid()

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        cut = None if documents is None else np.flatnonzero(np.diff(documents[0], prepend=0, append=0))
        options = {} if cut is None else {"cu_seqlens": torch.tensor(cut).cuda()}
        options |= {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return chunk_kda(*streams(torch.as_tensor(x).cuda().bfloat16()), **options)

    def reference(x: Any) -> Any:
        q, k, v, g, beta = streams(x)
        q, k = (z / (z.square().sum(-1, True) + 1e-6).sqrt() for z in (q, k))
        s, y = 0 * k[:, 0, ..., None] * v[:, 0, :, None], []
        for t in range(x.shape[1]):
            s = s * g[:, t, ..., None].exp()
            new = beta[:, t, :, None] * (v[:, t] - (k[:, t, ..., None] * s).sum(-2))
            s = s + k[:, t, ..., None] * new[:, :, None]
            y.append((q[:, t, ..., None] * s).sum(-2) / 4)
        return torch.stack(y, 1)

    return Layer(call, reference=reference)


def rwkv7() -> Layer:
    """Make one head of 64, with decays of at least exp(-0.606) as in RWKV-7."""
    import torch
    from fla.ops.rwkv7 import chunk_rwkv7

    def streams(x: Any) -> Any:
        r, w, k, v, kk, a = torch.as_tensor(x).cuda()[:, :, None].split(64, -1)
        kk = torch.nn.functional.normalize(kk, dim=-1)
        return r, -0.606 * w.sigmoid(), k, v, -kk, kk * a.sigmoid()

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        cut = None if documents is None else np.flatnonzero(np.diff(documents[0], prepend=0, append=0))
        given = streams(torch.as_tensor(x).cuda().bfloat16())
        cut = None if cut is None else torch.tensor(cut).cuda()
        return chunk_rwkv7(*given, initial_state=state, output_final_state=True, cu_seqlens=cut)

    def reference(x: Any) -> Any:
        r, w, k, v, a, b = (z.transpose(1, 2) for z in streams(x))
        s, y = 0 * k[:, :, 0, :, None] * v[:, :, 0, None], []
        for t in range(x.shape[1]):
            read = (a[:, :, t, :, None] * s).sum(-2)
            s = s * w[:, :, t, :, None].exp() + b[:, :, t, :, None] * read[:, :, None]
            s = s + k[:, :, t, :, None] * v[:, :, t, None]
            y.append((r[:, :, t, :, None] * s).sum(-2))
        return torch.stack(y, 1)

    return Layer(call, reference=reference)


def _subject(
    name: str,
    make: Callable[[], Layer],
    width: int,
    called: str,
    decays: slice | None = None,
    *,
    gradients: bool = True,
) -> Subject:
    promises = PROMISES | ({"decays"} if decays else set())
    if not gradients:
        promises -= {"gradients"}
    return Subject(
        name=f"flash-linear-attention: {name}",
        make=make,
        width=width,
        promises=promises,
        dtype="bfloat16",
        decays=decays,
        lengths=(65,),
        peer="fla-core",
        called=called,
        gpu=True,
    )


# Two of them refuse gradients on Hopper with Triton 3.4 to 3.7.0, and say so.
subjects = (
    _subject("GLA", gated_linear_attention, 64, "chunk_gla", slice(48, 64)),
    _subject(
        "Gated DeltaNet", gated_delta_rule, 50, "chunk_gated_delta_rule", slice(48, 49), gradients=False
    ),
    _subject("KDA", kimi_delta_attention, 65, "chunk_kda", slice(48, 64)),
    _subject("RWKV-7", rwkv7, 384, "chunk_rwkv7"),
    _subject(
        "simple GLA", simple_gated_linear_attention, 49, "chunk_simple_gla", slice(48, 49), gradients=False
    ),
)
