"""Adapters that are compared: they have as many trained parameters and differ in what makes their code."""

from dataclasses import dataclass
from typing import Literal

from jaxblt.adapters import AdapterConfig, ChunkMean, Clamp, Prefix, RouterConfig, Traces
from jaxblt.validation import check_bounds, check_fields

ARMS = ("static", "oracle", "chunk", "token", "token_imitated", "imitated_traces")
"""Names of `make_arm`."""
IMITATED = ("token_imitated", "imitated_traces")
"""Arms whose router has traces, and is told the labels in training."""
BANKS = ("imitated_traces", "oracle")
"""Arms whose code picks among experts, one a domain."""
WITHIN = 0.05
"""Arms of one size may differ in trained parameters by this share of the static one's."""


@dataclass(frozen=True)
class Settings:
    """The settings that all arms of a measurement share.

    Attributes:
      rank: r of a domain's adapter in a bank; the others have as many ranks as the whole bank.
      sites: of the adapters.
      also_train: parameters of the base that are trained besides, by every arm.
      scale: of every update, alpha over the rank.
      chunk, hidden: of routers.
      prefix: steps that a router's attention pools; it must be shorter than a row.
      seconds: of steps an arm and seed, compilation not counted; of no account with `steps`.
      steps: of an arm and seed, a multiple of `steps_a_call`; None for as many as the seconds allow.
      rate: peak of the learning rate, cosine to 0 by time or by steps, after a twentieth of it.
      router_factor: of the routers' rate.
      imitation: weight of the cross-entropy between the code of an arm of `IMITATED` and the labels, in nats.
      letters: that a cipher of the conflict mix permutes. A domain's adapter undoes up to rank + 1 of them.
      rows, length: of a batch.
      spans: bytes of the shortest and the longest span of one domain.
      test_rows: documents that all arms are scored on.
      steps_a_call: steps between two looks at the clock.
      dtype: of the computation.
    """

    rank: int = 4
    sites: tuple[str, ...] = ("mixer/*", "mlp/*")
    also_train: tuple[str, ...] = ("embedding/bytes",)
    scale: float = 2.0
    chunk: int = 64
    hidden: int = 48
    prefix: int = 128
    seconds: float = 30.0
    steps: int | None = None
    rate: float = 2e-3
    router_factor: float = 2.0
    imitation: float = 0.1
    letters: int = 26
    rows: int = 8
    length: int = 4096
    spans: tuple[int, int] = (256, 4096)
    test_rows: int = 256
    steps_a_call: int = 20
    dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(
            self, "rank", "chunk", "hidden", "prefix", "rows", "length", "steps", "steps_a_call", least=1
        )
        check_bounds(self, "spans", least=1)
        check_bounds(self, "scale", "seconds", "rate", "router_factor", above=0)
        check_bounds(self, "imitation", least=0)
        check_bounds(self, "chunk", "prefix", below="length", why=": no byte of a row would have a code")
        check_bounds(self, "letters", least=2, most=26)
        if self.spans[0] > self.spans[1]:
            raise ValueError(f"Settings.spans must be the shortest and the longest, got {self.spans}")
        if self.test_rows % self.rows:
            raise ValueError(
                f"Settings.test_rows must be a multiple of rows = {self.rows}, got {self.test_rows}: batches are whole"
            )
        if self.steps is not None and self.steps % self.steps_a_call:
            raise ValueError(
                f"Settings.steps must be a multiple of steps_a_call = {self.steps_a_call}, got {self.steps}"
            )


@dataclass(frozen=True)
class Arm:
    """One way to adapt.

    Attributes:
      adapter: of the base.
      labelled: the code is that of the byte's domain, and not a router's.
      imitation: weight of the labels in a router's loss.
    """

    adapter: AdapterConfig
    labelled: bool = False
    imitation: float = 0.0


def make_arm(name: str, settings: Settings, domains: int) -> Arm:
    """Return the arm of a name.

    static        c = 1, of the whole bank's rank
    oracle        a bank of one expert a domain, picked by labels, in the test too
    chunk, token  a free code of so many numbers as ranks
    token_imitated    token whose router has traces, a memory that knows the order of bytes, and no prefix. Its code is
                  drawn towards the labels in training: the mean of a domain's ranks is its logit
    imitated_traces    the bank under such a router, whose code is a softmax over experts

    Raises:
      ValueError: there is no such arm.
    """
    if name not in ARMS:
        raise ValueError(f"unknown arm {name!r}, choose of: {', '.join(ARMS)}")
    rank, blocks = domains * settings.rank, domains if name in BANKS else None
    router = None if name == "static" else _router(name, settings)
    adapter = AdapterConfig(
        sites=settings.sites,
        rank=rank,
        alpha=settings.scale * rank / (blocks or 1),
        blocks=blocks,
        router=router,
        code=() if router is None or blocks else (Clamp(3.0),),
    )
    imitation = settings.imitation if name in IMITATED else 0.0
    return Arm(adapter, name == "oracle", imitation)


def _router(name: str, settings: Settings) -> RouterConfig:
    return RouterConfig(
        level="token" if name in ("token", *IMITATED) else "chunk",
        chunk=settings.chunk,
        reads=(ChunkMean(), Traces() if name in IMITATED else Prefix(settings.prefix)),
        hidden=settings.hidden,
    )


def check_sizes(counts: dict[str, int]) -> None:
    """Refuse arms whose trained parameters differ by more than `WITHIN` of the static arm's, or of the first one's.

    Args:
      counts: trained parameters by arm.

    Raises:
      ValueError: says which, and what to change.
    """
    base = counts.get("static", next(iter(counts.values())))
    apart = {name: count for name, count in counts.items() if abs(count - base) > WITHIN * base}
    if apart:
        raise ValueError(
            f"trained parameters {apart} differ from {base} by more than {WITHIN:.0%}: use narrower routers "
            "(--settings.hidden) or a larger --settings.rank"
        )
