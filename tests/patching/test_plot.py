import jax.numpy as jnp
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter

from jaxblt.data.vocab import encode
from jaxblt.patching import PatcherConfig, plot_boundaries, plot_entropies, render_patches, split_patches
from jaxblt.patching.render import label_byte
from tests.patching.cases import patch

TEXT = "Call me Ishmael. Some years ago\n— never mind how long precisely — $5 & a_b\t^2 {x}".encode()


@pytest.fixture(scope="module")
def passage():
    ids = encode(TEXT, bos=True, eos=True)
    entropies = np.random.default_rng(0).gamma(1.2, 1.0, ids.shape).astype(np.float32)
    config = PatcherConfig(threshold=1.5, block_size=64)
    return (
        ids,
        entropies,
        patch(config, jnp.asarray(ids)[None], entropies=jnp.asarray(entropies)[None]),
    )


@pytest.mark.slow(days=28, group="costly")
def test_a_png_of_the_passage(passage, tmp_path):
    ids, entropies, patches = passage
    figure = plot_entropies(ids, entropies, patches, 1.5, bytes_per_line=40)
    path = tmp_path / "entropies.png"
    figure.savefig(path, dpi=60)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 20_000
    assert len(figure.axes) == 3


def test_a_notebook_shows_the_picture_without_pyplot(passage):
    ids, entropies, patches = passage
    figure = plot_entropies(ids, entropies, patches, bytes_per_line=200)
    shown, _ = DisplayFormatter().format(figure)
    assert shown["image/png"].startswith(b"\x89PNG")


def test_the_curve_stands_over_the_byte_that_was_predicted(passage):
    ids, entropies, patches = passage
    axis = plot_entropies(ids, entropies, patches, 1.5, bytes_per_line=200).axes[0]
    curve = next(line for line in axis.lines if len(line.get_xdata()) == len(ids) - 1)
    np.testing.assert_array_equal(curve.get_xdata(), np.arange(1, len(ids)))
    np.testing.assert_array_equal(curve.get_ydata(), entropies[:-1])
    labels = [text.get_text() for text in axis.get_xticklabels()]
    assert labels[:6] == ["⟨BOS⟩", "C", "a", "l", "l", "␣"]
    rules = {
        round(float(line.get_xdata()[0]) + 0.5) for line in axis.lines if len(set(line.get_xdata())) == 1
    }
    above = {t + 1 for t in range(len(ids) - 1) if entropies[t] > 1.5}
    assert rules == {0, 1, 64} | above


def test_a_probability_stands_over_its_own_byte(passage):
    ids, entropies, patches = passage
    axis = plot_boundaries(ids, entropies / entropies.max(), patches, bytes_per_line=200).axes[0]
    np.testing.assert_array_equal(axis.lines[-2].get_xdata(), np.arange(len(ids)))
    np.testing.assert_array_equal(axis.lines[-1].get_ydata(), [0.5, 0.5])


def test_shapes_are_checked(passage):
    ids, entropies, patches = passage
    with pytest.raises(ValueError, match="one row of"):
        plot_entropies(ids[1:], entropies, patches)


def patched(data: bytes, **options):
    ids = encode(data, bos=True, eos=True)
    return ids, patch(PatcherConfig(**options), jnp.asarray(ids)[None])


def test_words_specials_and_line_ends():
    ids, patches = patched("Le café\nest là".encode(), mode="space", block_size=32)
    assert render_patches(ids, patches) == "⟨BOS⟩│Le │café↵\n│est │là⟨EOS⟩"
    assert render_patches(ids, patches, separator="|").count("|") == 4


def test_bytes_of_a_split_character_show_as_escapes():
    ids, patches = patched("é".encode(), mode="byte", block_size=8)
    assert render_patches(ids, patches) == "⟨BOS⟩│\\xc3│\\xa9│⟨EOS⟩"


def test_patches_of_several_blocks_join_to_the_row():
    ids, patches = patched(bytes(range(256)), mode="static", patch_size=7, block_size=48)
    parts = split_patches(ids, patches)
    assert {len(p) for p in parts} == {7, 6, 4}
    np.testing.assert_array_equal(np.concatenate(parts), ids)
    with pytest.raises(ValueError, match="258 bytes"):
        split_patches(ids[:-1], patches)


@pytest.mark.parametrize(
    ("token", "label"),
    [
        (1, "⟨BOS⟩"),
        (4 + ord("$"), "$"),
        (4 + ord(" "), "␣"),
        (4 + ord("\n"), "↵"),
        (4 + 0xE9, "e9"),
        (4, "00"),
    ],
)
def test_labels(token, label):
    assert label_byte(token) == label
