"""The state of a training run: what each step changes, and the frozen trees that it only reads."""

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
"""The frozen tree of a base model: the trained parameters replace or extend it, see `whole_params`."""
REFERENCE = "reference"
"""The frozen tree of a second model that predictions are compared with."""

Step = int | Literal["best"]
"""Selects a checkpoint of a run: its step, or "best" for the checkpoint of the best evaluation."""

Weights = Literal["raw", "ema"]
"""Selects parameters of a run: those after the last step, or their exponential moving average."""


@flax.struct.dataclass
class Frozen:
    """A tree of parameters that steps read and never train.

    Attributes:
      params: in their stored dtypes; bfloat16 for an entropy model that was trained with this library.
      content_hash: hash of `params` (see `content_hash`). It names the tree's folder, and identifies the tree.
    """

    params: Any
    content_hash: str = flax.struct.field(pytree_node=False)

    __repr__ = show


@flax.struct.dataclass
class TrainState:
    """State of a training run. It holds no random key: a step uses `fold_in(key(seed), step)`.

    Attributes:
      step: number of steps taken, skipped steps included.
      params: the trained parameters, in fp32. Nothing else has gradients.
      opt_state: state of the optimiser of `params`.
      skipped: number of steps that changed nothing, because loss, gradient or update was not finite.
      skipped_in_a_row: number of skipped steps since the last good one.
      frozen: trees that are not trained, by name: `ENTROPY`, `BASE`, `REFERENCE`. They are stored once per run, not in
        each checkpoint.
      ema: exponential moving average of `params` (see `averaged`), or None.
      scaling: state of low precision, or None: "amax" has the largest entries of FP8 operands, "loss" the scale of the
        loss in fp16.
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
    """Make the state before step 0; with `ema` it holds an average, which begins as a copy of the parameters."""
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
    """Copy all arrays: a step donates its state, and no buffer may be donated twice."""
    return jax.tree.map(jnp.copy, tree)


def averaged(ema: Any, params: Any, decay: float, count: Int[Array, ""]) -> Any:
    """Return the exponential moving average after the `count`-th update of the parameters.

    m_t = s_t p_t + (1 - s_t) m_{t-1} with s_t = (1 - d) / (1 - d^t). This equals `optax.ema(d, debias=True)`, but the
    stored average is already bias-corrected.

    Args:
      ema: m_{t-1}, the average before the update; any values if t = 1.
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
    """Return the state with the parameters that evaluations use: the average, if the run has one."""
    return state if state.ema is None else replace(state, params=state.ema, ema=None)


OPTIONAL = ("ema", "scaling")
"""Fields of a state that only some runs have."""


def without_frozen(state: TrainState) -> dict[str, Any]:
    """Return the fields that a checkpoint holds, by name: all except `frozen`, and optional ones that are None."""
    held = {field.name: getattr(state, field.name) for field in fields(state) if field.name != "frozen"}
    return {name: value for name, value in held.items() if name not in OPTIONAL or value is not None}


def forgive(state: TrainState) -> TrainState:
    """Reset `skipped_in_a_row` to 0, for a state that is stored or restored.

    Otherwise a run that continues could end because of skips before the stop.
    """
    count = state.skipped_in_a_row
    if not int(count):
        return state
    return replace(state, skipped_in_a_row=jax.device_put(np.zeros((), np.int32), count.sharding))


def freeze(params: Any, dtype: Any = None) -> Frozen:
    """Return `params` as a frozen tree, rounded to `dtype`; None keeps their dtypes."""
    arrays = jax.tree.map(jnp.asarray, params)
    if dtype is not None:
        # Round by one program: without jit there is one for each shape
        arrays = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree))(arrays)
    return Frozen(params=arrays, content_hash=content_hash(arrays))


def freeze_entropy(params: Any) -> dict[str, Frozen]:
    """Freeze the parameters of an entropy model in bfloat16, as a run's only frozen tree."""
    return {ENTROPY: freeze(params, jnp.bfloat16)}


def widen(params: Any) -> Any:
    """Return frozen parameters cast to fp32, as modules expect them. Quantised kernels are not cast."""
    is_stored = lambda x: isinstance(x, StoredKernel)  # noqa: E731
    return jax.tree.map(lambda x: x if is_stored(x) else x.astype(jnp.float32), params, is_leaf=is_stored)


def whole_params(params: Any, frozen: Mapping[str, Frozen]) -> Any:
    """Return all parameters of the model: the trained ones, and those of the frozen base that they do not replace.

    Both are nested dicts. If both hold an array of one name, the trained array is taken. The base gets no gradient.
    """
    return params if BASE not in frozen else join_params(still(frozen[BASE].params), params)


def still(params: Any) -> Any:
    """Return frozen parameters as modules expect them, without gradients.

    Kernels keep their stored dtype, because scans over fp32 copies would take twice the memory.
    """

    def take(path: tuple[Any, ...], x: Any) -> Any:
        return x if getattr(path[-1], "key", None) == "kernel" else x.astype(jnp.float32)

    return jax.lax.stop_gradient(jax.tree_util.tree_map_with_path(take, params))


def content_hash(params: Any) -> str:
    """Return the SHA-256 over the parameters' paths, shapes, dtypes and bytes, in hex. It is the same on any mesh.

    Every process must call it: arrays that are split over processes are gathered on each host, one at a time.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = gathered(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def gathered(leaf: Any) -> np.ndarray:
    """Gather the whole array on this host. Every process must call it."""
    is_split = isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True) if is_split else leaf)
