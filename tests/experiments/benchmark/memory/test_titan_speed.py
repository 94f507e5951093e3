"""Train steps and decoding of models with a memory: the figures, and where a decoded token stands."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.benchmark.__main__ import main
from experiments.benchmark.memory import titan_speed as script
from jaxblt.mixers import check_capacity, init_state

TINY = script.Shape(dim=16, num_layers=1, num_heads=2, window=8, chunk_size=8, length=32, rows=2)


def test_a_state_stands_where_it_is_said_to() -> None:
    memory = script.memory_of(TINY)
    state = script.standing(init_state(memory, 3, capacity=1), 1000, 7)
    check_capacity(state)
    assert np.all(np.asarray(state.clock.time) == 1000)
    assert np.all(np.asarray(state.carry.opened.count) == 7)
    assert np.asarray(state.carry.opened.content).sum() == 3 * 2 * 7


def test_timed_tokens_write_their_state_in_place() -> None:
    memory = script.memory_of(TINY)
    state, xs = init_state(memory, 2, capacity=1), jax.ShapeDtypeStruct((3, 2, 1, 16), np.float32)
    params = jax.eval_shape(
        memory.build().init, jax.random.key(0), jax.ShapeDtypeStruct((2, 1, 16), np.float32)
    )
    program = script.tokens(memory.build()).lower({"params": params["params"]}, xs, state, 100, 7)
    assert all(leaf.donated for leaf in jax.tree.leaves(program.args_info[0][2]))
    assert jax.tree.map(np.shape, program.out_info[1]) == jax.tree.map(np.shape, state)


def test_the_model_has_150_million_parameters() -> None:
    from jaxblt.training.flops import count_params

    model = script.Shape().recipe.model
    ids = jax.ShapeDtypeStruct((1, 2048), np.int32)
    assert (
        145e6 < count_params(jax.eval_shape(model.build().init, jax.random.key(0), ids)["params"])[0] < 155e6
    )


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_speed_figures(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    sizes = ["--shape.dim=16", "--shape.num-layers=1", "--shape.num-heads=2", "--shape.window=8"]
    rows = ["--shape.chunk-size=8", "--shape.length=32", "--shape.rows=2"]
    options = ["--devices", "1", "2", "--positions", "100", "--decode-rows", "2"]
    main(["titan_speed", "--out", str(out), *sizes, *rows, *options])
    found = json.loads(out.read_text())
    one, two = found["steps"]
    assert (one["devices"], two["devices"]) == (1, 2)
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-2)
    assert one["bytes_per_second"] == pytest.approx(64 / one["seconds"]["median"])
    assert [at["ends_chunk"] for at in found["decoding"]] == [False, True]
    for at in found["decoding"]:
        assert at["read_bytes"] == 2 * 2 * 2 * 8 * 32 * 4
        assert at["share_of_bandwidth"] == pytest.approx(at["floor_seconds"] / at["seconds_a_token"])
        assert at["seconds_a_token"] == pytest.approx(at["seconds"]["median"] / at["tokens"])


def test_nothing_to_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to time"):
        script.titan_speed(str(tmp_path / "out.json"), devices=(), positions=())
    with pytest.raises(ValueError, match=r"devices must lie in 1\.\.8"):
        script.titan_speed(str(tmp_path / "out.json"), devices=(9,))
