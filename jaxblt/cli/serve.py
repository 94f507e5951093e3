"""Serves a trained run to clients of OpenAI's API: jaxblt serve RUN_DIR."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxblt.cli.mesh import parse_mesh
from jaxblt.cli.quantize import load_quantized
from jaxblt.precision.weights import Scheme
from jaxblt.remote import refuse_remote
from jaxblt.training.state import Step, Weights
from jaxblt.validation import number, whole

KEY = "JAXBLT_API_KEY"
"""The environment variable of the key that clients must send."""


def serve(
    run_dir: Annotated[str, tyro.conf.Positional],
    host: str = "127.0.0.1",
    port: int = 8000,
    lanes: tuple[str, ...] = ("8x8192",),
    max_waiting: int = 256,
    piece_bytes: int = 1024,
    prefix_mb: int = 0,
    drafts: int | None = None,
    beams: int = 0,
    compiled: Path | None = None,
    request_s: float = 600.0,
    drain_s: float = 60.0,
    name: str | None = None,
    as_trained: bool = True,
    mesh: str | None = None,
    dtype: str | None = None,
    quantize: Scheme | None = None,
    weights: Weights | None = None,
    step: Step | None = None,
) -> None:
    """Answer /v1/completions, /v1/scores, /v1/embeddings and /v1/models until SIGTERM.

    /health, /ready and /metrics tell how it is. If the environment has JAXBLT_API_KEY, clients must send it as a bearer
    token. At SIGTERM it takes no more requests, finishes those that run, and exits with status 0.

    Args:
      run_dir: folder of the run.
      host: address to listen at; the default is of this machine only.
      port: to listen at; 0 takes a free one.
      lanes: rows that decode together and the most bytes of each, prompt included: "8x8192" "1x131072".
      max_waiting: requests that may wait for a row; more are refused with status 429.
      piece_bytes: bytes of prompts that are read between two times that others draw.
      prefix_mb: memory for the states behind prompts, in MiB; prompts that begin alike are read once.
      drafts: bytes to guess from a row's own and to check in one call of the model, 0 to 16; none are by default.
      beams: compile for beam searches of up to so many beams before the first request; others compile when they come.
      compiled: folder in which compiled programs are kept; by default jaxblt's in the user's cache, and none on a CPU.
      request_s: seconds of a request at the most.
      drain_s: seconds after SIGTERM at which requests that still run are cancelled.
      name: of the model in /v1/models; by default the folder's.
      as_trained: prompts are read in the case of the run's data; without it every byte is taken as it is.
      mesh: "tensor=2" for weights that are split over two devices; one device by default.
      dtype: to compute in, "bfloat16" or "float32"; by default the recipe's.
      quantize: read kernels of products in fewer bits: int8, int4, fp8, or w8a8 with activations of 8 bits too.
      weights: "ema" for the parameters' average, "raw" for the parameters; by default the average if the run has one.
      step: of the checkpoint, or "best" for that of the best evaluation; by default the newest.

    Raises:
      ImportError: the extra `serve` is not installed.
      ValueError: an option is out of range, or the model cannot generate.
      OSError: the address is taken.
    """
    from jaxblt.inference.engine import Engine
    from jaxblt.inference.server import Limits, Service, listen, run_server

    check_installed()
    whole("--port", port, least=0, most=65_535)
    for option, value in (("--request-s", request_s), ("--drain-s", drain_s)):
        number(option, value, above=0)
    config = make_config(lanes, max_waiting, piece_bytes, prefix_mb, drafts, beams)
    # Look for the address now: compiling takes minutes
    listen(host, port).close()
    with _keeping_programs(programs_folder("--compiled", compiled)):
        devices = read_mesh(mesh, quantize)
        run = load_quantized(run_dir, quantize, step=step, weights=weights, dtype=dtype, mesh=devices)
        engine = Engine(run, config, as_trained=as_trained, mesh=devices)
        print("compiling the programs of all lanes", flush=True)
        engine.warm()
    limits = Limits(choices=min(Limits.choices, max_waiting), seconds=request_s)
    key = os.environ.get(KEY) or None
    service = Service(run, engine, name or Path(run_dir).name, key=key, limits=limits)
    with engine:
        run_server(
            service,
            host=host,
            port=port,
            drain_s=drain_s,
            started=lambda address: print(f"serving {service.name} at {address}", flush=True),
        )


def make_config(
    lanes: tuple[str, ...],
    max_waiting: int,
    piece_bytes: int,
    prefix_mb: int,
    drafts: int | None,
    beams: int = 0,
) -> Any:
    """Return the settings of an engine from those of a command line.

    Raises:
      ValueError: one is out of range.
    """
    from jaxblt.inference import Drafts
    from jaxblt.inference.engine import EngineConfig

    whole("--prefix-mb", prefix_mb, least=0)
    return EngineConfig(
        lanes=tuple(map(read_lane, lanes)),
        max_waiting=max_waiting,
        piece_bytes=piece_bytes,
        prefix_bytes=prefix_mb << 20,
        drafts=None if drafts is None else Drafts(count=drafts),
        beams=beams,
    )


@contextmanager
def _keeping_programs(folder: Path | None) -> Iterator[None]:
    """Take programs from a folder, and say how many were not there; without a folder change nothing."""
    from jaxblt.inference.stored_programs import storing_programs

    if folder is None:
        yield
        return
    with storing_programs(folder) as found:
        yield
    print(f"{folder}: {found}", flush=True)


def programs_folder(option: str, given: Path | None) -> Path | None:
    """Return the folder of compiled programs: that of an option, else jaxblt's in the user's cache; None on a CPU.

    A run's own folder is none: programs are machine code, and a run may be a stranger's.

    Raises:
      ValueError: what the option names is no local folder.
    """
    from jaxblt.training.start.startup import cache_folder
    from jaxblt.training.train_config import USER_CACHE

    if given is not None:
        refuse_remote(option, given)
        return given
    kept = cache_folder(USER_CACHE)
    return None if kept is None else Path(kept)


def read_mesh(mesh: str | None, quantize: Scheme | None) -> Any:
    """Read --mesh.

    Raises:
      ValueError: it is no mesh, or weights in fewer bits would be split.
    """
    if mesh is not None and quantize is not None:
        raise ValueError(
            f"--mesh {mesh} splits weights, which --quantize {quantize} leaves whole: give one of both"
        )
    return None if mesh is None else parse_mesh(mesh)


def read_lane(text: str) -> Any:
    """Read a lane such as "8x8192".

    Raises:
      ValueError: it is not two whole numbers.
    """
    from jaxblt.inference.engine import Lane

    slots, _, capacity = text.partition("x")
    if not (slots.isdecimal() and capacity.isdecimal()):
        raise ValueError(f"--lanes {text!r} is not rows x bytes, such as 8x8192")
    return Lane(int(slots), int(capacity))


def check_installed() -> None:
    """Raise ImportError unless the packages of the extra are there."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'jaxblt[serve]'") from error
