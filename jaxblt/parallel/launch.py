"""The number of this process among all, and the first one's address: from arguments, flags or the scheduler."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PORT = 8476


@dataclass(frozen=True)
class Launch:
    """The facts that a process needs to find the others.

    Attributes:
      coordinator: "host:port" of process 0.
      num_processes: of the whole run.
      process_id: of this one.
      local_device: the GPU of this process where a host runs one process a GPU, else None (all it sees).
      source: where this was learnt, for messages.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_device: int | None
    source: str


@dataclass(frozen=True)
class _Found:
    coordinator: str | None = None
    num_processes: str | int | None = None
    process_id: str | int | None = None
    local_device: int | None = None
    source: str = ""


def _first(*values: str | int | None) -> str | int | None:
    return next((value for value in values if value not in (None, "")), None)


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: "gpu[07-09,12],login1" gives "gpu07"."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist.strip())
    if match is None:
        raise ValueError(f"no host in the SLURM node list {nodelist!r}")
    return match[1] + (match[2] or "") + (match[3] or "")


def _port_of_job(job: str) -> int:
    """Return a port above 61440 that two jobs on one host are unlikely to share."""
    return 61440 + int(re.sub(r"\D", "", job) or 0) % 4096


def _local_device(env: Mapping[str, str], index: str | None, count: str | None) -> int | None:
    """Return the index of the one GPU that a process with neighbours takes, or None.

    It takes none by index if the scheduler shows it only one anyway.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if index is None or count is None or int(count) < 2 or (visible is not None and "," not in visible):
        return None
    return int(index)


def _slurm(env: Mapping[str, str]) -> _Found:
    tasks = _first(env.get("SLURM_STEP_NUM_TASKS"), env.get("SLURM_NTASKS"))
    nodes = _first(env.get("SLURM_STEP_NODELIST"), env.get("SLURM_JOB_NODELIST"))
    here = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return _Found(
        coordinator=f"{first_host(str(nodes))}:{_port_of_job(env['SLURM_JOB_ID'])}" if nodes else None,
        num_processes=tasks,
        process_id=env.get("SLURM_PROCID"),
        local_device=_local_device(env, env.get("SLURM_LOCALID"), here[0] if here else None),
        source="SLURM",
    )


def _open_mpi(env: Mapping[str, str]) -> _Found:
    size, local_size = env["OMPI_COMM_WORLD_SIZE"], env.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    launcher = re.match(r"(\d+)\.\d+;tcp6?://\[?([^,:\]]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    coordinator = None
    if launcher is not None:
        coordinator = f"{launcher[2]}:{_port_of_job(launcher[1])}"
    elif size == local_size:
        coordinator = f"127.0.0.1:{_port_of_job(env.get('PMIX_NAMESPACE', ''))}"
    rank = env.get("OMPI_COMM_WORLD_LOCAL_RANK")
    return _Found(
        coordinator, size, env.get("OMPI_COMM_WORLD_RANK"), _local_device(env, rank, local_size), "Open MPI"
    )


def _scheduler(env: Mapping[str, str]) -> _Found:
    if "OMPI_COMM_WORLD_SIZE" in env:
        return _open_mpi(env)
    if "SLURM_JOB_ID" in env and "SLURM_PROCID" in env:
        return _slurm(env)
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return _Found(process_id=env["JOB_COMPLETION_INDEX"], source="Kubernetes")
    return _Found()


def find_launch(
    env: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Launch | None:
    """Return the launch that arguments and environment describe; None for a single process.

    Each value comes from the first source that has it: the arguments; the variables `JAXBLT_COORDINATOR`,
    `JAXBLT_NUM_PROCESSES` and `JAXBLT_PROCESS_ID`; the scheduler. Schedulers are Open MPI, SLURM, and a Kubernetes
    indexed Job or JobSet. Kubernetes tells only the process id: the pod's environment must set the other two.

    Raises:
      ValueError: something is missing, is no number, or is out of range.
    """
    found = _scheduler(env)
    address = _first(coordinator, env.get("JAXBLT_COORDINATOR"), found.coordinator)
    count = _first(num_processes, env.get("JAXBLT_NUM_PROCESSES"), found.num_processes)
    index = _first(process_id, env.get("JAXBLT_PROCESS_ID"), found.process_id)
    if (count is None and address is None) or (count is not None and _integer("num_processes", count) == 1):
        return None
    known = {"coordinator": address, "num_processes": count, "process_id": index}
    if missing := [name for name, value in known.items() if value is None]:
        raise ValueError(
            f"several processes, but {' and '.join(missing)} unknown ({known}): tell init_distributed, or "
            f"set {', '.join('JAXBLT_' + name.upper() for name in missing)}"
        )
    total, rank = _integer("num_processes", count), _integer("process_id", index)
    if not 0 <= rank < total:
        raise ValueError(f"process_id={rank} of num_processes={total}: expected 0 to {total - 1}")
    address = str(address) if re.search(r":\d+$", str(address)) else f"{address}:{DEFAULT_PORT}"
    return Launch(address, total, rank, found.local_device, found.source or "arguments or JAXBLT_ variables")


def _integer(name: str, value: str | int | None) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ValueError(f"{name}={value!r} is not a whole number") from None
