"""What a training run carries from step to step, and what it leaves alone."""

import hashlib
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int


@flax.struct.dataclass
class Frozen:
    """The entropy model that cuts bytes into patches; it is never trained with the model it serves.

    Attributes:
      params: in bfloat16.
      threshold: entropy in nats above which a patch ends; the one in the patcher's config.
      content_hash: of `params`, to tell whether a checkpoint was made with the same entropy model.
    """

    params: Any
    threshold: Float[Array, ""]
    content_hash: str = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class TrainState:
    """State of a run. Randomness is `fold_in(key(seed), step)`, so no key needs to be kept.

    Attributes:
      step: steps taken, skipped ones included.
      params: fp32.
      opt_state: of the optimiser.
      skipped: steps whose loss, gradient or update was not finite, and which changed nothing.
      skipped_in_a_row: of those, the ones since the last good step.
      frozen: the entropy model, or None.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: optax.OptState
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]
    frozen: Frozen | None = None


def start(params: Any, optimizer: optax.GradientTransformation, frozen: Frozen | None = None) -> TrainState:
    """The state before step 0."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
        frozen=frozen,
    )


def forgive(state: TrainState) -> TrainState:
    """`state` without skips in a row, as it is stored and restored: a burst that passed must not end a later run."""
    count = state.skipped_in_a_row
    if not int(count):
        return state
    return replace(state, skipped_in_a_row=jax.device_put(np.zeros((), np.int32), count.sharding))


def freeze(params: Any, threshold: float) -> Frozen:
    """`params` rounded to bfloat16, with their hash and the threshold calibrated for them."""
    rounded = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.bfloat16), params)
    return Frozen(params=rounded, threshold=jnp.float32(threshold), content_hash=content_hash(rounded))


def widen(params: Any) -> Any:
    """Frozen parameters in fp32, as modules take them; their values stay those of bfloat16."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def content_hash(params: Any) -> str:
    """SHA-256 over the parameters' paths, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
