"""Ring attention on the GPUs of one host, against one of them: python -m experiments.benchmark ring --out FILE.

1. The gate: ring and one GPU's fused kernel against attention in f64 on the host, forward and backward, for rings
   of 2, 4, ... devices; and against the one-GPU kernel at the first length. It fails before anything is timed.
2. Seconds of one causal layer at each total length on n devices and on one: efficiency = T1 / (n Tn); and of the
   one-GPU kernel on every device at once, each with a row of its own of length / sqrt(n), which is as much work. All of
   a length alternate, round by round, and ratios are of the rounds' medians with their 95 % intervals.
3. Bytes per second that one exchange with the next device of the ring moves, by size of the message.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.benchmark._errors import errors, hold
from experiments.benchmark._schema import save, timed
from experiments.benchmark.exchange import exchange
from jaxblt.profiling import Case, Measurement, measure_all, ratio_interval

WITHIN = 1.25
"""Error of a ring that passes, in units of the one-GPU kernel's; what it is, is reported."""


class Shape(NamedTuple):
    """One row of attention, and the kernel that rings of it run; None for the fastest that runs."""

    length: int
    heads: int
    groups: int
    head_dim: int
    dtype: str
    implementation: Any = None

    def flops(self, *, backward: bool) -> float:
        """Of the visible half of the scores: 2 matmuls forward, 5 backward."""
        return (2 + 5 * backward) * float(self.length) ** 2 * self.head_dim * self.heads


def benchmark(
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
    """Gate, scaling and exchange of ring attention over all devices of this process.

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
        "exchange": [sent for mib in message_mib for sent in exchange(mib)],
        "scaling": [],
    }
    for shape in shapes:
        figures["scaling"].append(scale(shape, peers_up_to, one_device_up_to, trials))
        save("ring", out, figures)
    return figures


def inputs(shape: Shape, sharding: Any, rows: int = 1) -> tuple[Any, ...]:
    """q, k, v and a random cotangent of the output, the same numbers however they are placed."""
    import jax

    counts = (shape.heads, shape.groups, shape.groups, shape.heads)

    def draw() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 4)
        sizes = [(rows, shape.length, count, shape.head_dim) for count in counts]
        return tuple(jax.random.normal(k, s, shape.dtype) for k, s in zip(keys, sizes, strict=True))

    return jax.block_until_ready(jax.jit(draw, out_shardings=sharding)())


def one_device(shape: Shape, *, backward: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The fastest local kernel on the first device, compiled, and its arguments."""
    import jax

    from pallas_kernels.attention import attention, masks

    given = inputs(shape, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return compiled(lambda q, k, v: attention(q, k, v, masks.CAUSAL), given, backward=backward)


def split(
    shape: Shape, variant: str, *, backward: bool, devices: int | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A mode over the first `devices` devices; "ring" has the tokens in zig-zag order, "ring_swapped" swaps them."""
    import jax

    from jaxblt.parallel import CONTIGUOUS, ZIGZAG, batch_sharding, context_attention, make_mesh

    mesh = make_mesh(data=1, seq=-1, devices=jax.devices()[:devices])
    mode: Any = "ring" if variant == "ring_swapped" else variant
    layout = ZIGZAG if variant == "ring" else CONTIGUOUS

    implementation = shape.implementation if mode == "ring" else None

    def attend(q: Any, k: Any, v: Any) -> Any:
        return context_attention(
            q, k, v, causal=True, mode=mode, layout=layout, implementation=implementation
        )

    with jax.set_mesh(mesh):
        return compiled(attend, inputs(shape, batch_sharding(mesh)), backward=backward)


def independent(shape: Shape, *, backward: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The one-GPU kernel on all devices, which exchange nothing: rows of length / sqrt(n), a multiple of 128."""
    import jax

    from jaxblt.parallel import batch_sharding, make_mesh
    from jaxblt.parallel.islands import over_batch
    from pallas_kernels.attention import attention, masks

    mesh = make_mesh(data=-1)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return over_batch(lambda x, _: attention(*x, mask=masks.CAUSAL), (q, k, v))

    with jax.set_mesh(mesh):
        given = inputs(shape._replace(length=share(shape.length)), batch_sharding(mesh), len(jax.devices()))
        return compiled(attend, given, backward=backward)


def share(length: int) -> int:
    """Tokens of a row that is 1/n of the work."""
    import jax

    return max(1, round(length / len(jax.devices()) ** 0.5 / 128)) * 128


def compiled(
    attend: Callable[..., Any], given: tuple[Any, ...], *, backward: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The output alone, or with the gradients of q, k, v; each result lies where its input does."""
    import jax

    def forward(q: Any, k: Any, v: Any) -> tuple[Any]:
        return (attend(q, k, v),)

    def both(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        o, vjp = jax.vjp(attend, q, k, v)
        return (o, *vjp(do))

    args = given if backward else given[:3]
    step = jax.jit(both if backward else forward, out_shardings=given[0].sharding)
    return step.lower(*args).compile(), args


def gate(shape: Shape) -> dict[str, dict[str, float]]:
    """Relative errors of o, dq, dk, dv against f64 on one device and on rings of 2, 4, ...

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
    """Causal attention of one row in f64, a head at a time: o, dq, dk, dv from [T, H, K] and [T, G, K]."""
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
    """Relative differences between the ring and one device at a real length, and whether the ring repeats its bits."""
    step, args = one_device(shape, backward=True)
    expected = [np.asarray(x) for x in step(*args)]
    ring, placed = split(shape, "ring_swapped", backward=True)
    first, again = ([np.asarray(x) for x in ring(*placed)] for _ in range(2))
    same = [a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True)]
    return {
        "length": shape.length,
        "difference": errors(first, [x.astype(np.float64) for x in expected]),
        "output_repeats_bit_for_bit": same[0],
        "gradients_repeat_bit_for_bit": all(same[1:]),
    }


def scale(shape: Shape, peers_up_to: int, one_device_up_to: int, trials: int) -> dict[str, Any]:
    """Seconds on one device and on all, forward and forward with backward, and the efficiencies."""
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
    """What is timed at a length, by name; what does not run says why. Nothing is said of one device where it is {}."""
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
    """What `make` compiles, which has run once; or why it does not run (too large for one device, say)."""
    import jax

    try:
        step, given = make(*args, **options)
        jax.block_until_ready(step(*given))
    except jax.errors.JaxRuntimeError as error:
        return {"failed": str(error).splitlines()[0]}
    return Case(name, step, given)
