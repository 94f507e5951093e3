"""HyenaDNA as a config of a byte language model (Nguyen et al., 2306.15794).

Blocks of Hyena with an implicit filter as long as the longest sequence. Published weights are read by
`jaxblt.interchange.hyena_dna`.
"""

from typing import NamedTuple

from jaxblt.mixers import HyenaConfig, ImplicitFilter
from jaxblt.models.byte_lm import ByteLMConfig
from jaxblt.models.stack import StackConfig

NORM_EPSILON = 1e-5


class HyenaDNA(NamedTuple):
    """Sizes of a HyenaDNA model; the defaults are those of the published ones.

    Attributes:
      dim: width.
      num_layers: blocks.
      mlp_dim: width of the MLPs.
      max_len: taps of the filters, and bytes of the longest sequence.
      emb_dim: features of a lag.
      width: of the hidden layers that make the taps.
      inner_layers: hidden layers after the first.
    """

    dim: int
    num_layers: int
    mlp_dim: int
    max_len: int
    emb_dim: int = 5
    width: int = 64
    inner_layers: int = 2


def hyena_dna(sizes: HyenaDNA) -> ByteLMConfig:
    """Return the config of a HyenaDNA; `build()` makes the module, and a `Recipe` takes it as its model.

    Blocks are unrolled: block i of the checkpoint is `stack.period_i.block_0`. Sequences begin without BOS.
    """
    # The window falls from lag 0 to the last, over one step less than there are taps
    filter = ImplicitFilter(
        filter_len=sizes.max_len,
        reference_len=max(sizes.max_len - 1, 1),
        emb_dim=sizes.emb_dim,
        width=sizes.width,
        inner_layers=sizes.inner_layers,
        shift=0.05,
        unit_energy=False,
        learned_features=True,
    )
    stack = StackConfig(
        dim=sizes.dim,
        num_layers=sizes.num_layers,
        pattern="H",
        mixers={"H": HyenaConfig(dim=sizes.dim, filter=filter, in_bias=True, out_bias=True)},
        mlp_dim=sizes.mlp_dim,
        gated_mlp=False,
        activation="gelu_tanh",
        scan=False,
        norm_epsilon=NORM_EPSILON,
        layer_norm=True,
    )
    return ByteLMConfig(stack=stack, tie_head=False, head_bias=True, reads_bos=False)
