"""A local object store, and a cache of its own for each test."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.remote.s3_server import serving


class Store(NamedTuple):
    """A server for s3://, gs:// and http://; its objects by `bucket/key`; names in the order of their uploads."""

    address: str
    objects: dict[str, bytes]
    log: list[str]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as (address, objects, log):
        key = {"gcs_base_url": address, "disable_oauth": True}
        key |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.setenv(name, "x")
        yield Store(address, objects, log)
