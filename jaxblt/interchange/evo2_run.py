"""A checkpoint of Evo 2 as a run folder, and a run as such a checkpoint."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jaxblt.data import DataConfig
from jaxblt.interchange.entry import Entry, Source, check_source, open_source, write_entries
from jaxblt.interchange.runs import Dtype, Exported, check_new_folder
from jaxblt.interchange.striped_hyena import entries
from jaxblt.interchange.tensors import check_new
from jaxblt.interchange.torch_file import Lazy, write_torch
from jaxblt.models import ByteLMConfig
from jaxblt.models.striped_hyena import EVO2, evo2
from jaxblt.seals import check_finite
from jaxblt.training.recipe import Recipe, TrainConfig

if TYPE_CHECKING:
    from jaxblt.run import Run

RELEASED = {
    "evo2_1b_base": "evo2_1b_8k",
    "evo2_7b_base": "evo2_7b_8k",
    "evo2_7b_microviridae": "evo2_7b_8k",
    "evo2_7b_262k": "evo2_7b_262k",
    "evo2_7b": "evo2_7b_1m",
    "evo2_20b": "evo2_20b_1m",
    "evo2_40b_base": "evo2_40b_8k",
    "evo2_40b": "evo2_40b_1m",
}
"""Configs of the published files, by the files' names."""

HEAD, TABLE = "unembed.weight", "embedding_layer.weight"
"""The head of a checkpoint, which may hold the embedding twice, as the two are one."""

LEFT_OUT = "._extra_state"
"""How names end that hold Transformer Engine's FP8 state, which no answer here depends on."""

PRECISE = ("filter.log_poles", "filter.residues", "rotary_emb.inv_freq")
"""How names end that the reference keeps in fp32."""


def read_evo2(
    source: str | os.PathLike[str],
    run_dir: str | os.PathLike[str],
    *,
    config: str | None = None,
    fp8: bool = False,
) -> tuple[str, int]:
    """Make a run folder, which `jaxblt.load` opens, of a checkpoint of Evo 2.

    Returns its config's name, and how many tensors became parameters.

    Tensors are read and rewritten one by one into a file beside the folder, so that only one is in memory. Nothing of
    the checkpoint runs. The recipe computes in bfloat16, as the reference does, and names no data.

    Args:
      source: `.pt` file, whole or in parts; safetensors file; or folder of safetensors files with an index.
      run_dir: folder to make; it must not hold anything.
      config: name in `jaxblt.models.striped_hyena.EVO2`; None for the config of the published file of this name.
      fp8: compute Hyena's input projections in FP8, see `jaxblt.models.striped_hyena.evo2`.

    Raises:
      FileNotFoundError: there is no such file.
      FileExistsError: the folder holds something.
      ValueError: the config is unknown.
      ValueError: the file is damaged, or holds something else than tensors.
      ValueError: tensors are missing, unexpected, of another shape or not finite (all are named).
    """
    check_new_folder(Path(run_dir))
    path = Path(source)
    if path.name.endswith(".part0"):
        path = path.with_suffix("")
    name = _config_of(path) if config is None else config
    model = evo2(name, fp8=fp8)
    data = DataConfig(kind="fasta", seq_len=EVO2[name].max_len, batch_size=1)
    recipe = Recipe(name=path.stem, model=model, data=data, train=TrainConfig(dtype="bfloat16"))
    known = entries(model)
    with open_source(path) as opened:
        _check(str(path), opened, known)
        write_entries(run_dir, recipe, str(path), opened, known)
    return name, len(known)


def _config_of(path: Path) -> str:
    if path.stem not in RELEASED:
        raise ValueError(
            f"{path.name} is not the name of a published file ({', '.join(RELEASED)}): name its config by --config, "
            f"one of {', '.join(EVO2)}"
        )
    return RELEASED[path.stem]


def _check(where: str, found: Source, known: Mapping[str, Entry]) -> None:
    """Raise ValueError unless names and shapes are those known, and a head is the embedding."""
    told = {name: shape for name, shape in found.shapes.items() if not name.endswith(LEFT_OUT)}
    head, table = told.pop(HEAD, None), told.get(TABLE)
    if head is not None and (head != table or not np.array_equal(found.read(HEAD), found.read(TABLE))):
        raise ValueError(f"{where}: {HEAD} is not {TABLE}, and the head of Evo 2 is its embedding")
    check_source(where, told, known)


def write_evo2(
    run: "Run", file: str | os.PathLike[str], *, dtype: Dtype = "float32", overwrite: bool = False
) -> Exported:
    """Write the parameters of a run of Evo 2 as a checkpoint that vortex loads, tensor by tensor.

    Args:
      run: of `read_evo2`, or fine-tuned from one without adapters.
      file: `.pt` file to write.
      dtype: of its tensors; "bfloat16" rounds all but poles, residues and rotary frequencies.
      overwrite: replace a file that is there.

    Raises:
      FileExistsError: the file is there, and is not to be overwritten.
      FileNotFoundError: its folder is not.
      ValueError: the run's model is none of Evo 2, or a parameter is not finite.
    """
    check_new(file, overwrite=overwrite)
    model = run.recipe.model
    if model not in [evo2(name, fp8=fp8) for name in EVO2 for fp8 in (False, True)]:
        raise ValueError(
            f"the run's model is none of Evo 2 ({', '.join(EVO2)}), which vortex loads: merge adapters first, or leave "
            "out --to"
        )
    assert isinstance(model, ByteLMConfig)
    params: dict[str, Any] = flatten_dict(nn.meta.unbox(run.params), sep=".")
    check_finite("the run", params)

    def lazy(name: str, entry: Entry) -> Lazy:
        kind = jnp.float32 if dtype == "float32" or name.endswith(PRECISE) else jnp.bfloat16
        made = lambda: entry.theirs(*(np.asarray(params[p], np.float32) for p in entry.params))  # noqa: E731
        return Lazy(entry.shape, kind, made)

    tensors = {name: lazy(name, entry) for name, entry in entries(model).items()}
    return Exported(len(tensors), write_torch(file, tensors))
