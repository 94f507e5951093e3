"""Checkpoints: asynchronous, readable on any mesh and number of processes, and never trusted blindly.

A step holds the state (arrays) and a JSON object. Nothing is pickled. The one module that knows Orbax.
"""

import json
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from jaxblt.precision.weights import from_stored, has_quantized
from jaxblt.show import show
from jaxblt.training.stored import integrity
from jaxblt.training.stored.integrity import CheckpointCorrupt, StateMismatch
from jaxblt.training.stored.local_path import to_local_path
from jaxblt.training.stored.quiet import silence_leftovers
from jaxblt.training.stored.renamed import as_stored, with_current_names

logger = logging.getLogger(__name__)

LEAST_SHARE = 1 << 20
"""Bytes of a replicated array that a device copies to the host, at least."""


class Restored(NamedTuple):
    """A checkpoint read back: the pytree of arrays, the JSON object saved beside it, and its step."""

    state: Any
    meta: dict[str, Any]
    step: int

    __repr__ = show


def _context(
    *, partial_load: bool = False, on_commit: Any = None, at_a_time: int | None = None
) -> ocp.Context:
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="meta")
    context = ocp.Context()
    context.checkpointables.registry = registry
    context.pytree.loading.partial_load = partial_load
    # Orbax would compile a program that slices, for every shape of a replicated array
    context.array.saving.min_slice_bytes_for_replica_parallel = LEAST_SHARE
    context.asynchronous.post_finalization_callback = on_commit
    context.memory.transfer_concurrent_bytes = at_a_time
    context.memory.write_concurrent_bytes = at_a_time
    return context


def list_steps(directory: str | epath.PathLike) -> list[int]:
    """List the finished steps below `directory`, ascending; empty if there is none, or no such directory."""
    folder = to_local_path(directory)
    if not folder.exists():
        return []
    return sorted(found.step for found in ocp.path.step.standard_name_format().find_all(folder))


def _agreed_steps(folder: epath.Path) -> list[int]:
    """List the steps that process 0 sees, in every process: another may see one renamed or deleted meanwhile."""
    steps = list_steps(folder)
    if jax.process_count() == 1:
        return steps
    count = int(multihost_utils.broadcast_one_to_all(np.asarray(len(steps), np.int32)))
    if count == 0:
        return []
    mine = np.resize(np.asarray(steps or [0], np.int32), count)
    return [int(step) for step in multihost_utils.broadcast_one_to_all(mine)]


def _nested(path: str, value: Any) -> Any:
    for key in reversed(path.split("/") if path else []):
        value = {key: value}
    return value


def _inside(tree: Any, path: str, where: epath.Path) -> Any:
    for key in path.split("/") if path else []:
        if not isinstance(tree, dict) or key not in tree:
            known = sorted(tree) if isinstance(tree, dict) else type(tree).__name__
            raise StateMismatch(f"{where} holds no {path!r}: at {key!r} there is {known}")
        tree = tree[key]
    return tree


