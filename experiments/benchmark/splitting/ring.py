"""Ring attention on the GPUs of one host, against one of them: python -m experiments.benchmark ring --out FILE.

1. The gate: ring and one GPU's fused kernel against attention in f64 on the host, forward and backward, for rings
   of 2, 4, ... devices; and against the one-GPU kernel at the first length. It fails before anything is timed.
2. It times one causal layer at each total length on n devices and on one: efficiency = T1 / (n Tn). It also times the
one-GPU kernel on every device at once. Each device then has a row of length / sqrt(n), which is as much work. All of
   a length alternate, round by round, and ratios are of the rounds' medians with their 95 % intervals.
3. Bytes per second that one exchange with the next device of the ring moves, by size of the message.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from experiments.benchmark.figures.saved import save, timed
from experiments.benchmark.splitting.exchange import send_message
from experiments.benchmark.splitting.ring_programs import Shape, independent, one_device, share, split
from jaxblt.profiling import Case, Measurement, measure_all, ratio_interval

WITHIN = 1.25
"""Error of a ring that passes, in units of the one-GPU kernel's; what it is, is reported."""


def ring(
    out: str = "runs/benchmark/ring.json",
    lengths: tuple[int, ...] = (),
    heads: int = 32,
    groups: int = 8,
    head_dim: int = 128,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    exact_length: int = 4096,
    peers_up_to: int = 2**18,
    one_device_up_to: int = 2**18,
    message_mib: tuple[float, ...] = (0.25, 1, 4, 16, 64, 256),
    implementation: Literal["cudnn", "xla"] | None = None,
    trials: int = 20,
) -> dict[str, Any]:
    """Check ring attention over all devices of this process, and time it and its exchanges.

    Args:
      out: JSON file to write.
      lengths: total tokens; by default 8,192 and 2,048 a device, and 262,144.
      heads: query heads.
      groups: key and value heads.
      head_dim: width of a head.
      dtype: of the inputs.
      exact_length: tokens of the comparison with f64, over 4 heads.
      peers_up_to: longest length at which the other modes are timed.
      one_device_up_to: longest length at which one device is timed.
      message_mib: sizes of the exchanged messages, MiB a device.
      implementation: the rings' kernel; the fastest that runs if None.
      trials: rounds at each length, at least 20.
    """
    import jax

    devices = len(jax.devices())
    if devices < 2:
        raise ValueError(f"a ring needs at least 2 devices, there is {devices}: use a machine with more")
    lengths = lengths or (8192 * devices, 2048 * devices, 2**18)
    shapes = [Shape(length, heads, groups, head_dim, dtype, implementation) for length in lengths]
    figures: dict[str, Any] = {
        "devices_in_ring": devices,
        "shape": {"batch": 1, "heads": heads, "groups": groups, "head_dim": head_dim, "dtype": dtype},
        "implementation": implementation,
        "errors_against_f64": gate(Shape(exact_length, 4, min(groups, 2), head_dim, dtype, implementation)),
        "against_one_device": compare_with_one(shapes[0]),
        "exchange": [send_message(mib) for mib in message_mib],
        "scaling": [],
    }
    for shape in shapes:
        figures["scaling"].append(scale(shape, peers_up_to, one_device_up_to, trials))
        save("ring", out, figures)
    return figures


def gate(shape: Shape) -> dict[str, dict[str, float]]:
    """Return relative errors of o, dq, dk, dv against f64 on one device and on rings of 2, 4, ...

    Raises:
      RuntimeError: a ring's error is more than WITHIN times that of one device.
    """
    import jax

    from jaxblt.parallel import ZIGZAG

    step, args = one_device(shape, backward=True)
    exact = exact_passes(*(np.asarray(x).astype(np.float64)[0] for x in args))
    found = {"1": errors([np.asarray(x)[0] for x in step(*args)], exact)}
    count = 2
    while count <= len(jax.devices()):
        order = ZIGZAG.order(shape.length, count)
        swapped = split(shape, "ring_swapped", backward=True, devices=count)
        zigzag, placed = split(shape, "ring", backward=True, devices=count)
        placed = [jax.device_put(x[:, order], x.sharding) for x in placed]
        found[f"{count} swapped"] = errors([np.asarray(x)[0] for x in swapped[0](*swapped[1])], exact)
        got = [np.asarray(x)[0, np.argsort(order)] for x in zigzag(*placed)]
        found[str(count)] = errors(got, exact)
        count *= 2
    for name, of_ring in found.items():
        hold(f"a ring of {name}", of_ring, "one device", found["1"], WITHIN)
    return found


