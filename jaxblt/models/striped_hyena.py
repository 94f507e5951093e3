"""StripedHyena 2, the architecture of Evo 2, as configs of a byte language model (Ku et al., 2503.01868).

Blocks of Hyena with a short, a medium and a modal filter take turns, and one of seven is attention. Weights of the
released models are read by `jaxblt.interchange.striped_hyena`.
"""

from types import MappingProxyType
from typing import NamedTuple

from jaxblt.mixers import AttentionConfig, ExplicitFilter, HyenaConfig, ModalFilter
from jaxblt.models.byte_lm import ByteLMConfig
from jaxblt.models.stack import StackConfig

PERIOD = "SMHASMH"
"""Mixers of seven blocks: Hyena with a short (S), a medium (M) and a modal filter (H), and attention (A)."""

VOCAB_SIZE = 512
"""Rows of the released embeddings; of ours 260 are ids."""

PATTERN_40B = PERIOD * 5 + "ASMHSMHASMHSMHA"
"""From block 35 on the turns of the 40B models are others."""


class Evo2(NamedTuple):
    """Sizes of an Evo 2 model.

    Attributes:
      dim: width.
      num_layers: blocks.
      num_heads: heads of attention.
      mlp_dim: width of the MLPs.
      groups: filters of the short and of the medium convolutions.
      max_len: bytes of the longest context that it was trained on.
      rope_theta: base of the rotary frequencies.
      rope_scale: they are slowed by it.
      pattern: the mixers' turns.
    """

    dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    groups: int
    max_len: int
    rope_theta: float = 1e4
    rope_scale: float = 1.0
    pattern: str = PERIOD


EVO2 = MappingProxyType(
    {
        "evo2_1b_8k": Evo2(1920, 25, 15, 5120, 128, 8192),
        "evo2_7b_8k": Evo2(4096, 32, 32, 11008, 256, 8192),
        "evo2_7b_262k": Evo2(4096, 32, 32, 11008, 256, 2**18, rope_scale=32.0),
        "evo2_7b_1m": Evo2(4096, 32, 32, 11264, 256, 2**20, rope_scale=128.0),
        "evo2_20b_1m": Evo2(8192, 24, 64, 22528, 512, 2**20, 1e6, 128.0),
        "evo2_40b_8k": Evo2(8192, 50, 64, 21888, 512, 8192, 1e6, pattern=PATTERN_40B),
        "evo2_40b_1m": Evo2(8192, 50, 64, 22528, 512, 2**20, 1e6, 128.0, PATTERN_40B),
    }
)
"""The released models."""


def evo2(name: str, *, fp8: bool = False) -> ByteLMConfig:
    """Return the config of a released Evo 2 model, by its name in `EVO2`.

    Args:
      name: of the model.
      fp8: Hyena's input projections multiply in FP8, as the 1B, 20B and 40B models were trained.

    Raises:
      ValueError: there is no such model.
    """
    if name not in EVO2:
        raise ValueError(f"there is no Evo 2 model {name!r:.60}: expected one of {', '.join(EVO2)}")
    return striped_hyena(EVO2[name], fp8=fp8)


def striped_hyena(sizes: Evo2, *, fp8: bool = False) -> ByteLMConfig:
    """Return the config of a StripedHyena 2; `build()` makes the module, and a `Recipe` takes it as its model.

    The first block's MLP is gated by gelu, and the gates of all others are linear. Blocks are unrolled: the pattern
    names each of them, so that block i of the checkpoint is `stack.period_0.block_i`.
    """
    kind = {"dim": sizes.dim, "short_taps": 3, "out_bias": True, "fp8_in": fp8}
    short = ExplicitFilter(taps=7, groups=sizes.groups, skip=False)
    attention = AttentionConfig(
        dim=sizes.dim,
        num_heads=sizes.num_heads,
        rope_theta=sizes.rope_theta,
        rope_scale=sizes.rope_scale,
        out_bias=True,
    )
    layers = sizes.num_layers
    pattern = (sizes.pattern * (layers // len(sizes.pattern) + 1))[:layers]
    stack = StackConfig(
        dim=sizes.dim,
        num_layers=layers,
        pattern=pattern,
        mixers={
            "S": HyenaConfig(**kind, filter=short),
            "M": HyenaConfig(**kind, filter=ExplicitFilter(taps=128, groups=sizes.groups)),
            "H": HyenaConfig(**kind, filter=ModalFilter(modes=16)),
            "A": attention,
        },
        mlp_dim=sizes.mlp_dim,
        activation=("gelu", *("identity" for _ in range(layers - 1))),
        scan=False,
        norm_on_root=True,
    )
    return ByteLMConfig(stack=stack, vocab_size=VOCAB_SIZE)
