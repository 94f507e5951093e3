"""A stack of mixer blocks described by a pattern of their names such as ("hyena", "attention")."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt32

from jaxblt.array_checks import check_width
from jaxblt.layers import (
    FP8,
    MLP,
    Activation,
    Dropout,
    LayerNorm,
    OpenSum,
    RMSNorm,
    apart,
    closed,
    is_lone_token,
    is_stored,
    is_watched,
    stream_dtype,
)
from jaxblt.mixers import MixerConfig, init_state
from jaxblt.mixers.driver.base import blank, content_of
from jaxblt.mixers.driver.prepared import COLLECTION as PREPARED
from jaxblt.mixers.driver.sequence import check_call, splits_call
from jaxblt.models.adapter import CHOSEN, StackAdapter
from jaxblt.models.block_seeds import draw_seeds
from jaxblt.models.mixer_table import (
    BUILT_IN,
    OLD_LETTERS,
    STORED,
    WINDOW,
    WORDS,
    Table,
    check_names,
    find_mixer,
    split_words,
)
from jaxblt.models.remat import BLOCK_INPUT, Remat, remat
from jaxblt.models.routed import BlockState, call_routed, check_routers
from jaxblt.models.row_norm import RowNorm
from jaxblt.models.stack_states import check_depth, share_clock
from jaxblt.parallel.constraints import by_token
from jaxblt.parallel.layout import CONTIGUOUS, SequenceLayout
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields
from pallas_kernels.runtime import has_checked_ops

MOST_LAYERS = 1024
"""The most layers of a stack: a config file that asks for a million must not exhaust the memory of its reader."""


@dataclasses.dataclass(frozen=True)
class StackConfig:
    """A stack of pre-norm blocks: each computes x + mixer(norm x), then x + MLP(norm x).

    Attributes:
      dim: width D.
      num_layers: number of blocks.
      pattern: names of the mixers, repeated to `num_layers` blocks: a tuple such as ("hyena", "attention"), or a
        string. In a string with commas, words are names. Without a comma each letter is a name: H, A and W in "HHAH".
      mixers: configs by name, for names of your own and to replace built-in ones (`jaxblt.models.mixer_table`). The
        stack sets their `dim` and `causal`.
      mlp_dim: width of the MLP; None for 8/3 D rounded up to a multiple of 64, 0 for no MLP.
      gated_mlp: if True the MLP is (f(x W_g) * x W_u) W_d, otherwise f(x W_u + b_u) W_d + b_d (`jaxblt.layers.MLP`).
      activation: f of the MLP: one name for all blocks, or a tuple with one name per block of the pattern.
      dropout: dropout rate of the residual branches; off without a "dropout" rng.
      causal: whether all mixers of the stack are causal; otherwise all are bidirectional.
      remat: what a block keeps for the backward pass (see `jaxblt.models.remat`).
      scan: compile one period of the pattern and loop over it, instead of compiling every block. The loop copies what
        the backward pass needs into stacked arrays.
      norm_epsilon: added to the mean square in the norms of the blocks, and in the norm of a head after the stack.
      norm_on_root: add `norm_epsilon` to the root of the mean square instead (see `jaxblt.layers.RMSNorm`).
      layer_norm: subtract the mean in norms and add a bias (see `jaxblt.layers.LayerNorm`).
      row_norm: normalise each channel over a document's tokens, instead of each token (see `RowNorm`); not causal.
      adapter: config of the adapters of the blocks' products (set by `jaxblt.adapters.attach`), or None.
    """

    dim: int = 256
    num_layers: int = 4
    pattern: str | tuple[str, ...] = "HHAH"
    mixers: Mapping[str, Any] = dataclasses.field(default_factory=Table)
    mlp_dim: int | None = None
    gated_mlp: bool = True
    activation: Activation | tuple[Activation, ...] = "silu"
    dropout: float = 0.0
    causal: bool = True
    remat: Remat = "none"
    scan: bool = True
    norm_epsilon: float = 1e-6
    norm_on_root: bool = False
    layer_norm: bool = False
    row_norm: bool = False
    adapter: Any = None

    __repr__ = show

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", least=1)
        check_bounds(self, "num_layers", least=1, most=MOST_LAYERS)
        check_bounds(self, "mlp_dim", least=0, why=": 0 for no MLP, None for 8/3 dim")
        check_bounds(self, "dropout", least=0, below=1, why=": it is the share that is dropped")
        check_bounds(self, "norm_epsilon", above=0)
        if self.norm_on_root and self.layer_norm:
            raise ValueError(
                "StackConfig.norm_on_root = True is of RMS norms: set layer_norm=False, or leave it out"
            )
        self._check_row_norm()
        self._fill_table()
        self._check_activation()
        apart = [name for name in self.pattern if _layout(self.mixers[name]) != CONTIGUOUS]
        if apart and set(self.pattern) != {apart[0]}:
            raise ValueError(
                f"mixers[{apart[0]!r}].layout={_layout(self.mixers[apart[0]]).kind!r} goes with a pattern of it alone, "
                f"as other mixers need their tokens in order; got pattern {self.pattern!r}: use layout='contiguous'"
            )
        self._check_adapter()

    def _check_row_norm(self) -> None:
        if self.row_norm and (self.causal or self.norm_on_root or self.layer_norm):
            raise ValueError(
                f"StackConfig.row_norm = True reads whole documents in one way, and causal={self.causal}, "
                f"norm_on_root={self.norm_on_root}, layer_norm={self.layer_norm}: set all three to False, or leave "
                "row_norm out"
            )

    def _check_activation(self) -> None:
        if isinstance(self.activation, tuple) and len(self.activation) != len(self.pattern):
            raise ValueError(
                f"StackConfig.activation must name one for each of the pattern's {len(self.pattern)} blocks, or be a "
                f"text for all, got {self.activation!r:.80}"
            )

    def _check_adapter(self) -> None:
        """Check that the stack is causal if the adapter has a router, which reads tokens in order."""
        if self.adapter is None:
            return
        if not isinstance(self.adapter, StackAdapter):
            raise ValueError(f"StackConfig.adapter must be an AdapterConfig or None, got {self.adapter!r}")
        if self.adapter.build() is not None and not (self.causal and self.layout == CONTIGUOUS):
            raise ValueError(
                f"an adapter with a router reads what came before, and the stack has causal={self.causal} and layout "
                f"{self.layout.kind!r}: set router=None, or use a causal stack in layout 'contiguous'"
            )
        self.adapter.check(self)

    def _fill_table(self) -> None:
        """Complete `mixers` by the built-in configs that the pattern names, and drop those that it does not."""
        for name, mixer in self.mixers.items():
            if not (isinstance(name, str) and callable(getattr(mixer, "build", None))):
                given = dict(self.mixers)
                raise ValueError(f"StackConfig.mixers must hold mixer configs by name, got {given!r}")
        object.__setattr__(self, "pattern", split_words(self.pattern, self.mixers))
        if not self.pattern:
            raise ValueError(f"StackConfig.pattern is empty ({self.pattern!r}): name a mixer for each layer")
        if extra := self.pattern[self.num_layers :]:
            raise ValueError(
                f"StackConfig.pattern {self.pattern!r} names {len(self.pattern)} layers, and num_layers is "
                f"{self.num_layers}: set num_layers={len(self.pattern)}, or leave out {extra!r}"
            )
        check_names(self.pattern, self.mixers)
        used = {name: find_mixer(name, self.mixers) for name in self.pattern}
        given = {n: m for n, m in self.mixers.items() if n in self.pattern or m != BUILT_IN.get(n)}
        object.__setattr__(self, "mixers", Table({**used, **given}))

    @classmethod
    def upgrade(cls, stored: dict[str, Any]) -> dict[str, Any]:
        """Return fields that an older version stored: letters without a config, or a config for each family."""
        fields = dict(stored)
        if {"hyena", "attention", "recurrence"} & stored.keys():
            fields = cls._by_name(fields)
        pattern, mixers = fields.get("pattern"), fields.get("mixers", {})
        if not isinstance(pattern, str | tuple) or not isinstance(mixers, Mapping):
            return fields
        old = {name: STORED[name] for name in pattern if isinstance(name, str) and name in STORED}
        return fields | {"mixers": old | dict(mixers)} if old else fields

    @classmethod
    def _by_name(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Return fields with a config by name instead of one for each family."""
        hyena, attention = fields.pop("hyena", None), fields.pop("attention", None)
        recurrence, window = fields.pop("recurrence", None), fields.pop("window", WINDOW)
        mixers = dict(fields.pop("extra", ()))
        if hyena is not None:
            mixers |= {"H": hyena}
            mixers |= {c: dataclasses.replace(hyena, filter=WORDS[OLD_LETTERS[c]].filter) for c in "SM"}
        if attention is not None:
            mixers |= {"A": dataclasses.replace(attention, window=None)}
            mixers |= {"W": dataclasses.replace(attention, window=window)}
        if recurrence is not None:
            mixers |= {"R": recurrence}
        return {
            **fields,
            "mixers": {n: m for n, m in mixers.items() if n in fields.get("pattern", cls.pattern)},
        }

    @property
    def layout(self) -> SequenceLayout:
        """The order in which tokens come where a mesh splits the sequence."""
        return _layout(self.mixers[self.pattern[0]])

    @property
    def hidden(self) -> int:
        """Width of the MLP."""
        return -(-8 * self.dim // 3 // 64) * 64 if self.mlp_dim is None else self.mlp_dim

    @property
    def repeats(self) -> int:
        """Whole periods of the pattern, which are scanned."""
        return self.num_layers // len(self.pattern)

    @property
    def remainder(self) -> str | tuple[str, ...]:
        """The names of the last, partial period, which are unrolled."""
        return self.pattern[: self.num_layers % len(self.pattern)]

    def activation_of(self, layer: int) -> Activation:
        """Return the activation of a block, by its number in the stack."""
        given = self.activation
        return given[layer % len(self.pattern)] if isinstance(given, tuple) else given

    def norm(self, dtype: Any, name: str | None = None) -> RMSNorm | LayerNorm:
        """Make a norm of each position, as blocks without `row_norm` have it."""
        if self.layer_norm:
            return LayerNorm(dtype, self.norm_epsilon, name=name)
        return RMSNorm(dtype, self.norm_epsilon, self.norm_on_root, name=name)

    def mixer(self, name: str) -> MixerConfig:
        """Return the mixer config of a name, with the stack's width and causality, as its adapter asks for it."""
        config = dataclasses.replace(self.mixers[name], dim=self.dim, causal=self.causal)
        return config if self.adapter is None else self.adapter.mixer(config)


def _layout(mixer: Any) -> SequenceLayout:
    return SequenceLayout(getattr(mixer, "layout", "contiguous"))


@flax.struct.dataclass
class StackState:
    """The streaming state of a stack, one entry a block: `periods` of whole periods, `rest` of the partial one.

    If it is `scanned`, `periods` has an entry for each block of the pattern, stacked [repeats, B, ...]. An unrolled
    stack has such a tuple for each period, so that a call can leave unchanged entries in place. `router` is the state
    of the adapter's router, if the stack has one. If each block has a router, entries are `BlockState`s.
    """

    periods: tuple[Any, ...]
    rest: tuple[Any, ...]
    router: Any = None
    scanned: bool = flax.struct.field(pytree_node=False, default=True)

    __repr__ = show


def init_stack_state(
    config: StackConfig, batch_size: int, *, capacity: int, dtype: Any = jnp.float32
) -> StackState:
    """Return the stack's state before the first token.

    `capacity` is that of `jaxblt.mixers.init_state`.
    """

    adapter = config.adapter
    router = None if adapter is None else adapter.init_state(batch_size, config.dim)
    own, router = (router, None) if adapter is not None and adapter.of_blocks else (None, router)

    def states(names: Sequence[str]) -> tuple[Any, ...]:
        made = [init_state(config.mixer(c), batch_size, capacity=capacity, dtype=dtype) for c in names]
        return tuple(made) if own is None else tuple(BlockState(state, own) for state in made)

    if not config.scan or not config.repeats:
        periods = tuple(states(config.pattern) for _ in range(config.repeats))
        return StackState(periods, states(config.remainder), router, scanned=config.scan)
    periods = jax.tree.map(
        lambda x: jnp.tile(x[None], (config.repeats,) + (1,) * x.ndim), states(config.pattern)
    )
    return StackState(periods=periods, rest=states(config.remainder), router=router)


class Block(nn.Module):
    """One pre-norm block: a mixer along the sequence, then an MLP at each position.

    `layer` is its place in the stack; of a scanned block, that of the first. Its own router reads x before the norm, as
    a router has a norm. `chosen` says that the stack's router was given codes of rows.
    """

    config: StackConfig
    kind: str
    dtype: Any
    layer: int = 0
    chosen: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"] | OpenSum,
        segment_ids: Int[Array, "B T"] | None,
        positions: Any,
        state: Any,
        code: Float[Array, "B T E"] | None = None,
        side: Float[Array, "B T S"] | None = None,
        seeds: UInt32[Array, "2 2"] | None = None,
    ) -> tuple[Float[Array, "B T D"] | OpenSum, Any]:
        adapter = self.config.adapter
        if not isinstance(x, OpenSum):
            split = state is None or splits_call(x.shape[1])
            x = checkpoint_name(by_token(x, split=split), BLOCK_INPUT)
        if adapter is None or not adapter.of_blocks:
            return self._adapted(x, segment_ids, positions, state, code, seeds)
        before = BlockState(None, None) if state is None else state
        x, own, routed = call_routed(
            adapter.build(dtype=self.dtype, name="router"),
            x,
            segment_ids,
            positions,
            before.router,
            side,
            lambda x, ids, positions, code: self._adapted(x, ids, positions, before.mixer, code, seeds),
        )
        return x, None if state is None else BlockState(own, routed)

    def _adapted(
        self, x: Any, segment_ids: Any, positions: Any, state: Any, code: Any, seeds: Any
    ) -> tuple[Any, Any]:
        """Run the block, whose sites are scaled by the code."""
        adapter = self.config.adapter
        if adapter is None:
            return self._mix(x, segment_ids, positions, state, seeds)
        chosen = self.chosen or self.has_variable(CHOSEN, "router")
        with adapter.inside(self.path, self.layer, code, chosen=chosen):
            return self._mix(x, segment_ids, positions, state, seeds)

    def _mix(self, x: Any, segment_ids: Any, positions: Any, state: Any, seeds: Any) -> tuple[Any, Any]:
        config, split = self.config, state is None or splits_call(x.shape[1])
        fuses, options = self._fuses(x, state), {"segment_ids": segment_ids, "positions": positions}
        own, content = config.mixer(self.kind), content_of(segment_ids)
        mixer, norm = own.build(dtype=self.dtype, name="mixer"), self._norm("mixer_norm", segment_ids)
        if fuses and isinstance(norm, RMSNorm) and getattr(own, "takes_norm", False):
            x, state = mixer(x, **options, state=state, norm=norm)
        else:
            x = closed(x)
            y, state = mixer(norm(x), **options, state=state)
            x = by_token(x + self._drop(y, seeds, 0).astype(x.dtype), split=split)
            x = blank(x, content) if fuses else x
        if config.hidden and not getattr(config.mixers[self.kind], "bare", False):
            scale, activation = (2 * config.num_layers) ** -0.5, config.activation_of(self.layer)
            mlp: Any = MLP(config.hidden, self.dtype, scale, activation, config.gated_mlp, name="mlp")
            norm = self._norm("mlp_norm", segment_ids)
            if fuses and isinstance(norm, RMSNorm) and config.gated_mlp and activation == "silu":
                x = mlp(x, norm)
            else:
                x = closed(x)
                x = x + self._drop(apart(mlp(norm(x))), seeds, 1).astype(x.dtype)
        # Keep holes and padding zero, so that no later mixer can tell what an earlier one left there
        if isinstance(x, OpenSum):
            # It is zero there: mixers with a norm add nothing, and an MLP without bias keeps it so
            return x, state
        return by_token(blank(x, content), split=split), state

    def _fuses(self, x: Any, state: Any) -> bool:
        """Return whether the block's norms, products and sums are joined: of one decoded token, with plain weights.

        Where a caller sees the methods of modules they stay apart: joined products call none of `Linear` and norms.
        """
        config, held = self.config, jax.tree.leaves(self.variables.get("params", {}), is_leaf=is_stored)
        plain = not (config.norm_on_root or any(map(is_stored, held)))
        alone = config.adapter is None and (config.dropout == 0 or not self.has_rng("dropout"))
        return state is not None and plain and alone and is_lone_token(x) and not is_watched()

    def _norm(self, name: str, segment_ids: Any) -> Callable[[Any], Any]:
        config = self.config
        if not config.row_norm:
            return config.norm(self.dtype, name)
        packed = getattr(config.mixers[self.kind], "packed", True)
        return partial(RowNorm(self.dtype, config.norm_epsilon, packed, name=name), segment_ids=segment_ids)

    def _drop(self, x: Float[Array, "B T D"], seeds: Any, number: int) -> Float[Array, "B T D"]:
        return Dropout(self.config.dropout)(x, None if seeds is None else seeds[number])


