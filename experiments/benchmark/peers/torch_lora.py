"""PEFT's chain for LoRA in torch under CUDA graphs, a peer of `routed_lora`; needs torch and a GPU.

    python -m experiments.benchmark torch_lora --out FILE

    y = x W^T + scale (x A^T) B^T    of each site, operation by operation as PEFT's `Linear.forward`, without dropout

All is in bf16 (`autocast_adapter_dtype=False`; by default PEFT keeps A and B in fp32). W is frozen, and with gradients
those of x, A and B are made. The overhead is over the fastest product without an update, of the sites one by one or
joined.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.benchmark.peers.torch_calls import by_shape, milliseconds, named
from pallas_kernels.routed_lora.shapes import SHAPES, RoutedLoraShape

CHECKED = 64
"""Tokens that are compared with f64."""

WITHIN = 2.0**-7
"""Relative error, in norm, of a bf16 result that passes."""

SCALE = 2.0
WARMUP = 3
"""Calls before one is recorded, as torch asks for."""


class Site(NamedTuple):
    """A frozen weight [N, K] and its update: `a` [r, K], `b` [N, r]."""

    w: Any
    a: Any
    b: Any


def torch_lora(
    out: str = "runs/benchmark/torch_lora.json",
    shapes: tuple[str, ...] = ("llama_7b_qkv", "llama_7b_qkv_r64", "llama_7b_out", "d1024_qkv_64k"),
) -> dict[str, Any]:
    """Measure what PEFT's chain in torch costs over the plain product, forward and with gradients.

    Args:
      out: JSON file to write.
      shapes: names of shapes of `pallas_kernels.routed_lora` with one adapter for all tokens.
    """
    known = (shape for shape in SHAPES if shape.active is None)
    return by_shape("torch_lora", out, named(shapes, known), measure)


def measure(torch: Any, shape: RoutedLoraShape) -> dict[str, Any]:
    """Return largest relative error, milliseconds of each pass and version, and the overhead of the chain."""
    x, sites = arrays(torch, shape, "cuda")
    error = check(torch, x, sites)
    if not error <= WITHIN:
        raise RuntimeError(f"torch's {shape.name} is {error} from f64, expected at most {WITHIN}")
    joined = [Site(torch.cat([site.w for site in sites]), None, None)]
    versions = {"chain": (chain, sites), "products": (products, sites), "joined": (products, joined)}
    ms = {name: passes(torch, run, x, given) for name, (run, given) in versions.items()}
    return {"error": error, "ms": ms, "overhead": overhead(ms)}


def arrays(torch: Any, shape: RoutedLoraShape, device: str) -> tuple[Any, list[Site]]:
    """Draw x [B, T, K] and the sites, in bf16."""
    torch.manual_seed(0)

    def draw(*size: int) -> Any:
        return torch.randn(size, device=device, dtype=torch.bfloat16) * size[-1] ** -0.5

    k, n, r = shape.inputs, shape.outputs, shape.rank
    x = draw(shape.batch, shape.length, k) * k**0.5
    return x, [Site(draw(n, k), draw(r, k), draw(n, r)) for _ in range(shape.sites)]


def chain(torch: Any, x: Any, sites: Sequence[Site]) -> list[Any]:
    """Return y of each site as PEFT makes it."""
    linear = torch.nn.functional.linear
    return [linear(x, w) + linear(linear(x, a), b) * SCALE for w, a, b in sites]


def products(torch: Any, x: Any, sites: Sequence[Site]) -> list[Any]:
    """Return x W^T of each site."""
    return [torch.nn.functional.linear(x, site.w) for site in sites]


def overhead(ms: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return what the chain takes over the fastest other version of each pass, as a share."""
    others = [times for name, times in ms.items() if name != "chain"]
    return {name: taken / min(times[name] for times in others) - 1 for name, taken in ms["chain"].items()}


def check(torch: Any, x: Any, sites: Sequence[Site]) -> float:
    """Return largest relative error of the outputs and gradients of a few tokens against f64."""
    some = x[:1, :CHECKED]
    dy = [torch.randn_like(y) for y in chain(torch, some, sites)]
    found, truth = (
        _outputs(torch, some.to(dtype), [Site(*(z.to(dtype) for z in site)) for site in sites], dy)
        for dtype in (x.dtype, torch.float64)
    )
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
    # Avoid max(), which lets a NaN go by
    return sorted(errors, key=lambda error: (error == error, -error))[0]


def _outputs(torch: Any, x: Any, sites: Sequence[Site], dy: Sequence[Any]) -> list[Any]:
    asked, sites = _asked(x, sites)
    ys = chain(torch, asked[0], sites)
    found = torch.autograd.grad(ys, asked, [d.to(y.dtype) for d, y in zip(dy, ys, strict=True)])
    return [*(y.detach() for y in ys), *found]


def _asked(x: Any, sites: Sequence[Site]) -> tuple[list[Any], list[Site]]:
    """Return what gets a gradient, and the sites made of it."""

    def leaf(z: Any) -> Any:
        return None if z is None else z.detach().requires_grad_()

    sites = [Site(site.w, leaf(site.a), leaf(site.b)) for site in sites]
    trained = [z for site in sites for z in (site.a, site.b) if z is not None]
    return [leaf(x), *trained], sites


def passes(torch: Any, run: Callable[..., list[Any]], x: Any, sites: Sequence[Site]) -> dict[str, float]:
    """Return median milliseconds of only the outputs, and of the outputs and all gradients."""
    asked, given = _asked(x, sites)
    dy = [torch.randn_like(y) for y in run(torch, x, sites)]
    if run is products:  # nothing of an update gets a gradient
        asked = asked[:1]

    def forward() -> None:
        with torch.no_grad():
            run(torch, x, sites)

    def both() -> None:
        torch.autograd.grad(run(torch, asked[0], given), asked, dy)

    calls = {"forward": forward, "forward+backward": both}
    return {name: milliseconds(torch, graphed(torch, call)) for name, call in calls.items()}


def graphed(torch: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Return the call as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
