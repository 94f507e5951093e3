"""One program for the codes of all levels against a program each: python -m experiments.benchmark router_levels."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jaxblt.validation import check_bounds, check_fields

if TYPE_CHECKING:
    from jaxblt.adapters import AdapterConfig

LEVELS = ("prefix", "chunk", "token")
"""Names of sites, and their levels."""
BOUND = 1e-5
"""The most by which the codes may differ."""


@dataclass(frozen=True)
class Setting:
    """The routers, and what they read.

    Attributes:
      dim: width of a token.
      rank: numbers of a code.
      hidden: width of a router's network.
      chunk: steps of a chunk.
      prefix: steps that are pooled.
      shapes: (rows, tokens).
      trials: of each timing, at least 20.
    """

    dim: int = 512
    rank: int = 16
    hidden: int = 48
    chunk: int = 64
    prefix: int = 128
    shapes: tuple[tuple[int, int], ...] = ((1, 512), (8, 512), (2, 4096))
    trials: int = 20

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", "rank", "hidden", "chunk", "prefix", least=1)
        check_bounds(self, "trials", least=20)


def router_levels(
    out: str = "runs/benchmark/router_levels.json", setting: Setting = Setting()
) -> dict[str, Any]:
    """Time codes of prefix, chunk and token in one program and in a program each, after a check that they are equal.

    Several programs are called one after the other, and the host waits for the last one. `one_over_several` is the
    ratio of times, with its interval.

    Args:
      out: file for the figures as JSON.
      setting: of the routers.

    Raises:
      ValueError: codes differ.
    """
    from experiments.benchmark.figures.saved import save

    timed = [
        {"rows": rows, "tokens": tokens, **time_shape(setting, rows, tokens)}
        for rows, tokens in setting.shapes
    ]
    found = {"setting": asdict(setting), "shapes": timed}
    save("router_levels", out, found)
    return found


def time_shape(setting: Setting, rows: int, tokens: int) -> dict[str, Any]:
    """Return seconds of both ways for rows of one shape, and the first over the second."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.figures.saved import timed
    from jaxblt.profiling import Case, compare

    every = adapter_of(setting)
    x = jax.random.normal(jax.random.key(0), (rows, tokens, setting.dim))
    routers = {"every": every, **every.by_level}
    programs = {name: jax.jit(_codes(_built(adapter))) for name, adapter in routers.items()}
    params: Any = nn.meta.unbox(jax.jit(_built(every).init)(jax.random.key(1), x))["params"]
    # Move kernels away from 0, where all codes are alike
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)

    def several(x: Any) -> list[Any]:
        return [programs[level](params[level], x) for level in every.level_names]

    one = Case("one", lambda x: programs["every"](params, x), (x,))
    error = float(jnp.abs(one.fn(x) - jnp.concatenate(several(x), -1)).max())
    if not error <= BOUND:
        raise ValueError(
            f"codes of one program and of several differ by {error:.1e}: expected at most {BOUND}"
        )
    found = compare(one, Case("several", several, (x,)), rounds=setting.trials, method="calls")
    ratio = {"value": found.ratio, "low": found.low, "high": found.high}
    return {
        "one": timed(found.first),
        "several": timed(found.second),
        "one_over_several": ratio,
        "error": error,
    }


def adapter_of(setting: Setting) -> "AdapterConfig":
    """Return an adapter with a site at each level."""
    from jaxblt.adapters import AdapterConfig, ChunkMean, Prefix, RouterConfig

    reads = (ChunkMean(), Prefix(setting.prefix))
    router = RouterConfig("chunk", chunk=setting.chunk, reads=reads, hidden=setting.hidden, packed=False)
    levels: Any = (("token", "token"), ("prefix", "prefix"))
    return AdapterConfig(sites=LEVELS, rank=setting.rank, router=router, levels=levels)


def _built(adapter: "AdapterConfig") -> Any:
    """Return the routers of an adapter that has some."""
    return adapter.build()


def _codes(router: Any) -> Callable[[Any, Any], Any]:
    return lambda params, x: router.apply({"params": params}, x)[0]
