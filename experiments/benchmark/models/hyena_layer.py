"""A Hyena layer and its parts, by kind of filter: python -m experiments.benchmark hyena_layer --out FILE."""

from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from jaxblt.profiling import Case

Kind = Literal["implicit", "modal"]
PASSES = ("forward", "forward+backward")


def hyena_layer(
    out: str,
    lengths: tuple[int, ...] = (8192, 65_536, 1_048_576),
    kinds: tuple[Kind, ...] = get_args(Kind),
    tokens: int = 524_288,
    dim: int = 768,
    trials: int = 20,
) -> dict[str, Any]:
    """Time a layer, its mixer, its MLP, its long convolution and the making of its taps.

    There is one document a row. Each is a program of its own, in turns with the others of its length. What a layer
    takes beyond its parts are its projections, the short convolution and norms; parts that the compiler joins may take
    more alone.

    Args:
      out: file for the figures as JSON, written anew after each layer.
      lengths: tokens of a row; filters are as long.
      kinds: of the filter.
      tokens: of all rows; a longer row stands alone.
      dim: width.
      trials: timed calls of each, at least 20.

    Raises:
      ValueError: there is nothing to time.
    """
    import jax

    from experiments.benchmark.figures.saved import save

    if not kinds or not lengths or min(lengths) < 1:
        raise ValueError(
            f"there is nothing to time: name kinds and lengths from 1 on, got {kinds} and {lengths}"
        )
    figures: dict[str, Any] = {"dim": dim, "layers": []}
    for length in lengths:
        rows = max(tokens // length, 1)
        for kind in kinds:
            parts = timed_parts(cases(kind, rows, length, dim), jax.random.key(length), trials)
            figures["layers"].append({"filter": kind, "rows": rows, "length": length, "parts": parts})
            save("hyena_layer", out, figures)
    return figures


def timed_parts(programs: "list[Case]", key: Any, trials: int) -> dict[str, dict[str, Any]]:
    """Time both passes of each program, and return the share of the first one, the layer, too."""
    from experiments.benchmark.figures.saved import timed
    from jaxblt.profiling import compiled, forward_backward, measure_all

    found: dict[str, dict[str, Any]] = {case.name: {} for case in programs}
    for label in PASSES:
        passes = programs if label == PASSES[0] else [forward_backward(case, key) for case in programs]
        measured = measure_all(compiled(passes), trials=trials)
        for case, taken in zip(programs, measured, strict=True):
            share = taken.summary.median / measured[0].summary.median
            found[case.name][label] = timed(taken) | {"share": share}
    return found


def cases(kind: Kind, rows: int, length: int, dim: int) -> "list[Case]":
    """Return the layer, its mixer, its MLP, its convolution with taps that are there, and the making of taps."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxblt.layers import MLP
    from jaxblt.mixers import HyenaConfig, ImplicitFilter, ModalFilter
    from jaxblt.mixers.hyena.implicit_taps import ImplicitTaps
    from jaxblt.models import StackConfig
    from jaxblt.models.stack import Stack
    from jaxblt.profiling import Case
    from pallas_kernels.long_conv import long_conv
    from pallas_kernels.modal_conv import modal_conv

    implicit, modal = ImplicitFilter(length), ModalFilter(max_timescale=float(length))
    mixer = HyenaConfig(dim=dim, filter=implicit if kind == "implicit" else modal, packed=False)
    stack = StackConfig(dim=dim, num_layers=1, pattern="H", mixers={"H": mixer}, scan=False)
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)  # noqa: E731
    x, streams = draw(0, rows, length, dim), [draw(i, rows, dim, length) for i in (1, 2, 3)]

    def of(name: str, module: Any) -> Case:
        params = jax.jit(module.init)(jax.random.key(0), x[:1, :16])
        return Case(name, lambda params, x: module.apply(params, x), (params, x))

    def convolve(*given: Any) -> Any:
        (v, pre_gate, post_gate), weights = given[:3], given[3:]
        op = long_conv if kind == "implicit" else modal_conv
        return op(v, *weights, pre_gate=pre_gate, post_gate=post_gate)

    programs = [
        of("layer", Stack(stack, jnp.bfloat16)),
        of("mixer", mixer.build(dtype=jnp.bfloat16)),
        of("mlp", MLP(stack.hidden, jnp.bfloat16)),
    ]
    if kind == "modal":
        slow, shape = -float(np.log(length)), (dim, modal.modes)
        rates = -jnp.exp(jax.random.uniform(jax.random.key(4), shape, minval=slow, maxval=0.0))
        weights = (rates, jax.random.normal(jax.random.key(5), shape))
        return [*programs, Case("convolution", convolve, (*streams, *weights))]
    taps = ImplicitTaps(implicit, dim, 1)
    params = jax.jit(taps.init, static_argnums=1)(jax.random.key(0), 16)
    make = Case("taps", lambda params: taps.apply(params, length)[0], (params,))
    made = jax.jit(make.fn)(params)
    return [*programs, Case("convolution", convolve, (*streams, made)), make]
