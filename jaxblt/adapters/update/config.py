"""What an adapter is: which products it goes to, its rank, and what makes the code that scales its updates."""

import dataclasses
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxblt.adapters.code.config import RouterConfig
from jaxblt.adapters.code.draw import Draw
from jaxblt.adapters.code.experimental.mixed import Mixed
from jaxblt.adapters.code.level_routers import Routers, level_name
from jaxblt.adapters.code.levels import Level
from jaxblt.adapters.code.losses import AdapterLosses
from jaxblt.adapters.code.router import Router, RouterState, init_router_state
from jaxblt.adapters.code.sticky import Sticky
from jaxblt.adapters.code.transforms import Clamp, Sparse, TopK
from jaxblt.adapters.retrieval.neighbours import Neighbours
from jaxblt.adapters.update.forms import Form
from jaxblt.adapters.update.governor import Governor
from jaxblt.adapters.update.site import adapted
from jaxblt.mixers.attention.attention import AttentionConfig
from jaxblt.mixers.attention.key_bias import BiasedAttentionConfig
from jaxblt.validation import check_bounds, check_fields, check_read

Rank = int | tuple[int, ...]
"""Of a site: one number, or one for each layer of its stack."""


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """Low-rank updates of products with a weight: y = x W + (alpha/r) ((x V) * c) U (Hu et al., 2106.09685).

    V is drawn and U starts at 0, so that a model with adapters starts as its base. Without a router c = 1. A router
    makes c of what came before; see `RouterConfig`. Blocks of r/E ranks are the experts of a bank. The ranks of a block
    share a number of the code, and these numbers are a softmax. The scale is alpha E/r, that of each expert.

    A gate scales the outputs of a product: y_n = (1 + c_g s_n) (x W)_n. Scales s are learned from 0 (Liu et al.,
    2205.05638), and c = 1 without a router. Number g of the code is of the g-th group of heads, the first of the
    product's new axes. So here, too, c = 0 is the base, and `TopK(k)` changes k groups.

    Attributes:
      sites: patterns of names of `Linear`s below a block, such as "mixer/q" or "mlp/*". A pair (pattern, rank) has a
        rank of its own, and (pattern, (2, 4, 8)) one in each layer of the stack. `jaxblt.adapters.find_sites` lists the
        names. It may be empty where there are gates or forms.
      gates: patterns of names of products that have a gate instead.
      forms: (pattern, form) for products with another update, alone or behind a low-rank one or a gate; see
        `jaxblt.adapters.update.forms.Form`.
      rank: r of the others, and the numbers of a free code.
      alpha: of the scale.
      blocks: experts E of a bank; None for a free number a rank, 1 + f.
      router: what makes the code; None for c = 1.
      levels: (pattern, level) for sites whose code comes at another level than the router's: ("mlp/*", "token"). Each
        level has a router of its own, in all else like `router`, with transforms of its own.
      code: transforms of the code, in order; see `jaxblt.adapters.code.transforms`.
      losses: what training pays for besides, with weights.
      governor: bounds the update of each site; None for no bound.
      key_bias: logits of attention have a bias b_s = c_s W by the code of the key's token, one for each head of keys.
        W starts at 0. It learns once codes differ, as a softmax does not see a bias that all keys share. Merging at one
        code leaves it out for the same reason.
    """

    sites: tuple[str | tuple[str, Rank], ...] = ("mixer/*", "mlp/down")
    gates: tuple[str, ...] = ()
    forms: tuple[tuple[str, Any], ...] = ()
    rank: int = 8
    alpha: float = 16.0
    blocks: int | None = None
    router: RouterConfig | None = None
    levels: tuple[tuple[str, Level], ...] = ()
    code: tuple[Any, ...] = ()
    losses: AdapterLosses = AdapterLosses()
    governor: Governor | None = None
    key_bias: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.code, tuple):
            raise ValueError(
                f"AdapterConfig.code must be a tuple of transforms such as (Clamp(3.0),), got {self.code!r}: put it in "
                "a tuple"
            )
        check_fields(self)
        check_bounds(self, "rank", "blocks", least=1)
        check_bounds(self, "alpha", above=0)
        if not self.sites and not self.gates and not self.forms:
            raise ValueError("AdapterConfig.sites must hold a pattern, such as 'mixer/*', got ()")
        self._check_forms()
        if self.gates and self.governor is not None:
            raise ValueError(
                f"AdapterConfig.gates = {self.gates} and governor = {self.governor}, which bounds updates of low rank "
                "only: leave one of them out"
            )
        if self.key_bias and self.router is None:
            raise ValueError(
                "AdapterConfig.key_bias = True needs a router, as a softmax does not see one bias of all keys: set "
                "RouterConfig(), or leave it False"
            )
        self._check_read()
        self._check_ranks()
        self._check_code()
        self._check_levels()

    def _check_forms(self) -> None:
        for pattern, form in self.forms:
            if not isinstance(form, Form):
                fix = f": call it, {form.__name__}(...)" if isinstance(form, type) else ""
                raise ValueError(
                    f"AdapterConfig.forms must pair patterns with forms such as Film(), got {(pattern, form)}{fix}"
                )
        if self.forms and self.governor is not None:
            raise ValueError(
                f"AdapterConfig.forms = {self.forms} and governor = {self.governor}, which bounds updates of low rank "
                "only: leave one of them out"
            )

    def _check_read(self) -> None:
        check_read(self, "alpha", needed="sites", is_read=bool(self.sites))
        if self.losses.orthogonality and not self.sites:
            raise ValueError(
                f"AdapterConfig.losses weighs orthogonality = {self.losses.orthogonality} of sites, and sites is (): "
                "leave it out"
            )

    def _check_ranks(self) -> None:
        for pattern, rank in ((pattern, rank) for pattern, ranks in self.patterns for rank in _each(ranks)):
            if rank < 1:
                raise ValueError(
                    f"AdapterConfig.sites: the rank of {pattern!r} must be at least 1, got {rank}"
                )
            if self.blocks is not None and rank % self.blocks:
                raise ValueError(
                    f"AdapterConfig.sites: rank {rank} of {pattern!r} does not divide into blocks = {self.blocks}: use "
                    "a multiple"
                )
            if self.router is not None and self.blocks is None and rank != self.rank:
                raise ValueError(
                    f"AdapterConfig.sites: {pattern!r} has rank {rank} where the router's code has {self.rank} "
                    "numbers: set blocks, which any multiple can share, or one rank"
                )

    def _check_code(self) -> None:
        level = None if self.router is None else self.router.level
        if isinstance(level, Mixed) and level.by == "entropy" and self.numbers == 1:
            raise ValueError(
                "Mixed(by='entropy') needs a code of two numbers or more, got 1: use by='length'"
            )
        if self.router is None and (self.blocks is not None or self.code):
            raise ValueError(
                f"AdapterConfig.blocks = {self.blocks} and code = {self.code} shape a router's code, and router is "
                "None: set RouterConfig()"
            )
        if self.router is None and self.losses.of_codes:
            raise ValueError(
                f"AdapterConfig.losses weighs {sorted(self.losses.of_codes)} of a router's code, and router is None: "
                "set RouterConfig(), or leave orthogonality alone"
            )
        for transform in self.code:
            if isinstance(transform, type) or not callable(getattr(transform, "check", None)):
                fix = f": call it, {transform.__name__}(...)" if isinstance(transform, type) else ""
                raise ValueError(
                    f"AdapterConfig.code must hold transforms such as Clamp(3.0), got {transform!r}{fix}"
                )
            transform.check(self)

    def _check_levels(self) -> None:
        if self.levels and (self.router is None or self.router.reads_of(Neighbours)):
            raise ValueError(
                f"AdapterConfig.levels = {self.levels} are of a router without an index, and router is {self.router}: "
                "leave them out"
            )
        if self._level in (level for _, level in self.levels):
            raise ValueError(
                f"AdapterConfig.levels = {self.levels} names {self._level!r}, the router's level, which others have:"
                " leave it out"
            )
        if self.levels:
            self.by_level  # noqa: B018 - a level may not go with the router's settings or a transform

    def check(self, stack: Any) -> None:
        """Raise ValueError for a `StackConfig` of another number of layers than ranks, or without logits to bias."""
        if self.key_bias and not any(isinstance(mixer, AttentionConfig) for mixer in stack.mixers.values()):
            raise ValueError(
                f"AdapterConfig.key_bias = True is of AttentionConfig, and the stack has {list(stack.mixers)}: leave it"
                " False"
            )
        for pattern, ranks in self.patterns:
            if isinstance(ranks, int):
                continue
            if len(ranks) != stack.num_layers:
                raise ValueError(
                    f"AdapterConfig.sites gives {pattern!r} {len(ranks)} ranks, {ranks}, and the stack has num_layers "
                    f"= {stack.num_layers}: give one rank a layer, and each stack its own adapter"
                )
            scanned = ranks[: stack.repeats * len(stack.pattern)]
            if stack.scan and scanned != ranks[: len(stack.pattern)] * stack.repeats:
                raise ValueError(
                    f"AdapterConfig.sites gives {pattern!r} the ranks {ranks}, which differ between periods of the "
                    f"pattern {stack.pattern!r}, and these are scanned: set StackConfig(scan=False)"
                )

    @property
    def patterns(self) -> tuple[tuple[str, Rank], ...]:
        """Patterns of names, each with its rank."""
        return tuple((site, self.rank) if isinstance(site, str) else site for site in self.sites)

    @property
    def of_blocks(self) -> bool:
        """True if each block has a router of its own, which reads the block's input."""
        return self.router is not None and self.router.per == "block"

    @property
    def numbers(self) -> int:
        """Numbers of a code: one a block, or one a rank."""
        return self.rank if self.blocks is None else self.blocks

    @property
    def is_sparse(self) -> bool:
        """True if transforms set numbers of a code to 0, and none behind them fills these again."""
        deciding = [transform for transform in self.code if not isinstance(transform, Clamp)]
        last = deciding[-1] if deciding else None
        if isinstance(last, TopK):
            return last.k < self.numbers
        return isinstance(last, Sparse | Sticky | Draw)

    @property
    def level_names(self) -> tuple[str, ...]:
        """Names of the routers, in the order of their codes; one for an adapter without `levels`."""
        return tuple(sorted({self._level, *(level for _, level in self.levels)}))

    @property
    def _level(self) -> str:
        return "" if self.router is None else level_name(self.router.level)

    @property
    def by_level(self) -> dict[str, "AdapterConfig"]:
        """Adapters by router; each makes the code of its level for all sites."""
        assert self.router is not None
        levels: dict[str, Level | Mixed] = {level: level for _, level in self.levels}
        levels[self._level] = self.router.level
        return {
            name: dataclasses.replace(
                self, levels=(), router=dataclasses.replace(self.router, level=levels[name])
            )
            for name in self.level_names
        }

    @property
    def width(self) -> int:
        """Numbers of a token's codes, of all levels."""
        return len(self.level_names) * self.numbers

    def levels_at(self, name: str) -> set[str]:
        """Return the levels that patterns ask for at the site of a name; none for the router's own level."""
        return {level for pattern, level in self.levels if fnmatchcase(name, pattern)}

    def place(self, name: str) -> int:
        """Return which of the codes scales the site of a name."""
        return self.level_names.index(max(self.levels_at(name), default=self._level))

    def split(self, codes: Float[Array | np.ndarray, "... W"] | None) -> list[Any]:
        """Return the codes of all levels apart; None for None."""
        count, each = len(self.level_names), self.numbers
        if codes is None or count == 1:
            return [codes]
        return [codes[..., i * each : (i + 1) * each] for i in range(count)]

    @property
    def start(self) -> float:
        """Number of every block before training: 1, or an expert's even share."""
        return 1.0 if self.blocks is None else 1.0 / self.blocks

    def scale(self, rank: int) -> float:
        """Return alpha over the rank of an expert, at a site of this rank."""
        return self.alpha * (self.blocks or 1) / rank

    def ranks(self, name: str, layer: int) -> set[int]:
        """Return the ranks that patterns ask for at the site of a name in a layer: none where there is no adapter."""
        found = [ranks for pattern, ranks in self.patterns if fnmatchcase(name, pattern)]
        return {ranks if isinstance(ranks, int) else ranks[layer] for ranks in found}

    def has_gate(self, name: str) -> bool:
        """Return whether the site of a name has a gate."""
        return any(fnmatchcase(name, pattern) for pattern in self.gates)

    def mixer(self, config: Any) -> Any:
        """Return a block's mixer config as codes ask for it: with tokens in order, and a bias of logits."""
        if self.router is None or not isinstance(config, AttentionConfig):
            return config
        # Promise no row of one document: attention would sort its holes behind tokens, away from their codes
        config = dataclasses.replace(config, packed=True)
        if not self.key_bias:
            return config
        return BiasedAttentionConfig(
            **{f.name: getattr(config, f.name) for f in dataclasses.fields(AttentionConfig)}
        )

    def forms_at(self, name: str) -> tuple[Form, ...]:
        """Return the forms of the site of a name, in the order in which they act."""
        return tuple(form for pattern, form in self.forms if fnmatchcase(name, pattern))

    @property
    def form_numbers(self) -> int:
        """Numbers of a code as forms read it: one, 1, without a router."""
        return 1 if self.router is None else self.numbers

    def inside(
        self, path: tuple[str, ...], layer: int, code: Float[Array, "B T W"] | None, *, chosen: bool = False
    ) -> AbstractContextManager[Any]:
        """Make a context in which every site below the block of this path, a layer's, adds its update.

        `chosen` says that rows have codes of `jaxblt.adapters.update.row_adapters`, such as that of one expert.
        """
        return adapted(self, path, layer, code, sparse=chosen or self.is_sparse)

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> Router | Routers | None:
        """Make the router's module, which computes in fp32 whatever the `dtype`; None without a router."""
        if self.router is None:
            return None
        return Routers(tuple(self.by_level.items()), name=name) if self.levels else Router(self, name=name)

    def init_state(self, batch_size: int, dim: int) -> RouterState | dict[str, RouterState] | None:
        """Return the router's state before the first token of rows of width `dim`; None without a router."""
        if self.router is None:
            return None
        if not self.levels:
            return init_router_state(self, batch_size, dim)
        return {name: init_router_state(own, batch_size, dim) for name, own in self.by_level.items()}


def _each(ranks: Rank) -> tuple[int, ...]:
    return (ranks,) if isinstance(ranks, int) else ranks
