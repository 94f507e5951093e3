"""Folders that `datasets` writes with `save_to_disk`: which Arrow files they hold, in order."""

import json
from pathlib import Path


def saved_files(folder: Path) -> list[Path] | None:
    """Return the Arrow files of a saved dataset in order, or None for another folder.

    Raises:
      IsADirectoryError: the folder holds several splits, of which one is to be named.
      FileNotFoundError: a file that the folder lists is missing.
      ValueError: `state.json` does not list files of the folder, or a list of rows goes with them.
    """
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    if splits.is_file():
        names = _json(splits).get("splits", [])
        raise IsADirectoryError(
            f"{str(folder)!r} holds the splits {names}: name one, such as {str(folder / 'train')!r}"
        )
    if not state.is_file():
        return None
    held = _json(state)
    if held.get("_indices_data_files") or held.get("_indices_files"):
        raise ValueError(
            f"{str(state)!r} names rows apart from the data: save the dataset anew after flatten_indices()"
        )
    try:
        names = [str(file["filename"]) for file in held["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{str(state)!r} lists no _data_files: save the dataset anew with save_to_disk"
        ) from error
    for name in names:
        if Path(name).name != name:
            raise ValueError(
                f"{str(state)!r} names {name!r}, which lies outside of its folder: save the dataset anew"
            )
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{str(folder / name)!r} is missing, which {str(state)!r} lists: copy the folder again"
            )
    return [folder / name for name in names]


def _json(file: Path) -> dict:
    try:
        held = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(file)!r} is not JSON ({error}): save the dataset anew") from error
    if not isinstance(held, dict):
        raise ValueError(
            f"{str(file)!r} holds a {type(held).__name__}, expected an object: save the dataset anew"
        )
    return held
