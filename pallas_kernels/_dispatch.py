"""The choice of an op's implementation: an explicit table, read in order, and the reasons to pass an entry over."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels._compat import is_symbolic

KERNELS = ("jla", "mosaic_gpu", "triton")
"""How names of implementations begin that are kernels of ours or of an optional package."""


@dataclass(frozen=True)
class Device:
    """The hardware as an op sees it: platform ("cpu", "gpu", "tpu") and CUDA capability, e.g. (9, 0)."""

    platform: str
    capability: tuple[int, int] | None = None
    kind: str = "cpu"


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
      name: "reference", "xla", "cudnn", "mosaic_gpu", "triton", a form of one of these such as "mosaic_gpu_step", or
        "jla" for an optional package.
      run: the function, with the op's signature without `implementation`.
      why_not: returns why this entry cannot run a call, or None. It gets the device and the call's arguments, which may
        be ShapeDtypeStructs.
      rather_not: returns why a later entry is preferred although this one can run, or None. Ignored if the caller names
        this entry.
    """

    name: str
    run: Callable[..., Any]
    why_not: Callable[..., str | None] = lambda device, *args, **options: None
    rather_not: Callable[..., str | None] = lambda device, *args, **options: None

    def cannot_run(self, device: Device, *args: Any, **options: Any) -> str | None:
        """Return why this entry cannot run a call, or None.

        A reference takes all sizes that `jax.export` leaves open. XLA's programs take open numbers of rows, the first
        axis of an array. Kernels take none, as a number of programs follows from each.
        """
        if self.name != "reference" and (size := _open_size(args, 1)) is not None:
            return f"it is compiled for one length, and the size {size} is symbolic"
        if self.name.startswith(KERNELS) and (size := _open_size(args, 0)) is not None:
            return f"it is compiled for one number of rows, and the size {size} is symbolic"
        return self.why_not(device, *args, **options)

    def passed_over(self, device: Device, *args: Any, **options: Any) -> str | None:
        """Return why a call that names no entry goes on to the next one, or None."""
        reason = self.cannot_run(device, *args, **options)
        return self.rather_not(device, *args, **options) if reason is None else reason


def _open_size(args: Any, first: int) -> Any:
    """Return a size that `jax.export` leaves open, of the axes of an array from `first` on, or None."""
    sizes = (size for x in jax.tree.leaves(args) for size in getattr(x, "shape", ())[first:])
    return next(filter(is_symbolic, sizes), None)


_RECORDERS: ContextVar[tuple[list[str], ...]] = ContextVar("recorders", default=())
_EXPLAINING: ContextVar[bool] = ContextVar("explaining", default=False)
# Keep these in JAX's context: with a ContextVar, JAX would reuse inside a block what it traced outside.
_REFERENCE = jax.make_user_context(False)
_TARGET = jax.make_user_context(None)


def current_device() -> Device:
    """Return the device that jit compiles for by default, or that `compiling_for` names."""
    if (target := _TARGET.value) is not None:
        return target
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return as_device(device)


@contextmanager
def compiling_for(device: Any) -> Iterator[None]:
    """Make ops choose for `device` inside the block.

    It is a JAX device that this machine need not have, or a `Device`.
    """
    with _TARGET(device if isinstance(device, Device) else as_device(device)):
        yield


def as_device(device: Any) -> Device:
    """Return a JAX device as ops see it."""
    text = getattr(device, "compute_capability", None)
    capability = None if text is None else (int(text.split(".")[0]), int(text.split(".")[1]))
    return Device(platform=device.platform, capability=capability, kind=device.device_kind)


@contextmanager
def reference_ops() -> Iterator[None]:
    """Make ops choose "reference" inside the block; see `jaxblt`.

    What is traced there has derivatives of any order. An op that is told its implementation by name keeps it. Blocks
    nest, and each thread has its own.
    """
    with _REFERENCE(True):
        yield


def has_reference_ops() -> bool:
    """Return whether this is in a `reference_ops` block, where no `OwnGradient` may be traced."""
    return _REFERENCE.value


