"""Tensors of a StripedHyena 2 checkpoint (Evo 2) as parameters of jaxblt, and back.

Definitions are those of the paper (Ku et al., 2503.01868) and of vortex, the reference implementation. Six differ here:

- Rows of the input projections lie interleaved, x2, x1 and v of a channel side by side; ours are v, x1, x2.
- The weights of `Wqkv` in a file are q, k and v of one head after the other, and products are [out, in].
- Filters of fewer than 128 taps are correlations, the last tap of lag 0, as are those of the projections. Others are
  convolutions, the first tap of lag 0.
- A mode is stored as the logarithm of its pole, here as the logarithm of its rate.
- A byte is its own id, here byte + 4: rows of the embedding move, see `embedding_rows`.
- Rotary frequencies are stored, here they follow from the config.
"""

from typing import Any

import numpy as np

from jaxblt.data.vocab import BOS, OFFSET, PAD
from jaxblt.interchange.entry import Entry, inside, same, turned
from jaxblt.mixers import AttentionConfig, ExplicitFilter, HyenaConfig
from jaxblt.mixers.attention.rotary import TURN, rotary_frequencies
from jaxblt.models import ByteLMConfig

CORRELATED = 128
"""Filters of fewer taps are stored with the tap of lag 0 last."""

END, PADDING = 0, 1
"""The reference's ids for the end of a document, which it also begins one with, and for padding."""


def embedding_rows(vocab_size: int) -> np.ndarray:
    """Return the reference's row of each of our ids, a permutation.

    BOS is its end of a document, which it begins records with, and PAD its padding. Bytes 0 and 1, whose rows these
    are, and the special ids that it has not take rows that no text of it names.
    """
    rows = np.full(vocab_size, -1)
    rows[np.arange(2, 256) + OFFSET] = np.arange(2, 256)
    rows[BOS], rows[PAD] = END, PADDING
    rows[rows < 0] = np.arange(256, vocab_size)
    return rows


def entries(config: ByteLMConfig) -> dict[str, Entry]:
    """Return every tensor of a model's checkpoint by its name there.

    Args:
      config: of `jaxblt.models.striped_hyena`.
    """
    stack, rows = config.stack, embedding_rows(config.vocab_size)
    found = {
        "embedding_layer.weight": Entry(
            (config.vocab_size, stack.dim),
            ("embedding.bytes",),
            lambda x: (x[rows],),
            lambda x: x[np.argsort(rows)],
        ),
        "norm.scale": same((stack.dim,), "head.norm.scale"),
    }
    for i in range(stack.num_layers):
        mixer: Any = stack.mixer(stack.pattern[i])
        block = _attention(mixer) if isinstance(mixer, AttentionConfig) else _hyena(mixer)
        block |= _rest(stack.dim, stack.hidden)
        found |= inside(f"blocks.{i}.", block, f"stack.period_0.block_{i}.")
    return found


def _rest(dim: int, hidden: int) -> dict[str, Entry]:
    """Return norms and MLP of a block."""
    return {
        "pre_norm.scale": same((dim,), "mixer_norm.scale"),
        "post_norm.scale": same((dim,), "mlp_norm.scale"),
        "mlp.l1.weight": turned((hidden, dim), "mlp.gate.kernel"),
        "mlp.l2.weight": turned((hidden, dim), "mlp.up.kernel"),
        "mlp.l3.weight": turned((dim, hidden), "mlp.down.kernel"),
    }


