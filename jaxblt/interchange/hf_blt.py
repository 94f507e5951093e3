"""Parts of Hugging Face's `BltForCausalLM` as configs and parameters of jaxblt.

Definitions are those of the paper (Byte Latent Transformer, Pagnoni et al., 2412.09871) and of the configs and weights
that transformers documents. Two parts are stacks of the same blocks as jaxblt's: the patcher, which is a `ByteLM`, and
the global transformer over patches. What joins them differs, see `DIFFERENCES`: no `BLT` of jaxblt is the whole.

Weights W [out, in] of a linear layer become kernels [in, out]. Rotary positions there turn neighbouring channels
(2i, 2i + 1); here they turn (i, i + K/2). So the channels of queries and keys change places, which no product of the
two sees.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxblt.data import DataConfig
from jaxblt.interchange.tensors import Arrays, check_entries, read_header, read_tensors
from jaxblt.interchange.weight_files import read_config, read_whole, weight_files
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.patching import PatcherConfig
from jaxblt.seals import check_finite
from jaxblt.training.recipe import Recipe
from jaxblt.training.train_config import TrainConfig

DIFFERENCES = (
    "a patch asks its bytes with cross_attn_k vectors made of their maximum (here: with one, of its last byte)",
    "a byte reads one patch in every layer of the decoder (here: the latest look_back patches, once)",
    "n-grams are hashed by a polynomial in 64 bits modulo the table (here: by multipliers in 32 bits)",
)
"""The differences that keep a jaxblt `BLT` from computing what `BltForCausalLM` does."""

KINDS = {"patcher": "patcher_config", "global_transformer": "global_config"}
"""The configs of the parts that can be read, by part."""


class PatcherPart(NamedTuple):
    """The entropy model of a `BltForCausalLM`: a recipe whose model it is, its parameters, and how it cuts patches."""

    recipe: Recipe
    params: Any
    patcher: PatcherConfig


class StackPart(NamedTuple):
    """A stack's config and its parameters."""

    config: StackConfig
    params: Any


def read_patcher(folder: str | os.PathLike[str], *, name: str = "patcher") -> PatcherPart:
    """Read the entropy model as a byte language model, and the threshold that cuts its patches.

    Args:
      folder: with `config.json` and safetensors weights, as `save_pretrained` writes it.
      name: of the recipe.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the folder holds another kind of model; a setting has no counterpart; or entries are missing,
        unexpected or of another shape (all are named).
    """
    config = _read_config(folder)
    part = _part(config, "patcher")
    stack = _stack(part, "patcher")
    vocab = read_whole(part, "vocab_size", "patcher_config")
    model = ByteLMConfig(stack=stack, tie_head=False, vocab_size=vocab)
    length = read_whole(part, "max_position_embeddings", "patcher_config")
    data, train = DataConfig(seq_len=length, batch_size=1), TrainConfig(dtype="float32")
    outer = {"embed_tokens.weight": (vocab, stack.dim), "norm.weight": (stack.dim,)}
    outer |= {"lm_head.weight": (vocab, stack.dim)}
    found = _read_part(folder, "model.patcher.", _layer_shapes(stack) | outer)
    params = {
        "embedding": {"bytes": found["embed_tokens.weight"]},
        "stack": _stack_params(stack, found),
        "head": {"norm": {"scale": found["norm.weight"]}, "logits": {"kernel": found["lm_head.weight"].T}},
    }
    recipe = Recipe(name=name, model=model, data=data, train=train)
    return PatcherPart(recipe, params, _patcher(config))


def read_global(folder: str | os.PathLike[str]) -> StackPart:
    """Read the transformer over patches as the latent stack of a `BLTConfig`.

    Vectors in and out are those of the stack.

    Args:
      folder: as of `read_patcher`.

    Raises:
      FileNotFoundError, ValueError: as of `read_patcher`; or patches are projected to another width before the stack.
    """
    config = _read_config(folder)
    part = _part(config, "global_transformer")
    if part.get("encoder_cross_output_size") is not None:
        raise ValueError(
            f"global_config.encoder_cross_output_size is {part['encoder_cross_output_size']}, expected null: a stack "
            "has no projection before its first block"
        )
    stack = _stack(part, "global_transformer")
    found = _read_part(folder, "model.global_transformer.", _layer_shapes(stack))
    return StackPart(stack, _stack_params(stack, found))


def refuse_whole(folder: str | os.PathLike[str]) -> None:
    """Raise ValueError that says why no `BLT` is the whole model, and which part can be had."""
    _read_config(folder)
    raise ValueError(
        f"{folder} holds a BltForCausalLM, which no BLTConfig describes: {'; '.join(DIFFERENCES)}. Its entropy model "
        "can be imported: add --part patcher. Its global transformer is read by jaxblt.interchange.read_global"
    )


def _read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    config = read_config(folder)
    kind = config.get("model_type")
    if kind != "blt":
        raise ValueError(
            f"{Path(folder) / 'config.json'} has model_type {kind!r:.40}, expected 'blt' or 'hyenadna': other "
            "models are not read"
        )
    return config