def _place(abstract: Any) -> Any:
    """Place leaves without a sharding on the default device."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def place(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or isinstance(leaf, np.ndarray):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here if sharding is None else sharding)

    return jax.tree.map(place, abstract)


def _cause(error: BaseException) -> BaseException:
    """Return what caused `error`: Orbax wraps it in much else."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    """Return the first words of what caused `error`."""
    cause = _cause(error)
    return f"{type(cause).__name__}: {str(cause).strip()[:300]}"


def _together[T](read: Callable[[], T]) -> T:
    """Call `read()`, which must succeed in every process, or CheckpointCorrupt is raised in every process.

    What another attempt or an older step cannot cure (another state, no memory) is raised as it is.
    """
    error, value = None, None
    silence_leftovers()
    try:
        value = read()
    except (integrity.StateMismatch, jax.errors.JaxRuntimeError):
        raise
    except Exception as caught:
        # Keep Ctrl-C from being taken for damage: an older step would be read, and the command would go on
        if isinstance(_cause(caught), KeyboardInterrupt):
            raise KeyboardInterrupt from caught
        error = caught
    fine = [error is None]
    if jax.process_count() > 1:
        fine = list(multihost_utils.process_allgather(np.asarray(error is None)))
    if error is not None:
        raise CheckpointCorrupt(_reason(error)) from error
    if not all(fine):
        raise CheckpointCorrupt(f"process {fine.index(False)} could not read it")
    return cast(T, value)


class _Request(NamedTuple):
    """A request for parts of a step; see `restore`."""

    abstract: Any
    subtree: str = ""
    leave_out: Collection[str] = ()
    check: Callable[[Any, str], None] = lambda tree, where: None


def _stored(where: epath.Path, request: _Request) -> Any:
    """Read names, shapes and dtypes of a step. One process checks its files first, for all see the same ones."""
    if jax.process_index() == 0:
        integrity.check_files(where)
    stored = ocp.checkpointables_metadata(where).metadata["state"]
    if stored is None:
        raise CheckpointCorrupt(f"{where}: the description of the arrays cannot be read")
    stored = _inside(stored, request.subtree, where)
    integrity.check_room(stored, where)
    if request.leave_out and isinstance(stored, dict):
        stored = {name: part for name, part in stored.items() if name not in request.leave_out}
    return stored


def _fitting(make: Callable[[Any], Any], stored: Any) -> Any:
    """Call `make` with what is stored; if a model does not fit the names there, under today's names.

    An array where the model looks for a module is an error of another kind than a missing name.
    """
    try:
        return make(stored)
    except (StateMismatch, ValueError):
        current = with_current_names(stored)
        if current is stored:
            raise
        return make(current)


def _check_kernels(stored: Any, abstract: Any, where: str) -> None:
    """Raise StateMismatch where weights are quantised and those asked for are not."""
    if has_quantized(from_stored(stored)) and not has_quantized(from_stored(abstract)):
        raise StateMismatch(f"{where} holds quantised weights: name the run that they were made of")


def _read_step(where: epath.Path, request: _Request) -> Restored:
    abstract, subtree = request.abstract, request.subtree
    with _context(partial_load=True):
        stored = _together(lambda: _stored(where, request))
        abstract = _fitting(abstract, stored) if callable(abstract) else abstract
        _check_kernels(stored, abstract, str(where))
        abstract, renamed = as_stored(stored, abstract)
        recast = integrity.check_leaves(stored, abstract, where=str(where), cast=bool(subtree))
        note = _together(lambda: ocp.load_checkpointables(where, {"meta": None}))["meta"]
        asked = {"state": _nested(subtree, _place(abstract))}
        loaded = _together(lambda: ocp.load_checkpointables(where, asked))
    skip = {f"{subtree}/{name}" for name in recast}
    state = _inside(loaded["state"], subtree, where)
    _together(lambda: integrity.check_types(state, abstract))
    _together(lambda: integrity.check_fingerprint(loaded["state"], note["fingerprint"], skip=skip))
    request.check(state, str(where))
    return Restored(renamed(state), note["meta"], int(where.name))


def restore(
    directory: str | epath.PathLike,
    abstract: Any,
    *,
    step: int | None = None,
    subtree: str = "",
    leave_out: Collection[str] = (),
    check: Callable[[Any, str], None] = lambda tree, where: None,
) -> Restored:
    """Read the newest step that is whole, or `step`; change nothing on disk.

    Args:
      directory: holds one folder a step.
      abstract: pytree of `jax.ShapeDtypeStruct` with shardings (of any mesh); or a function that makes one from the
        names, shapes and dtypes of what is stored.
      step: this step and no other; None for the newest.
      subtree: read this part alone, e.g. `"params"`; then dtypes are cast to those of `abstract`.
      leave_out: names at the top of what is read; parts of these names are not read, whether they are there or not.
      check: is given what was read, under the names that it is stored by, and its folder; it raises if they do not fit.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      StateMismatch: it holds other names, shapes or dtypes than `abstract`.
      CheckpointCorrupt: no step could be read.
    """
    folder = to_local_path(directory)
    steps = _agreed_steps(folder)
    if step is not None and step not in steps:
        raise FileNotFoundError(f"no checkpoint of step {step} in {folder}; there are {steps or 'none'}")
    if not steps:
        raise FileNotFoundError(
            f"no checkpoint in {folder}: it should hold a folder a step, e.g. {folder}/100"
        )
    request, reasons, tried = (
        _Request(abstract, subtree, leave_out, check),
        list[CheckpointCorrupt](),
        set[int](),
    )
    candidates = steps[::-1] if step is None else [step]
    while candidates:
        for candidate in candidates:
            try:
                restored = _read_step(folder / str(candidate), request)
            except CheckpointCorrupt as error:
                logger.warning("the checkpoint of step %d in %s cannot be used: %s", candidate, folder, error)
                reasons.append(error)
            else:
                if reasons:
                    logger.warning("fell back to the checkpoint of step %d in %s", candidate, folder)
                return restored
        tried.update(candidates)
        # A run that trains meanwhile removes old steps and writes newer ones
        candidates = [s for s in _agreed_steps(folder)[::-1] if s not in tried] if step is None else []
    listed = "\n  ".join(map(str, reasons))
    raise CheckpointCorrupt(f"no checkpoint in {folder} can be read:\n  {listed}") from reasons[0]


def _is_new(record: logging.LogRecord) -> bool:
    """Return False for what Orbax logs of a failed save, a traceback of a hundred lines: `wait` raises it too."""
    return not (record.exc_info and "orbax" in record.pathname)


class _Named:
    """Has Orbax keep the steps that a function names."""

    def __init__(self, steps: Callable[[], Collection[int]]) -> None:
        self.steps = steps

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return one answer for each of the checkpoints."""
        named = set(self.steps())
        return [checkpoint.step in named for checkpoint in checkpoints]


