"""Adapters that are compared: they have as many trained parameters and differ in what makes their code."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxblt.adapters import AdapterConfig, ChunkMean, Clamp, Mixed, Prefix, RouterConfig, Traces
from jaxblt.adapters.experimental.diagonal import Diagonal
from jaxblt.validation import check_bounds, check_fields

BY_BLOCK = ("chunk_block", "bank_block")
"""Arms with a router in each block."""
TRACES = ("token_traces", "token_imitated", "imitated_traces")
"""Arms of a code for each token, whose router has traces."""
IMITATED = ("token_imitated", "imitated", "imitated_traces")
"""Arms whose router is told the labels in training."""
BANKS = ("bank", "bank_block", "imitated", "imitated_traces", "oracle")
FREE = ("prefix", "chunk", "chunk_block", "token", "token_traces", "token_imitated", "levels")
"""Arms of a free code."""
ARMS = ("static", "diagonal", *FREE, *BANKS, "full")
"""Names of `make_arm`."""
SQUARE = "mixer/*"
"""Products with as many outputs as inputs, as the attention of books_512 has them."""
WITHIN = 0.05
"""Arms of one size may differ in trained parameters by this share of the static one's."""


@dataclass(frozen=True)
class Settings:
    """The settings that all arms of a measurement share.

    Attributes:
      rank: r of a domain's adapter in a bank; the others have as many ranks as the whole bank.
      sites: of the adapters.
      also_train: parameters of the base that are trained besides.
      scale: of every update, alpha over the rank.
      chunk, hidden: of routers.
      prefix: steps that a router's attention pools; it must be shorter than a row.
      seconds: of steps an arm and seed, compilation not counted; of no account with `steps`.
      steps: of an arm and seed, a multiple of `steps_a_call`; None for as many as the seconds allow.
      rate: peak of the learning rate, cosine to 0 by time or by steps, after a twentieth of it.
      full_rate: that of full fine-tuning.
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
    full_rate: float = 3e-4
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
        check_bounds(self, "scale", "seconds", "rate", "full_rate", "router_factor", above=0)
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
      adapter: None for none.
      also_train: parameters of the base that are trained.
      rate: peak of the learning rate.
      labelled: the code is that of the byte's domain, and not a router's.
      imitation: weight of the labels in a router's loss.
    """

    adapter: AdapterConfig | None
    also_train: tuple[str, ...]
    rate: float
    labelled: bool = False
    imitation: float = 0.0

    @property
    def of_blocks(self) -> bool:
        """True where each block has a router of its own."""
        return self.adapter is not None and self.adapter.of_blocks


def make_arm(name: str, settings: Settings, domains: int) -> Arm:
    """Return the arm of a name.

    static        c = 1, of the whole bank's rank
    diagonal      static, and a diagonal update at the products of `SQUARE`
    prefix, chunk, token    a free code of so many numbers as ranks
    chunk_block   chunk with a router in each block, of a fourth of the width: it reads what the block does, and so the
                  context of a byte, where the one router of chunk reads only bytes
    token_traces  token whose router has traces, a memory that knows the order of bytes, and no prefix
    token_imitated    token_traces whose code is drawn towards the labels in training: the mean of a domain's ranks is
                  its logit
    levels        a free code that mixes those of prefix, chunk and token; a gate learns the weights
    bank          a softmax over a domain's number of experts for each chunk
    bank_block    bank with a router in each block
    imitated      a bank whose code is drawn towards the labels in training
    imitated_traces    imitated with the router of token_traces
    oracle        the same experts, picked by labels, in the test too
    full          all parameters of the base, no adapter

    Raises:
      ValueError: there is no such arm.
    """
    if name not in ARMS:
        raise ValueError(f"unknown arm {name!r}, choose of: {', '.join(ARMS)}")
    if name == "full":
        return Arm(None, ("*",), settings.full_rate)
    rank, blocks = domains * settings.rank, domains if name in BANKS else None
    router = None if name in ("static", "diagonal") else _router(name, settings)
    adapter = AdapterConfig(
        sites=settings.sites,
        rank=rank,
        alpha=settings.scale * rank / (blocks or 1),
        blocks=blocks,
        router=router,
        forms=((SQUARE, Diagonal()),) if name == "diagonal" else (),
        code=() if router is None or blocks else (Clamp(3.0),),
    )
    imitation = settings.imitation if name in IMITATED else 0.0
    return Arm(adapter, settings.also_train, settings.rate, name == "oracle", imitation)


def _router(name: str, settings: Settings) -> RouterConfig:
    level: Any = "token" if name in ("token", *TRACES) else "prefix" if name == "prefix" else "chunk"
    divisor = 4 if name in BY_BLOCK else 2 if name == "levels" else 1
    return RouterConfig(
        level=Mixed() if name == "levels" else level,
        chunk=settings.chunk,
        reads=(ChunkMean(), Traces() if name in TRACES else Prefix(settings.prefix)),
        hidden=max(1, settings.hidden // divisor),
        per="block" if name in BY_BLOCK else "stack",
    )


def check_sizes(counts: dict[str, int], matched: Sequence[str]) -> None:
    """Refuse arms whose trained parameters differ by more than `WITHIN` of the static arm's.

    Args:
      counts: trained parameters by arm.
      matched: arms that are to be equal; there may be none.

    Raises:
      ValueError: says which, and what to change.
    """
    if not matched:
        return
    base = counts["static"] if "static" in matched else counts[matched[0]]
    apart = {name: counts[name] for name in matched if abs(counts[name] - base) > WITHIN * base}
    if apart:
        raise ValueError(
            f"trained parameters {apart} differ from {base} by more than {WITHIN:.0%}: use narrower routers "
            "(--settings.hidden) or a larger --settings.rank"
        )
