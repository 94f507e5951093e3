"""A stack of Hyena blocks with modal filters, forward: python -m experiments.benchmark stack --out FILE."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxblt.models import StackConfig
    from jaxblt.profiling import Ceilings


def stack(
    out: str,
    lengths: tuple[int, ...] = (4096, 65536),
    layers: int = 24,
    dim: int = 1024,
    batch_size: int = 1,
    trials: int = 20,
) -> dict[str, Any]:
    """Time the forward pass of Hyena blocks with their MLPs on random inputs, bf16.

    There is one document a row.

    Args:
      out: file for the figures as JSON.
      lengths: tokens of a row.
      layers: blocks.
      dim: width.
      batch_size: rows.
      trials: timed calls, at least 20.
    """
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.figures.saved import save
    from jaxblt.profiling import measure_ceilings

    config = stack_config(layers, dim)
    params = parameters(config)
    ceilings = measure_ceilings()
    figures: dict[str, Any] = {"ceilings": asdict(ceilings), "dim": dim, "layers": layers, "lengths": []}
    for length in lengths:
        x = jax.random.normal(jax.random.key(length), (batch_size, length, dim), jnp.bfloat16)
        figures["lengths"].append(forward(config, params, x, ceilings, trials))
        save("stack", out, figures)
    return figures


def stack_config(layers: int, dim: int) -> "StackConfig":
    """Return Hyena with the default modal filter in all blocks, not scanned: bf16 parameters are read as they are."""
    from jaxblt.mixers import HyenaConfig
    from jaxblt.models import StackConfig

    hyena = HyenaConfig(dim=dim, packed=False)
    return StackConfig(dim=dim, num_layers=layers, pattern="H", mixers={"H": hyena}, scan=False)


def parameters(config: "StackConfig") -> Any:
    """Draw untrained parameters in bf16."""
    import jax.numpy as jnp

    from experiments.benchmark.models.forward_pass import draw
    from jaxblt.models.stack import Stack, unstack_periods

    scanned = Stack(replace(config, scan=True))
    return unstack_periods(draw(scanned, jnp.zeros((1, 16, config.dim), jnp.float32)))


def forward(config: "StackConfig", params: Any, x: Any, ceilings: "Ceilings", trials: int) -> dict[str, Any]:
    """Time a pass; also return its share of the floor set by projections and MLPs only."""
    from experiments.benchmark.models.forward_pass import kernel_sizes, timed
    from jaxblt.models.stack import Stack
    from jaxblt.training.state import widen

    def program(params: Any, x: Any) -> Any:
        return Stack(config, x.dtype).apply({"params": widen(params)}, x)[0]  # pyright: ignore[reportIndexIssue]

    rows, length, _ = x.shape
    flops = 2.0 * kernel_sizes(params) * rows * length
    found = timed(program, params, x, flops=flops, ceilings=ceilings, trials=trials)
    rate = rows * length / found["seconds"]["median"]
    return {"rows": rows, "tokens": length, "tokens_per_second": rate, **found}
