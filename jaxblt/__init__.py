"""Models that read raw bytes over very long contexts."""

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxblt.run import Run

__version__ = "0.1.0"

__all__ = ["__version__", "load", "reference_ops"]


def load(run_dir: str | os.PathLike[str], **options: Any) -> "Run":
    """A finished or running run's model, parameters, patcher, threshold and vocabulary; see `jaxblt.run.load`."""
    from jaxblt.run import load as load_run

    return load_run(run_dir, **options)


def reference_ops() -> AbstractContextManager[None]:
    """Trace programs that have derivatives of any order: `jax.jvp`, `jax.linearize`, Hessian-vector products.

    Outside of the block ops have gradients written by hand (`jax.custom_vjp`), which JAX can take once and in reverse
    mode alone. Inside it each op is its textbook definition and the library has no such gradients. Values are equal
    within the tolerance table. Definitions are slow and take memory, T x T for each channel of a Hyena filter: short
    rows and small models.

        with jaxblt.reference_ops():
            hvp = jax.jit(lambda v: jax.jvp(jax.grad(loss), (params,), (v,))[1])(v)

    What counts is where a function is traced: call it inside the block. JAX's caches know the block, so that a jitted
    function that was called outside is traced again inside, and the other way round. What was traced for good
    (`jax.make_jaxpr`, `.lower()`, the function that `jax.linearize` returns) stays what it is. The block holds for its own
    thread, and is over when it ends.

    An implementation that a config names is kept: leave `implementation` None. A ring, or a window, over a mesh that
    splits the sequence has no definition: attention names `context_parallel="all_to_all"` there, or raises ValueError.
    """
    from pallas_kernels.runtime import reference_ops as of_kernels

    return of_kernels()