def _part(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(KINDS[name])
    if not isinstance(found, dict):
        raise ValueError(f"config.json has {KINDS[name]} {found!r:.40}, expected the settings of the {name}")
    return found


def _stack(part: Mapping[str, Any], name: str) -> StackConfig:
    """Return blocks of attention and SwiGLU, as the settings of a part say.

    The patcher's window is 512 where its settings name none, as transformers has it; the global transformer has none.
    """
    where = KINDS[name]
    sizes = {f: read_whole(part, f, where) for f in ("hidden_size", "num_hidden_layers", "intermediate_size")}
    heads = read_whole(part, "num_attention_heads", where)
    shared = (
        heads if part.get("num_key_value_heads") is None else read_whole(part, "num_key_value_heads", where)
    )
    for field, expected in (("hidden_act", "silu"), ("head_dim", sizes["hidden_size"] // heads)):
        if part.get(field, expected) != expected:
            raise ValueError(f"{where}.{field} is {part[field]!r:.40}, expected {expected!r}")
    window = part.get("sliding_window", 512) if name == "patcher" else None
    attention = AttentionConfig(
        dim=sizes["hidden_size"],
        num_heads=heads,
        num_kv_heads=shared,
        window=window,
        rope_theta=_rope_theta(part, where, 10_000.0 if name == "patcher" else 500_000.0),
    )
    return StackConfig(
        dim=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        pattern="A" if window is None else "W",
        mixers={"A" if window is None else "W": attention},
        mlp_dim=sizes["intermediate_size"],
        norm_epsilon=float(part.get("rms_norm_eps", 1e-5)),
    )


def _rope_theta(part: Mapping[str, Any], where: str, default: float) -> float:
    """Return the base of positions from `rope_parameters` or, of older versions, `rope_theta`.

    Raises ValueError for scaled positions.
    """
    told = part.get("rope_parameters") or part.get("rope_scaling") or {}
    kind = told.get("rope_type", told.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"{where} has rope_type {kind!r}, expected 'default': positions are not rescaled here"
        )
    return float(told.get("rope_theta", part.get("rope_theta", default)))


def _patcher(config: Mapping[str, Any]) -> PatcherConfig:
    """Return how the whole model cuts bytes: H_t > threshold in nats, and a longest patch."""
    mode = config.get("patching_mode", "entropy")
    if mode != "entropy":
        raise ValueError(f"patching_mode is {mode!r:.40}, expected 'entropy': only it reads the patcher")
    threshold = config.get("patching_threshold")
    if not isinstance(threshold, int | float) or isinstance(threshold, bool):
        raise ValueError(
            f"config.json has patching_threshold {threshold!r:.40}, expected a number of nats: without one "
            "transformers takes a default of its own, or cuts by patch_size"
        )
    return PatcherConfig(
        mode="entropy", threshold=float(threshold), max_length=config.get("max_patch_length")
    )


def _layer_shapes(stack: StackConfig) -> dict[str, tuple[int, ...]]:
    """Return shapes of a part's layer weights, by the names that follow the part's."""
    mixer = stack.mixer(stack.pattern[0])
    assert isinstance(mixer, AttentionConfig)
    queries, keys = mixer.num_heads * mixer.width, mixer.groups * mixer.width
    width, hidden = stack.dim, stack.hidden
    shapes = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    return {
        f"layers.{i}.{name}.weight": shape for i in range(stack.num_layers) for name, shape in shapes.items()
    }


def _stack_params(stack: StackConfig, found: Arrays) -> dict[str, Any]:
    """Return parameters of a scanned `Stack`: the layers' stacked [layers, ...]."""
    mixer: Any = stack.mixer(stack.pattern[0])

    def stacked(name: str, turn: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return np.stack([turn(found[f"layers.{i}.{name}.weight"]) for i in range(stack.num_layers)])

    def heads(w: np.ndarray) -> np.ndarray:
        return w.reshape(-1, mixer.width, stack.dim).transpose(2, 0, 1)

    def turned(w: np.ndarray) -> np.ndarray:
        split = heads(w)
        return np.concatenate([split[..., ::2], split[..., 1::2]], -1)

    def joined(w: np.ndarray) -> np.ndarray:
        return w.T.reshape(-1, mixer.width, stack.dim)

    kernels = {"q": turned, "k": turned, "v": heads, "out": joined}
    block = {
        "mixer_norm": {"scale": stacked("input_layernorm", np.asarray)},
        "mlp_norm": {"scale": stacked("post_attention_layernorm", np.asarray)},
        "mixer": {n: {"kernel": stacked(f"self_attn.{n[0]}_proj", turn)} for n, turn in kernels.items()},
        "mlp": {n: {"kernel": stacked(f"mlp.{n}_proj", np.transpose)} for n in ("gate", "up", "down")},
    }
    return {"periods": {"block_0": block}}


def _read_part(
    folder: str | os.PathLike[str], prefix: str, expected: Mapping[str, tuple[int, ...]]
) -> Arrays:
    """Read a part's weights in fp32, by the names that follow its prefix.

    Others in the files are not read.
    """
    where = {name: file for file in weight_files(folder) for name in read_header(file).arrays}
    headers = {file: read_header(file).arrays for file in set(where.values())}
    found = {n.removeprefix(prefix): headers[file][n] for n, file in where.items() if n.startswith(prefix)}
    # Take any float, as all are widened
    shapes = {n: jax.ShapeDtypeStruct(x.shape, np.float32) for n, x in found.items()}
    wanted = {n: jax.ShapeDtypeStruct(shape, np.float32) for n, shape in expected.items()}
    check_entries(
        f"{folder} does not hold the {prefix.removeprefix('model.')[:-1]} of its config", shapes, wanted
    )
    arrays: Arrays = {}
    for file in headers:
        names = [prefix + name for name in expected if where[prefix + name] == file]
        read = read_tensors(file, names)
        check_finite(str(file), read)
        arrays |= {name.removeprefix(prefix): x.astype(np.float32) for name, x in read.items()}
    return arrays
