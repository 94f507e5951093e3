"""Weights of Evo 2 that are drawn on the device, by the names of a checkpoint: both sides of `evo2` get the same."""

from typing import Any

import numpy as np

from jaxblt.interchange.evo2_run import PRECISE
from jaxblt.interchange.striped_hyena import entries
from jaxblt.models.striped_hyena import EVO2, Evo2, striped_hyena

TINY = Evo2(16, 5, 2, 24, 4, 1024, rope_scale=4.0, pattern="SMHAS")
"""All kinds of blocks, for a CPU."""


def sizes_of(model: str) -> Evo2:
    """Return the sizes of a released model, or of "tiny".

    Raises:
      ValueError: there is no such model.
    """
    known = {"tiny": TINY, **EVO2}
    if model not in known:
        raise ValueError(f"unknown model {model!r}, choose one of: {', '.join(known)}")
    return known[model]


def draw(sizes: Evo2) -> dict[str, Any]:
    """Return a checkpoint's tensors as arrays of JAX in bf16; poles, residues and frequencies are fp32."""
    import jax
    import jax.numpy as jnp

    found, key = {}, jax.random.key(0)
    for i, (name, entry) in enumerate(entries(striped_hyena(sizes)).items()):
        if name.endswith("inv_freq"):
            found[name] = jnp.asarray(entry.theirs())
            continue
        kind = jnp.float32 if name.endswith(PRECISE) else jnp.bfloat16
        found[name] = _tensor(name, entry.shape, jax.random.fold_in(key, i)).astype(kind)
    return found


def _tensor(name: str, shape: tuple[int, ...], key: Any) -> Any:
    import jax
    import jax.numpy as jnp

    if name.endswith("log_poles"):
        return -jnp.exp(jax.random.uniform(key, shape, minval=np.log(1 / 500), maxval=np.log(2.0)))
    noise = jax.random.normal(key, shape)
    if name.endswith("scale"):
        return 1 + 0.2 * noise
    scales = {"embedding_layer.weight": 0.02, "bias": 0.1, "filter.D": 0.3, "residues": 0.1}
    return noise * next((s for end, s in scales.items() if name.endswith(end)), shape[-1] ** -0.5)