def _check_readable(folder: epath.Path, step: int) -> None:
    """Raise CheckpointCorrupt unless readers of a folder find a step that was saved, and what describes its arrays."""
    try:
        if step not in list_steps(folder):
            raise FileNotFoundError(f"{folder} lists no step {step}")
        with _context(partial_load=True):
            _stored(folder / str(step), _Request(None))
    except Exception as error:
        raise CheckpointCorrupt(
            f"step {step} was saved in {folder}, and cannot be read: {_reason(error)}; use another folder"
        ) from error


class Checkpointer:
    """Saves and restores the steps of one run. Every process calls every method.

    Args:
      directory: local; made by the first save if absent.
      keep: newest steps kept; at least 2, or there is nothing to fall back to.
      keep_period: steps that are a multiple of it are kept for ever.
      at_a_time: bytes of arrays that are being written at any time; None for all. More than the largest array has.

    Attributes:
      best: gives steps that are kept besides, as long as it names them.
    """

    def __init__(
        self,
        directory: str | epath.PathLike,
        *,
        keep: int = 3,
        keep_period: int | None = None,
        at_a_time: int | None = None,
    ) -> None:
        if keep < 2:
            raise ValueError(f"keep={keep}: keep at least 2 checkpoints, or a damaged one cannot be replaced")
        self.directory = to_local_path(directory)
        self.best: Callable[[], Collection[int]] = tuple
        self._at_a_time = at_a_time
        self._saving: int | None = None
        self._response: Any = None
        # of its own, or the first of two to close would take the other's away
        self._filter = partial(_is_new)
        logging.getLogger("absl").addFilter(self._filter)
        policies = ocp.training.preservation_policies
        # a function: Orbax copies its options deeply
        kept: list[Any] = [policies.LatestN(keep), _Named(lambda: self.best())]
        if keep_period is not None:
            kept.append(policies.EveryNSteps(keep_period))
        self._policy = policies.AnyPreservationPolicy(kept)
        self._manager: ocp.training.Checkpointer | None = None

    def _writer(self) -> ocp.training.Checkpointer:
        """Make the writer at the first save: it makes the directory, and clears it of torn saves in a thread."""
        if self._manager is None:
            self._manager = ocp.training.Checkpointer(
                self.directory,
                # Orbax copies its options deeply: a bound method would arrive bound to a copy of self.
                context=_context(on_commit=lambda: self._list_files(), at_a_time=self._at_a_time),
                preservation_policy=cast(Any, self._policy),
                cleanup_tmp_directories=True,
            )
        return self._manager

    def _list_files(self) -> None:
        """List files once everything is written, before the step gets its final name (or its commit mark)."""
        if jax.process_index() != 0 or self._saving is None:
            return
        name = str(self._saving)
        for entry in self.directory.iterdir():
            if entry.name == name or entry.name.startswith(f"{name}.orbax-checkpoint-tmp"):
                integrity.write_file_list(entry)

    def save(self, step: int, state: Any, meta: dict[str, Any] | None = None) -> None:
        """Start to save; return once `state` has been copied, so its buffers may be donated.

        Waits for the save before it, and raises that one's error if it failed.

        Raises:
          ValueError: `meta` is not JSON, or the step is there already.
        """
        try:
            json.dumps(meta)
        except (TypeError, ValueError) as error:
            raise ValueError(f"meta must be JSON (numbers, strings, lists, dicts): {error}") from error
        self.wait()
        if step in self.steps():
            raise ValueError(
                f"step {step} is saved already in {self.directory}; restore it or use another run"
            )
        state = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, np.generic) else leaf, state)
        note = {"meta": meta or {}, "fingerprint": integrity.fingerprint(state)}
        self._saving = step
        parts = {"state": state, "meta": note}
        self._response = self._writer().save_checkpointables_async(step, parts, force=True)

    def steps(self) -> list[int]:
        """Return the finished steps, ascending, as process 0 sees them."""
        return _agreed_steps(self.directory)

    def latest_step(self) -> int | None:
        """Return the newest finished step; whether it can be read is known only after `restore`."""
        return max(self.steps(), default=None)

    def restore(self, abstract: Any, *, step: int | None = None, leave_out: Collection[str] = ()) -> Restored:
        """Read the newest step that is whole, or `step`, from which the run goes on; errors as of `restore`.

        Newer steps, damaged or left behind, are renamed to `<step>.aside`: the run will save them again.
        """
        self.wait()
        restored = restore(self.directory, abstract, step=step, leave_out=leave_out)
        self._set_aside_beyond(restored.step)
        return restored

    def _set_aside_beyond(self, kept: int) -> None:
        if jax.process_index() == 0:
            for step in [step for step in list_steps(self.directory) if step > kept]:
                number = len(list(self.directory.glob(f"{step}.aside*")))
                target = self.directory / f"{step}.aside{number or ''}"
                (self.directory / str(step)).rename(target)
                logger.warning("continuing from step %d: %s was moved to %s", kept, step, target)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoints set aside")
        if self._manager is not None:
            self._manager.reload()

    def check(self) -> None:
        """Raise the error of a save that failed meanwhile; does not wait for one that is on its way."""
        if self._response is None:
            return
        try:
            self._response.result(timeout=0)
        except TimeoutError:
            return
        except Exception:
            logger.debug("the save of step %s failed", self._saving)
        self.wait()

    def wait(self) -> None:
        """Return when the last save is on disk, as a step that can be read; raise its error if it failed.

        Raises:
          CheckpointCorrupt: it was written, and a reader would not find it or what it needs.
        """
        try:
            if self._manager is not None:
                self._manager.wait()
            if self._response is not None:
                # Free its thread and event loop: each save has its own
                self._response.result()
            if self._saving is not None and jax.process_index() == 0:
                _check_readable(self.directory, self._saving)
        finally:
            self._saving = self._response = None

    def close(self) -> None:
        """Wait, then free threads."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
            logging.getLogger("absl").removeFilter(self._filter)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
