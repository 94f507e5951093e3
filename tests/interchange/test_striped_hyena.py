"""Models with Evo 2's architecture and drawn weights compute here what the reference computed; see make_evo2.py."""

import dataclasses
import json
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxblt.data.vocab import BOS, OFFSET
from jaxblt.inference import generate
from jaxblt.interchange.striped_hyena import entries, to_params
from jaxblt.models.stack import Block
from jaxblt.models.striped_hyena import EVO2, VOCAB_SIZE, Evo2, evo2, striped_hyena
from jaxblt.testing.tolerances import bound, worst
from tests.interchange import evo2_weights as weights

FIXTURE = Path(__file__).parent / "evo2"


def tiny(pattern: str):
    """The config of a case."""
    sizes = (weights.WIDTH, len(pattern), weights.HEADS, weights.HIDDEN, weights.GROUPS, 1024)
    return striped_hyena(Evo2(*sizes, weights.THETA, weights.SCALE, pattern))


def our_ids(ids: np.ndarray) -> np.ndarray:
    """A row behind the reference's id 0 as one behind BOS."""
    return np.concatenate([[BOS], ids[1:] + OFFSET]).astype(np.int32)


def drawn(case: str):
    """Config and parameters of a case."""
    config = tiny(weights.CASES[case])
    shapes = {name: entry.shape for name, entry in entries(config).items()}
    tensors = weights.draw(shapes, list(weights.CASES).index(case))
    return config, unflatten_dict(
        {tuple(n.split(".")): x for n, x in to_params(config, tensors).items()}
    )


@pytest.mark.parametrize("case", weights.CASES)
def test_states_logits_and_likelihoods_are_the_references(case):
    config, params = drawn(case)
    model = config.build()

    @jax.jit
    def run(ids, segment_ids):
        (logits, _), kept = model.apply(
            {"params": params},
            ids,
            segment_ids=segment_ids,
            capture_intermediates=lambda module, _: isinstance(module, Block),
        )
        return logits, jax.tree.leaves(kept["intermediates"])

    with np.load(FIXTURE / f"{case}.npz") as expected:
        longest = max(weights.LENGTHS)
        for length in weights.LENGTHS:
            ids = np.zeros((1, longest), np.int32)
            ids[0, :length] = our_ids(weights.draw_bytes(length))
            logits, _ = run(ids, (np.arange(longest) < length)[None].astype(np.int32))
            print(case, length, logits.shape)
