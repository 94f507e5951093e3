"""Properties of adapters in training: planted codes are found, one batch is learned, and memory stays flat."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from jaxblt.adapters.code.levels import is_known, levels_of
from jaxblt.adapters.update.config import AdapterConfig
from jaxblt.adapters.update.params import join_params, split_params
from jaxblt.adapters.update.site import ZERO
from jaxblt.random_keys import make_key

STEPS = 200
"""The steps of training on one batch, and between the two measurements of memory."""
SETTLED = 5
"""Steps after which memory is measured first."""
LEARNED = 0.1
"""Share of the first loss of a batch that may be left after `STEPS`."""
FOUND = 0.9
"""Share of the variance of planted codes that a router has to explain."""
ROWS, DOMAINS, NOISE = 16, 4, 0.1
"""The rows that codes are planted in: each row is of one domain, tokens are its vector and noise."""
SEARCH = 300
"""Steps of the search for planted codes."""


class Learned(NamedTuple):
    """The results of training on one batch: losses at its ends, and bytes of live arrays near both."""

    first: float
    last: float
    before: int
    after: int


def fresh(own: Any) -> tuple[Any, Any]:
    """Return (base, trained) of a stack's parameters, as new adapters begin.

    U, scales and the router's last kernels of the trained part are 0.
    """
    base, trained = split_params(own)

    def reset(path: tuple[Any, ...], x: Array) -> Array:
        names = [getattr(entry, "key", "") for entry in path]
        return jnp.zeros_like(x) if names[-1] in ZERO or names[-2].startswith("code") else x

    return base, jax.tree_util.tree_map_with_path(reset, trained)


def learn(subject: Any) -> Learned:
    """Train new adapters to give the outputs of the subject's, on its one batch."""
    base, trained = fresh(subject.own)
    x, ids = jnp.asarray(subject.x), jnp.ones(subject.x.shape[:2], jnp.int32)
    wanted = subject.parallel(subject.params, x, ids)
    optimizer = optax.adam(3e-2)

    def loss(trained: Any) -> Float[Array, ""]:
        params = {"params": {"stack": join_params(base, trained)}}
        return jnp.mean((subject.module.apply(params, x, segment_ids=ids)[0] - wanted) ** 2)

    step = jax.jit(_stepper(optimizer, loss))
    state, losses, bytes_live = optimizer.init(trained), [], []
    for i in range(STEPS):
        trained, state, value = step(trained, state)
        if i in (0, SETTLED, STEPS - 1):
            losses.append(float(value))
            bytes_live.append(sum(array.nbytes for array in jax.live_arrays()))
    return Learned(losses[0], losses[-1], bytes_live[1], bytes_live[2])


def _stepper(optimizer: optax.GradientTransformation, loss: Callable[[Any], Any]) -> Callable[..., Any]:
    def step(params: Any, state: Any) -> tuple[Any, Any, Float[Array, ""]]:
        value, gradient = jax.value_and_grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def check_overfits(subject: Any) -> None:
    """Check that training on one batch takes nine tenths of its loss away, or more."""
    found = subject.learned
    if not found.last <= LEARNED * found.first:
        raise AssertionError(
            f"one batch is not learned: its loss was {found.first:.3g} and is {found.last:.3g} after {STEPS} steps"
        )


def check_memory(subject: Any) -> None:
    """Check that steps leave nothing behind."""
    found = subject.learned
    if found.after > found.before:
        raise AssertionError(
            f"live arrays grew from {found.before} to {found.after} bytes between steps {SETTLED} and {STEPS}"
        )


def check_recovers(subject: Any) -> None:
    """Check that a new router learns codes that were planted by domain.

    It says them of rows that it did not see.
    """
    adapter = AdapterConfig(
        rank=subject.stack.adapter.rank,
        blocks=subject.stack.adapter.blocks,
        router=subject.stack.adapter.router,
    )
    module, size = adapter.build(), adapter.router.side if adapter.router else 0
    assert module is not None
    domains, codes = subject.noise(21, (DOMAINS, subject.config.dim)), _planted(subject, adapter)
    wanted = jnp.asarray(np.resize(codes, (ROWS, codes.shape[1])))[:, None]
    known = _all_known(adapter.router, subject.length)

    def rows(salt: int) -> Array:
        noise = subject.noise(salt, (ROWS, subject.length, subject.config.dim))
        return jnp.asarray(np.resize(domains, (ROWS, domains.shape[1]))[:, None] + NOISE * noise)

    def error(params: Any, x: Array) -> Float[Array, ""]:
        side = x[..., :size] if size else None
        code = module.apply({"params": params}, x, side=side)[0]  # type: ignore[index]
        return jnp.sum(jnp.where(known, (code - wanted) ** 2, 0.0)) / jnp.sum(known, dtype=jnp.float32)

    def search(params: Any, x: Array, other: Array) -> Float[Array, ""]:
        optimizer = optax.adam(2e-2)
        step = _stepper(optimizer, lambda params: error(params, x))
        state = params, optimizer.init(params)
        (params, _), _ = jax.lax.scan(lambda s, _: (step(*s)[:2], None), state, None, length=SEARCH)
        return error(params, other)

    x = rows(22)
    made = jax.jit(module.init)(make_key(subject.seed), x, side=x[..., :size] if size else None)["params"]
    left = float(jax.jit(search)(nn.meta.unbox(made), x, rows(23)))
    share = 1 - left / float(np.sum(np.var(codes, 0)))
    if not share > FOUND:
        raise AssertionError(
            f"of the variance of planted codes the router explains {share:.3f}, expected > {FOUND}"
        )


def _planted(subject: Any, adapter: AdapterConfig) -> np.ndarray:
    """Return a code for each domain, as far apart as the numbers of a router may be."""
    scores = subject.noise(24, (DOMAINS, adapter.numbers))
    return 1 + scores if adapter.blocks is None else np.asarray(jax.nn.softmax(jnp.asarray(2 * scores), -1))


def _all_known(config: Any, length: int) -> Bool[Array, "1 T 1"]:
    """Mark tokens at which every level has a code."""
    time = jnp.arange(length, dtype=jnp.int32)[None]
    known = [is_known(config, level, time) for level in levels_of(config)]
    return jnp.all(jnp.stack(known), 0)[..., None]