def _attention(mixer: AttentionConfig) -> dict[str, Entry]:
    heads, width, dim = mixer.num_heads, mixer.width, mixer.dim
    kernels = tuple(f"mixer.{name}.kernel" for name in "qkv")

    def split(x: Any) -> tuple[Any, ...]:
        each = x.reshape(heads, 3, width, dim).transpose(1, 3, 0, 2)
        return each[0], each[1], each[2]

    def joined(*parts: Any) -> Any:
        return np.stack(parts).transpose(2, 0, 3, 1).reshape(3 * heads * width, dim)

    return {
        "inner_mha_cls.Wqkv.weight": Entry((3 * heads * width, dim), kernels, split, joined),
        "inner_mha_cls.out_proj.weight": Entry(
            (dim, heads * width),
            ("mixer.out.kernel",),
            lambda x: (x.transpose(1, 0).reshape(heads, width, dim),),
            lambda x: x.reshape(heads * width, dim).transpose(1, 0),
        ),
        "inner_mha_cls.out_proj.bias": same((dim,), "mixer.out.bias"),
        "inner_mha_cls.rotary_emb.inv_freq": _frequencies(mixer),
    }


def _frequencies(mixer: AttentionConfig) -> Entry:
    """Rotary frequencies before they are slowed, which tell another base from the config's."""
    turns = rotary_frequencies(mixer.width, theta=mixer.rope_theta)
    own = (turns * (2 * np.pi / TURN)).astype(np.float32)

    def compared(x: Any) -> tuple[Any, ...]:
        # A file may hold them in bfloat16
        if not np.allclose(x, own, rtol=1e-2, atol=1e-9):
            raise ValueError(f"of another base than {mixer.rope_theta:g}: name the config of this checkpoint")
        return ()

    return Entry((mixer.width // 2,), (), compared, lambda: own)


def _hyena(mixer: HyenaConfig) -> dict[str, Entry]:
    dim, taps = mixer.dim, mixer.short_taps
    return _long(mixer) | {
        "projections.weight": Entry(
            (3 * dim, dim),
            ("mixer.in.kernel",),
            lambda x: (x.reshape(dim, 3, dim)[:, ::-1].transpose(2, 1, 0).reshape(dim, 3 * dim),),
            lambda x: x.reshape(dim, 3, dim).transpose(2, 1, 0)[:, ::-1].reshape(3 * dim, dim),
        ),
        "filter.short_filter_weight": Entry(
            (3 * dim, 1, taps),
            ("mixer.short",),
            lambda x: (x.reshape(dim, 3, taps)[:, ::-1, ::-1].transpose(1, 0, 2).reshape(1, 3 * dim, taps),),
            lambda x: x.reshape(3, dim, taps).transpose(1, 0, 2)[:, ::-1, ::-1].reshape(3 * dim, 1, taps),
        ),
        "out_filter_dense.weight": turned((dim, dim), "mixer.out.kernel"),
        "out_filter_dense.bias": same((dim,), "mixer.out.bias"),
    }


def _long(mixer: HyenaConfig) -> dict[str, Entry]:
    """Return the long filter and its skip."""
    filter, dim = mixer.filter, mixer.dim
    skip = {"filter.D": same((dim,), "mixer.long_0.bias")}
    if isinstance(filter, ExplicitFilter):
        step = -1 if filter.taps < CORRELATED else 1
        taps = Entry(
            (filter.groups or dim, 1, filter.taps),
            ("mixer.long_0.taps",),
            lambda x: (x[:, 0, ::step],),
            lambda x: x[:, None, ::step],
        )
        return {"filter.h": taps} | (skip if filter.skip else {})
    modes = (dim, getattr(filter, "modes", 0))
    return skip | {
        "filter.log_poles": Entry((*modes, 1), ("mixer.long_0.log_rate",), _log_rate, _log_poles),
        "filter.residues": Entry(modes, ("mixer.long_0.residues",), lambda x: (x[None],), lambda x: x[0]),
    }


def _log_rate(x: Any) -> tuple[Any, ...]:
    if not np.all(x < 0):
        raise ValueError(f"{float(np.max(x)):g}, expected numbers below 0: each mode of a filter decays")
    return (np.log(-x[None, ..., 0]),)


def _log_poles(x: Any) -> Any:
    return -np.exp(x[0, ..., None])
