"""Time tiles and splits of the kernel: `python -m pallas_kernels.token_product.tune --out tiles.json`.

Weights lie in more sets than a cache holds, so that each launch reads them from memory. `split.py` makes the choice:
put what is ahead there.
"""

import argparse
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._alone import alone
from pallas_kernels._measure import this_machine
from pallas_kernels._trace import device_events, read_trace
from pallas_kernels.token_product import reference, triton_gpu
from pallas_kernels.token_product.bench import plan
from pallas_kernels.token_product.shapes import SHAPES, TokenShape
from pallas_kernels.token_product.split import MOST_PARTS, Split, Tile, cut_rows

Kernel = Callable[..., tuple[Any, ...]]


class Candidate(NamedTuple):
    """A form of the kernel, a tile and a split."""

    kernel: str
    tile: Tile
    split: Split


TILES = (
    Tile(128, 64, 4, 4),
    Tile(128, 64, 4, 2),
    Tile(128, 64, 2, 4),
    Tile(128, 128, 4, 4),
    Tile(256, 64, 2, 4),
    Tile(256, 64, 2, 8),
    Tile(256, 32, 2, 4),
)
PARTS = (4, 8, 11)
"""The most parts of a product; above eight only of one that narrows."""

MOST = 128
"""Most registers of a thread that loads may need."""

CACHE = 120 * 2**20
"""Bytes of the sets of weights: twice the cache of an H200."""

TRIALS = 20


def candidates(shape: TokenShape) -> list[tuple[Tile, Split]]:
    """Return tiles and splits to try, of whose matrix a thread holds no more than its registers do."""
    most = [parts for parts in PARTS if parts <= MOST_PARTS or sum(shape.widths) < shape.dim]
    pairs = [(tile, cut_rows(shape.dim, tile, parts)) for tile, parts in product(TILES, most)]
    return list(dict.fromkeys(pair for pair in pairs if _registers(*pair) <= MOST))


def _registers(tile: Tile, split: Split) -> int:
    """Return the registers in which a thread holds what it loads of a matrix at a time."""
    return min(tile.rows * tile.loads, split.rows) * tile.columns // (64 * tile.warps)


def _compiled(shape: TokenShape, args: Any, kernels: dict[str, Kernel]) -> Iterator[tuple[Candidate, Any]]:
    """Yield candidates with their programs, compiled side by side; one that needs too much memory is left out."""
    tried = [Candidate(name, *each) for name, each in product(kernels, candidates(shape))]
    run = lambda each: partial(launch, kernels[each.kernel], each, leaves_norm=shape.leaves_norm)  # noqa: E731
    with ThreadPoolExecutor() as pool:
        programs = [pool.submit(jax.jit(run(each)).lower(*args).compile) for each in tried]
        for each, program in zip(tried, programs, strict=True):
            try:
                yield each, program.result()
            except jax.errors.JaxRuntimeError as error:
                logging.info(f"{shape.name} {each}: {error}")


def launch(kernel: Kernel, each: Candidate, *arrays: Any, **options: Any) -> Any:
    """Return what the kernel writes, its product first."""
    token, y, *squares = kernel(*arrays, chosen=(each.tile, each.split), **options)
    return (y, *squares) if token is None or arrays[2] is None else (y, *squares, token)


def _time(programs: list[Any], sets: list[Any]) -> list[float]:
    """Return the median microseconds of each program's launches."""
    for program in programs:
        jax.block_until_ready(program(*sets[0]))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for trial, program in product(range(TRIALS), programs):
                jax.block_until_ready(program(*sets[trial % len(sets)]))
        events = [event[1:] for event in device_events(read_trace(folder)) if "token_product" in event[1]]
    if len(events) != TRIALS * len(programs):
        raise RuntimeError(f"{len(events)} kernels ran in {TRIALS * len(programs)} calls of one each")
    events.sort(key=lambda event: event[1])
    taken = np.array([end - start for _, start, end in events]).reshape(TRIALS, -1)
    return [float(us) for us in np.median(taken, 0) / 1e3]


def read_kernel(file: str) -> Kernel:
    """Return `token_product` of a Python file, such as one that `git show COMMIT:PATH` wrote."""
    spec = spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file}: expected a file of Python")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.token_product


def tune(shape: TokenShape, kernels: dict[str, Kernel]) -> list[dict[str, Any]]:
    """Return the times of all kernels, tiles and splits of a shape, the shortest first.

    Raises:
      ArithmeticError: a candidate's result is not that of the definition.
    """
    x, matrices, *rest = plan(shape).truth.args
    count = -(-CACHE // sum(matrix.nbytes for matrix in matrices))
    sets = [(x, tuple(jnp.array(matrix) for matrix in matrices), *rest) for _ in range(count)]
    exact = np.asarray(reference.token_product(*sets[0], leaves_norm=shape.leaves_norm)[1]).sum(0)
    tried = list(_compiled(shape, sets[0], kernels))
    for each, program in tried:
        off = np.abs(np.asarray(program(*sets[0])[0]).sum(0) - exact).max() / np.abs(exact).max()
        if not off < 0.02:
            raise ArithmeticError(f"{shape.name} {each}: off by {off}")
    with alone():
        times = _time([program for _, program in tried], sets)
    found = [
        {"us": us, "kernel": each.kernel, **each.tile._asdict(), "parts": each.split.parts}
        for us, (each, _) in zip(times, tried, strict=True)
    ]
    return sorted(found, key=lambda line: line["us"])


def main() -> None:
    """Time the shapes that are named, print the fastest, and write all to a JSON file."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.token_product.tune")
    parser.add_argument("--out", default="runs/benchmark/token_product_tiles.json")
    named = {shape.name: shape for shape in SHAPES}
    parser.add_argument("--shapes", nargs="+", choices=named, default=[*named], metavar="SHAPE")
    parser.add_argument(
        "--others", nargs="*", default=[], metavar="FILE", help="other forms of triton_gpu.py"
    )
    given = parser.parse_args()
    own: dict[str, Kernel] = {"triton_gpu": triton_gpu.token_product}
    kernels = own | {Path(f).stem: read_kernel(f) for f in given.others}
    found: dict[str, Any] = {"machine": asdict(this_machine()), "tiles": {}}
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    for name in given.shapes:
        found["tiles"][name] = lines = tune(named[name], kernels)
        logging.info("\n  ".join(map(str, (name, *lines[:6], lines[-1]))))
        Path(given.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
