"""Configs of any content: each is read, or refused by one line that names the file."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblt.models import BLTConfig, ByteLMConfig
from jaxblt.patching import PatcherConfig
from jaxblt.training.stored.resolved import Resolved, read_resolved, write_resolved
from tests.training.tiny import TinyConfig, tiny_recipe

few = settings(max_examples=30)

RECIPES = (
    tiny_recipe(model=BLTConfig(), patcher=PatcherConfig(threshold=1.0), entropy_model=ByteLMConfig()),
    tiny_recipe(),
)
FROZEN = {"entropy": "0" * 64}
WRONG = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        2,
        0.5,
        1e400,
        float("nan"),
        10**30,
        "",
        "x",
        "\ud800",
        [],
        [1],
        ["a", []],
        {},
        {"class": 1},
    ]
    + [
        {"class": name}
        for name in ("", "os:system", "jaxblt.run:Run", "jaxblt.nowhere:X", "jaxblt.a.b", "a:b:c")
    ]
    + [
        {"class": "tests.training.tiny:TinyConfig", "dim": "x"},
        {"class": "jaxblt.mixers:HyenaConfig", "dim": 8},
    ]
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder, and the texts of sound configs."""
    folder, texts = tmp_path_factory.mktemp("fuzz"), []
    for recipe in RECIPES:
        write_resolved(folder, Resolved(recipe, FROZEN))
        texts.append((folder / "config.json").read_text())
    return folder, texts


def read_or_refuse(folder, data):
    (folder / "config.json").write_bytes(data)
    refusal, found = "", None
    try:
        found = read_resolved(folder)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert str(folder / "config.json") in refusal
        assert "\n" not in refusal
        assert len(refusal) < 1000
    return found


def places(tree, path=()):
    """Paths of all values of a tree of JSON."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


@few
@given(st.data())
def test_a_value_of_a_config_replaced(stored, data):
    folder, texts = stored
    tree = json.loads(data.draw(st.sampled_from(texts)))
    chosen = [path for path in places({"recipe": tree["recipe"], "frozen": tree["frozen"]}) if path]
    *outer, last = data.draw(st.sampled_from(chosen))
    node = tree
    for key in outer:
        node = node[key]
    node[last] = data.draw(WRONG)
    read_or_refuse(folder, json.dumps(tree).encode())


@pytest.mark.parametrize("filter", [None, "modal", {"class": "attention", "dim": 8}])
def test_a_filter_that_is_none_of_them_is_refused(stored, filter):
    folder, texts = stored
    tree = json.loads(texts[0])
    tree["recipe"]["model"]["latent"]["mixers"]["H"]["filter"] = filter
    assert read_or_refuse(folder, json.dumps(tree).encode()) is None


@few
@given(st.data())
def test_bytes_of_a_config_replaced(stored, data):
    folder, texts = stored
    text = data.draw(st.sampled_from(texts)).encode()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.sampled_from([start, start + 1, start + 9, len(text)]))
    read_or_refuse(folder, text[:start] + data.draw(st.binary(max_size=3)) + text[stop:])


def test_sound_configs_are_read(stored):
    folder, texts = stored
    for recipe, text in zip(RECIPES, texts, strict=True):
        assert read_or_refuse(folder, text.encode()) == (recipe, FROZEN)
    assert isinstance(RECIPES[1].model, TinyConfig)
