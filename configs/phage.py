"""A small model of an embedded genome, phage lambda, for notebooks: a minute of training on a CPU."""

from jaxblt.data import DataConfig
from jaxblt.mixers import AttentionConfig, HyenaConfig, ModalFilter
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.recipe import Recipe, TrainConfig


def hyena(steps: int = 120) -> Recipe:
    """Train two layers of width 48 on rows of 512 bases of both strands; a base costs 1.96 bits in `score.ipynb`.

    Args:
      steps: of training.
    """
    mixers = {
        "H": HyenaConfig(dim=48, filter=ModalFilter(modes=8, max_timescale=512.0)),
        "A": AttentionConfig(dim=48, num_heads=4),
    }
    return Recipe(
        name="phage",
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
