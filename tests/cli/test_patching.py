"""What the patch script says of refused boundaries, and what it writes down with entropies."""

from dataclasses import fields, replace
from unittest.mock import create_autospec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxblt.cli import patching
from jaxblt.cli.main import main
from jaxblt.cli.patch import PatcherOptions, patch
from jaxblt.data import read_entropies
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.patching import PatcherConfig, PatchOverflowWarning
from jaxblt.run import Run
from jaxblt.training.start.frozen import bounded_context
from jaxblt.training.state import freeze

CONFIG = ByteLMConfig(
    stack=StackConfig(
        dim=8, num_layers=1, pattern="A", mlp_dim=0, mixers={"A": AttentionConfig(dim=8, num_heads=1)}
    )
)


@pytest.mark.slow(days=28, group="costly", turn="cli/test_patching")
def test_refused_boundaries_are_told_with_the_figure(tmp_path, capsys):
    file = tmp_path / "words.txt"
    file.write_text("a bc def " * 40)
    options = PatcherOptions(mode="space", block_size=32, capacity=8)
    with pytest.warns(PatchOverflowWarning, match=r"\d+ of \d+ patch boundaries \(\d+\.\d%\) were refused"):
        patch(str(file), own=options)
    assert "boundaries refused for want of slots: " in capsys.readouterr().out
    patch(str(file), own=options, recalibrate=True)
    assert "boundaries refused for want of slots: 0" in capsys.readouterr().out


OWN = PatcherConfig(threshold=2.0, margin=0.1, block_size=64, capacity=20, entropy_context=32)


@pytest.mark.parametrize(
    ("own", "changes", "expected"),
    [
        (None, {}, PatcherConfig(mode="space")),
        (None, {"mode": "static", "patch_size": 6}, PatcherConfig(mode="static", patch_size=6)),
        (OWN, {}, OWN),
        (OWN, {"min_length": 3}, replace(OWN, min_length=3)),
        (OWN, {"threshold": 1.0}, replace(OWN, threshold=1.0, margin=None)),
        (
            OWN,
            {"mode": "length_constrained", "num_patches": 16},
            replace(OWN, mode="length_constrained", num_patches=16, margin=None, capacity=None),
        ),
        (OWN, {"mode": "space"}, PatcherConfig(mode="space", block_size=64)),
    ],
)
def test_every_field_of_the_patcher_can_be_given(own, changes, expected):
    assert {field.name for field in fields(PatcherOptions)} == {field.name for field in fields(PatcherConfig)}
    model = None if own is None else patching.EntropyModel(CONFIG, freeze({}), own)
    assert patching.patcher_of(model, changes) == expected


@pytest.mark.slow(days=28, group="costly", turn="cli/test_patching")
def test_patches_of_a_given_number_are_cut(tmp_path, monkeypatch, capsys):
    """--mode length_constrained failed whatever was given: there was no option for the number."""
    (tmp_path / "a.txt").write_bytes(b"abcdefg")
    model = patching.EntropyModel(CONFIG, freeze({}), replace(OWN, block_size=8, capacity=None))
    monkeypatch.setattr(patching.EntropyModel, "entropies", lambda self, ids: np.arange(8, dtype=np.float32))
    monkeypatch.setattr(patching, "load_patching_model", lambda run_dir, step: model)
    words = ["patch", str(tmp_path / "a.txt"), "--run-dir", "run", "--mode", "length_constrained"]
    main([*words, "--num-patches", "2"])
    assert "8 bytes (BOS included), 2 patches, 4.00 bytes a patch" in capsys.readouterr().out
    with pytest.raises(ValueError, match="cuts a block into num_patches patches, got None: set it"):
        main(words)


def test_numbers_of_a_router_are_called_p_whatever_cuts(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_bytes(b"ab cdef")
    own = PatcherConfig(mode="learned", block_size=8, reads_entropies=True)
    entropy = patching.EntropyModel(CONFIG, freeze({}), None, context=64)
    model = patching.RoutedModel(create_autospec(Run, instance=True, patcher=own), entropy)
    monkeypatch.setattr(patching.RoutedModel, "entropies", lambda self, ids: np.full(8, 0.25, np.float32))
    monkeypatch.setattr(patching, "load_patching_model", lambda run_dir, step: model)
    patch(str(tmp_path / "a.txt"), "run", PatcherOptions(mode="space"), as_trained=False)
    said = capsys.readouterr().out
    assert "p: mean 0.250, above 1/2 at 0.00% of bytes" in said
    assert "nats" not in said


def test_a_context_reaches_the_entropy_model_of_a_router():
    """--entropy-context was taken and left aside where a router reads entropies."""
    entropy = patching.EntropyModel(CONFIG, freeze({}), None, context=64)
    routed = patching.RoutedModel(create_autospec(Run, instance=True), entropy)
    assert patching.with_context(routed, 16) == replace(routed, entropy=replace(entropy, context=16))
    assert patching.with_context(entropy, 16) == replace(entropy, context=16)


@pytest.mark.slow(days=28, group="costly", turn="cli/test_patching")
def test_entropies_are_written_with_model_and_context(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(np.random.default_rng(0).integers(0, 256, 50).astype(np.uint8).tobytes())
    params = nn.meta.unbox(jax.jit(CONFIG.build().init)(jax.random.key(0), jnp.ones((1, 4), jnp.int32)))[
        "params"
    ]
    model = patching.EntropyModel(
        CONFIG, freeze(params, jnp.bfloat16), None, context=bounded_context(CONFIG, 16)
    )
    source = patching.open_file(str(file))
    patching.write_all(str(tmp_path / "e.npy"), source, model)
    written = read_entropies(tmp_path / "e.npy", source)
    written.check(model.frozen.content_hash, 16)
    for content_hash, context in (("another", 16), (model.frozen.content_hash, 32)):
        with pytest.raises(ValueError, match="entrop"):
            written.check(content_hash, context)


def test_a_context_bounds_what_does_not_bound_itself():
    window = AttentionConfig(dim=8, num_heads=1, window=8)
    local = ByteLMConfig(stack=StackConfig(dim=8, num_layers=2, pattern="W", mixers={"W": window}))
    assert bounded_context(CONFIG, 1001) == 1000
    assert bounded_context(local, 1000) is None
    assert bounded_context(local, 20) == 20, "fourteen bytes are more than half of its training rows"
