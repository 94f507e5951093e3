"""Values of another kind than a public function takes: one line that names the value and what to hand over."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

import jaxblt
from jaxblt.data import BytesSource, DataConfig, make_dataset
from jaxblt.data.sources import TextSource
from jaxblt.inference.engine import Engine
from jaxblt.models import BLTConfig
from jaxblt.training.loop import fit

DATA = DataConfig(sample="book", seq_len=64, batch_size=1)
RUN: Any = "genes"
CASES: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "mesh of load": (lambda x: jaxblt.load(RUN, mesh=x), 3, "parallel.make_mesh"),
    "mesh of score": (lambda x: jaxblt.load(RUN).score([b"ACGT"], mesh=x), "data=1", "parallel.make_mesh"),
    "mesh of evaluate": (lambda x: jaxblt.load(RUN).evaluate(mesh=x), {"seq": 1}, "parallel.make_mesh"),
    "folder of load": (jaxblt.load, b"genes", "pathlib.Path"),
    "recipe of fit": (lambda x: fit(x, "nowhere"), "demo", "recipes.get"),
    "recipe of fit in a store": (lambda x: fit(x, "s3://nowhere/run"), "demo", "recipes.get"),
    "folder of fit": (lambda x: fit(jaxblt.load(RUN).recipe, x), 3, "pathlib.Path"),
    "config of make_dataset": (make_dataset, "a.txt", "DataConfig"),
    "source of make_dataset": (lambda x: make_dataset(DATA, source=x), "a.txt", "TextSource"),
    "paths of TextSource": (TextSource, 3, "pathlib.Path"),
    "a path of TextSource": (TextSource, b"a.txt", "pathlib.Path"),
    "documents of BytesSource": (lambda x: BytesSource([x]), "text", "list of bytes"),
    "run of Engine": (Engine, "genes", "jaxblt.load"),
    "config of Engine": (lambda x: Engine(jaxblt.load(RUN), x), 3, "EngineConfig"),
    "mesh of Engine": (lambda x: Engine(jaxblt.load(RUN), mesh=x), 3, "parallel.make_mesh"),
    "patcher of build": (lambda x: BLTConfig().build(patcher=x), "space", "PatcherConfig"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_value_of_another_kind_is_named_with_what_to_hand_over(name: str) -> None:
    call, value, fix = CASES[name]
    with pytest.raises(TypeError) as caught:
        call(value)
    said = str(caught.value)
    assert f"got {value!r}" in said
    assert fix in said
    assert "\n" not in said


def test_a_mesh_of_other_axes_is_named_before_it_is_used() -> None:
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="the mesh has axes x, expected data, fsdp, seq, tensor: make it"):
        jaxblt.load(RUN).evaluate(mesh=mesh)


def test_prompts_that_are_no_list_are_refused() -> None:
    run = jaxblt.load(RUN)
    for as_trained in (True, False):
        with pytest.raises(ValueError, match="prompts must be a list of bytes, got None"):
            run.generate(None, max_new_bytes=1, as_trained=as_trained)  # pyright: ignore[reportArgumentType]
