"""Text for the run log: how the model goes on behind the beginning of the validation split."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxblt.data.dataset import Dataset
from jaxblt.data.vocab import decode
from jaxblt.inference import Decoder, SamplingConfig, generate
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.state import ENTROPY, TrainState, evaluated, whole_params, widen

PROMPT = 64
"""Bytes of the prompt, at most."""
NAME = "validation/sample"


@dataclass(frozen=True)
class Continuation:
    """Generates by a run's model, on one device of its own.

    Attributes:
      decoder: model and patcher.
      count: bytes to generate.
      seed: of the draws.
    """

    decoder: Decoder
    count: int
    seed: int

    def __call__(self, state: TrainState, data: Dataset) -> str:
        """Write the first bytes of the validation split in brackets, and what the model makes follow them."""
        row = data.batch(0, slots=(0,))
        ids = np.asarray(row.inputs)[0][np.asarray(row.segment_ids)[0] == 1]
        prompt = decode(ids[1 : PROMPT + 1])
        entropy = widen(state.frozen[ENTROPY].params) if ENTROPY in state.frozen else None
        params: dict[str, Any] = {
            "model": whole_params(evaluated(state).params, state.frozen),
            "entropy": entropy,
        }
        device = jax.local_devices()[:1]
        params = jax.device_put(jax.device_get(params), device[0])
        with jax.set_mesh(MeshConfig(data=1).build(device)):
            sampling = SamplingConfig(temperature=0.8)
            (drawn,) = generate(
                self.decoder, params, [prompt], max_new_bytes=self.count, sampling=sampling, seed=self.seed
            )
        return f"[{prompt.decode('utf-8', 'replace')}]{drawn.decode('utf-8', 'replace')}"


def continuation_of(recipe: Recipe) -> Continuation | None:
    """Make what `train.sample_bytes` asks for; None for 0.

    Raises:
      ValueError: the model cannot generate, or the run has several processes.
    """
    if not recipe.train.sample_bytes:
        return None
    if jax.process_count() > 1:
        raise ValueError(
            f"train.sample_bytes = {recipe.train.sample_bytes} needs a run of one process, got "
            f"{jax.process_count()}: set it to 0, and use `jaxblt generate`"
        )
    decoder = Decoder(recipe.model, recipe.patcher, recipe.entropy_model, recipe.train.compute_dtype)
    return Continuation(decoder, recipe.train.sample_bytes, recipe.train.seed)
