"""A run as one safetensors file, and such a file as a run folder.

Entries are named by their paths: `model.embedding.bytes` is a parameter of the model, `frozen.entropy.stack...` one of
the entropy model. The file's text holds the recipe, the step, the content hashes of the frozen trees and the dtype of
the model's parameters. Frozen trees keep the dtype that they are stored in, which their hashes depend on.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxblt.interchange.tensors import (
    Arrays,
    Header,
    check_entries,
    check_new,
    read_header,
    read_tensors,
    write_tensors,
)
from jaxblt.precision.weights import refuse_quantized
from jaxblt.seals import check_seal
from jaxblt.training.experimental.hybrid import without_weights
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.frozen import entropy_dtype, param_shapes
from jaxblt.training.start.setup import boxed_params, make_task
from jaxblt.training.state import ENTROPY, Frozen, freeze
from jaxblt.training.stored.checkpoint import Checkpointer
from jaxblt.training.stored.fitting import check_recipe
from jaxblt.training.stored.frozen_store import write_frozen
from jaxblt.training.stored.resolved import Resolved, checkpoint_dir, recipe_from_json, write_resolved
from jaxblt.training.stored.safe_files import one_line
from jaxblt.training.stored.serialize import to_json
from jaxblt.validation import whole

if TYPE_CHECKING:
    from jaxblt.run import Run

FORMAT, VERSION = "jaxblt", "1"
MODEL, FROZEN = "model", "frozen"
"""The first parts of entries' names."""

Dtype = Literal["float32", "bfloat16"]


class Exported(NamedTuple):
    """The arrays and bytes that were written."""

    arrays: int
    size: int


def alone(recipe: Recipe) -> Recipe:
    """Return the recipe of a file, which holds the whole model once.

    It has no average beside the parameters, and no base below them. Nor does it hold what training compared predictions
    with, or weighed.
    """
    started = {"also_train": (), "experts": (), "fresh": (), "freeze": ()}
    learned = {"train": replace(recipe.train, ema=None), "reference": None}
    return replace(recipe, base_run=None, objective=without_weights(recipe.objective), **started, **learned)


def write_run(
    run: "Run", file: str | os.PathLike[str], *, dtype: Dtype = "float32", overwrite: bool = False
) -> Exported:
    """Write parameters, frozen trees and recipe of a run as one safetensors file; no optimiser.

    Args:
      run: a trained run.
      file: to write.
      dtype: of the model's parameters in the file: "float32" keeps every bit, "bfloat16" rounds them to half the size.
      overwrite: replace a file that is there.

    Raises:
      FileExistsError: the file is there, and is not to be overwritten.
      FileNotFoundError: its folder is not.
      ValueError: `dtype` is another one, or a parameter is not finite.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}, expected 'float32' or 'bfloat16'")
    check_new(file, overwrite=overwrite)
    refuse_quantized((run.params, run.frozen), "a safetensors file")
    params = jax.tree.map(lambda x: np.asarray(x).astype(_stored(x, dtype)), run.params)
    arrays = by_name(params, MODEL)
    for name, tree in run.frozen.items():
        arrays |= by_name(tree.params, f"{FROZEN}.{name}")
    hashes = {name: tree.content_hash for name, tree in run.frozen.items()}
    told = {"recipe": to_json(alone(run.recipe)), "step": str(run.step), "weights": run.weights}
    told["frozen"] = json.dumps(hashes)
    size = write_tensors(file, arrays, {"format": FORMAT, "version": VERSION, "dtype": dtype, **told})
    return Exported(len(arrays), size)


def read_run(file: str | os.PathLike[str], run_dir: str | os.PathLike[str]) -> Exported:
    """Make a run folder, which `jaxblt.load` opens, of a file that `write_run` wrote.

    The file need not be trusted: no code of it runs. Everything is checked before anything is written, and the folder
    appears whole or not at all. It holds no optimiser: train from it by `init_from`.

    Args:
      file: to read.
      run_dir: folder to make; it must not hold anything.

    Raises:
      FileNotFoundError: there is no such file.
      FileExistsError: the folder holds something.
      ValueError: the file is none of `write_run`; or entries are missing, unexpected, or of another shape or dtype than
        its recipe's model (all are named); or a bit is not as it was written; or a parameter is not finite.

    Warns:
      UnsealedWarning: the file is of an earlier version, and has no hash.
    """
    header = read_header(file)
    told = _read_text(file, header)
    shapes, treedef = _model_shapes(told)
    expected = shapes | _frozen_shapes(told, header)
    check_entries(f"{file} does not hold the model of its recipe", header.arrays, expected)
    arrays = read_tensors(file, expected)
    check_seal(file, arrays, header.metadata, ours=True)
    widened = [arrays[name].astype(_widened(arrays[name])) for name in shapes]
    frozen = {name: _frozen_tree(str(file), name, told, arrays) for name in told.frozen}
    write_run_folder(run_dir, told.recipe, jax.tree.unflatten(treedef, widened), frozen, step=told.step)
    return Exported(len(expected), Path(file).stat().st_size)


def write_run_folder(
    run_dir: str | os.PathLike[str],
    recipe: Recipe,
    params: Any,
    frozen: dict[str, Frozen],
    *,
    step: int,
    at_a_time: int | None = None,
) -> None:
    """Write config, one checkpoint and the frozen trees as a run folder, whole or not at all.

    `at_a_time` is that of a `Checkpointer`.

    Raises:
      FileExistsError: the folder holds something.
    """
    with _whole_folder(Path(run_dir)) as partial:
        hashes = {name: tree.content_hash for name, tree in frozen.items()}
        write_resolved(partial, Resolved(recipe, hashes))
        write_frozen(partial, frozen)
        with Checkpointer(checkpoint_dir(partial), at_a_time=at_a_time) as checkpoints:
            checkpoints.save(step, {"params": params})


def by_name(tree: Any, prefix: str) -> dict[str, Any]:
    """Return leaves by path, such as "model.head.norm.scale"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {f"{prefix}.{jax.tree_util.keystr(path, simple=True, separator='.')}": x for path, x in leaves}


