"""Error of Hyena that sees only an overlap of its neighbour: python -m experiments.benchmark overlap --out FILE."""

from dataclasses import dataclass
from typing import Any

from jaxblt.validation import check_bounds, check_fields


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The row and how it is cut.

    Attributes:
      dim: width.
      length: positions of a row.
      shards: pieces of it, one a device.
      overlaps: positions before a piece that it sees besides its own; the exact mode sees all.
      seeds: of parameters and rows.
    """

    dim: int = 32
    length: int = 4096
    shards: int = 4
    overlaps: tuple[int, ...] = (0, 16, 64, 256, 1024)
    seeds: int = 3

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", "seeds", least=1)
        check_bounds(self, "shards", least=2)
        check_bounds(self, "overlaps", least=0)
        if self.length % self.shards:
            raise ValueError(f"length {self.length} must be a multiple of shards = {self.shards}")


def filters_of(settings: Settings) -> dict[str, Any]:
    """Return a Hyena by the name of its filter."""
    from jaxblt.mixers import ExplicitFilter, HyenaConfig, ImplicitFilter, ModalFilter

    kinds = {
        "explicit, 128 taps": ExplicitFilter(taps=128),
        "modal, up to 256 steps": ModalFilter(max_timescale=256.0),
        "modal, up to 4,096 steps": ModalFilter(max_timescale=4096.0),
        "implicit, as long as the row": ImplicitFilter(filter_len=settings.length),
    }
    return {name: HyenaConfig(dim=settings.dim, filter=kind) for name, kind in kinds.items()}


def overlap(out: str, settings: Settings = Settings()) -> dict[str, Any]:
    """Compute a Hyena layer at its start by pieces that see an overlap only, and compare it with the whole row.

    The error is |by pieces - whole| / |whole|, norms over all positions and channels, as means over seeds.

    Args:
      out: file for the figures as JSON.
      settings: of the row.
    """
    from experiments.benchmark.figures.saved import save

    rows = [
        {"filter": name, "overlap": size, "error": error}
        for name, config in filters_of(settings).items()
        for size, error in errors(config, settings).items()
    ]
    figures = {"settings": vars(settings), "rows": rows}
    save("overlap", out, figures)
    return figures


def errors(config: Any, settings: Settings) -> dict[int, float]:
    """Return the error of each overlap."""
    import jax
    import jax.numpy as jnp

    module, piece = config.build(), settings.length // settings.shards

    def run(key: Any) -> Any:
        start, row = jax.random.split(key)
        x = jax.random.normal(row, (1, settings.length, settings.dim))
        params = module.init(start, x)
        whole = module.apply(params, x)[0]
        found = []
        for size in settings.overlaps:
            parts = []
            for first in range(0, settings.length, piece):
                seen = x[:, max(first - size, 0) : first + piece]
                parts.append(module.apply(params, seen)[0][:, -piece:])
            apart = jnp.concatenate(parts, 1) - whole
            found.append(jnp.linalg.norm(apart) / jnp.linalg.norm(whole))
        return jnp.stack(found)

    keys = jax.random.split(jax.random.key(0), settings.seeds)
    found = jnp.mean(jnp.stack([jax.jit(run)(key) for key in keys]), 0)
    return dict(zip(settings.overlaps, found.tolist(), strict=True))