class Period(nn.Module):
    """The blocks of one period of the pattern, the first of which is number `first` of the stack.

    `chosen` is as for a `Block`.
    """

    config: StackConfig
    kinds: str | tuple[str, ...]
    dtype: Any
    first: int = 0
    chosen: bool = False

    @nn.compact
    def __call__(
        self,
        x: Any,
        segment_ids: Any,
        positions: Any,
        states: Any,
        code: Any = None,
        side: Any = None,
        seeds: Any = None,
    ) -> tuple[Any, Any]:
        block = remat(Block, self.config.remat)
        after = []
        for i, kind in enumerate(self.kinds):
            state = states[i] if states else None
            own = seeds[self.first + i] if seeds else None
            x, state = block(self.config, kind, self.dtype, self.first + i, self.chosen, name=f"block_{i}")(
                x, segment_ids, positions, state, code, side, own
            )
            after.append(state)
        # Add the parts before a scan's next turn: it carries one array
        return closed(x) if self.config.scan else x, tuple(after) if states else ()


class Stack(nn.Module):
    """`config.num_layers` blocks; whole periods scanned, the rest unrolled.

    With a state, any split of a sequence into calls gives the same outputs, as for a single mixer.
    """

    config: StackConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: StackState | None = None,
        side: Float[Array, "B T S"] | None = None,
    ) -> tuple[Float[Array, "B T D"], StackState | None]:
        """Mix along the sequence.

        `side` are side features that the adapter's router reads.
        """
        config = self.config
        check_width("Stack", x, config.dim)
        check_call(x, segment_ids, positions)
        if state is not None:
            check_depth(config, state)
            check_routers(config.adapter, state, x.shape[0], config.dim)
        # Zero holes, which norms and MLPs would read: one NaN there would be in the gradient of their weights
        x = blank(x.astype(stream_dtype(self.dtype)), content_of(segment_ids))
        adapter = config.adapter
        router = None
        if adapter is not None and not adapter.of_blocks:
            router = adapter.build(dtype=self.dtype, name="router")
        if router is None:
            return self._through(x, segment_ids, positions, None, side, state)
        x, after, routed = call_routed(
            router,
            x,
            segment_ids,
            positions,
            None if state is None else state.router,
            side,
            lambda x, ids, positions, code: self._through(x, ids, positions, code, None, state),
        )
        return x, None if after is None else dataclasses.replace(after, router=routed)

    def _through(
        self, x: Any, segment_ids: Any, positions: Any, code: Any, side: Any, state: StackState | None
    ) -> tuple[Float[Array, "B T D"], StackState | None]:
        """Run the blocks.

        The code scales their sites, or their routers read the side features.
        """
        config = self.config
        state = state if state is None or state.scanned else share_clock(state)
        carried = (state.periods, state.rest) if state else ((), ())
        # Each layer of a scan draws its own
        seeds = None if config.scan or config.dropout == 0 else draw_seeds(self, block_names(config))
        x, periods = self._periods(x, segment_ids, positions, carried[0], code, side, seeds)
        scanned = config.repeats * len(config.pattern)
        x, rest = Period(config, config.remainder, self.dtype, scanned, self._chosen(), name="rest")(
            x, segment_ids, positions, carried[1], code, side, seeds
        )
        return closed(x), StackState(periods, rest, scanned=config.scan) if state else None

    def _periods(
        self, x: Any, segment_ids: Any, positions: Any, states: Any, code: Any, side: Any, seeds: Any
    ) -> tuple[Any, Any]:
        config = self.config
        if not config.repeats:
            return x, ()
        if config.scan:
            scanned = nn.scan(
                Period,
                variable_axes={
                    "params": 0,
                    "losses": 0,
                    "metrics": 0,
                    "intermediates": 0,
                    PREPARED: 0,
                    FP8: 0,
                },
                variable_broadcast=CHOSEN,
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, nn.broadcast, 0, nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]
                length=config.repeats,
                metadata_params={nn.PARTITION_NAME: "layers"},
                # Skip Flax's look whether broadcast collections depend on the blocks: it takes every check for a yes
                check_constancy_invariants=not has_checked_ops(),
            )
            return scanned(config, config.pattern, self.dtype, chosen=self._chosen(), name="periods")(
                x, segment_ids, positions, states, code, side
            )
        after = []
        for i in range(config.repeats):
            first, name = i * len(config.pattern), f"period_{i}"
            x, here = Period(config, config.pattern, self.dtype, first, self._chosen(), name=name)(
                x, segment_ids, positions, states[i] if states else (), code, side, seeds
            )
            after.append(here)
        return x, tuple(after) if states else ()

    def _chosen(self) -> bool:
        """Return whether the stack's router was given codes of rows."""
        return self.has_variable(CHOSEN, "router")


