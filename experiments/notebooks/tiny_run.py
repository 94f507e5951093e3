"""The runs that the notebooks ask: a model of an embedded genome, and one with a memory; a minute each on a CPU."""

import contextlib
import io
from dataclasses import replace

import jaxblt
from jaxblt.data import DataConfig
from jaxblt.mixers import AttentionConfig, HyenaConfig, ModalFilter
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.recipes import titans
from jaxblt.run import Run
from jaxblt.training import AdamWConfig, Recipe, TrainConfig
from jaxblt.training.loop import fit

STEPS = 120
RECALL_STEPS = 400


def tiny_run(run_dir: str = "runs/lambda", steps: int = STEPS) -> Run:
    """Train a byte Hyena on the genome of phage lambda a few times, both strands.

    Args:
      run_dir: folder of the run; one that is finished there is loaded.
      steps: of training.
    """
    return trained(recipe(steps), run_dir)


def recall_run(run_dir: str = "runs/recall", steps: int = RECALL_STEPS) -> Run:
    """Train a memory of one layer to hold four pairs over a gap, by the recipe `titan_recall`.

    Args:
      run_dir: folder of the run; one that is finished there is loaded.
      steps: of training.
    """
    recall = titans.recall()
    return trained(replace(recall, train=replace(recall.train, steps=steps)), run_dir)


def trained(recipe: Recipe, run_dir: str) -> Run:
    """Train a recipe without what training says on the way, and return the run."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        fit(recipe, run_dir)
    return jaxblt.load(run_dir)


def recipe(steps: int) -> Recipe:
    """Return a recipe of two layers of width 48 over rows of 512 bases."""
    mixers = {
        "H": HyenaConfig(dim=48, filter=ModalFilter(modes=8, max_timescale=512.0)),
        "A": AttentionConfig(dim=48, num_heads=4),
    }
    return Recipe(
        name="lambda",
        model=ByteLMConfig(stack=StackConfig(dim=48, num_layers=2, pattern="HA", mixers=mixers)),
        data=DataConfig(
            sample="lambda",
            kind="fasta",
            seq_len=512,
            stride=256,
            batch_size=8,
            partial="drop",
            reverse_complement=True,
            scored="ACGT",
        ),
        optimizer=AdamWConfig(learning_rate=4e-3, warmup_steps=10),
        train=TrainConfig(
            steps=steps,
            dtype="float32",
            log_every=40,
            eval_every=0,
            checkpoint_every=steps,
            compilation_cache=None,
        ),
    )
