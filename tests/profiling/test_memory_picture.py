"""Pictures of memories: what they show is what the model's own pass does, and the file of values holds the same."""

import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from jaxblt.cli.memory import memory
from jaxblt.data import DataConfig
from jaxblt.mixers import AttentionConfig, MACConfig, MAGConfig, SlotMemoryConfig
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.profiling import memory_picture
from jaxblt.profiling.memory_picture import draw, plot_memory
from jaxblt.training.log.runlog import RunLog
from tests.parameters import drawn
from tests.tolerances import assert_close
from tests.training.log.test_runlog import events

DIM, CHUNK, SLOTS = 8, 4, 3
MIXERS = {
    "J": MAGConfig(DIM, 2, window=4, chunk_size=CHUNK, expand=2),
    "C": MACConfig(DIM, 2, chunk_size=CHUNK, depth=1),
    "B": SlotMemoryConfig(DIM, 2, slots=SLOTS, interval=CHUNK, top_k=2),
    "A": AttentionConfig(DIM, 2),
}
STACK = StackConfig(DIM, 6, "JCB", MIXERS, mlp_dim=0)
MODEL = ByteLMConfig(stack=STACK).build()
TEXT = b"a=4711, b=23."
"""13 bytes and BOS: three whole chunks, and two ids of a fourth."""


@pytest.fixture(scope="module")
def params() -> Any:
    return drawn(MODEL, jnp.zeros((1, 8), jnp.int32))["params"]


@pytest.fixture(scope="module")
def found(params, tmp_path_factory) -> tuple[Any, Any]:
    """The picture, and the folder of its files."""
    folder = tmp_path_factory.mktemp("pictures")
    with RunLog(folder) as log:
        run: Any = SimpleNamespace(model=MODEL, params=params, step=7)
        return plot_memory(run, TEXT, out=folder / "new" / "memory", log=log), folder


def shown(figure: Any) -> dict[str, list[Any]]:
    """What the artists of a figure hold, by gid; lines that go on in another row of it are joined."""
    held: dict[str, list[Any]] = {}
    for axis in figure.axes:
        for line in axis.lines:
            if line.get_gid():
                before = held.setdefault(line.get_gid(), [])
                assert list(line.get_xdata()) == list(range(len(before), len(before) + len(line.get_ydata())))
                before.extend(line.get_ydata().tolist())
        for image in axis.images:
            held[image.get_gid()] = image.get_array().tolist()  # blanks are None
    return held


def written(values: dict[str, Any]) -> dict[str, list[Any]]:
    """The series and tables of a file of values, by gid."""
    return {
        f"{layer['layer']}/{name}": x
        for layer in values["layers"]
        for name, x in layer.items()
        if type(x) is list
    }


