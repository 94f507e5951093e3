"""A checkpoint of HyenaDNA in Hugging Face's layout as a run folder, and a run as such tensors.

Definitions are those of the paper (Nguyen et al., 2306.15794) and of the files beside the published weights. Four
differ here:

- Projections lie as x0, x1, v; ours are v, x1, x0. Products are [out, in], and the last short tap is of lag 0.
- A token of its alphabet has one row; here each byte has one. Bytes outside of ACGTN have the row of [UNK], and share
  its probability evenly: a bias of -log n on the logit of each of these n bytes makes the sum over bytes the same.
- Its sequences begin without a special token. BOS is a hole here, and its row is never read.
- Features of the lags are stored, as they may have been trained. Times and decays are stored too, and only compared.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import numpy as np
from flax.traverse_util import flatten_dict

from jaxblt.data import DataConfig
from jaxblt.data.vocab import BOE, BOS, EOS, OFFSET, PAD, VOCAB_SIZE
from jaxblt.interchange.entry import (
    Entry,
    Source,
    check_source,
    inside,
    open_source,
    same,
    turned,
    write_entries,
)
from jaxblt.interchange.runs import Dtype, Exported, check_new_folder
from jaxblt.interchange.tensors import check_new, write_tensors
from jaxblt.interchange.weight_files import read_config, read_whole
from jaxblt.mixers import HyenaConfig, ImplicitFilter
from jaxblt.models import ByteLMConfig
from jaxblt.models.hyena_dna import NORM_EPSILON, HyenaDNA, hyena_dna
from jaxblt.seals import check_finite
from jaxblt.training.recipe import Recipe, TrainConfig

if TYPE_CHECKING:
    from jaxblt.run import Run

TOKENS = ("[CLS]", "[SEP]", "[BOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]", *"ACGTN")
"""The tokenizer's vocabulary; rows behind it fill the table up."""

MOST_ROWS = 128
"""Rows at most: those that no byte means are given to bytes from 255 down."""

ROOT = "hyena.backbone."
TABLE, HEAD = f"{ROOT}embeddings.word_embeddings.weight", "lm_head.weight"

FIXED = {
    "vocab_size": len(TOKENS),
    "hyena_order": 2,
    "short_filter_order": 3,
    "layer_norm_epsilon": NORM_EPSILON,
    "train_freq": True,
}
"""Settings of which one value has a counterpart. These are also the defaults of a config that does not name them."""

SIZES = {
    "d_model": 256,
    "n_layer": 12,
    "max_seq_len": 1024,
    "emb_dim": 3,
    "filter_order": 64,
    "num_inner_mlps": 2,
}
"""Sizes, with the values of a config that does not name them."""


def rows_of_ids(count: int) -> np.ndarray:
    """Return the row of each of our ids in a table of `count` rows."""
    rows = np.full(VOCAB_SIZE, TOKENS.index("[UNK]"))
    known = {ord(letter) + OFFSET: letter for letter in "ACGTN"}
    known |= {BOE: "[MASK]", BOS: "[BOS]", EOS: "[SEP]", PAD: "[PAD]"}
    for own, token in known.items():
        rows[own] = TOKENS.index(token)
    left = sorted(set(range(count)) - set(rows.tolist()))
    rows[VOCAB_SIZE - len(left) :] = left
    return rows


def entries(config: ByteLMConfig, *, rows: int = 16) -> dict[str, Entry]:
    """Return every tensor of a model's checkpoint by its name there.

    Args:
      config: of `jaxblt.models.hyena_dna`.
      rows: of the embedding.
    """
    stack, ids = config.stack, rows_of_ids(rows)
    mixer: Any = stack.mixer("H")
    table = (rows, stack.dim)
    found = {
        TABLE: Entry(table, ("embedding.bytes",), lambda x: (x[ids],), lambda x: _by_token(x, ids)),
        HEAD: _head(table, ids),
        f"{ROOT}ln_f.weight": same((stack.dim,), "head.norm.scale"),
        f"{ROOT}ln_f.bias": same((stack.dim,), "head.norm.bias"),
    }
    for i in range(stack.num_layers):
        block = inside("mixer.", _mixer(mixer), "mixer.") | _rest(stack.dim, stack.hidden)
        block |= inside("mixer.filter_fn.", _filter(mixer.filter, stack.dim), "mixer.long_0.")
        found |= inside(f"{ROOT}layers.{i}.", block, f"stack.period_{i}.block_0.")
    return found


