"""Scores of an arm on the test rows: nats of every byte, and the figures that are made of them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark.adapters.paired_arms import bits_by, by_distance


@dataclass(frozen=True)
class Scored:
    """An arm on the test rows.

    Attributes:
      nats: of each target, [rows, T].
      rows: the same for all arms and seeds, as NumPy arrays.
      picked: of a bank with a router, [experts, domains], bytes of a domain at which an expert has the largest number.
    """

    nats: np.ndarray
    rows: Any
    picked: np.ndarray | None = None

    @property
    def bits_per_byte(self) -> np.ndarray:
        """Bits of each row."""
        return self.nats.mean(1) / np.log(2)


def count_picks(code: Any, domain: Any, domains: int) -> Any:
    """Return [experts, domains]: bytes of a domain at which an expert has the largest number of a code.

    Where all numbers are the same, as before a row's first code, it is none's.

    Args:
      code: [B, T, experts].
      domain: [B, T], of each byte.
      domains: how many there are.
    """
    leads = jnp.any(code != code[..., :1], -1, keepdims=True)
    largest = jax.nn.one_hot(jnp.argmax(code, -1), code.shape[-1]) * leads.astype(jnp.float32)
    return jnp.einsum("bte,btd->ed", largest, jax.nn.one_hot(domain, domains))


def figures_of(scored: Scored, domains: list[str]) -> dict[str, Any]:
    """Return bits per byte, all, by domain (by its name) and by bytes since a change, and a router's purity."""
    nats, rows = scored.nats, scored.rows
    by_domain = bits_by(nats, rows.target_domain, len(domains))
    found: dict[str, Any] = {
        "bits_per_byte": float(scored.bits_per_byte.mean()),
        "by_domain": dict(zip(domains, by_domain, strict=True)),
        "by_distance": by_distance(nats, rows.since, nats.shape[1]),
    }
    if scored.picked is not None:
        found["purity"] = float(scored.picked.max(1).sum() / max(scored.picked.sum(), 1))
    return found