class _Text(NamedTuple):
    recipe: Recipe
    step: int
    frozen: dict[str, str]
    dtype: Any


def _read_text(file: Any, header: Header) -> _Text:
    """Read recipe, step, hashes and dtype out of a file's text."""
    found = header.metadata
    if found.get("format") != FORMAT:
        raise ValueError(
            f"{file} has format {found.get('format')!r}, expected {FORMAT!r}: jaxblt import reads files of jaxblt "
            "export, and folders of Hugging Face models"
        )
    if found.get("version") != VERSION:
        raise ValueError(
            f"{file} has version {found.get('version')!r}, expected {VERSION!r}: export it with this jaxblt"
        )
    try:
        recipe = recipe_from_json(found["recipe"])
        frozen = {str(name): str(content) for name, content in json.loads(found["frozen"]).items()}
        step, dtype = int(found["step"]), {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[found["dtype"]]
        whole("step", step, least=0)
        check_recipe(recipe, frozen=ENTROPY in frozen)
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} has text that cannot be read: {one_line(error)}") from error
    return _Text(recipe, step, frozen, dtype)


def _model_shapes(told: _Text) -> tuple[dict[str, jax.ShapeDtypeStruct], Any]:
    """Return shapes of the model's entries by name, as stored, and their tree."""
    shapes = _shapes("model", lambda: nn.meta.unbox(boxed_params(make_task(told.recipe), told.recipe)))
    stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, _stored(x, told.dtype)), shapes)
    return by_name(stored, MODEL), jax.tree.structure(shapes)


def _shapes(what: str, make: Callable[[], Any]) -> Any:
    """Return what `make` makes of a recipe's configs, or raise an error of one line."""
    try:
        return make()
    except Exception as error:
        raise ValueError(f"the {what} of the recipe cannot be built: {one_line(error)}") from error


def _frozen_shapes(told: _Text, header: Header) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes of the frozen trees' entries.

    The entropy model's come from its config, others are known by their hash.
    """
    expected = {}
    for name in told.frozen:
        prefix = f"{FROZEN}.{name}"
        if name == ENTROPY:
            shapes = _shapes("entropy model", lambda: param_shapes(told.recipe.entropy_model))
            dtype = entropy_dtype([x for key, x in header.arrays.items() if key.startswith(f"{prefix}.")])
            stored = jax.tree.map(lambda x, dtype=dtype: jax.ShapeDtypeStruct(x.shape, dtype), shapes)
            expected |= by_name(stored, prefix)
        else:
            expected |= {key: x for key, x in header.arrays.items() if key.startswith(f"{prefix}.")}
    return expected


def _frozen_tree(file: str, name: str, told: _Text, arrays: Arrays) -> Frozen:
    prefix = f"{FROZEN}.{name}."
    paths = {tuple(key.removeprefix(prefix).split(".")): key for key in arrays if key.startswith(prefix)}
    tree = freeze(unflatten_dict({path: arrays[key] for path, key in paths.items()}))
    if tree.content_hash != told.frozen[name]:
        raise ValueError(
            f"{file} holds another frozen {name!r} than was exported: its content hash is {tree.content_hash}, the "
            f"file's text names {told.frozen[name]}: export the run again"
        )
    return tree


def _stored(leaf: Any, dtype: Any) -> Any:
    """Return the dtype in a file: `dtype` for floats, their own for other arrays."""
    return jnp.dtype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype


def _widened(array: np.ndarray) -> Any:
    return _stored(array, jnp.float32)


def check_new_folder(folder: Path) -> None:
    """Raise FileExistsError if a folder holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already, and nothing is overwritten: choose another folder")


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder beside `folder`, renamed to `folder` once the block ends without an error."""
    check_new_folder(folder)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        yield partial
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