def block_names(config: StackConfig) -> dict[str, list[str]]:
    """Return the names of a stack's children, each with those of its blocks.

    Scanned periods stand there once.
    """
    periods = ["periods"] if config.scan else [f"period_{i}" for i in range(config.repeats)]
    names = dict.fromkeys(periods if config.repeats else [], config.pattern) | {"rest": config.remainder}
    return {name: [f"block_{i}" for i in range(len(kinds))] for name, kinds in names.items() if kinds}


def stack_periods(
    params: dict[str, Any], join: Callable[..., Any] = lambda *layers: jnp.stack(layers)
) -> dict[str, Any]:
    """Convert unrolled parameters ("period_0", ...) to the scanned form ("periods", stacked).

    Args:
      params: of the stack, or shapes.
      join: makes one leaf of those of all periods.
    """
    names = sorted(
        (name for name in params if name.startswith("period_")), key=lambda n: int(n.split("_")[1])
    )
    rest = {name: value for name, value in params.items() if name not in names}
    if not names:
        return rest
    return rest | {"periods": jax.tree.map(join, *(params[name] for name in names))}


def unstack_periods(params: dict[str, Any]) -> dict[str, Any]:
    """Undo `stack_periods`."""
    rest = {name: value for name, value in params.items() if name != "periods"}
    if "periods" not in params:
        return rest
    repeats = jax.tree.leaves(params["periods"])[0].shape[0]
    unrolled = {
        f"period_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], params["periods"]) for i in range(repeats)
    }
    return rest | unrolled


def unstack_state(state: StackState) -> StackState:
    """Convert the state of a stack to that of the same stack unrolled."""
    if not state.scanned:
        return state
    repeats = max((len(leaf) for leaf in jax.tree.leaves(state.periods)), default=0)
    periods = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], state.periods) for i in range(repeats))
    return dataclasses.replace(state, periods=periods, scanned=False)