def choose(
    op: str,
    table: Sequence[Implementation],
    implementation: str | None,
    device: Device,
    *args: Any,
    **options: Any,
) -> Implementation:
    """Return the named implementation, or the first of the table that is not passed over.

    `record_choices` hears of it. Inside `reference_ops` "reference" counts as named.

    Raises:
      ValueError: the name is unknown, or the named implementation cannot run; the message says why.
    """
    if implementation is None and has_reference_ops():
        implementation = "reference"
    entry = _find(op, table, implementation, device, *args, **options)
    recorders, explaining = _RECORDERS.get(), _EXPLAINING.get()
    if recorders or explaining:
        asked = f"{op}: {entry.name} on {device.kind} (asked for)"
        line = asked if implementation else explain(op, table, device, *args, **options)
        if explaining:
            raise _Explained(line)
        for lines in recorders:
            if line not in lines:
                lines.append(line)
    return entry


@contextmanager
def record_choices() -> Iterator[list[str]]:
    """Collect a line, as of `explain`, on every choice made inside the block.

    Lines are in order and without repeats. Choices are made while a program is traced: a call of a function that is
    already compiled makes none. Blocks nest, and each thread records its own.
    """
    lines: list[str] = []
    token = _RECORDERS.set((*_RECORDERS.get(), lines))
    try:
        yield lines
    finally:
        _RECORDERS.reset(token)


def _find(
    op: str,
    table: Sequence[Implementation],
    implementation: str | None,
    device: Device,
    *args: Any,
    **options: Any,
) -> Implementation:
    if implementation is None:
        for entry in table:
            if entry.passed_over(device, *args, **options) is None:
                return entry
        raise ValueError(
            f"{op}: no implementation can run here\n{explain(op, table, device, *args, **options)}"
        )
    for entry in table:
        if entry.name == implementation:
            reason = entry.cannot_run(device, *args, **options)
            if reason is not None:
                raise ValueError(
                    f"{op}: implementation {implementation!r} cannot run here: {reason}; leave it None for the first "
                    "that can"
                )
            return entry
    names = [entry.name for entry in table]
    raise ValueError(f"{op}: unknown implementation {implementation!r}, expected one of {names} or None")


def explain(op: str, table: Sequence[Implementation], device: Device, *args: Any, **options: Any) -> str:
    """Say in one line what would run for these arguments on `device`, and what was passed over."""
    if has_reference_ops():
        return f"{op}: reference on {device.kind} (asked for)"
    passed = []
    for entry in table:
        reason = entry.passed_over(device, *args, **options)
        if reason is None:
            because = f" ({'; '.join(passed)})" if passed else ""
            return f"{op}: {entry.name} on {device.kind}{because}"
        passed.append(f"not {entry.name}: {reason}")
    return f"{op}: nothing can run on {device.kind} ({'; '.join(passed)})"


def explain_call(operation: Callable[..., Any], device: Device | None, *args: Any, **options: Any) -> str:
    """Say in the line of `explain` what this call of an op would run.

    The op's own checks refuse what they refuse of a call that runs. The call ends where the op chooses. Arrays may be
    ShapeDtypeStructs; None is the device of `current_device`.
    """
    leaves, tree = jax.tree.flatten((args, options))
    # Trace what has no values: what annotates an argument as an array may be checked, and takes no ShapeDtypeStruct.
    shapes = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)}

    def call(traced: dict[int, Any]) -> None:
        args, options = jax.tree.unflatten(tree, [traced.get(i, leaf) for i, leaf in enumerate(leaves)])
        operation(*args, **options)

    token = _EXPLAINING.set(True)
    try:
        with compiling_for(device or current_device()):
            jax.eval_shape(call, shapes)
    except _Explained as explained:
        return str(explained)
    finally:
        _EXPLAINING.reset(token)
    raise AssertionError(f"{operation.__name__} made no choice")


class _Explained(Exception):
    """The end of a call that `explain_call` makes, with its line."""
