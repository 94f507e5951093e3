"""The genome of E. coli K-12, split by position 80 / 10 / 10, both strands in training.

The entropy of DNA is nearly flat, so the model reads bases without patches. Score with
jaxblt evaluate runs/ecoli --split test --context 4096
"""

from jaxblt.data.config import DataConfig
from jaxblt.mixers import AttentionConfig, ExplicitFilter, HyenaConfig, ModalFilter
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.train_config import TrainConfig


def hyena() -> Recipe:
    """Return a byte Hyena with short, medium and long filters.

    One layer in four is attention.
    """
    stack = StackConfig(
        dim=384,
        num_layers=8,
        pattern=("hyena_short", "hyena_medium", "hyena", "attention"),
        mixers={
            "hyena_short": HyenaConfig(dim=384, filter=ExplicitFilter(taps=7)),
            "hyena_medium": HyenaConfig(dim=384, filter=ExplicitFilter(taps=128)),
            "hyena": HyenaConfig(dim=384, filter=ModalFilter(max_timescale=4096.0)),
            "attention": AttentionConfig(dim=384, num_heads=6),
        },
        dropout=0.2,
    )
    return Recipe(
        name="ecoli",
        model=ByteLMConfig(stack=stack),
        data=DataConfig(
            paths=("data/ecoli/*.fa.xz",),
            kind="fasta",
            split="position",
            seq_len=8192,
            stride=4096,
            batch_size=8,
            partial="drop",
            reverse_complement=True,
            scored="ACGT",
        ),
        optimizer=AdamWConfig(learning_rate=1e-3, warmup_steps=100, weight_decay=0.2),
        train=TrainConfig(steps=1500, log_every=50, eval_every=0, checkpoint_every=1500, time_limit_s=300),
    )
