"""The benchmark of what adapters cost, tiny: its figures, its ratios, and what it refuses."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from experiments.benchmark.adapters.adapter_speed import ARMS, Setting, adapter_speed, compared, model_of

TINY = Setting(
    dim=8,
    layers=1,
    rank=2,
    chunk=4,
    prefix=4,
    hidden=4,
    shapes=((1, 8),),
    step=(1, 8),
    rows=(2,),
    prompt=4,
    new_bytes=2,
)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_it_leaves_its_figures_and_goes_on(tmp_path: Path) -> None:
    out = str(tmp_path / "speed.json")
    first = adapter_speed(out, ("none", "static"), TINY)
    both = adapter_speed(out, ("none", "static", "chunk"), TINY)
    assert json.loads(Path(out).read_text())["arms"] == json.loads(json.dumps(both["arms"]))
    assert list(both["arms"]) == ["none", "static", "chunk"]
    assert both["arms"]["static"] == json.loads(json.dumps(first["arms"]["static"]))
    assert "step" not in both["arms"]["none"]
    assert both["arms"]["chunk"]["parameters"] > both["arms"]["static"]["parameters"] > 0
    assert both["compared"]["none"]["decoding_over_none"] == [1.0]
    with pytest.raises(ValueError, match=r"has setting = .*choose another --out"):
        adapter_speed(out, ("full",), Setting())


def arm(forward: float, rate: float, step: float | None) -> dict:
    found = {"forward": [{"median": forward}], "decoding": [{"bytes_per_second": rate}]}
    return found if step is None else found | {"step": {"median": step}}


def test_a_file_that_has_all_arms_is_compared_too(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    said = json.loads(json.dumps({"setting": asdict(TINY)}))
    out.write_text(json.dumps(said | {"arms": {"none": arm(2, 100, None), "static": arm(3, 90, 4)}}))
    found = adapter_speed(str(out), ("none", "static"), TINY)
    assert found["compared"]["static"]["forward_over_none"] == [1.5]


def test_ratios_by_hand() -> None:
    found = compared(
        {
            "none": arm(1, 100, None),
            "static": arm(1.1, 90, 3.8),
            "chunk": arm(1.5, 85, 4),
            "full": arm(1, 100, 5),
        }
    )
    assert found["chunk"]["forward_over_none"] == [1.5]
    assert found["chunk"]["decoding_over_none"] == [0.85]
    assert found["chunk"]["step_over_full"] == 0.8
    assert found["chunk"]["router_of_step"] == pytest.approx(0.05)
    assert "router_of_step" not in found["static"]


def test_arms_are_models_of_one_base() -> None:
    routers = {name: getattr(model_of(name, TINY).stack.adapter, "router", None) for name in ARMS}
    assert [name for name, router in routers.items() if router] == ["prefix", "chunk", "token"]
    assert model_of("none", TINY) == model_of("full", TINY)
    with pytest.raises(ValueError, match=r"unknown arms \['statc'\], choose of: none, static"):
        adapter_speed(arms=("statc",))
