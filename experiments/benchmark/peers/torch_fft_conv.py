"""PyTorch's FFT as a gated long convolution, a peer of `long_conv`; needs torch and a GPU.

    python -m experiments.benchmark torch_fft_conv --out FILE

    y = post_gate irfft(rfft(pre_gate x) rfft(h)), transforms of 2 T points in fp32, streams in bf16

The taps are transformed once before anything is timed forward, which favours torch; with gradients their transform is
part of what is timed. Before a shape is timed, values and gradients of a few channels are compared with f64.
"""

from typing import Any

from experiments.benchmark.peers.torch_calls import by_shape, named, unless_too_large
from pallas_kernels.long_conv.shapes import SHAPES, LongConvShape

CHECKED = 2
"""Rows and channels that are compared with f64."""

WITHIN = 2.0**-7
"""Relative error, in norm, of a bf16 result that passes."""


def torch_fft_conv(
    out: str = "runs/benchmark/torch_fft_conv.json",
    shapes: tuple[str, ...] = ("hyena_d768_8k", "hyena_d768_16k", "hyena_d768_32k"),
) -> dict[str, Any]:
    """Time torch.fft's convolution with both gates, forward and with all gradients.

    Args:
      out: JSON file to write.
      shapes: names of causal shapes of `pallas_kernels.long_conv` with one document a row.
    """
    known = (shape for shape in SHAPES if shape.causal and shape.documents == 1)
    return by_shape("torch_fft_conv", out, named(shapes, known), measure)


def convolve(torch: Any, x: Any, filter: Any, pre_gate: Any, post_gate: Any, spectrum: Any = None) -> Any:
    """Return the gated convolution of x [B, D, T]; with a `spectrum` of the taps, these are not read."""
    length = x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    if spectrum is None:
        spectrum = torch.fft.rfft(filter.to(wide), n=2 * length)
    u = torch.fft.rfft((pre_gate * x).to(wide), n=2 * length)
    return torch.fft.irfft(u * spectrum, n=2 * length)[..., :length].to(x.dtype) * post_gate


def measure(torch: Any, shape: LongConvShape, device: str = "cuda") -> dict[str, Any]:
    """Return largest relative error, and milliseconds of each pass or why it was not timed."""
    torch.manual_seed(0)
    full = (shape.batch, shape.channels, shape.length)
    x, pre_gate, post_gate, dy = (torch.randn(full, device=device, dtype=torch.bfloat16) for _ in range(4))
    filter = torch.randn(shape.channels, shape.taps, device=device) * shape.taps**-0.5
    given = [x, filter, pre_gate, post_gate]
    error = check(torch, given, dy)
    if not error <= WITHIN:
        raise RuntimeError(f"torch.fft's {shape.name} is {error} from f64, expected at most {WITHIN}")
    return {"error": error, "torch_ms": passes(torch, given, dy)}


def check(torch: Any, given: list[Any], dy: Any) -> float:
    """Return largest relative error of the value and the four gradients on a few rows and channels."""
    some = [z[:CHECKED, :CHECKED] if z.ndim == 3 else z[:CHECKED] for z in (*given, dy)]
    found, truth = (
        _outputs(torch, [z.to(dtype or z.dtype) for z in some]) for dtype in (None, torch.float64)
    )
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
    # Avoid max(), which lets a NaN go by
    return sorted(errors, key=lambda error: (error == error, -error))[0]


def _outputs(torch: Any, arrays: list[Any]) -> list[Any]:
    *inputs, dy = [z.detach().requires_grad_() for z in arrays]
    y = convolve(torch, *inputs)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def passes(torch: Any, given: list[Any], dy: Any) -> dict[str, float | str]:
    """Return median milliseconds of only the output, and of the output and all gradients."""
    inputs = [z.detach().requires_grad_() for z in given]
    spectrum = torch.fft.rfft(given[1], n=2 * given[0].shape[-1])

    def forward() -> None:
        with torch.no_grad():
            convolve(torch, *given, spectrum)

    def both() -> None:
        torch.autograd.grad(convolve(torch, *inputs), inputs, dy)

    calls = {"forward": forward, "forward+backward": both}
    return {name: unless_too_large(torch, call) for name, call in calls.items()}
