"""titans-pytorch as a peer of `neural_memory`; needs torch, titans-pytorch and a GPU.

    python -m experiments.benchmark titans_pytorch --out FILE

Both make one step of gradient descent at the end of every chunk: f(x) = x + silu(x M1) M2, momentum, forgetting, gates
averaged over the chunk. The peer's projections, norms and output gate are taken out, so that its streams are given as
the operation's are. It has no divisor and no limit, and the last token of a chunk reads what its own chunk wrote. So
values and gradients are compared in fp32 with small steps, and without those tokens, before anything is timed. Where
TorchScript's fuser does not compile, set PYTORCH_JIT=0.
"""

from functools import partial
from typing import Any

import numpy as np

from experiments.benchmark.peers.torch_calls import by_shape, import_torch, named, unless_too_large
from pallas_kernels.neural_memory.shapes import SHAPES, NeuralMemoryShape

WITHIN = 1e-4
"""Relative difference, in norm, of fp32 results that pass."""
CHECKED = NeuralMemoryShape("checked", batch=2, length=64, heads=2, width=16, hidden=32, chunk=16)
"""The shapes compared before anything is timed."""


def titans_pytorch(
    out: str = "runs/benchmark/titans_pytorch.json",
    shapes: tuple[str, ...] = ("d1024_16k_c2048", "d1024_16k_c512"),
) -> dict[str, Any]:
    """Time titans-pytorch's memory in bf16 (autocast), forward and with all gradients.

    Args:
      out: JSON file to write.
      shapes: names of shapes of `pallas_kernels.neural_memory` with two matrices a head.
    """
    chosen = named(shapes, (shape for shape in SHAPES if shape.hidden))
    error = difference(import_torch(), CHECKED, "cuda")
    if not error <= WITHIN:
        raise RuntimeError(f"titans-pytorch is {error} from `neural_memory`, expected at most {WITHIN}")
    return by_shape("titans_pytorch", out, chosen, passes, error=error)


def streams(shape: NeuralMemoryShape, step: float) -> tuple[np.ndarray, ...]:
    """Draw q, k [B, T, H, K] of length 1, v, gates theta, eta, alpha [B, T, H], and M1 and M2 of each head."""
    draw = np.random.default_rng(0)
    full = (shape.batch, shape.length, shape.heads, shape.width)
    q, k, v = (draw.standard_normal(full, np.float32) for _ in range(3))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    theta, eta, alpha = (draw.uniform(0.1, 0.9, full[:3]).astype(np.float32) for _ in range(3))
    sizes = (shape.width, shape.hidden)
    first, second = (
        draw.standard_normal((shape.heads, *s), np.float32) * s[0] ** -0.5 for s in (sizes, sizes[::-1])
    )
    return q, k, v / shape.width**0.5, step * theta, eta, 0.1 * alpha, first, second


