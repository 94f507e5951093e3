"""Products in FP8 beside bfloat16 by size: python -m experiments.benchmark fp8_products --out FILE."""

from collections.abc import Callable
from typing import Any

from experiments.benchmark.figures.saved import save, timed

SQUARES = (1024, 2048, 4096, 8192)
LAYERS = ((16384, 2048, 2048), (16384, 2048, 5504), (16384, 5504, 2048))
"""Tokens, inputs and outputs of the products of a byte Transformer of 1.2 B parameters on 16,384 bytes."""
PEAK = 989e12
"""Dense bf16 FLOP/s of an H200's datasheet; FP8 has twice as many."""


def fp8_products(
    out: str,
    squares: tuple[int, ...] = SQUARES,
    layers: tuple[tuple[int, int, int], ...] = LAYERS,
    trials: int = 20,
) -> dict[str, Any]:
    """Time products of bfloat16 arrays in FP8 and in bfloat16, forward and with both gradients, and their errors.

    `plain` multiplies operands that are in FP8 already. `current` and `delayed` begin with bfloat16. The crossover is
    the smallest square from which `delayed` with its gradients is faster than bfloat16, up to the largest.

    Args:
      out: JSON file to write.
      squares: sides of square products.
      layers: tokens, inputs and outputs of other products.
      trials: of each timing, at least 20.
    """
    found: dict[str, Any] = {"peak_flops": PEAK, "products": []}
    for shape in (*((n, n, n) for n in squares), *layers):
        found["products"].append(_measured(shape, trials))
        found["crossover"] = crossover(found["products"])
        save("fp8_products", out, found)
    return found


def crossover(products: list[dict[str, Any]]) -> int | None:
    """Return the smallest square side from which all larger ones are faster in FP8, or None."""
    side = None
    for row in sorted(
        (row for row in products if len(set(row["shape"])) == 1), key=lambda row: -row["shape"][0]
    ):
        times = row["taken"]["forward_backward"]
        if times["delayed"]["median"] >= times["bfloat16"]["median"]:
            break
        side = row["shape"][0]
    return side


def _measured(shape: tuple[int, int, int], trials: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from jaxblt.profiling import Case, measure_all

    tokens, inner, outer = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x, g = (
        jax.random.normal(k, (tokens, n), jnp.float32).astype(jnp.bfloat16)
        for k, n in zip(keys, (inner, outer), strict=False)
    )
    kernel = (jax.random.normal(keys[2], (inner, outer), jnp.float32) * inner**-0.5).astype(jnp.bfloat16)
    products = forms(
        largest=(float(jnp.max(jnp.abs(x))), float(jnp.max(jnp.abs(kernel))), float(jnp.max(jnp.abs(g))))
    )
    cases = [Case(f"forward/{name}", jax.jit(f), (x, kernel)) for name, f in products.items()]
    cases.append(Case("forward/plain", jax.jit(plain), plain_operands(x, kernel)))
    cases += [
        Case(f"forward_backward/{name}", jax.jit(with_gradients(f)), (x, kernel, g))
        for name, f in products.items()
    ]
    row: dict[str, Any] = {
        "shape": list(shape),
        "taken": {},
        "flops_share": {},
        "errors": errors(products, x, kernel),
    }
    for case, taken in zip(cases, measure_all(cases, trials=trials), strict=True):
        passes, name = case.name.split("/")
        seconds = timed(taken)
        times = 2 if passes == "forward" else 6
        row["taken"].setdefault(passes, {})[name] = seconds
        share = times * tokens * inner * outer / seconds["median"] / PEAK
        row["flops_share"].setdefault(passes, {})[name] = share
    return row


def forms(largest: tuple[float, float, float]) -> dict[str, Callable[[Any, Any], Any]]:
    """Return ways to multiply, by name; those of `delayed` know the largest entries beforehand."""
    import jax.numpy as jnp

    from jaxblt.precision import Past, fp8_product

    past = Past(*(jnp.full(1, entry, jnp.float32) for entry in largest))
    return {
        "bfloat16": lambda x, kernel: x @ kernel,
        "current": lambda x, kernel: fp8_product("td,de->te", x, kernel),
        "delayed": lambda x, kernel: fp8_product("td,de->te", x, kernel, past=past),
    }


def with_gradients(product: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return the product with the gradients of both operands."""
    import jax

    def run(x: Any, kernel: Any, g: Any) -> Any:
        y, back = jax.vjp(product, x, kernel)
        return y, back(g)

    return run


def plain_operands(x: Any, kernel: Any) -> tuple[Any, Any]:
    """Return operands in E4M3, the second one transposed, as cuBLAS reads them."""
    import jax.numpy as jnp

    from jaxblt.precision import E4M3, quantise

    return quantise(x, jnp.float32(1), E4M3), quantise(kernel, jnp.float32(64), E4M3).T.copy()


def plain(x: Any, transposed: Any) -> Any:
    """Return the product of operands that are in FP8 already."""
    import jax
    import jax.numpy as jnp

    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, transposed, dims, preferred_element_type=jnp.bfloat16)


def errors(products: dict[str, Callable[[Any, Any], Any]], x: Any, kernel: Any) -> dict[str, float]:
    """Return each product's relative error, |y - y_64| / |y_64|, on the first 128 rows against fp64."""
    import jax
    import numpy as np

    exact = np.asarray(x[:128], np.float64) @ np.asarray(kernel, np.float64)
    found = {name: np.asarray(jax.jit(f)(x, kernel)[:128], np.float64) for name, f in products.items()}
    return {name: float(np.linalg.norm(y - exact) / np.linalg.norm(exact)) for name, y in found.items()}
