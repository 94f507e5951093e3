"""Slots kept as codes between turns: decoding equals the parallel pass, gradients reach encoder and book."""

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import StateEngineConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.models.experimental.coded_turns import CodedTurnsConfig
from jaxblt.side_outputs import SIDE_OUTPUTS
from jaxblt.training.loop import fit
from tests.training.test_loop import logged
from tests.training.tiny import Letters, tiny_recipe

ENGINE = StateEngineConfig(dim=8, num_heads=2, head_dim=4, num_slots=4, chunk_size=8)
STACK = StackConfig(dim=8, num_layers=2, pattern=("engine",), mixers={"engine": ENGINE})
CONFIG = CodedTurnsConfig(base=ByteLMConfig(stack=STACK), turn=6, code_dim=4, codes=8)
TURN = pytest.mark.slow(days=28, group="costly", turn="models/experimental/test_coded_turns")


@TURN
def test_turns_by_pieces_equal_the_parallel_pass_and_the_next_turn_trains_the_codes() -> None:
    module, ids = CONFIG.build(), jax.random.randint(jax.random.key(0), (2, 12), 4, 260)
    params = nn.meta.unbox(jax.jit(module.init)(jax.random.key(1), ids))["params"]

    def second(params: Any) -> Any:
        (logits, _), side = module.apply({"params": params}, ids, mutable=SIDE_OUTPUTS)
        return jnp.sum(logits[:, 6:] ** 2), (logits, side)

    gradient, (logits, side) = jax.jit(jax.grad(second, has_aux=True))(params)
    compressor = gradient["compressor"]
    assert np.any(compressor["encoder"]["kernel"])
    assert np.any(compressor["decoder"]["kernel"])
    assert float(jnp.sum(side["losses"]["compressor"]["state_compressor"][0])) > 0
    state = module.init_state(2, num_bytes=12)
    stream = jax.jit(
        lambda ids, state, live: module.apply(
            {"params": params}, ids, state, segment_ids=live, method="stream"
        )
    )
    live = jnp.asarray([[1, 1, 1], [1, 1, 1]])
    found = []
    for start in range(0, 12, 3):
        piece, state = stream(ids[:, start : start + 3], state, live)
        found.append(piece)
    np.testing.assert_allclose(jnp.concatenate(found, 1), logits, rtol=2e-4, atol=2e-5)


@TURN
def test_a_run_trains_the_book_with_the_model(tmp_path: Any) -> None:
    recipe = tiny_recipe(
        model=replace(CONFIG, turn=16), steps=24, log_every=1, eval_every=0, mesh={"data": 1}
    )
    fitted = fit(recipe, tmp_path / "run", source=Letters(), devices=jax.devices()[:1])
    assert fitted.finished
    lines = logged(tmp_path / "run")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["sown_loss"] < lines[0]["sown_loss"]
    assert lines[-1]["compressor/state_compressor"] > 1


def test_what_does_not_fit_turns_is_refused() -> None:
    for stack, said in (
        (replace(STACK, pattern=("recurrence",)), r"widths \[\]"),
        (replace(STACK, mixers={"engine": replace(ENGINE, cell="gru")}), r"widths \[\]"),
        (replace(STACK, pattern=("attention",), causal=False), "reads both ways"),
    ):
        with pytest.raises(ValueError, match=said):
            CodedTurnsConfig(base=ByteLMConfig(stack=stack))
    with pytest.raises(ValueError, match=r"counts turns from a row's start, got data\.packing='first_fit'"):
        tiny_recipe(model=CONFIG, data={"packing": "first_fit"})
