"""Figures of a model's memories while they read a passage of bytes, by layer, as plain numbers."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.array_checks import check_ids
from jaxblt.data.vocab import check_whole, encode
from jaxblt.mixers.driver.recording import Recorded
from jaxblt.profiling.layer_tables import tabled_layers

SERIES = ("surprise", "norm", "alpha")
"""The series of a neural memory: a number a byte, the mean over heads."""
Shown = Literal["memory"] | Recorded
"""What a picture shows: memories, routes and reads of state engines, or weights of attention."""
TABLES = ("usage", "age", "reads")
"""The tables of a slot memory: a row for each slot of each head, and a column an interval (reads: a byte).

Usage and age of a free slot are None.
"""


@runtime_checkable
class Trained(Protocol):
    """A model with its parameters, such as a `jaxblt.run.Run`."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def params(self) -> Any: ...


def read_passage(
    model: nn.Module | Trained,
    passage: bytes | np.ndarray,
    params: Any = None,
    labels: Sequence[str] | None = None,
    what: Shown = "memory",
) -> dict[str, Any]:
    """Return figures of the model's memories, or of other layers, while they read one document.

    Arguments are those of `jaxblt.profiling.memory_picture.plot_memory`, which says what the figures are.

    Returns:
      {"ids": [T], "labels": [T], "layers": [...]}, a layer being {"layer", "kind": "neural memory", "chunk_size",
      "surprise": [T], "norm": [T], "alpha": [T]} or {"layer", "kind": "slots", "interval", "heads", "usage", "age",
      "reads"}; of routing and attention see `jaxblt.profiling.layer_tables`. Lists and numbers only; floats hold their
      fp32 values.

    Raises:
      ValueError: see `plot_memory`.
    """
    from jaxblt.patching.render import label_byte

    module, params = _model_of(model, params)
    ids = _ids_of(passage, module.config.vocab_size)
    labels = [label_byte(int(token)) for token in ids] if labels is None else list(labels)
    if len(labels) != len(ids):
        raise ValueError(f"{len(labels)} labels do not name {len(ids)} ids: give one for each")
    layers = _layers(module, params, ids) if what == "memory" else tabled_layers(module, params, ids, what)
    return {"ids": ids.tolist(), "labels": labels, "layers": layers}


def _ids_of(passage: Any, size: int) -> np.ndarray:
    """Return one row of ids in 0..size-1."""
    if isinstance(passage, str):
        raise ValueError(f"a passage is bytes or ids, got text {passage!r:.40}: call its encode()")
    ids = encode(passage, bos=True) if isinstance(passage, bytes) else np.asarray(passage)
    check_whole("ids of the passage", ids)
    if ids.ndim != 1 or not ids.size:
        raise ValueError(
            f"a passage is one row of bytes or ids, got shape {ids.shape}: give one that is not empty"
        )
    check_ids(ids, size)
    return ids


def _model_of(model: Any, params: Any) -> tuple[nn.Module, Any]:
    """Return the module and its parameters."""
    if isinstance(model, nn.Module):
        if params is None:
            raise ValueError(f"{type(model).__name__} comes without parameters: pass params, or a run")
        found = model
    else:
        found, params = model.model, model.params if params is None else params
    if getattr(found, "patch_stacks", ()):
        raise ValueError(
            f"{type(found).__name__} cuts bytes into patches, and pictures of memories are by byte: use a ByteLM"
        )
    return found, params


def _layers(module: nn.Module, params: Any, ids: np.ndarray) -> list[dict[str, Any]]:
    """Return the layers that have a memory."""
    from jaxblt.mixers.driver.recording import COLLECTION, kept_core
    from jaxblt.mixers.memory.passages import follow, span_of
    from jaxblt.models.hidden import layers_of

    places = layers_of(module)
    scanned = {layer.path: layer.period is not None for layer in places}
    spans = {}

    def program(params: Any, ids: Any) -> dict[Any, Any]:
        _, kept = module.apply({"params": params}, ids, mutable=[COLLECTION])
        found = {}
        for path, repeats in scanned.items():
            core = kept_core(_below(kept.get(COLLECTION, {}), path))
            if core is not None:
                spans[path] = span_of(core[0])
                found[path] = jax.vmap(follow)(*core) if repeats else follow(*core)
        return found

    passages = jax.device_get(jax.jit(program)(params, jnp.asarray(ids, jnp.int32)[None]))
    if not passages:
        raise ValueError(
            f"no layer of this {type(module).__name__} has a memory: give its stack NeuralMemoryConfig, MAGConfig, "
            "MACConfig or SlotMemoryConfig, as jaxblt.models.titan does"
        )
    found = {
        i: (_of_period(passages[layer.path], layer.period), spans[layer.path])
        for i, layer in enumerate(places)
        if layer.path in passages
    }
    for i, (passage, _) in found.items():
        _check_finite(i, passage, params)
    return [{"layer": i, **_figures(*one)} for i, one in found.items()]


def _check_finite(layer: int, passage: Any, params: Any) -> None:
    """Raise ValueError for figures that no picture and no JSON can hold."""
    from jaxblt.models.finite import explain_nonfinite

    for name, x in vars(passage).items():
        if not np.isfinite(x).all():
            raise ValueError(
                f"{name} of the memory in layer {layer} is {x[~np.isfinite(x)][0]} under this passage; "
                f"{explain_nonfinite(params)}"
            )


def _below(tree: Any, path: tuple[str, ...]) -> Any:
    """Return what a layer kept; nothing if it kept nothing."""
    for name in path:
        tree = tree.get(name, {})
    return tree


def _of_period(tree: Any, period: int | None) -> Any:
    return tree if period is None else jax.tree.map(lambda x: x[period], tree)


def _figures(passage: Any, span: int) -> dict[str, Any]:
    """Return lists of what a memory did."""
    if hasattr(passage, "surprise"):
        means = {name: getattr(passage, name).mean(1).tolist() for name in SERIES}
        return {"kind": "neural memory", "chunk_size": span, **means}
    heads = passage.reads.shape[1]
    tables = {name: getattr(passage, name).reshape(len(getattr(passage, name)), -1).T for name in TABLES}
    free = ~passage.valid.reshape(len(passage.valid), -1).T
    for name in ("usage", "age"):
        tables[name] = tables[name].astype(object)
        tables[name][free] = None
    return {"kind": "slots", "interval": span, "heads": heads} | {n: x.tolist() for n, x in tables.items()}
