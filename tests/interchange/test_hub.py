"""Runs pushed to a hub on localhost and read from there."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxblt
from jaxblt.cli.main import main
from jaxblt.interchange.hub import push_run
from tests.remote.hub_server import Repositories, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repositories]:
    import huggingface_hub
    from huggingface_hub import constants

    with serving() as (address, repositories):
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.setenv("HF_TOKEN", "hf_written_here")
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield repositories


@pytest.mark.slow(days=28, group="costly")
def test_a_pushed_run_is_read_from_the_hub_and_replaced_only_if_asked(hub, files, capsys):
    main(["push", str(files / "bytes"), "hf://owner/small", "--limits", "Reads nothing."])
    assert capsys.readouterr().out == "uploaded step 7; next: jaxblt evaluate hf://owner/small\n"
    (stored,) = hub.values()
    assert stored["README.md"].startswith(b"---\nlibrary_name: jaxblt\n---\n\n# ")
    assert b"Reads nothing." in stored["README.md"]
    here, there = jaxblt.load(files / "bytes"), jaxblt.load("hf://owner/small")
    assert there.step == 7
    assert there.recipe == here.recipe
    jax.tree.map(np.testing.assert_array_equal, there.params, here.params)
    with pytest.raises(
        FileExistsError, match="hf://owner/small holds a run: name another repository, or pass"
    ):
        push_run(files / "bytes", "hf://owner/small")
    stored |= {"checkpoints/3/old": b"", "metrics.jsonl": b"of the run that was there"}
    push_run(files / "bytes", "hf://owner/small", overwrite=True)
    assert not {"checkpoints/3/old", "metrics.jsonl"} & set(stored)


@pytest.mark.parametrize("url", ["hf://owner", "s3://owner/name", "owner/name", "hf://datasets/name"])
def test_what_is_no_repository_is_told(url: str):
    with pytest.raises(
        ValueError, match=f"{url} names no model repository of the hub, expected hf://owner/name"
    ):
        push_run("english", url)
