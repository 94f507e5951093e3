"""A model of a chromosome's contacts that reads all of it: windows, a stack over them, and a head for pairs of bins."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.benchmark.labels.contact_settings import Settings
from jaxblt.mixers import HyenaConfig, ImplicitFilter
from jaxblt.models import StackConfig
from jaxblt.models.stack import Stack
from jaxblt.training.flops import count_params
from jaxblt.training.optimisers.adamw import AdamWConfig, make_optimizer


class Rows(NamedTuple):
    """Chromosomes side by side, padded to the longest.

    Attributes:
      windows: what is known of each window.
      there: 1 for a window of the chromosome, 0 behind its end.
      targets: of bins i and i + d at [i, d]; NaN where there is none.
    """

    windows: Float[np.ndarray, "C T F"]
    there: Any
    targets: Float[np.ndarray, "C N E"]


class PairModel(nn.Module):
    """r_ij = MLP([p_i + p_j, p_i p_j, e_d]), p a bin's mean over its windows behind a stack that reads both ways.

    Attributes:
      stack: over windows.
      farthest: bins from i to j at most.
      a_bin: windows of a bin.
    """

    stack: StackConfig
    farthest: int
    a_bin: int

    @nn.compact
    def __call__(self, windows: Float[Array, "C T F"], there: Any) -> Float[Array, "C N E"]:
        dim, distances = self.stack.dim, self.farthest + 1
        x, _ = Stack(self.stack, name="stack")(nn.Dense(dim, name="in")(windows), segment_ids=there)
        bins = jnp.mean(x.reshape(len(x), -1, self.a_bin, dim), 2)
        p = nn.Dense(dim, name="bins")(nn.RMSNorm(name="norm")(bins))
        other = (
            jnp.arange(p.shape[1], dtype=jnp.int32)[:, None] + jnp.arange(distances, dtype=jnp.int32)[None]
        )
        near, far = p[:, :, None], p[:, jnp.minimum(other, p.shape[1] - 1)]
        places = self.param("distances", nn.initializers.normal(1.0), (distances, dim))
        pair = nn.Dense(dim, name="sum")(near + far) + nn.Dense(dim, name="product")(near * far)
        return nn.Dense(1, name="out")(jax.nn.gelu(pair + places[None, None]))[..., 0]


def side_by_side(windows: list[np.ndarray], targets: list[np.ndarray], most: int, a_bin: int) -> Rows:
    """Pad chromosomes to `most` bins with zeros behind their ends."""
    there = np.zeros((len(targets), most * a_bin), np.int32)
    wide = np.zeros((*there.shape, windows[0].shape[1]), np.float32)
    held = np.full((len(targets), most, targets[0].shape[1]), np.nan, np.float32)
    for i, (own, target) in enumerate(zip(windows, targets, strict=True)):
        wide[i, : len(own)], there[i, : len(own)], held[i, : len(target)] = own, 1, target
    return Rows(wide, there, held)


def flipped(windows: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a chromosome from its other end: the pair of bins i and i + d is that of n - 1 - i - d and d then."""
    turned = np.full_like(target, np.nan)
    for d in range(min(target.shape[1], len(target))):
        turned[: len(target) - d, d] = target[: len(target) - d, d][::-1]
    return windows[::-1], turned


def predict(
    parts: dict[str, tuple[list[np.ndarray], list[np.ndarray]]], settings: Settings, seed: int
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Train on one part, and return predictions of the test part by the parameters that are best on validation.

    Every other step reads the chromosomes from their other ends.

    Args:
      parts: windows and targets of the chromosomes of "train", "validation" and "test".
      settings: of the model and its training.
      seed: of parameters and dropout.
    """
    a_bin = settings.windows
    hyena = HyenaConfig(dim=settings.dim, filter=ImplicitFilter(filter_len=settings.reach))
    stack = StackConfig(
        dim=settings.dim,
        num_layers=settings.layers,
        pattern=("hyena",),
        mixers={"hyena": hyena},
        dropout=settings.dropout,
        causal=False,
    )
    model = PairModel(stack, settings.farthest, a_bin)
    # Pad to the longest of all parts: the programs of all seeds are the same then
    most = max(len(target) for _, targets in parts.values() for target in targets)
    rows = {name: side_by_side(*part, most, a_bin) for name, part in parts.items()}
    turned = side_by_side(*map(list, zip(*map(flipped, *parts["train"]), strict=True)), most, a_bin)
    both = jax.tree.map(lambda *x: jnp.stack(x), rows["train"], turned)
    params, errors = _fit(model, both, rows["validation"], settings, seed)
    test, size = rows["test"], count_params(params)[0]
    found = np.asarray(jax.jit(model.apply)({"params": params}, test.windows, test.there))
    return [own[: len(one)] for own, one in zip(found, parts["test"][1], strict=True)], {
        "parameters": size,
        "validation_errors": errors,
    }


def _fit(model: PairModel, both: Rows, held: Rows, settings: Settings, seed: int) -> tuple[Any, list[float]]:
    start, drop = jax.random.split(jax.random.key(seed))
    boxed = jax.jit(model.init)(start, both.windows[0, :1], both.there[0, :1])["params"]
    rates = {"learning_rate": settings.learning_rate, "weight_decay": settings.weight_decay}
    optimizer = make_optimizer(AdamWConfig(**rates, warmup_steps=settings.steps // 10), settings.steps, boxed)
    params = nn.meta.unbox(boxed)

    def step(carried: Any, number: Array, both: Rows, key: Array) -> tuple[Any, None]:
        params, state = carried
        rngs = {"dropout": jax.random.fold_in(key, number)}
        own = jax.tree.map(lambda x: x[number % 2], both)
        gradients = jax.grad(lambda p: _error(model, p, own, rngs))(params)
        updates, state = optimizer.update(gradients, state, params)
        return (jax.tree.map(lambda p, u: p + u, params, updates), state), None

    def call(carried: Any, numbers: Array, both: Rows, key: Array) -> Any:
        return jax.lax.scan(lambda carried, number: step(carried, number, both, key), carried, numbers)[0]

    a_look, call = settings.steps // settings.looks, jax.jit(call)
    error = jax.jit(lambda params, rows: _error(model, params, rows, {}))
    carried, errors, best = (params, optimizer.init(params)), [float(error(params, held))], params
    for look in range(settings.looks):
        carried = call(carried, look * a_look + jnp.arange(a_look), both, drop)
        errors.append(float(error(carried[0], held)))
        best = carried[0] if errors[-1] == min(errors) else best
    return best, errors


def _error(model: PairModel, params: Any, rows: Rows, rngs: Any) -> Array:
    found = model.apply({"params": params}, rows.windows, rows.there, rngs=rngs)
    return jnp.mean(jnp.square(found - jnp.nan_to_num(rows.targets)), where=jnp.isfinite(rows.targets))
