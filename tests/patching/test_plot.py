import jax.numpy as jnp
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter

from jaxblt.data.vocab import encode
from jaxblt.patching import PatcherConfig, plot_boundaries, plot_entropies
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
