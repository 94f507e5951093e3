"""Exported files can be read by the description of their format alone."""

import json
import struct
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from jaxblt.cli.export import export, write_safetensors
from tests.training.tiny import tiny_recipe


def read(path) -> tuple[dict, dict]:
    """Header and arrays, dtypes as stored."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    rest = content[8 + length :]
    kinds = {"F32": np.float32, "BF16": jnp.bfloat16}
    arrays = {}
    for name, told in header.items():
        if name != "__metadata__":
            start, end = told["data_offsets"]
            arrays[name] = np.frombuffer(rest[start:end], kinds[told["dtype"]]).reshape(told["shape"])
    return header, arrays


def test_a_run_is_one_file_with_its_recipe(tmp_path, monkeypatch, capsys):
    params = {"embed": {"table": jnp.arange(6.0).reshape(2, 3)}, "scale": jnp.float32(2)}
    frozen = {"entropy": SimpleNamespace(params={"w": jnp.ones((3,), jnp.bfloat16)})}
    run = SimpleNamespace(params=params, frozen=frozen, recipe=tiny_recipe(), step=7)
    monkeypatch.setattr(jaxblt, "load", lambda folder, step: run)
    file = tmp_path / "run.safetensors"
    export("runs/x", str(file))
    header, arrays = read(file)
    assert set(arrays) == {"model.embed.table", "model.scale", "frozen.entropy.w"}
    np.testing.assert_array_equal(arrays["model.embed.table"], params["embed"]["table"])
    assert arrays["frozen.entropy.w"].dtype == jnp.bfloat16
    assert arrays["model.scale"].shape == ()
    assert header["__metadata__"]["step"] == "7"
    assert type(run.recipe).from_json(header["__metadata__"]["recipe"]) == run.recipe
    assert f"3 arrays of step 7, {file.stat().st_size:,} bytes" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match="is there already, and nothing is overwritten"):
        export("runs/x", str(file))
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        export("runs/x", str(tmp_path / "none" / "a.safetensors"))
    with pytest.raises(ValueError, match="--step must be at least 0, got -1"):
        export("runs/x", str(tmp_path / "b.safetensors"), step=-1)
    assert [path.name for path in tmp_path.iterdir()] == ["run.safetensors"]


def test_what_the_format_lacks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a is complex64, expected one of float32, "):
        write_safetensors(str(tmp_path / "a"), {"a": np.zeros(1, np.complex64)}, {})
    assert not list(tmp_path.iterdir())