def exact_passes(q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray) -> list[np.ndarray]:
    """Return o, dq, dk, dv of causal attention of one row in f64, a head at a time, from [T, H, K] and [T, G, K]."""
    o, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    scale, hidden = q.shape[-1] ** -0.5, ~np.tri(len(q), dtype=bool)
    for h in range(q.shape[1]):
        g = h * k.shape[1] // q.shape[1]
        scores = scale * q[:, h] @ k[:, g].T
        scores[hidden] = -np.inf
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        o[:, h] = p @ v[:, g]
        dv[:, g] += p.T @ do[:, h]
        ds = scale * p * (do[:, h] @ v[:, g].T - np.sum(do[:, h] * o[:, h], 1)[:, None])
        dq[:, h], dk[:, g] = ds @ k[:, g], dk[:, g] + ds.T @ q[:, h]
    return [o, dq, dk, dv]


def compare_with_one(shape: Shape) -> dict[str, Any]:
    """Compare the ring with one device at a real length, and check that the ring repeats its bits."""
    step, args = one_device(shape, backward=True)
    expected = [np.asarray(x) for x in step(*args)]
    swapped, placed = split(shape, "ring_swapped", backward=True)
    first, again = ([np.asarray(x) for x in swapped(*placed)] for _ in range(2))
    same = [a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True)]
    return {
        "length": shape.length,
        "difference": errors(first, [x.astype(np.float64) for x in expected]),
        "output_repeats_bit_for_bit": same[0],
        "gradients_repeat_bit_for_bit": all(same[1:]),
    }


def scale(shape: Shape, peers_up_to: int, one_device_up_to: int, trials: int) -> dict[str, Any]:
    """Time one device and all, forward and with backward, and return the efficiencies."""
    row: dict[str, Any] = {"length": shape.length, "length_of_independent": share(shape.length)}
    for name, backward in (("forward", False), ("forward_backward", True)):
        made = programs(shape, peers_up_to, one_device_up_to, backward=backward)
        cases = [case for case in made.values() if isinstance(case, Case)]
        taken = {found.name: found for found in measure_all(cases, trials=trials, warmup=2, method="calls")}
        row[name] = {
            variant: _figures(shape, taken, variant, backward=backward) if isinstance(case, Case) else case
            for variant, case in made.items()
        }
    return row


def programs(
    shape: Shape, peers_up_to: int, one_device_up_to: int, *, backward: bool
) -> dict[str, Case | dict[str, Any]]:
    """Return what is timed at a length, by name; what does not run says why; {} of one device: nothing is said."""
    import jax

    devices = len(jax.devices())
    makers: dict[str, Callable[..., Any]] = {
        "independent": independent,
        "ring": partial(split, variant="ring"),
    }
    if shape.length <= peers_up_to:
        makers["ring_swapped"] = partial(split, variant="ring_swapped")
        if shape.heads % devices == shape.groups % devices == 0:
            makers["all_to_all"] = partial(split, variant="all_to_all")
    if shape.length <= one_device_up_to:
        makers = {"one_device": one_device} | makers
    made: dict[str, Any] = {"one_device": {}}
    return made | {name: attempt(name, make, shape, backward=backward) for name, make in makers.items()}


def _figures(shape: Shape, taken: dict[str, Measurement], variant: str, *, backward: bool) -> dict[str, Any]:
    import jax

    figures, own = timed(taken[variant]), np.array(taken[variant].seconds)
    if variant in ("one_device", "independent"):
        return figures
    devices, work = len(jax.devices()), shape.flops(backward=backward) / 1e12
    figures["tflops_per_device"] = work / figures["median"] / devices
    bases = {
        "efficiency": ("one_device", 1 / devices),
        "efficiency_against_independent": (
            "independent",
            (shape.length / share(shape.length)) ** 2 / devices,
        ),
    }
    for name, (base, factor) in bases.items():
        if base in taken:
            ratio = [factor * x for x in ratio_interval(np.array(taken[base].seconds), own)]
            figures |= {name: ratio[0], f"{name}_interval": ratio[1:]}
    return figures


def attempt(name: str, make: Callable[..., Any], *args: Any, **options: Any) -> Case | dict[str, Any]:
    """Return what `make` compiles, which has run once, or why it does not run (too large for one device, say)."""
    import jax

    try:
        step, given = make(*args, **options)
        jax.block_until_ready(step(*given))
    except jax.errors.JaxRuntimeError as error:
        return {"failed": str(error).splitlines()[0]}
    return Case(name, step, given)


def errors(got: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> dict[str, float]:
    """Return |got - exact| / |exact| of o, dq, dk, dv."""
    pairs = zip(("o", "dq", "dk", "dv"), got, exact, strict=True)
    return {name: float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b)) for name, a, b in pairs}


def hold(name: str, found: dict[str, float], other: str, base: dict[str, float], within: float) -> None:
    """Let errors pass that are at most `within` times those of `base`; NaN is not.

    Raises:
      RuntimeError: one does not pass.
    """
    if wrong := {x: error for x, error in found.items() if not error <= within * base[x]}:
        raise RuntimeError(f"{name} errs by {wrong}, {other} by {base}: {within} times that is allowed")
