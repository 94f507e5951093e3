"""Runs a worker module as several JAX processes on this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def worker_env(devices: int, **extra: str) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        **extra,
    }


def run_processes(module: str, *arguments: str, count: int, devices: int, timeout: float = 120) -> list[str]:
    """Standard outputs by process; raises with all output if one fails."""
    flags = {"JAXBLT_COORDINATOR": f"127.0.0.1:{free_port()}", "JAXBLT_NUM_PROCESSES": str(count)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=worker_env(devices, JAXBLT_PROCESS_ID=str(rank), **flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in running]
    finally:
        for process in running:
            process.kill()
    told = "\n".join(
        f"== process {rank} ended with {process.returncode}\n{out}\n{err[-4000:]}"
        for rank, (process, (out, err)) in enumerate(zip(running, outputs, strict=True))
    )
    assert all(process.returncode == 0 for process in running), told
    return [out for out, _ in outputs]
