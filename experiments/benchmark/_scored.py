"""What an arm does on the test rows: nats of every byte, and the figures that are made of them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark._paired import bits_by, by_distance


@dataclass(frozen=True)
class Scored:
    """An arm on the test rows.

    Attributes:
      nats: of each target, [rows, T].
      rows: the same for all arms and seeds, as NumPy arrays.
      picked: of a bank with a router, [experts, domains], bytes of a domain at which an expert has the largest number.
      right: of reviews, whether each one's label was found, [rows].
      cut: of a base with patches, how many there are, and how many boundaries found no slot.
    """

    nats: np.ndarray
    rows: Any
    picked: np.ndarray | None = None
    right: np.ndarray | None = None
    cut: np.ndarray | None = None

    @property
    def bits_per_byte(self) -> np.ndarray:
        """Of each row."""
        there = np.ones_like(self.nats) if self.rows.segment_ids is None else self.rows.segment_ids
        return (self.nats * there).sum(1) / there.sum(1) / np.log(2)


def count_picks(code: Any, domain: Any, domains: int) -> Any:
    """[experts, domains], bytes of a domain at which an expert has the largest number of a code [B, T, experts].

    Where all numbers are the same, as before a row's first code, it is none's.
    """
    leads = jnp.any(code != code[..., :1], -1, keepdims=True)
    largest = jax.nn.one_hot(jnp.argmax(code, -1), code.shape[-1]) * leads.astype(jnp.float32)
    return jnp.einsum("bte,btd->ed", largest, jax.nn.one_hot(domain, domains))


def figures_of(scored: Scored, domains: list[str]) -> dict[str, Any]:
    """Bits per byte, all, by domain and behind changes, and what else was scored; domains by their names."""
    nats, rows = scored.nats, scored.rows
    there = np.ones_like(rows.inputs) if rows.segment_ids is None else rows.segment_ids
    by_domain = bits_by(nats[there > 0], rows.target_domain[there > 0], len(domains))
    found: dict[str, Any] = {
        "bits_per_byte": float(scored.bits_per_byte.mean()),
        "by_domain": dict(zip(domains, by_domain, strict=True)),
        "by_distance": by_distance(nats, rows.since, nats.shape[1]),
    }
    if scored.picked is not None:
        found["purity"] = float(scored.picked.max(1).sum() / max(scored.picked.sum(), 1))
    if scored.right is not None:
        found["accuracy"] = float(scored.right.mean())
    if scored.cut is not None:
        patches, overflow = (float(number) for number in scored.cut)
        found["bytes_per_patch"] = float(there.sum()) / patches
        found["overflow"] = overflow / (patches + overflow)
    return found
