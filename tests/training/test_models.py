"""The library's own models in the loop: patched, packed and plain, on one device and on several."""

import jax
import numpy as np
import pytest

import jaxblt
from jaxblt.mixers import AttentionConfig, HyenaConfig, ModalFilter
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.patching import PatcherConfig
from jaxblt.training.loop import fit
from jaxblt.training.objectives.objectives import Masked
from tests.mixer_table import table
from tests.training.test_loop import losses
from tests.training.tiny import Letters, tiny_recipe


def stack(pattern: str, *, causal: bool = True, **options) -> StackConfig:
    return StackConfig(
        dim=16,
        num_layers=len(pattern),
        pattern=pattern,
        causal=causal,
        mixers=table(
            hyena=HyenaConfig(dim=16, filter=ModalFilter(modes=4, max_timescale=64.0)),
            attention=AttentionConfig(dim=16, num_heads=2),
            window=8,
        ),
        **options,
    )


def patched(*, causal: bool = True) -> BLTConfig:
    ends = stack("W", causal=causal, remat="full")
    hashes = HashConfig(sizes=(2, 3), table_size=64)
    latent = stack("H" if causal else "A", causal=causal)
    return BLTConfig(encoder=ends, latent=latent, decoder=ends, hash=hashes, bridge_heads=2)


STATIC = PatcherConfig(mode="static", patch_size=4, block_size=16)


@pytest.mark.slow(days=28, group="whole runs")
def test_blt_on_one_device_and_on_a_mesh(tmp_path):
    options = {"model": patched(), "patcher": STATIC, "steps": 6, "eval_every": 0}
    fit(tiny_recipe(**options), tmp_path / "one", source=Letters(), devices=jax.devices()[:1])
    mesh = tiny_recipe(**options, mesh={"data": 2, "fsdp": 2}, accumulate=2)
    fit(mesh, tmp_path / "mesh", source=Letters(), devices=jax.devices()[:4])
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "mesh")
    assert expected[6] < expected[2]
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-3)


@pytest.mark.slow(days=28, group="whole runs")
def test_bidirectional_blt_fills_gaps(tmp_path):
    recipe = tiny_recipe(
        model=patched(causal=False), patcher=STATIC, objective=Masked(rate=0.3), steps=6, eval_every=6
    )
    fitted = fit(recipe, tmp_path, source=Letters(), devices=jax.devices()[:1])
    assert losses(tmp_path)[6] < losses(tmp_path)[2]
    assert 0 < fitted.validation["bytes"] < 410
    scored = jaxblt.load(tmp_path).evaluate("validation", source=Letters())
    np.testing.assert_allclose(scored["bits_per_byte"], fitted.validation["bits_per_byte"], rtol=1e-3)
    assert scored["bytes_per_patch"] == pytest.approx(4.0, abs=0.1)


@pytest.mark.slow(days=28, group="whole runs")
def test_byte_lm_on_packed_rows_in_bfloat16(tmp_path):
    data = {"packing": "first_fit", "long_documents": "split"}
    recipe = tiny_recipe(
        model=ByteLMConfig(stack=stack("HW")), data=data, steps=6, eval_every=0, dtype="bfloat16"
    )
    # flax's norms promote bfloat16 by themselves
    with jax.numpy_dtype_promotion("standard"):
        fitted = fit(recipe, tmp_path, source=Letters(), devices=jax.devices()[:2])
    assert losses(tmp_path)[6] < losses(tmp_path)[2]
    assert {leaf.dtype for leaf in jax.tree.leaves(fitted.state.params)} == {np.dtype("float32")}
