"""Runs on the Hugging Face hub: one checkpoint, what it needs, and a card; `jaxblt.load` reads them there."""

import os
import re
from pathlib import Path
from typing import Any, Literal

from jaxblt.interchange.card import make_card
from jaxblt.remote import url_of
from jaxblt.training.stored.remote_run import CONFIG, readable

REPOSITORY = re.compile(r"hf://([\w.-]+/[\w.-]+)")
FRONT = "---\nlibrary_name: jaxblt\n---\n\n"
"""What the hub reads of a card."""


def push_run(
    run_dir: str | os.PathLike[str],
    url: str,
    *,
    step: int | Literal["best"] | None = None,
    licence: str = "",
    limits: str = "",
    private: bool = False,
    overwrite: bool = False,
) -> int:
    """Upload a run to a model repository of the hub, in one commit; return the step of its checkpoint.

    The repository is made where there is none. `HF_TOKEN` or `hf auth login` says who uploads.

    Args:
      run_dir: folder of the run, or the name of one that comes with jaxblt.
      url: "hf://owner/name".
      step: of the checkpoint; None for the newest, "best" for that of the best evaluation.
      licence, limits: of the card, see `make_card`.
      private: whether a repository that is made is.
      overwrite: replace the run that the repository holds.

    Raises:
      ValueError: the URL names no repository.
      FileExistsError: the repository holds a run, and it is not to be replaced.
      FileNotFoundError: there is no such run or step.
      ImportError: huggingface_hub is missing.
    """
    from jaxblt.run import load

    found = REPOSITORY.fullmatch(url_of(url) or url)
    if found is None or found[1].startswith("datasets/"):
        raise ValueError(f"{url} names no model repository of the hub, expected hf://owner/name")
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ImportError(f"push needs huggingface_hub ({error}): pip install 'jaxblt[remote]'") from error
    api, repository = HfApi(), found[1]
    step = load(run_dir, step=step).step
    card = FRONT + make_card(run_dir, step=step, licence=licence, limits=limits)
    api.create_repo(repository, private=private, exist_ok=True)
    there = api.list_repo_files(repository)
    if CONFIG in there and not overwrite:
        raise FileExistsError(f"hf://{repository} holds a run: name another repository, or pass overwrite")
    with readable(run_dir, step) as folder:
        operations = _operations(folder, step, card.encode(), there)
        api.create_commit(repository, operations, commit_message=f"Upload step {step} by jaxblt")
    return step


def _operations(folder: Path, step: int, card: bytes, there: list[str]) -> list[Any]:
    """Return what a commit adds, and removes of the run that was there."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    kept = [folder / CONFIG, folder / "metrics.jsonl"]
    kept += sorted([*(folder / "checkpoints" / str(step)).rglob("*"), *(folder / "frozen").rglob("*")])
    added = {str(file.relative_to(folder)): file for file in kept if file.is_file()}
    ours = ("checkpoints/", "frozen/", "metrics.jsonl")
    old = [name for name in there if name.startswith(ours) and name not in added]
    return [
        CommitOperationAdd("README.md", card),
        *(CommitOperationAdd(name, file) for name, file in added.items()),
        *map(CommitOperationDelete, old),
    ]
