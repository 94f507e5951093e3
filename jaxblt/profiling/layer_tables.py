"""Tables of a model's layers while they read a passage: routes of state engines, and attention's weights."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.mixers.driver.recording import COLLECTION, Recorded, kept_tables, record_tables
from jaxblt.models.finite import explain_nonfinite
from jaxblt.models.hidden import layers_of

KINDS: dict[Recorded, str] = {"routing": "state engine", "attention": "attention"}
"""The kind of a layer that has the tables."""
NEEDED: dict[Recorded, str] = {"routing": "StateEngineConfig", "attention": "AttentionConfig"}
MOST = 512
"""Ids of a passage whose weights are tabled: a table of attention grows with their square."""


def tabled_layers(module: nn.Module, params: Any, ids: np.ndarray, what: Recorded) -> list[dict[str, Any]]:
    """Return the layers that have tables of a kind, as {"layer", "kind", "heads", name: [heads * rows, columns]}.

    Routing has "routes" and "reads", a row for each slot of each head and a column a byte: what a byte writes to the
    slot, and what it reads there. Attention has "weights", a row for each query of each head and a column a key.

    Raises:
      ValueError: no layer has such tables, one is not finite, or the passage is too long for attention's.
    """
    if what == "attention" and len(ids) > MOST:
        raise ValueError(
            f"weights of attention are tabled for at most {MOST} ids, got {len(ids)}: draw a shorter passage"
        )
    places = layers_of(module)

    def program(params: Any, ids: Any) -> dict[Any, Any]:
        with record_tables(what):
            _, kept = module.apply({"params": params}, ids, mutable=[COLLECTION])
        found = {layer.path: kept_tables(_below(kept.get(COLLECTION, {}), layer.path)) for layer in places}
        return {path: tables for path, tables in found.items() if tables is not None}

    found = jax.device_get(jax.jit(program)(params, jnp.asarray(ids, jnp.int32)[None]))
    if not found:
        raise ValueError(
            f"no layer of this {type(module).__name__} shows {what}: give its stack {NEEDED[what]}, or draw something "
            "else"
        )
    if not all(np.isfinite(table).all() for table in jax.tree.leaves(found)):
        raise ValueError(f"{what} is not finite under this passage; {explain_nonfinite(params)}")
    layers = [(i, layer) for i, layer in enumerate(places) if layer.path in found]
    return [
        {"layer": i, "kind": KINDS[what], **_rows(found[layer.path], layer.period, what)}
        for i, layer in layers
    ]


def _rows(tables: dict[str, Any], period: int | None, what: Recorded) -> dict[str, Any]:
    """Return tables [B, T, H, N] of the first row as [H * rows, columns]: slots by bytes, or queries by keys."""
    shown: dict[str, Any] = {}
    for name, table in tables.items():
        one = np.asarray(table if period is None else table[period])[0]
        order = (1, 2, 0) if what == "routing" else (1, 0, 2)
        shown["heads"] = one.shape[1]
        shown[name] = (
            one.transpose(order).reshape(-1, one.shape[0] if what == "routing" else one.shape[2]).tolist()
        )
    return shown


def _below(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree.get(name, {})
    return tree
