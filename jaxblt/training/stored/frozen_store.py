"""Frozen trees on disk: each once a run, in a folder that its content hash names.

`<run_dir>/frozen/<content hash>/0` is laid out as the checkpoint of a step. It holds the tree alone.
Nothing deletes it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxblt.precision.weights import to_stored
from jaxblt.training.state import Frozen, content_hash, freeze
from jaxblt.training.stored.checkpoint import Checkpointer, restore
from jaxblt.training.stored.integrity import CheckpointCorrupt, StateMismatch
from jaxblt.training.stored.resolved import FROZEN, checkpoint_dir
from jaxblt.training.stored.safe_files import one_line


def frozen_dir(run_dir: str | os.PathLike[str], content_hash: str = "") -> Path:
    """Return where a run keeps its frozen trees, or the one of this hash."""
    return Path(run_dir) / FROZEN / content_hash


def write_frozen(run_dir: str | os.PathLike[str], frozen: Mapping[str, Frozen]) -> None:
    """Write the trees that the folder lacks, and return once they are on disk; every process calls it."""
    for tree in frozen.values():
        with Checkpointer(frozen_dir(run_dir, tree.content_hash)) as folder:
            if not folder.steps():
                folder.save(0, to_stored(tree.params))


def read_frozen(
    run_dir: str | os.PathLike[str], name: str, expected: str, abstract: Any, *, step: int | None = None
) -> Frozen:
    """Read a run's frozen tree, once its content is known to have the `expected` hash; every process calls it.

    Args:
      run_dir: of the run.
      name: of the tree.
      expected: its content hash, from the run's config.
      abstract: of the tree, as of `restore`.
      step: of the checkpoint to look into if the run was begun when each step held the tree; None for the newest.

    Raises:
      FileNotFoundError: the folder of the tree is missing.
      StateMismatch: it holds another tree: another hash, other names, shapes or dtypes.
      CheckpointCorrupt: it is damaged.
    """

    def check(tree: Any, where: str) -> None:
        found = content_hash(tree)
        if found != expected:
            raise StateMismatch(
                f"{where} holds another tree than the run's frozen {name!r}: its content hash is {found}, "
                f"config.json names {expected}: put back a copy of the right one"
            )

    folder = frozen_dir(run_dir, expected)
    try:
        return Frozen(restore(folder, abstract, check=check).state, expected)
    except FileNotFoundError as error:
        return _from_step(run_dir, name, abstract, step, error)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(
            f"the run's frozen {name!r} is damaged, put back a copy of {folder}: {one_line(error)}"
        ) from error


def _from_step(run_dir: Any, name: str, abstract: Any, step: int | None, missing: Exception) -> Frozen:
    """Read the tree of a run from before trees had folders: each step holds it, with the threshold beside it.

    It is hashed anew, for its parameters may have been renamed since. Its bits are checked with the step's.
    """
    try:
        return freeze(restore(checkpoint_dir(run_dir), abstract, step=step, subtree="frozen/params").state)
    except (FileNotFoundError, StateMismatch) as error:
        raise FileNotFoundError(
            f"the run's frozen {name!r} is missing: {one_line(missing)}; put back a copy of that folder"
        ) from error
