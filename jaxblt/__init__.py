"""Models that read raw bytes over very long contexts."""

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from jaxblt import process_start  # noqa: F401  # First: sources that change later are not what this process reads

if TYPE_CHECKING:
    from jaxblt.run import Run

__version__ = "0.1.0"
"""Version of the package."""

__all__ = ["__version__", "checked_ops", "load", "reference_ops"]


def load(run_dir: str | os.PathLike[str], **options: Any) -> "Run":
    """Open a finished or running run: its model, parameters, patcher, threshold and vocabulary.

    Args:
      run_dir: the folder that was given to `fit`, or its URL.
      options: those of `jaxblt.run.load`. `step` is a number or "best", for another checkpoint than the newest. `dtype`
        to compute in is "bfloat16" or "float32", `weights` "ema" or "raw". On a `mesh` each device reads its part.

    Raises:
      FileNotFoundError: the folder holds no run, or no checkpoint of that step.
      ValueError, CheckpointCorrupt: as of `jaxblt.run.load`.
    """
    from jaxblt.run import load as load_run

    return load_run(run_dir, **options)


def reference_ops() -> AbstractContextManager[None]:
    """Trace programs with derivatives of any order.

    `jax.jvp`, `jax.linearize` and Hessian-vector products work inside. Outside of the block ops have gradients written
    by hand (`pallas_kernels.runtime.OwnGradient`): they have no forward mode, and kernels cannot be derived again.
    Inside it each op is its textbook definition, and nothing else in a model has such a gradient. Values are equal
    within the tolerance table. Definitions are slow and take memory, T x T numbers for each channel of a finite Hyena
    filter: use short rows and small models. See docs/guides/curvature.md.

        with jaxblt.reference_ops():
            product = jax.jit(lambda v: jax.jvp(jax.grad(loss), (params,), (v,))[1])(v)

    What counts is where a function is traced, so call it inside the block. JAX's caches know the block: a jitted
    function that was called outside is traced again inside, and the other way round. The results of `.lower()`,
    `jax.make_jaxpr` and `jax.linearize` stay what they are. The block holds for its own thread and leaves no trace.

    An op whose config names an implementation keeps it: leave `implementation` None. A ring, or a window, over a mesh
    that splits the sequence has first derivatives only. Attention then raises ValueError: name
    `context_parallel="all_to_all"`.
    """
    from pallas_kernels.runtime import reference_ops as of_kernels

    return of_kernels()


def checked_ops() -> AbstractContextManager[None]:
    """Check the arguments of operations and mixers inside the block, also under `jax.jit`.

    Gates, step sizes, codes, ids and positions of documents have ranges (`RANGES` of each operation). Values out of
    range give wrong numbers, not errors. Every call checks NumPy arrays, and small arrays on a CPU. Inside the block
    all arrays are checked, which waits for the device. Traced arrays are checked by `jax.experimental.checkify`:

        with jaxblt.checked_ops():
            error, loss = jax.jit(checkify.checkify(step))(params, batch)
        error.throw()  # raises with operation, argument, value and place

    A function that is traced inside the block must go through `checkify`, or JAX refuses to compile it. It must not use
    a mesh, because checkify of JAX 0.11 fails at a `shard_map`. Programs traced outside of the block hold no checks.
    JAX caches programs inside and outside of the block apart, as for `reference_ops`.
    """
    from pallas_kernels.runtime import checked_ops as of_kernels

    return of_kernels()
