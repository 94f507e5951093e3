"""What a training run carries from step to step, and what it leaves alone."""

import hashlib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jaxtyping import Array, Int

ENTROPY = "entropy"
"""The frozen tree whose entropies cut bytes into patches."""
BASE = "base"
"""The frozen tree that the trained parameters are laid over, see `whole_params`."""


@flax.struct.dataclass
class Frozen:
    """A tree of parameters that steps read and never train.

    Attributes:
      params: in the dtypes that it is stored in; bfloat16 for an entropy model.
      content_hash: of `params`, see `content_hash`: the name of its folder, and how a run knows its tree again.
    """

    params: Any
    content_hash: str = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class TrainState:
    """State of a run. Randomness is `fold_in(key(seed), step)`, so no key needs to be kept.

    Attributes:
      step: steps taken, skipped ones included.
      params: fp32. Gradients are taken of them and of nothing else.
      opt_state: of the optimiser of `params`.
      skipped: steps whose loss, gradient or update was not finite, and which changed nothing.
      skipped_in_a_row: of those, the ones since the last good step.
      frozen: any other trees, by name: `ENTROPY`, `BASE`. Checkpoints hold them once a run, not once a step.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: optax.OptState
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]
    frozen: dict[str, Frozen] = flax.struct.field(default_factory=dict)


def start(
    params: Any, optimizer: optax.GradientTransformation, frozen: Mapping[str, Frozen] | None = None
) -> TrainState:
    """The state before step 0."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
        frozen=dict(frozen or {}),
    )


def without_frozen(state: TrainState) -> dict[str, Any]:
    """The fields that change from step to step, by name: what a step's checkpoint holds."""
    return {field.name: getattr(state, field.name) for field in fields(state) if field.name != "frozen"}


def forgive(state: TrainState) -> TrainState:
    """`state` without skips in a row, as it is stored and restored: a burst that passed must not end a later run."""
    count = state.skipped_in_a_row
    if not int(count):
        return state
    return replace(state, skipped_in_a_row=jax.device_put(np.zeros((), np.int32), count.sharding))


def freeze(params: Any, dtype: Any = None) -> Frozen:
    """`params` with their hash, rounded to `dtype`; None keeps the dtypes that they have."""
    arrays = jax.tree.map(jnp.asarray, params)
    if dtype is not None:
        arrays = jax.tree.map(lambda x: x.astype(dtype), arrays)
    return Frozen(params=arrays, content_hash=content_hash(arrays))


def freeze_entropy(params: Any) -> dict[str, Frozen]:
    """The frozen trees of a run whose only one is an entropy model with these parameters: in bfloat16."""
    return {ENTROPY: freeze(params, jnp.bfloat16)}


def widen(params: Any) -> Any:
    """Frozen parameters in fp32, as modules take them; their values stay those that are stored."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def whole_params(params: Any, frozen: Mapping[str, Frozen]) -> Any:
    """The model's parameters: those of the frozen base, if there is one, with the trained ones laid over them.

    No gradient flows to the base. Both are dicts of dicts; where both hold an array, the trained one counts.
    """
    return params if BASE not in frozen else _laid_over(_still(frozen[BASE].params), params)


def _still(params: Any) -> Any:
    """The base as modules take it. Keep kernels as stored: scans of fp32 copies would take twice a base's memory."""

    def take(path: tuple[Any, ...], x: Any) -> Any:
        return x if getattr(path[-1], "key", None) == "kernel" else x.astype(jnp.float32)

    return jax.lax.stop_gradient(jax.tree_util.tree_map_with_path(take, params))


def _laid_over(below: Any, above: Any) -> Any:
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    both = {name: _laid_over(below[name], above[name]) for name in below if name in above}
    return {**below, **above, **both}


def content_hash(params: Any) -> str:
    """SHA-256 over the parameters' paths, shapes, dtypes and bytes, in hex; the same on any mesh.

    Every process calls it: what is split over several is gathered on each host, one array at a time.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = _on_host(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _on_host(leaf: Any) -> np.ndarray:
    is_split = isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True) if is_split else leaf)
