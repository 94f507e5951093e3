"""What a training run carries from step to step, and what it leaves alone."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jaxtyping import Array, Int

from jaxblt.adapters import join_params
from jaxblt.layers import StoredKernel
from jaxblt.show import show

ENTROPY = "entropy"
"""The frozen tree whose entropies cut bytes into patches."""
BASE = "base"
"""The frozen tree that the trained parameters are laid over, see `whole_params`."""
REFERENCE = "reference"
"""The frozen tree of a second model that predictions are compared with."""

Step = int | Literal["best"]
"""A checkpoint of a run, by its step, or that of the best evaluation."""

Weights = Literal["raw", "ema"]
"""Parameters of a run: those that the last step left, or their exponential moving average."""


@flax.struct.dataclass
class Frozen:
    """A tree of parameters that steps read and never train.

    Attributes:
      params: in the dtypes that it is stored in; bfloat16 for an entropy model that was trained here.
      content_hash: of `params`, see `content_hash`: the name of its folder, and how a run knows its tree again.
    """

    params: Any
    content_hash: str = flax.struct.field(pytree_node=False)

    __repr__ = show


@flax.struct.dataclass
class TrainState:
    """State of a run. Randomness is `fold_in(key(seed), step)`, so no key needs to be kept.

    Attributes:
      step: steps taken, skipped ones included.
      params: fp32. Gradients are taken of them and of nothing else.
      opt_state: of the optimiser of `params`.
      skipped: steps whose loss, gradient or update was not finite, and which changed nothing.
      skipped_in_a_row: of those, the ones since the last good step.
      frozen: any other trees, by name: `ENTROPY`, `BASE`, `REFERENCE`. Checkpoints hold them once a run, not a step.
      ema: the exponential moving average of `params`, see `averaged`; None for a run without.
      scaling: what low precision remembers: "amax" of FP8 products, "loss" of fp16; None for a run without.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: optax.OptState
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]
    frozen: dict[str, Frozen] = flax.struct.field(default_factory=dict)
    ema: Any = None
    scaling: dict[str, Any] | None = None

    __repr__ = show


def start(
    params: Any,
    optimizer: optax.GradientTransformation,
    frozen: Mapping[str, Frozen] | None = None,
    *,
    ema: bool = False,
    scaling: dict[str, Any] | None = None,
) -> TrainState:
    """Make the state before step 0; with `ema` its average begins at the parameters."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
        frozen=dict(frozen or {}),
        ema=copied(params) if ema else None,
        scaling=scaling,
    )


def copied(tree: Any) -> Any:
    """Copy values into arrays of their own: a step donates its state, and no buffer may be donated twice."""
    return jax.tree.map(jnp.copy, tree)


def averaged(ema: Any, params: Any, decay: float, count: Int[Array, ""]) -> Any:
    """Return the exponential moving average after the `count`-th update of the parameters, from the average before it.

    m_t = s_t p_t + (1 - s_t) m_{t-1} with s_t = (1 - d) / (1 - d^t): `optax.ema(d, debias=True)` as a recursion of its
    corrected average, which needs no correction when it is read.

    Args:
      ema: m_{t-1}; it does not matter where t = 1.
      params: p_t.
      decay: d, in (0, 1).
      count: t, from 1.
    """
    log = math.log(decay)
    size = jnp.float32(math.expm1(log)) / jnp.expm1(
        jnp.float32(log) * jnp.maximum(count, 1).astype(jnp.float32)
    )
    return optax.incremental_update(params, ema, size)


def evaluated(state: TrainState) -> TrainState:
    """Return the state with the parameters that evaluations score: their average, if the run has one."""
    return state if state.ema is None else replace(state, params=state.ema, ema=None)


OPTIONAL = ("ema", "scaling")
"""Fields of a state that only some runs have."""


def without_frozen(state: TrainState) -> dict[str, Any]:
    """Return the fields that change from step to step, by name: what a step's checkpoint holds."""
    held = {field.name: getattr(state, field.name) for field in fields(state) if field.name != "frozen"}
    return {name: value for name, value in held.items() if name not in OPTIONAL or value is not None}


def forgive(state: TrainState) -> TrainState:
    """Forget skips in a row, as it is stored and restored: a burst that passed must not end a later run."""
    count = state.skipped_in_a_row
    if not int(count):
        return state
    return replace(state, skipped_in_a_row=jax.device_put(np.zeros((), np.int32), count.sharding))


def freeze(params: Any, dtype: Any = None) -> Frozen:
    """Return `params` with their hash, rounded to `dtype`; None keeps the dtypes that they have."""
    arrays = jax.tree.map(jnp.asarray, params)
    if dtype is not None:
        arrays = jax.tree.map(lambda x: x.astype(dtype), arrays)
    return Frozen(params=arrays, content_hash=content_hash(arrays))


def freeze_entropy(params: Any) -> dict[str, Frozen]:
    """Freeze the parameters of an entropy model as the only frozen tree of a run: in bfloat16."""
    return {ENTROPY: freeze(params, jnp.bfloat16)}


def widen(params: Any) -> Any:
    """Return frozen parameters in fp32, as modules take them; their values stay those that are stored.

    Quantised kernels stay as they are.
    """
    is_stored = lambda x: isinstance(x, StoredKernel)  # noqa: E731
    return jax.tree.map(lambda x: x if is_stored(x) else x.astype(jnp.float32), params, is_leaf=is_stored)


def whole_params(params: Any, frozen: Mapping[str, Frozen]) -> Any:
    """Return the model's parameters: those of the frozen base, if any, with the trained ones laid over them.

    No gradient flows to the base. Both are dicts of dicts; where both hold an array, the trained one counts.
    """
    return params if BASE not in frozen else join_params(still(frozen[BASE].params), params)


def still(params: Any) -> Any:
    """Return a frozen model as modules take it, without gradients.

    Kernels stay as they are stored: scans of fp32 copies would take twice the memory.
    """

    def take(path: tuple[Any, ...], x: Any) -> Any:
        return x if getattr(path[-1], "key", None) == "kernel" else x.astype(jnp.float32)

    return jax.lax.stop_gradient(jax.tree_util.tree_map_with_path(take, params))


def content_hash(params: Any) -> str:
    """Return the SHA-256 over the parameters' paths, shapes, dtypes and bytes, in hex; the same on any mesh.

    Every process calls it: what is split over several is gathered on each host, one array at a time.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = gathered(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def gathered(leaf: Any) -> np.ndarray:
    """Gather the whole array on this host; every process calls it."""
    is_split = isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True) if is_split else leaf)
