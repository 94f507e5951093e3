"""Hugging Face's `BltForCausalLM` as a run folder, its entropy model alone as one, and a run as such tensors.

Definitions are those of the paper (Byte Latent Transformer, Pagnoni et al., 2412.09871) and of transformers, which
follows the released weights. The model is a `ReleasedBLT`, see `jaxblt.models.released_blt`. Its entropy model, there
a part of it, is a frozen `ByteLM` here.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import numpy as np
from flax.traverse_util import flatten_dict

from jaxblt.data import DataConfig
from jaxblt.interchange.entry import Entry, check_source, open_source, read_entries, write_entries
from jaxblt.interchange.hf_blt_entries import PATCHER, model_entries, patcher_entries
from jaxblt.interchange.runs import Dtype, Exported, check_new_folder
from jaxblt.interchange.tensors import Arrays, check_new, write_tensors
from jaxblt.interchange.weight_files import read_config, read_whole
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.models.released_blt import PolynomialHash, ReleasedBLTConfig
from jaxblt.patching import PatcherConfig
from jaxblt.seals import check_finite
from jaxblt.training.recipe import Recipe
from jaxblt.training.state import ENTROPY, freeze
from jaxblt.training.train_config import TrainConfig

if TYPE_CHECKING:
    from jaxblt.run import Run

KINDS = {
    "patcher": "patcher_config",
    "local_encoder": "encoder_config",
    "global_transformer": "global_config",
    "local_decoder": "decoder_config",
}
"""Configs of parts, by part."""

FIXED = {"patch_in_forward": True, "patching_mode": "entropy", "tie_word_embeddings": False}
"""Settings of which one value has a counterpart, which is also the default."""

GRAMS = (3, 4, 5, 6, 7, 8)
"""Lengths of n-grams of a config that does not name them."""


class PatcherPart(NamedTuple):
    """The entropy model of a `BltForCausalLM`: a recipe whose model it is, its parameters, and how it cuts patches."""

    recipe: Recipe
    params: Any
    patcher: PatcherConfig


def read_patcher(folder: str | os.PathLike[str], *, name: str = "patcher") -> PatcherPart:
    """Read the entropy model as a byte language model, and the threshold that cuts its patches.

    Args:
      folder: with `config.json` and safetensors weights, as `save_pretrained` writes it.
      name: of the recipe.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the folder holds another kind of model, or a setting has no counterpart.
      ValueError: tensors are missing, unexpected, of another shape or not finite (all are named).
    """
    config = _read_config(folder)
    model, length = _entropy_model(config)
    recipe = Recipe(
        name=name,
        model=model,
        data=DataConfig(seq_len=length, batch_size=1),
        train=TrainConfig(dtype="float32"),
    )
    known = patcher_entries(model)
    with open_source(Path(folder)) as opened:
        own = {key: shape for key, shape in opened.shapes.items() if key.startswith(PATCHER)}
        check_source(str(folder), own, known)
        return PatcherPart(recipe, read_entries(str(folder), opened, known), _patcher(config))


def read_hf_blt(folder: str | os.PathLike[str], run_dir: str | os.PathLike[str]) -> tuple[int, PatcherConfig]:
    """Make a run folder, which `jaxblt.load` opens, of a whole `BltForCausalLM`.

    Returns how many tensors became parameters, and how bytes are cut. Blocks of patches are as long as the longest
    sequence, with a slot for each byte: no patch is refused.

    Args:
      folder: with `config.json` and safetensors weights, as `save_pretrained` writes it.
      run_dir: folder to make; it must not hold anything.

    Raises:
      FileNotFoundError: a file is missing.
      FileExistsError: the run folder holds something.
      ValueError: as of `read_patcher`.
    """
    check_new_folder(Path(run_dir))
    config = _read_config(folder)
    entropy_model, _ = _entropy_model(config)
    model = _model(config)
    length = read_whole(_part(config, "local_encoder"), "max_position_embeddings", "encoder_config")
    recipe = Recipe(
        name=Path(folder).resolve().name,
        model=model,
        data=DataConfig(seq_len=length, batch_size=1),
        train=TrainConfig(dtype="float32"),
        patcher=_patcher(config, block_size=length),
        entropy_model=entropy_model,
    )
    known, entropy = model_entries(model), patcher_entries(entropy_model)
    with open_source(Path(folder)) as opened:
        check_source(str(folder), opened.shapes, known | entropy)
        # Keep fp32: rounded to bfloat16 it would move boundaries
        frozen = {ENTROPY: freeze(read_entries(str(folder), opened, entropy))}
        write_entries(run_dir, recipe, str(folder), opened, known, frozen)
    assert recipe.patcher is not None
    return len(known) + len(entropy), recipe.patcher


def write_hf_blt(
    run: "Run", file: str | os.PathLike[str], *, dtype: Dtype = "float32", overwrite: bool = False
) -> Exported:
    """Write model and entropy model of a run as a safetensors file that Hugging Face's `BltForCausalLM` loads.

    Args:
      run: of `read_hf_blt`, or fine-tuned from one without adapters.
      file: `model.safetensors` of a folder that holds the published `config.json`.
      dtype: of its tensors.
      overwrite: replace a file that is there.

    Raises:
      FileExistsError: the file is there, and is not to be overwritten.
      FileNotFoundError: its folder is not.
      ValueError: the run's model is no released BLT with an entropy model, it has other parameters, or one is not
        finite.
    """
    check_new(file, overwrite=overwrite)
    model, entropy = run.recipe.model, run.recipe.entropy_model
    if not isinstance(model, ReleasedBLTConfig) or not isinstance(entropy, ByteLMConfig):
        raise ValueError(
            "the run's model is no BltForCausalLM with its entropy model: merge adapters first, or leave out --to"
        )
    arrays = _written(run.params, model_entries(model))
    arrays |= _written(run.frozen[ENTROPY].params, patcher_entries(entropy))
    size = write_tensors(
        file, {name: x.astype(np.dtype(dtype)) for name, x in arrays.items()}, {"format": "pt"}
    )
    return Exported(len(arrays), size)


def _written(tree: Any, known: Mapping[str, Entry]) -> Arrays:
    """Return the tensors of a tree of parameters."""
    flat: dict[str, Any] = flatten_dict(nn.meta.unbox(tree), sep=".")
    params = {name: np.asarray(x, np.float32) for name, x in flat.items()}
    check_finite("the run", params)
    known_here = {name for entry in known.values() for name in entry.params}
    if unlike := sorted(params.keys() ^ known_here):
        raise ValueError(
            f"BltForCausalLM has no counterpart of the run's {unlike[0]}, or the run lacks it: export a run of "
            "read_hf_blt, or leave out --to"
        )
    return {name: entry.theirs(*(params[own] for own in entry.params)) for name, entry in known.items()}


def _read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    config = read_config(folder)
    kind = config.get("model_type")
    if kind != "blt":
        raise ValueError(
            f"{Path(folder) / 'config.json'} has model_type {kind!r:.40}, expected 'blt' or 'hyenadna': other "
            "models are not read"
        )
    for name, expected in FIXED.items():
        if config.get(name, expected) != expected:
            raise ValueError(
                f"config.json.{name} is {config[name]!r:.40}, expected {expected!r}: no other is read"
            )
    return config


def _part(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(KINDS[name])
    if not isinstance(found, dict):
        raise ValueError(f"config.json has {KINDS[name]} {found!r:.40}, expected the settings of the {name}")
    return found


def _entropy_model(config: Mapping[str, Any]) -> tuple[ByteLMConfig, int]:
    """Return the entropy model, and the longest sequence that it was made for.

    Its window is 512 where its settings name none, as transformers has it.
    """
    part, where = _part(config, "patcher"), KINDS["patcher"]
    stack = _stack(part, where, window=part.get("sliding_window", 512), theta=10_000.0)
    ids = read_whole(part, "vocab_size", where)
    length = read_whole(part, "max_position_embeddings", where)
    return ByteLMConfig(stack=stack, tie_head=False, vocab_size=ids), length


def _model(config: Mapping[str, Any]) -> ReleasedBLTConfig:
    """Return the model without its entropy model."""
    parts = {name: _part(config, name) for name in KINDS if name != "patcher"}
    window = config.get("local_attention_window_len", 512)
    local = {"window": window, "theta": 500_000.0}
    encoder, decoder = (_stack(parts[f"local_{x}"], f"{x}_config", **local) for x in ("encoder", "decoder"))
    latent = _stack(parts["global_transformer"], "global_config", window=None, theta=500_000.0)
    vectors = read_whole(config, "cross_attn_k", "config.json", default=2)
    ids = read_whole(config, "vocab_size", "config.json", default=260)
    asked = {
        "encoder_config.cross_attn_k": vectors,
        "decoder_config.cross_attn_k": vectors,
        "encoder_config.vocab_size": ids,
        "decoder_config.hidden_size_global": latent.dim,
    }
    for path, expected in asked.items():
        where, field = path.split(".")
        value = config[where].get(field, expected)
        if value != expected:
            raise ValueError(
                f"{path} is {value!r:.40}, expected {expected}, as other parts of config.json have it"
            )
    return ReleasedBLTConfig(
        encoder=encoder,
        latent=latent,
        decoder=decoder,
        hash=_hash(config),
        vectors=vectors,
        reads_each_block=_flag(parts["local_decoder"], "decoder_config", default=True),
        spare_reads=_flag(parts["local_encoder"], "encoder_config", default=False) * (encoder.num_layers - 1),
        vocab_size=ids,
    )


def _flag(part: Mapping[str, Any], where: str, *, default: bool) -> bool:
    value = part.get("cross_attn_all_layers", default)
    if not isinstance(value, bool):
        raise ValueError(f"{where}.cross_attn_all_layers is {value!r:.40}, expected true or false")
    return value


def _hash(config: Mapping[str, Any]) -> PolynomialHash:
    told = {"size": config.get("encoder_hash_byte_group_size") or list(GRAMS)}
    if not isinstance(told["size"], list):
        raise ValueError(
            f"config.json.encoder_hash_byte_group_size is {told['size']!r:.40}, expected whole numbers"
        )
    prefix, where = "encoder_hash_byte_group_", "config.json"
    return PolynomialHash(
        sizes=tuple(told["size"]),
        table_size=read_whole(config, f"{prefix}vocab", where, default=500_002),
        functions=read_whole(config, f"{prefix}nb_functions", where, default=1),
    )


def _stack(part: Mapping[str, Any], where: str, *, window: Any, theta: float) -> StackConfig:
    """Return unrolled blocks of attention and SwiGLU, as the settings of a part say."""
    sizes = {f: read_whole(part, f, where) for f in ("hidden_size", "num_hidden_layers")}
    if part.get("intermediate_size") is None:
        part = {**part, "intermediate_size": 8 * sizes["hidden_size"] // 3}
    heads = read_whole(part, "num_attention_heads", where)
    shared = (
        heads if part.get("num_key_value_heads") is None else read_whole(part, "num_key_value_heads", where)
    )
    known = (("hidden_act", "silu"), ("head_dim", sizes["hidden_size"] // heads), ("dropout", 0))
    for field, expected in known:
        if part.get(field, expected) != expected:
            raise ValueError(f"{where}.{field} is {part[field]!r:.40}, expected {expected!r}")
    attention = AttentionConfig(
        dim=sizes["hidden_size"],
        num_heads=heads,
        num_kv_heads=shared,
        window=window,
        rope_theta=_rope_theta(part, where, theta),
    )
    name = "A" if window is None else "W"
    return StackConfig(
        dim=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        pattern=name,
        mixers={name: attention},
        mlp_dim=read_whole(part, "intermediate_size", where),
        norm_epsilon=_number(part, "rms_norm_eps", where, 1e-5),
        scan=False,
    )


def _rope_theta(part: Mapping[str, Any], where: str, default: float) -> float:
    """Return the base of positions from `rope_parameters` or, of older versions, `rope_theta`.

    Raises ValueError for scaled positions.
    """
    told = part.get("rope_parameters") or part.get("rope_scaling") or {}
    if not isinstance(told, dict):
        raise ValueError(f"{where} has rope_parameters {told!r:.40}, expected settings by name")
    kind = told.get("rope_type", told.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"{where} has rope_type {kind!r}, expected 'default': positions are not rescaled here"
        )
    return _number(told if "rope_theta" in told else part, "rope_theta", where, default)


def _number(settings: Mapping[str, Any], field: str, where: str, default: float) -> float:
    value = settings.get(field, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{where}.{field} is {value!r:.40}, expected a number")
    return float(value)


def _patcher(config: Mapping[str, Any], block_size: int = 4096) -> PatcherConfig:
    """Return how the whole model cuts bytes: H_t > threshold in nats, and a longest patch."""
    threshold = config.get("patching_threshold")
    if not isinstance(threshold, int | float) or isinstance(threshold, bool):
        raise ValueError(
            f"config.json has patching_threshold {threshold!r:.40}, expected a number of nats: without one "
            "transformers takes a default of its own, or cuts by patch_size"
        )
    return PatcherConfig(
        mode="entropy",
        threshold=float(threshold),
        max_length=config.get("max_patch_length"),
        block_size=block_size,
    )