def memory(torch: Any, shape: NeuralMemoryShape, first: Any, second: Any) -> Any:
    """Return the peer's module with these weights; it takes q [B, T, H K] and what `stored` makes of the rest."""
    try:
        from titans_pytorch import NeuralMemory
    except ImportError as error:
        raise RuntimeError("the peer needs titans-pytorch: pip install titans-pytorch") from error

    class TwoMatrices(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Build it on the CPU, where the package tries it.
            self.first = torch.nn.Parameter(first[0].cpu().clone())
            self.second = torch.nn.Parameter(second[0].cpu().clone())

        def forward(self, x: Any) -> Any:
            return x + torch.nn.functional.silu(x @ self.first) @ self.second

    heads, wide = shape.heads, shape.heads * shape.width
    module = NeuralMemory(
        dim=wide,
        dim_head=shape.width,
        heads=heads,
        chunk_size=shape.chunk,
        batch_size=shape.chunk,
        model=TwoMatrices(),
        store_memory_loss_fn=lambda found, v: (found - v).pow(2).sum(-1) / 2,
        adaptive_step_transform=lambda step: step,
        pre_rmsnorm=False,
        mem_model_norm_add_residual=False,
    ).to(first.device)
    module.memory_model_parameters = torch.nn.ParameterList([first.clone(), second.clone()])
    picks = {
        "to_queries": lambda x: x,
        "to_keys": lambda x: x[..., :wide],
        "to_values": lambda x: x[..., wide : 2 * wide],
        "to_adaptive_step": lambda x: _by_head(x[..., 2 * wide : 2 * wide + heads]),
        "reduce_to_chunk_rep": partial(_means, gates=2 * heads),
        # Undo the sigmoid that the module takes of what these give.
        "to_momentum": lambda means: _by_head(torch.logit(means[..., :heads]))[None, ..., None],
        "to_decay_factor": lambda means: _by_head(torch.logit(means[..., heads:]))[..., None],
        "retrieve_gate": None,
        "combine_heads": lambda x: x,
    }
    for name, pick in picks.items():
        delattr(module, name)
        setattr(module, name, pick)
    return module


def _by_head(x: Any) -> Any:
    """Return [B, N, H] as [B H, N]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])


def _means(x: Any, gates: int, chunk_size: int) -> Any:
    """Return means of the last `gates` columns over each chunk."""
    return x[..., -gates:].unflatten(1, (-1, chunk_size)).mean(2)


def stored(torch: Any, k: Any, v: Any, *gates: Any) -> Any:
    """Return k, v and the gates as columns of one stream, [B, T, 2 H K + 3 H]."""
    return torch.cat([k.flatten(2), v.flatten(2), *(g.to(k.dtype) for g in gates)], -1)


def apply(torch: Any, module: Any, q: Any, k: Any, v: Any, *gates: Any) -> Any:
    """Return what the queries read, [B, T, H, K]."""
    y, _ = module(q.flatten(2), store_seq=stored(torch, k, v, *gates))
    return y.reshape(q.shape)


def difference(torch: Any, shape: NeuralMemoryShape, device: str) -> float:
    """Return largest relative difference to `neural_memory`, of the value and eight gradients, in fp32."""
    arrays = streams(shape, step=0.25 / shape.chunk)
    cotangent = np.random.default_rng(1).standard_normal(arrays[0].shape, np.float32)
    counted = np.arange(shape.length) % shape.chunk != shape.chunk - 1
    cotangent *= counted[None, :, None, None]
    given = [torch.as_tensor(x, device=device).requires_grad_() for x in arrays]
    module = memory(torch, shape, *(x.detach() for x in given[6:]))
    y = apply(torch, module, *given[:6])
    inputs = [*given[:6], *module.memory_model_parameters]
    gradients = torch.autograd.grad(y, inputs, torch.as_tensor(cotangent, device=device))
    found = [x.detach().cpu().double().numpy() for x in (y, *gradients)]
    truth = _ours(shape, arrays, cotangent)
    found[0], truth[0] = found[0][:, counted], truth[0][:, counted]
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, truth, strict=True)]
    return float(np.max(errors))


def _ours(
    shape: NeuralMemoryShape, arrays: tuple[np.ndarray, ...], cotangent: np.ndarray
) -> list[np.ndarray]:
    """Return the value and the gradients of `neural_memory` on the CPU."""
    import jax

    from pallas_kernels.neural_memory import neural_memory

    def op(q: Any, k: Any, v: Any, theta: Any, eta: Any, alpha: Any, *weights: Any) -> Any:
        return neural_memory(
            q, k, v, theta, eta, alpha, weights, chunk_size=shape.chunk, implementation="xla"
        )

    with jax.default_device(jax.devices("cpu")[0]):
        y, pull = jax.vjp(op, *arrays)
        return [np.asarray(x, np.float64) for x in (y, *pull(jax.numpy.asarray(cotangent)))]


def passes(torch: Any, shape: NeuralMemoryShape) -> dict[str, float | str]:
    """Return median milliseconds of only the output, and of the output and all gradients; or why one was not timed."""
    arrays = [torch.as_tensor(x, device="cuda") for x in streams(shape, step=1.0 / shape.chunk)]
    module = memory(torch, shape, *arrays[6:])
    given = [x.to(torch.bfloat16) for x in arrays[:3]] + arrays[3:6]
    inputs = [*(x.requires_grad_() for x in given), *module.memory_model_parameters]
    cotangent = torch.randn_like(given[0])

    def run() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return apply(torch, module, *given)

    def forward() -> None:
        with torch.no_grad():
            run()

    def both() -> None:
        y = run()
        torch.autograd.grad(y, inputs, cotangent.to(y.dtype))

    calls = {"forward": forward, "forward+backward": both}
    return {name: unless_too_large(torch, call) for name, call in calls.items()}
