"""Models with Evo 2's architecture and drawn weights compute here what the reference computed; see make_evo2.py."""

import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from scipy.special import log_softmax

from jaxblt.data.vocab import BOS, OFFSET
from jaxblt.interchange.striped_hyena import embedding_rows, entries
from jaxblt.models.stack import Block
from jaxblt.models.striped_hyena import EVO2, Evo2, evo2, striped_hyena
from jaxblt.testing.tolerances import bound, worst
from tests.interchange import evo2_weights as weights

FIXTURE = Path(__file__).parent / "evo2"
LONGEST = max(weights.LENGTHS)


def tiny(pattern: str) -> Evo2:
    """The sizes of a case."""
    sizes = (weights.WIDTH, len(pattern), weights.HEADS, weights.HIDDEN, weights.GROUPS, 1024)
    return Evo2(*sizes, weights.THETA, weights.SCALE, pattern)


def draw(case: str) -> tuple[Any, dict[str, np.ndarray]]:
    """Config and tensors of a case."""
    config = striped_hyena(tiny(weights.CASES[case]))
    shapes = {name: entry.shape for name, entry in entries(config).items()}
    return config, weights.draw(shapes, list(weights.CASES).index(case))


def to_params(config: Any, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Parameters by name."""
    found = {}
    for name, entry in entries(config).items():
        found |= dict(zip(entry.params, entry.ours(tensors[name]), strict=True))
    return found


def as_tree(params: dict[str, Any]) -> Any:
    return unflatten_dict({tuple(name.split(".")): jnp.asarray(x) for name, x in params.items()})


@pytest.mark.slow(days=7, group="files of others")
@pytest.mark.parametrize("case", weights.CASES)
def test_states_logits_and_likelihoods_are_the_references(case):
    config, tensors = draw(case)
    model, params = config.build(), as_tree(to_params(config, tensors))
    rows = embedding_rows(config.vocab_size)

    @jax.jit
    def run(params, ids, segment_ids):
        options = {"segment_ids": segment_ids, "capture_intermediates": lambda x, _: isinstance(x, Block)}
        (logits, _), kept = model.apply({"params": params}, ids, **options)
        blocks = kept["intermediates"]["stack"]["period_0"]
        states = [blocks[f"block_{i}"]["__call__"][0][0][0] for i in range(config.stack.num_layers)]
        # Each row of the reference's embedding is at another place
        return jnp.stack(states), jnp.zeros_like(logits[0]).at[:, rows].set(logits[0])

    with np.load(FIXTURE / f"{case}.npz") as expected:
        for length in weights.LENGTHS:
            theirs = weights.draw_bytes(length)
            ids = np.zeros((1, LONGEST), np.int32)
            ids[0, :length] = np.concatenate([[BOS], theirs[1:] + OFFSET])
            segments = (np.arange(LONGEST) < length)[None].astype(np.int32)
            states, logits = jax.device_get(run(params, ids, segments))
            near = bound(np.float32, length)
            last = states[:, max(0, length - weights.KEPT) : length]
            for ours, known in zip(last, expected[f"hidden_{length}"], strict=True):
                assert worst(ours, known) < near
            step = 1 if config.stack.num_layers > 1 else 8
            assert worst(logits[length - 1, ::step], expected[f"logits_{length}"]) < near
            nats = log_softmax(logits, -1)[np.arange(length - 1), theirs[1:]].sum()
            assert worst(nats, expected[f"likely_{length}"]) < near


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_striped_hyena_in_bf16")
@pytest.mark.parametrize("case", weights.CASES)
def test_bf16_is_no_further_from_fp32_than_the_references(case):
    config, tensors = draw(case)
    params = as_tree(to_params(config, tensors))
    ids = jnp.asarray(np.concatenate([[BOS], weights.draw_bytes(LONGEST)[1:] + OFFSET]), jnp.int32)[None]
    models = [config.build(dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    exact, found = (jax.jit(lambda p, m=m: m.apply({"params": p}, ids)[0])(params) for m in models)
    assert jnp.linalg.norm(found - exact) <= weights.ROUNDED[case] * jnp.linalg.norm(exact)


def released(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a released checkpoint, as the reference's state dict has them."""
    found = {}
    for numbers, shapes in json.loads((FIXTURE / "names.json").read_text())[name]:
        prefixes = [""] if numbers is None else [f"blocks.{i}." for i in numbers]
        found |= {prefix + key: tuple(shape) for prefix in prefixes for key, shape in shapes.items()}
    return found


@pytest.mark.parametrize("name", EVO2)
def test_released_names_and_shapes_are_those_of_the_config(name):
    assert {key: entry.shape for key, entry in entries(evo2(name)).items()} == released(name)


def test_tensors_become_all_parameters_and_come_back():
    config, tensors = draw("mixed")
    params = to_params(config, tensors)
    made = jax.eval_shape(config.build().init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    leaves: dict[str, Any] = flatten_dict(nn.meta.unbox(made["params"]), sep=".")
    known = {name: x.shape for name, x in leaves.items()}
    assert {name: x.shape for name, x in params.items()} == known
    for name, entry in entries(config).items():
        again = entry.theirs(*(params[param] for param in entry.params))
        assert worst(again, tensors[name]) < bound(np.float32)


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_striped_hyena")
@pytest.mark.parametrize("name", ["evo2_1b_8k", "evo2_7b_1m"])
def test_tensors_of_true_sizes_become_all_parameters(name):
    """Shapes alone: nothing as large as a matrix is made."""
    config = evo2(name)
    found = {}
    for key, entry in entries(config).items():
        small = key.endswith(("log_poles", "inv_freq"))
        made = (
            entry.ours(entry.theirs(*_decays(entry))) if small else jax.eval_shape(entry.ours, _shape(entry))
        )
        found |= {param: x.shape for param, x in zip(entry.params, made, strict=True)}
    drawn = jax.eval_shape(config.build().init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    leaves: dict[str, Any] = flatten_dict(nn.meta.unbox(drawn["params"]), sep=".")
    assert found == {param: x.shape for param, x in leaves.items()}


def _shape(entry: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(entry.shape, jnp.float32)


def _decays(entry: Any) -> list[np.ndarray]:
    """Log rates of 0 for poles, whose signs an import looks at; nothing for rotary frequencies."""
    return [np.zeros((1, *entry.shape[:-1]), np.float32) for _ in entry.params]


def test_there_is_no_other_released_model():
    with pytest.raises(ValueError, match="no Evo 2 model 'evo2_7b': expected one of evo2_1b_8k, evo2_7b_8k"):
        evo2("evo2_7b")
