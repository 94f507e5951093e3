import json
from dataclasses import dataclass

import pytest

from jaxblt.mixers import StateEngineConfig
from jaxblt.training.stored.serialize import from_json, to_json


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    names: tuple[str, ...] = ("a", "b")


@dataclass(frozen=True)
class Outer:
    inner: Inner
    pairs: tuple[tuple[str, Inner], ...] = ()
    count: int = 3
    ratio: float = 1.0
    on: bool = True
    missing: float | None = None
    anything: object = None


def test_round_trip_is_exact():
    config = Outer(Inner(rate=1 / 3), pairs=(("x", Inner(names=())),), ratio=2.0, missing=1e-30)
    back = from_json(to_json(config))
    assert back == config
    assert type(back.ratio) is float
    assert type(back.count) is int
    assert type(back.on) is bool
    assert type(back.pairs[0][1]) is Inner


def test_left_out_fields_take_their_defaults():
    tree = json.loads(to_json(Outer(Inner())))
    del tree["count"]
    assert from_json(json.dumps(tree)).count == 3


def test_what_nothing_reads_is_set_back_in_files_of_older_versions():
    stored = json.loads(to_json(StateEngineConfig(dim=8, num_heads=2)))
    assert from_json(json.dumps(stored | {"interval": 4})) == StateEngineConfig(dim=8, num_heads=2)
    edges = stored | {"interval": 4, "state_routes": True}
    assert from_json(json.dumps(edges)).interval == 4
    with pytest.raises(
        ValueError, match=r"StateEngineConfig.interval = 4 is read with cell, state_attention or"
    ):
        StateEngineConfig(dim=8, num_heads=2, interval=4)


def test_slots_of_older_runs_fill_as_they_did():
    stored = json.loads(to_json(StateEngineConfig(dim=8, num_heads=2)))
    assert from_json(json.dumps(stored)).full
    del stored["full"]
    assert not from_json(json.dumps(stored)).full


def test_unknown_field_is_an_error():
    tree = json.loads(to_json(Outer(Inner())))
    tree["inner"]["ratr"] = 0.2
    with pytest.raises(ValueError, match=r"config\.inner: .*:Inner has no field ratr"):
        from_json(json.dumps(tree))


def test_missing_required_field_is_an_error():
    tree = json.loads(to_json(Outer(Inner())))
    del tree["inner"]
    with pytest.raises(ValueError, match="inner"):
        from_json(json.dumps(tree))


@pytest.mark.parametrize(
    "name", ["os:system", "not_imported_anywhere:Config", "jaxblt.nowhere:Config", "jaxblt:load"]
)
def test_a_file_cannot_name_arbitrary_classes(name):
    with pytest.raises(ValueError, match=name.split(":")[0]):
        from_json(json.dumps({"class": name}))


@pytest.mark.parametrize("value", [[1], {"a": 1}, object(), Inner])
def test_values_that_would_not_come_back_are_refused(value):
    with pytest.raises(TypeError, match=r"config\.anything"):
        to_json(Outer(Inner(), anything=value))


def test_numbers_that_json_lacks_are_refused():
    with pytest.raises(ValueError, match=r"config\.ratio is nan"):
        to_json(Outer(Inner(), ratio=float("nan")))
