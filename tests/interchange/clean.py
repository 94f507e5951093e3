"""What a clean process finds in a folder's runs and programs: python -m tests.interchange.clean FOLDER NAME ..."""

import sys
from pathlib import Path

import jax
import numpy as np

import jaxblt
from jaxblt.data import Batch
from jaxblt.interchange import read_program
from jaxblt.training.step import predict
from tests.answers.runs import SEQ_LEN, SHORT
from tests.compiled import compiled_once_and_quickly

NAMES = ("bytes", "patches")
SIZES = (1, 3)
"""Records that each program is asked about."""


def logits_of(run) -> np.ndarray:
    """Logits of one row, which entropies of the run's own model cut."""
    ids = np.random.default_rng(0).integers(4, 260, (1, SEQ_LEN)).astype(np.int32)
    ones, places = np.ones_like(ids), np.arange(SEQ_LEN, dtype=np.int32)[None]
    batch = Batch(inputs=ids, targets=ids, segment_ids=ones, positions=places, loss_mask=ones)
    # arguments, as constants would be another program
    find = jax.jit(lambda params, frozen, batch: predict(run.task, params, frozen, batch, {})[0])
    return np.asarray(find(run.params, run.frozen, jax.tree.map(jax.numpy.asarray, batch)))


def main(folder: Path, *names: str) -> None:
    found = {}
    with compiled_once_and_quickly(str(folder / "compiled")):
        for name in names:
            if (folder / name).is_dir():
                found[name] = logits_of(jaxblt.load(folder / name))
                continue
            program = read_program(folder / name)
            for size in SIZES:
                found |= {f"{name}.{size}.{what}": x for what, x in program(SHORT[:size]).items()}
    np.savez(folder / "found.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
