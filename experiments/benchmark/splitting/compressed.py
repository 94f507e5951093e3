"""Gradients' mean in 8 bits, and moments on the host: python -m experiments.benchmark compressed --out FILE."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.benchmark.figures.saved import save, timed
from jaxblt.profiling import Case, measure_all, ratio_interval
from jaxblt.validation import whole

if TYPE_CHECKING:
    from jax import Array

DEVICES = 2
"""Between which gradients are exchanged."""


def compressed(
    out: str = "runs/benchmark/compressed.json", side: int = 2364, arrays: int = 24, trials: int = 20
) -> dict[str, Any]:
    """Time gradients' mean over two devices by the bits of its messages, and AdamW with moments on the host.

    Speeds are over those of fp32, and of moments on the device. Means and updates are checked before they are timed.

    Args:
      out: JSON file to write.
      side, arrays: parameters are so many square matrices of that side; by default 134 million numbers.
      trials: rounds, at least 20.

    Raises:
      RuntimeError: the mean in 8 bits errs by more than a step of its codes, or updates differ.
      ValueError: there is one device only, or a size is below 1.
    """
    import jax

    for name, value in (("side", side), ("arrays", arrays)):
        whole(name, value, least=1)
    if (count := jax.device_count()) < DEVICES:
        raise ValueError(
            f"a mean takes {DEVICES} devices, this process has {count}: start it where there are more"
        )
    keys = jax.random.split(jax.random.key(0), arrays)
    gradients = {str(i): jax.random.normal(key, (DEVICES, side, side)) for i, key in enumerate(keys)}
    found: dict[str, Any] = {"parameters": arrays * side**2, "arrays": arrays}
    found["means"] = _means(gradients, trials)
    save("compressed", out, found)
    found["updates"] = _updates({name: both[0] for name, both in gradients.items()}, trials)
    save("compressed", out, found)
    return found


def _means(gradients: "dict[str, Array]", trials: int) -> dict[str, Any]:
    """Return times, speeds and largest errors of the mean over devices, by its messages.

    Raises:
      RuntimeError: an entry in 8 bits is off by more than the largest gradient over 127: each of two roundings errs by
        half of that.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxblt.parallel import make_mesh
    from jaxblt.parallel.experimental import compressed_mean, zero_error

    def plain(gradients: Any, error: Any, dtype: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.lax.pmean(x.astype(dtype), "data").astype(x.dtype), gradients
        ), error

    def in_8_bits(gradients: Any, error: Any) -> Any:
        mean, error = compressed_mean(gradients, error[0], axis="data")
        return mean, error[None]

    mesh = make_mesh(data=DEVICES, devices=jax.devices()[:DEVICES])
    rows = NamedSharding(mesh, P("data"))
    error = jnp.tile(zero_error({name: both[0] for name, both in gradients.items()}, DEVICES), (DEVICES, 1))
    largest = max(float(jnp.abs(both).max()) for both in gradients.values())
    args = jax.device_put((gradients, error), rows)
    bodies = {
        "fp32": partial(plain, dtype=jnp.float32),
        "bf16": partial(plain, dtype=jnp.bfloat16),
        "8 bits": in_8_bits,
    }
    cases, means = [], {}
    for name, body in bodies.items():
        split = jax.shard_map(
            body, mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")), check_vma=False
        )
        compiled = jax.jit(split).lower(*args).compile()
        means[name] = np.stack([np.asarray(mean) for mean in compiled(*args)[0].values()])
        cases.append(Case(name, compiled, args))
    errors = {name: float(np.abs(mean - means["fp32"]).max()) for name, mean in means.items()}
    if errors["8 bits"] > largest / 127:
        raise RuntimeError(
            f"the mean in 8 bits errs by {errors['8 bits']:.3g}, a step of its codes is {largest / 127:.3g}"
        )
    return {name: {**taken, "error": errors[name]} for name, taken in _speeds(cases, trials).items()}


def _updates(params: "dict[str, Array]", trials: int) -> dict[str, Any]:
    """Return times and speeds of AdamW's update, by where its moments lie between updates.

    Raises:
      RuntimeError: updates differ.
    """
    import jax
    import optax

    from jaxblt.training.experimental.offload import offload

    cases, updates = [], {}
    for name, optimizer in {"device": optax.adamw(1e-3), "host": offload(optax.adamw(1e-3))}.items():
        state = optimizer.init(params)
        places = jax.tree.map(lambda x: x.sharding, state)
        args = (params, state, params)
        compiled = jax.jit(optimizer.update, out_shardings=(None, places)).lower(*args).compile()
        updates[name] = jax.device_get(compiled(*args)[0])
        cases.append(Case(name, compiled, args))
    if not all(jax.tree.leaves(jax.tree.map(np.array_equal, updates["device"], updates["host"]))):
        raise RuntimeError("updates with moments on the host are not those with moments on the device")
    return _speeds(cases, trials)


def _speeds(cases: Sequence[Case], trials: int) -> dict[str, Any]:
    """Return each case's time, and its speed over that of the first."""
    first, *_ = taken = measure_all(cases, trials=trials, warmup=1, method="calls")
    seconds = [np.array(found.seconds) for found in taken]
    return {
        case.name: {"seconds": timed(found), "speed": ratio_interval(np.array(first.seconds), own)}
        for case, found, own in zip(cases, taken, seconds, strict=True)
    }
