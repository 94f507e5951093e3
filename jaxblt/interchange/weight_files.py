"""Folders of Hugging Face models: their config, and the files of their weights."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxblt.training.stored.safe_files import one_line, read_json

MAX_CONFIG = 1 << 20
"""Bytes of a config, at most."""
MOST_INDEX = 1 << 25
"""Bytes of an index of weights, at most."""


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the config of a model.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is no object of JSON.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: expected the folder of a Hugging Face model")
    config = read_json(file, folder, most=MAX_CONFIG)
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds {config!r:.40}, expected settings by name")
    return config


def read_whole(
    settings: Mapping[str, Any], field: str, where: str, *, default: int | None = None, least: int = 1
) -> int:
    """Return a setting that is a whole number, or raise ValueError."""
    value = settings.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}.{field} is {value!r:.40}, expected a whole number of at least {least}")
    return value


def weight_files(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the safetensors files of a model: one, or those that an index names."""
    one, index = Path(folder) / "model.safetensors", Path(folder) / "model.safetensors.index.json"
    if one.is_file() or not index.is_file():
        yield one
        return
    try:
        names = set(read_json(index, folder, most=MOST_INDEX)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of weights: {one_line(error)}") from error
    for name in sorted(names):
        if Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, which lies outside of the folder")
        yield Path(folder) / name