@pytest.mark.slow(days=28, group="costly", turn="profiling/test_memory_picture")
def test_picture_and_file_hold_equal_values(found):
    picture, folder = found
    values = json.loads((folder / "new" / "memory.json").read_text(encoding="utf-8"))
    assert (folder / "new" / "memory.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    kinds = [layer["kind"] for layer in values["layers"]]
    assert kinds == ["neural memory", "neural memory", "slots"] * 2
    assert shown(picture.figure) == written(values)
    assert len(written(values)) == 6 * 3
    axis = picture.figure.axes[0]
    assert [text.get_text() for text in axis.get_xticklabels()] == values["labels"]
    assert values["labels"] == ["⟨BOS⟩", *"a=4711,␣b=23."]


@pytest.mark.slow(days=28, group="costly", turn="profiling/test_memory_picture")
def test_a_long_passage_goes_on_in_the_next_line(found):
    values = json.loads(json.dumps(found[0].values))
    for layer in values["layers"]:
        long = {name: x * 13 if name in ("surprise", "norm", "alpha") else x for name, x in layer.items()}
        layer.update(long)
    values["labels"] = values["labels"] * 13
    assert shown(draw(values)) == written(values)


@pytest.mark.slow(days=28, group="costly", turn="profiling/test_memory_picture")
def test_tensorboard_shows_the_same_picture(found):
    picture, folder = found
    (logged,) = events(folder).Images("eval/memory")
    assert logged.step == 7
    assert logged.encoded_image_string == (folder / "new" / "memory.png").read_bytes() == picture.png


@pytest.mark.slow(days=28, group="costly", turn="profiling/test_memory_picture")
def test_figures_are_those_of_the_models_own_pass(found, params):
    """Against what training logs of the same passage, by layer: means over writes, or over tokens."""
    values, edge = found[0].values, 3 * CHUNK
    ids = jnp.asarray(values["ids"], jnp.int32)[None]
    _, sown = jax.jit(lambda p: MODEL.apply({"params": p}, ids, mutable=["metrics"]))(params)
    blocks = sown["metrics"]["stack"]["periods"]
    for i, layer in enumerate(values["layers"]):
        period, place = divmod(i, 3)
        mixer = blocks[f"block_{place}"]["mixer"]
        mixer = mixer.get("memory", mixer)
        logged = {name: x[0].value[period] for name, x in mixer.items()}
        if layer["kind"] == "slots":
            used = [[x is not None for x in column] for column in zip(*layer["usage"], strict=True)]
            assert_close(jnp.mean(jnp.asarray(used, jnp.float32)[1:]), logged["slot_utilisation"])
            continue
        assert_close(jnp.float32(np.mean(layer["surprise"][:edge])), logged["memory_surprise"])
        assert_close(jnp.float32(np.mean(layer["norm"][CHUNK::CHUNK])), logged["memory_norm"])
        assert_close(jnp.float32(np.mean(layer["alpha"])), logged["memory_alpha"])


@pytest.mark.slow(days=28, group="long")
def test_slots_are_those_of_the_streamed_state(found, params):
    values = found[0].values
    ids = jnp.asarray(values["ids"][: 3 * CHUNK], jnp.int32)[None]
    state = MODEL.init_state(1, num_bytes=16)
    _, state = jax.jit(lambda p: MODEL.apply({"params": p}, ids, state, method="stream"))(params)
    memory, bank = (state.stack.periods[place].carry for place in (1, 2))
    for period in range(2):
        mac, slots = values["layers"][3 * period + 1], values["layers"][3 * period + 2]
        norms = jnp.sqrt(jnp.sum(jnp.square(memory.memory.weights[0][period, 0]), (1, 2)))
        assert_close(jnp.float32(mac["norm"][-1]), jnp.mean(norms))
        valid = np.asarray(bank.bank.valid)[period, 0].ravel()
        for name in ("usage", "age"):
            last = [row[-1] for row in slots[name]]
            assert [x is not None for x in last] == valid.tolist()
            held = np.asarray(getattr(bank.bank, name))[period, 0].ravel()[valid]
            assert_close(
                jnp.asarray([x for x in last if x is not None], jnp.float32), held.astype(np.float32)
            )
        reads = np.array(slots["reads"]).reshape(2, SLOTS, -1).sum(1)
        assert (reads[:, :CHUNK] == 0).all()
        assert ((reads[:, CHUNK:] > 0) & (reads[:, CHUNK:] <= 1)).all()


def test_what_cannot_be_drawn_is_refused(params):
    window = StackConfig(DIM, 1, "A", MIXERS, mlp_dim=0)
    plain = ByteLMConfig(stack=window).build()
    weights = drawn(plain, jnp.zeros((1, 8), jnp.int32))["params"]
    with pytest.raises(
        ValueError, match="no layer of this ByteLM has a memory: give its stack NeuralMemoryConfig"
    ):
        plot_memory(plain, TEXT, params=weights)
    with pytest.raises(ValueError, match="ByteLM comes without parameters: pass params, or a run"):
        plot_memory(MODEL, TEXT)
    with pytest.raises(ValueError, match="BLT cuts bytes into patches"):
        plot_memory(BLTConfig().build(), TEXT, params=weights)
    with pytest.raises(ValueError, match=r"one row of bytes or ids, got shape \(0,\)"):
        plot_memory(MODEL, np.zeros(0, np.int32), params=params)
    with pytest.raises(ValueError, match=r"bytes or ids, got text 'a=4711, b=23\.': call its encode\(\)"):
        plot_memory(MODEL, TEXT.decode(), params=params)
    for beyond in (-1, 999):
        with pytest.raises(
            ValueError, match=rf"ids must lie in 0\.\.259, got {min(beyond, 5)}\.\.{max(beyond, 5)}"
        ):
            plot_memory(MODEL, np.asarray([5, beyond]), params=params)
    with pytest.raises(ValueError, match="2 labels do not name 14 ids"):
        plot_memory(MODEL, TEXT, params=params, labels=("a", "b"))


@pytest.mark.slow(days=28, group="costly", every="B-*")
@pytest.mark.parametrize(
    ("pattern", "name", "first"),
    [("J", "memory_1", "surprise"), ("C", "memory_1", "surprise"), ("B", "sink", "reads")],
)
def test_figures_that_are_not_finite_name_layer_and_parameters(
    pattern: str, name: str, first: str, tmp_path
) -> None:
    model = ByteLMConfig(stack=StackConfig(DIM, 2, f"A{pattern}", MIXERS, mlp_dim=0)).build()

    def broken(path: Any, leaf: Any) -> Any:
        return leaf * jnp.nan if path[-1].key == name else leaf

    params = jax.tree_util.tree_map_with_path(broken, drawn(model, jnp.zeros((1, 8), jnp.int32))["params"])
    told = rf"{first} of the memory in layer 1 is nan under this passage; parameters stack/.*/{name} hold NaN"
    with pytest.raises(ValueError, match=told):
        plot_memory(model, TEXT, params=params, out=tmp_path / "memory")
    assert not list(tmp_path.iterdir())


def test_a_command_draws_a_part_of_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_bytes(b"0123456789")
    asked = {}

    def plot(run, ids, *, what, out, log):
        assert what == "memory"
        asked.update(run=run, ids=ids.tolist(), out=out)
        if log is not None:
            log.image(3, memory_picture.NAME, plain.png)
        return plain

    numbers = {"surprise": [1.0], "norm": [2.0], "alpha": [0.5]}
    values = {"labels": ["a"], "layers": [{"layer": 0, "kind": "neural memory", "chunk_size": 4, **numbers}]}
    plain = memory_picture.MemoryPicture(draw(values), values)
    run = SimpleNamespace(recipe=SimpleNamespace(data=DataConfig()))
    monkeypatch.setattr(jaxblt, "load", lambda run_dir, *, step: run)
    monkeypatch.setattr(memory_picture, "plot_memory", plot)
    memory("runs/titan", str(tmp_path / "text.txt"), start=8, out="x")
    assert asked == {"run": run, "ids": [1, ord("8") + 4, ord("9") + 4], "out": "x"}
    assert "layers: 1, ids: 3" in capsys.readouterr().out
    memory(str(tmp_path), str(tmp_path / "text.txt"), length=2, tensorboard=True)
    assert [image.step for image in events(tmp_path).Images("eval/memory")] == [3]
    with pytest.raises(ValueError, match=r"leave .* which has 10 bytes"):
        memory("runs/titan", str(tmp_path / "text.txt"), start=10)
