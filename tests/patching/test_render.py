import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data.vocab import encode
from jaxblt.patching import PatcherConfig, render_patches, split_patches
from jaxblt.patching.render import label_byte
from tests.patching.cases import patch


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
