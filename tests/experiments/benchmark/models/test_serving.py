"""The benchmark of serving: what it refuses before a model is drawn, and its arms."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from experiments.benchmark.models.decode_kernels import decode_kernels
from experiments.benchmark.models.engine_delays import first_byte, long_document, rounds
from experiments.benchmark.models.serving import serving
from jaxblt.inference import Decoder
from jaxblt.models import ByteLMConfig, StackConfig


def test_a_size_without_static_patches_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--size books_1b has entropy patches: add --patches entropy"):
        serving(str(tmp_path / "none.json"), size="books_1b")


@pytest.mark.slow(days=28, group="costly", turn="experiments/engine_delays")
def test_delays_of_a_small_byte_model():
    decoder = Decoder(ByteLMConfig(stack=StackConfig(dim=16, num_layers=1, pattern="H", mlp_dim=16)))
    drawn = jax.jit(decoder.build().init)(jax.random.key(0), jnp.ones((1, 8), jnp.int32))
    model = decoder, {"model": nn.meta.unbox(drawn)["params"]}
    found = first_byte(*model, prompt_bytes=1100, prefix_bytes=2**24, trials=2)
    # BOS comes before a prompt
    assert found["known_bytes"] == 2 * 1101
    found = rounds(*model, rows=2, capacity=256, count=8, trials=1)
    assert min(found["round_ms"], found["decode_ms"]) > 0
    found = decode_kernels(*model, rows=2, capacity=256, rounds=2)
    assert found["all"]["count"] == pytest.approx(sum(kind["count"] for kind in found["kinds"].values()))
    found = long_document(*model, length=8192, new_bytes=8, trials=20)
    assert found["ratio"] == found["long"]["median"] / found["short"]["median"]
