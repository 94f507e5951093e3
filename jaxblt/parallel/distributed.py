"""Several processes as one: start, first exchange, and global arrays from each process's rows."""

import itertools
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxblt.parallel.launch import Launch, find_launch

NAME_BYTES = 64
GRACE_S = 60


class DistributedError(RuntimeError):
    """The processes of a run did not find or answer each other."""


def _within[T](seconds: float, call: Callable[[], T]) -> T:
    """Return `call()`, or raise TimeoutError.

    What hangs in the network can only be left behind, in a thread.
    """
    outcome: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            errors.append(error)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    worker.join(seconds)
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return outcome[0]


def init_distributed(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: int = 300,
) -> Launch | None:
    """Join the processes of a run; call it before any JAX computation.

    With one process it does nothing. What is not given comes from the environment, see `find_launch`. Ends with an
    exchange among all, so that a network that cannot carry one shows now.

    Args:
      coordinator: "host:port" of process 0, reachable from all.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      timeout_s: to wait for the others.

    Raises:
      ValueError: arguments and environment do not tell enough.
      DistributedError: the others did not come or did not answer in time.
    """
    launch = find_launch(
        os.environ, coordinator=coordinator, num_processes=num_processes, process_id=process_id
    )
    if launch is None:
        return None

    def join() -> None:
        jax.distributed.initialize(
            coordinator_address=launch.coordinator,
            num_processes=launch.num_processes,
            process_id=launch.process_id,
            local_device_ids=launch.local_device,
            # Stop before JAX's own limit, at which it ends the process without an exception.
            initialization_timeout=timeout_s + GRACE_S,
        )

    who = f"process {launch.process_id} of {launch.num_processes} ({launch.source})"
    try:
        _within(timeout_s, join)
    except TimeoutError as error:
        raise DistributedError(
            f"{who} did not join at {launch.coordinator} within {timeout_s} s: are all processes started, is the "
            "address that of process 0, and its port open to all?"
        ) from error
    except RuntimeError as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DistributedError(f"{who} could not join at {launch.coordinator}: {reason}") from error
    first_exchange(timeout_s=timeout_s)
    return launch


def first_exchange(*, timeout_s: float = 300.0) -> list[tuple[str, int]]:
    """Gather host name and number of devices of every process, over the network of training.

    Raises:
      DistributedError: it failed, or took longer than `timeout_s`.
    """
    mine = np.zeros(NAME_BYTES + 1, np.int32)
    name = socket.gethostname().encode()[:NAME_BYTES]
    mine[: len(name)] = list(name)
    mine[-1] = jax.local_device_count()
    try:
        rows = np.atleast_2d(_within(timeout_s, lambda: multihost_utils.process_allgather(mine)))
    except (TimeoutError, RuntimeError) as error:
        raise DistributedError(
            f"the first exchange among {jax.process_count()} processes failed ({error}). This is process "
            f"{jax.process_index()}, on {socket.gethostname()} with {jax.local_device_count()} devices. Look "
            "for one that died, or hosts whose interfaces differ (NCCL_SOCKET_IFNAME); try NCCL_DEBUG=INFO"
        ) from error
    return [(bytes(int(c) for c in row[:-1] if c).decode(), int(row[-1])) for row in rows]


def process_table(*, timeout_s: float = 300.0) -> str:
    """Return processes, hosts and devices, one line a process; every process must call it."""
    kinds = {process: set[str]() for process in range(jax.process_count())}
    for device in jax.devices():
        kinds[device.process_index].add(device.device_kind)
    lines = [f"{'process':>7}  {'host':<24}  devices"]
    for process, (host, count) in enumerate(first_exchange(timeout_s=timeout_s)):
        here = "  (this one)" if process == jax.process_index() else ""
        lines.append(f"{process:>7}  {host:<24}  {count} x {', '.join(sorted(kinds[process]))}{here}")
    return "\n".join(lines)


def local_rows(sharding: NamedSharding, batch_size: int) -> tuple[int, int]:
    """Return the first row, and the one past the last, that this process's devices hold.

    They hold these rows of a global batch at their full length.

    Raises:
      ValueError: the batch does not divide among the shards.
    """
    axes = sharding.spec[0] if len(sharding.spec) else None
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    shards = int(np.prod([sharding.mesh.shape[name] for name in names], dtype=np.int64))
    if batch_size % shards:
        raise ValueError(
            f"a batch of {batch_size} rows does not divide among {shards} shards "
            f"({dict(sharding.mesh.shape)}): use a multiple of {shards}"
        )
    rows_only = NamedSharding(sharding.mesh, PartitionSpec(axes))
    held = rows_only.addressable_devices_indices_map((batch_size,)).values()
    spans = sorted({index[0].indices(batch_size)[:2] for index in held if index is not None})
    if any(before[1] != after[0] for before, after in itertools.pairwise(spans)):
        raise ValueError(
            f"the devices of process {jax.process_index()} hold rows {spans}, with gaps: reorder the mesh"
        )
    return spans[0][0], spans[-1][1]


def make_global(local: Any, sharding: NamedSharding, *, batch_size: int) -> Any:
    """Make one global array for each NumPy array of `local`, whose rows are this process's.

    Args:
      local: pytree of arrays `[rows, ...]`, the rows that `local_rows(sharding, batch_size)` names, whole.
      sharding: of `[B, T, ...]`, see `batch_sharding`; axes beyond an array's rank are left out.
      batch_size: B, rows of all processes together.

    Raises:
      ValueError: an array has another number of rows than this process should bring.
    """
    start, stop = local_rows(sharding, batch_size)

    def place(array: np.ndarray) -> jax.Array:
        if array.shape[0] != stop - start:
            raise ValueError(
                f"process {jax.process_index()} brought {array.shape[0]} rows of a batch of {batch_size}; "
                f"its devices hold rows {start} to {stop - 1}: bring these {stop - start}"
            )
        spec = PartitionSpec(*sharding.spec[: array.ndim])
        return jax.make_array_from_process_local_data(
            NamedSharding(sharding.mesh, spec), array, (batch_size, *array.shape[1:])
        )

    return jax.tree.map(place, local)