def _by_token(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return a table's row of each token; raise ValueError if bytes of one token have different rows."""
    found = x[np.unique(ids, return_index=True)[1]]
    if not np.array_equal(found[ids], x):
        raise ValueError(
            "bytes that the tokenizer does not tell apart were trained apart: freeze embedding and head"
        )
    return found


def _head(table: tuple[int, int], ids: np.ndarray) -> Entry:
    """Return the head, whose bias shares the probability of a token among its bytes."""
    bias = -np.log(np.bincount(ids)[ids]).astype(np.float32)

    def theirs(kernel: np.ndarray, own: np.ndarray) -> np.ndarray:
        if not np.array_equal(own, bias):
            raise ValueError("the head's bias was trained, and HyenaDNA has none: freeze the head")
        return _by_token(kernel.transpose(1, 0), ids)

    names = ("head.logits.kernel", "head.logits.bias")
    return Entry(table, names, lambda x: (x[ids].transpose(1, 0), bias), theirs)


def _rest(dim: int, hidden: int) -> dict[str, Entry]:
    """Return norms and MLP of a block."""
    found = {"mlp.fc1.weight": turned((hidden, dim), "mlp.up.kernel")}
    found |= {"mlp.fc1.bias": same((hidden,), "mlp.up.bias")}
    found |= {"mlp.fc2.weight": turned((dim, hidden), "mlp.down.kernel")}
    found |= {"mlp.fc2.bias": same((dim,), "mlp.down.bias")}
    for theirs, ours in (("norm1", "mixer_norm"), ("norm2", "mlp_norm")):
        found |= {f"{theirs}.weight": same((dim,), f"{ours}.scale")}
        found |= {f"{theirs}.bias": same((dim,), f"{ours}.bias")}
    return found


def _mixer(mixer: HyenaConfig) -> dict[str, Entry]:
    """Return projections and the short convolution."""
    dim, taps = mixer.dim, mixer.short_taps

    def turn(x: np.ndarray) -> np.ndarray:
        return x.reshape(3, dim, *x.shape[1:])[::-1].reshape(x.shape)

    into = Entry((3 * dim, dim), ("in.kernel",), lambda x: (turn(x).T,), lambda x: turn(x.T))
    short = Entry(
        (3 * dim, 1, taps),
        ("short",),
        lambda x: (turn(x[:, 0, ::-1])[None],),
        lambda x: turn(x[0])[:, None, ::-1],
    )
    biases = {"in_proj.bias": "in.bias", "short_filter.bias": "short_bias"}
    return {
        "in_proj.weight": into,
        "short_filter.weight": short,
        **{name: Entry((3 * dim,), (own,), lambda x: (turn(x),), turn) for name, own in biases.items()},
        "out_proj.weight": turned((dim, dim), "out.kernel"),
        "out_proj.bias": same((dim,), "out.bias"),
    }


def _filter(filter: ImplicitFilter, dim: int) -> dict[str, Entry]:
    """Return the implicit filter and its skip."""
    taps, features, width = filter.filter_len, filter.emb_dim, filter.width
    times = (np.arange(taps) / filter.normaliser).astype(np.float32)
    # Signs of the decays are those of logarithms of the target
    decays = -np.linspace(*filter.decay_range(), dim, dtype=np.float32)
    found = {
        "bias": same((dim,), "bias"),
        "pos_emb.z": Entry((1, taps, features), ("implicit.features",), lambda x: (x[0],), lambda x: x[None]),
        "pos_emb.t": _compared(times[None, :, None], "not the times of its config"),
        "modulation.deltas": _compared(decays[None, None], "not the decays of its definition"),
        "implicit_filter.1.freq": Entry(
            (1, width), ("implicit.frequency",), lambda x: (x[0],), lambda x: x[None]
        ),
    }
    last = 2 * (filter.inner_layers + 1)
    for i in range(filter.inner_layers + 1):
        shape = (width, width if i else features)
        found[f"implicit_filter.{2 * i}.weight"] = turned(shape, f"implicit.layer_{i}.kernel")
        found[f"implicit_filter.{2 * i}.bias"] = same((width,), f"implicit.layer_{i}.bias")
    found[f"implicit_filter.{last}.weight"] = Entry(
        (dim, width),
        ("implicit.out.kernel",),
        lambda x: (x.transpose(1, 0)[:, None],),
        lambda x: x[:, 0].transpose(1, 0),
    )
    return found


def _compared(own: np.ndarray, why: str) -> Entry:
    """Return the entry of a tensor that follows from the config."""

    def ours(x: np.ndarray) -> tuple[Any, ...]:
        # A file may hold it in bfloat16
        if not np.allclose(x, own, rtol=1e-2, atol=1e-6):
            raise ValueError(why)
        return ()

    return Entry(own.shape, (), ours, lambda: own)


def read_hyena_dna(folder: str | os.PathLike[str], run_dir: str | os.PathLike[str]) -> int:
    """Make a run folder, which `jaxblt.load` opens, of a HyenaDNA, and return how many tensors became parameters.

    Args:
      folder: with `config.json` and safetensors weights, as Hugging Face's `save_pretrained` writes it.
      run_dir: folder to make; it must not hold anything.

    Raises:
      FileNotFoundError: a file is missing.
      FileExistsError: the run folder holds something.
      ValueError: a setting has no counterpart; or tensors are missing, unexpected, of another shape or not finite (all
        are named).
    """
    check_new_folder(Path(run_dir))
    config = read_config(folder)
    sizes = _sizes(config)
    model = hyena_dna(sizes)
    data = DataConfig(kind="fasta", soft_mask="upper", seq_len=sizes.max_len, batch_size=1)
    recipe = Recipe(
        name=Path(folder).resolve().name, model=model, data=data, train=TrainConfig(dtype="float32")
    )
    known = entries(model, rows=_rows(config))
    with open_source(Path(folder)) as opened:
        found = _without_copies(str(folder), opened, tied=config.get("tie_word_embeddings", True))
        check_source(str(folder), found.shapes, known)
        write_entries(run_dir, recipe, str(folder), found, known)
    return len(known)


def _sizes(config: Mapping[str, Any]) -> HyenaDNA:
    kind = config.get("model_type")
    if kind != "hyenadna":
        raise ValueError(f"config.json has model_type {kind!r:.40}, expected 'hyenadna'")
    for name, expected in FIXED.items():
        if config.get(name, expected) != expected:
            raise ValueError(
                f"config.json.{name} is {config[name]!r:.40}, expected {expected!r}: no other is read"
            )
    least = {"max_seq_len": 2, "emb_dim": 3, "num_inner_mlps": 0}
    found = {
        name: read_whole(config, name, "config.json", default=default, least=least.get(name, 1))
        for name, default in SIZES.items()
    }
    given = config.get("d_inner") is not None
    hidden = read_whole(config, "d_inner", "config.json") if given else 4 * found["d_model"]
    dim, layers, taps, *filter = found.values()
    return HyenaDNA(dim, layers, hidden, taps, *filter)


def _rows(config: Mapping[str, Any]) -> int:
    step = read_whole(config, "pad_vocab_size_multiple", "config.json", default=8)
    rows = -(-len(TOKENS) // step) * step
    if rows > MOST_ROWS:
        raise ValueError(f"config.json.pad_vocab_size_multiple is {step}, expected at most {MOST_ROWS}")
    return rows


def _without_copies(where: str, found: Source, *, tied: bool) -> Source:
    """Return a checkpoint's tensors once each: sines share a frequency, and a tied head is the embedding.

    A file may hold any of the copies.

    Raises:
      ValueError: copies differ.
    """
    names: dict[str, str] = {}
    for name in sorted(found.shapes):
        once = re.sub(r"(\.implicit_filter\.)\d*[13579](\.freq)$", r"\g<1>1\2", name)
        known = names.setdefault(once, name)
        if known != name and not np.array_equal(found.read(known), found.read(name)):
            raise ValueError(f"{where}: {name} is not {known}, and all sines of a filter have one frequency")
    if tied and TABLE in names:
        names.setdefault(HEAD, names[TABLE])
    shapes = {once: found.shapes[name] for once, name in names.items()}
    return Source(shapes, lambda name: found.read(names[name]))


def write_hyena_dna(
    run: "Run", file: str | os.PathLike[str], *, dtype: Dtype = "float32", overwrite: bool = False
) -> Exported:
    """Write the parameters of a run of HyenaDNA as a safetensors file that Hugging Face's class loads.

    Args:
      run: of `read_hyena_dna`, or fine-tuned from one without adapters, its embedding and head frozen.
      file: `model.safetensors` of a folder that holds the published `config.json`.
      dtype: "float32" alone, as the published files have it.
      overwrite: replace a file that is there.

    Raises:
      FileExistsError: the file is there, and is not to be overwritten.
      FileNotFoundError: its folder is not.
      ValueError: the run's model is no HyenaDNA, or its parameters have no counterpart.
    """
    check_new(file, overwrite=overwrite)
    if dtype != "float32":
        raise ValueError(f"--dtype is {dtype}, and HyenaDNA's files hold float32: leave it out")
    model = run.recipe.model
    if not _is_hyena_dna(model):
        raise ValueError("the run's model is no HyenaDNA: merge adapters first, or leave out --to")
    flat: dict[str, Any] = flatten_dict(nn.meta.unbox(run.params), sep=".")
    params = {name: np.asarray(x, np.float32) for name, x in flat.items()}
    check_finite("the run", params)
    arrays = {
        name: entry.theirs(*(params[param] for param in entry.params))
        for name, entry in entries(model, rows=_rows_behind(params["head.logits.bias"])).items()
    }
    size = write_tensors(file, arrays, {"format": "pt"})
    return Exported(len(arrays), size)


def _rows_behind(bias: np.ndarray) -> int:
    """Return the rows of the tokenizer's table, of which the bytes that share [UNK] tell."""
    named, counts = np.unique(rows_of_ids(0), return_counts=True)
    return len(named) + int(counts.max()) - round(float(np.exp(-bias.min())))


def _is_hyena_dna(model: Any) -> bool:
    if not isinstance(model, ByteLMConfig) or set(model.stack.pattern) != {"H"}:
        return False
    mixer: Any = model.stack.mixer("H")
    filter = getattr(mixer, "filter", None)
    if not isinstance(filter, ImplicitFilter):
        return False
    sizes = (model.stack.dim, model.stack.num_layers, model.stack.hidden, filter.filter_len)
    return model == hyena_dna(HyenaDNA(*sizes, filter.emb_dim, filter.width, filter.inner_layers))
