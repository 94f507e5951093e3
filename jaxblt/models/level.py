"""A second level of learned patches: slots of the first are grouped again, for the latent stack to run over groups."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.layers import dense
from jaxblt.mixers.driver.base import rows
from jaxblt.mixers.driver.prepared import COLLECTION as PREPARED
from jaxblt.models.adapter import CHOSEN
from jaxblt.models.bridge import last_bytes, to_blocks, to_row, visible_patches
from jaxblt.models.change import change_in
from jaxblt.models.stack import Stack, StackConfig, StackState, init_stack_state
from jaxblt.models.unmerge import LatestPatch, keep_bytes, smooth
from jaxblt.parallel.layout import CONTIGUOUS
from jaxblt.patching.config import PatcherConfig
from jaxblt.patching.learned import BoundaryConfig, Router, RouterState, confidence, init_router
from jaxblt.patching.patches import Patches, from_closed
from jaxblt.patching.rules import MIDDLE
from jaxblt.patching.segment import closes
from jaxblt.show import show
from jaxblt.side_outputs import sow_metric
from jaxblt.validation import check_bounds, check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelConfig:
    """A level between the patches of a byte-patched model and its latent stack (H-Net, 2507.07955, sec. 2.3).

    Slots, the patch vectors of a block and its holes, are to this level what bytes are to the model. A group of slots
    is represented by its last one, which holds what the causal encoder read before. A group ends where the router says,
    at a block's first slot and at the last one that its block fills.

    Attributes:
      encoder: stack over slots, which finds what the router compares; its width is that of the slots.
      decoder: stack over slots behind the latent stack; as wide.
      router: scores boundaries by content alone, and comes back by "gather".
      slots_per_group: mean number of slots in a group that the ratio loss leads to.
      min_slots: boundaries nearer to the group's start are refused. A block's last group may be shorter.
      max_slots: a group that reaches them ends. None sets no limit but the block.

    Raises:
      ValueError: an option is out of range, or stacks and router do not fit.
    """

    encoder: StackConfig = StackConfig(dim=384, num_layers=1, pattern="W")
    decoder: StackConfig = StackConfig(dim=384, num_layers=1, pattern="W")
    router: BoundaryConfig = BoundaryConfig()
    slots_per_group: float = 2.0
    min_slots: int = 1
    max_slots: int | None = None

    __repr__ = show

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "slots_per_group", above=1, why=": a router is led to it")
        check_bounds(self, "min_slots", "max_slots", least=1)
        longest = math.inf if self.max_slots is None else self.max_slots
        if not self.min_slots <= self.slots_per_group <= longest:
            raise ValueError(
                f"slots_per_group = {self.slots_per_group} lies outside the lengths that groups may have, "
                f"{self.min_slots}..{longest}: change min_slots or max_slots"
            )
        if self.encoder.dim != self.decoder.dim:
            raise ValueError(
                f"the level's encoder and decoder share the slots' width, got {self.encoder.dim} and "
                f"{self.decoder.dim}"
            )
        if not all(x.causal and x.layout == CONTIGUOUS for x in (self.encoder, self.decoder)):
            raise ValueError(
                "a level cuts by slots up to its own, in order: use causal stacks in layout 'contiguous'"
            )
        if (self.router.strategy, self.router.unmerge) != ("content_similarity", "gather"):
            raise ValueError(
                "slots have neither letters nor entropies: a level's router takes strategy='content_similarity' and "
                f"unmerge='gather', got {self.router.strategy!r} and {self.router.unmerge!r}"
            )

    @property
    def has_limits(self) -> bool:
        """True if groups may not have any length."""
        return self.min_slots > 1 or self.max_slots is not None

    def groups(self, slots: int) -> int:
        """Return the groups that a block of so many slots has room for."""
        return min(math.ceil(slots / self.slots_per_group), slots)


class LevelState(flax.struct.PyTreeNode):
    """Memory of a level of each row's document.

    Attributes:
      encoder, decoder, latent: states of the stacks.
      router: the last slot, as the router compares it.
      smoothed: the latest group's vector, fp32.
      document: its number; 0 before the first.
      in_block: slots of the block so far, holes too.
      used: groups of the block that have ended.
      open: slots of the group that has not; None without limits.
      slots: of a block.
    """

    encoder: StackState
    decoder: StackState
    latent: StackState
    router: RouterState
    smoothed: Float[Array, "B D"]
    document: Int[Array, "B"]
    in_block: Int[Array, "B"]
    used: Int[Array, "B"]
    open: Int[Array, "B"] | None
    slots: int = flax.struct.field(pytree_node=False)

    __repr__ = show


def init_level_state(
    config: LevelConfig, latent: StackConfig, batch_size: int, *, blocks: int, slots: int, dtype: Any
) -> LevelState:
    """Return the state before the first slot, for documents of so many blocks of so many slots."""
    own = {"capacity": blocks * slots, "dtype": dtype}
    zeros = [jnp.zeros((batch_size,), jnp.int32) for _ in range(3)]
    return LevelState(
        init_stack_state(config.encoder, batch_size, **own),
        init_stack_state(config.decoder, batch_size, **own),
        init_stack_state(latent, batch_size, capacity=blocks * config.groups(slots), dtype=dtype),
        init_router(config.router, batch_size, dim=config.encoder.dim, dtype=dtype),
        jnp.zeros((batch_size, latent.dim), jnp.float32),
        *zeros,
        open=jnp.zeros((batch_size,), jnp.int32) if config.has_limits else None,
        slots=slots,
    )


def last_slots(patches: Patches, segment_ids: Int[Array, "B N P"]) -> Bool[Array, "B N P"]:
    """Mark the last slot that a block fills, of blocks whose last byte has come."""
    live = segment_ids > 0
    after = jnp.pad(live[..., 1:], ((0, 0), (0, 0), (0, 1)))
    return live & ~after & (patches.patch_ids[..., -1:] < patches.capacity)


class Level(nn.Module):
    """y = decoder(c_t U z_latest(t) + W h_t), where h = encoder(x) and z = latent(groups of h).

    c is the router's confidence and z is smoothed by its p, as of the model's own patches (see `BoundaryConfig`). With
    a state, any split of a row's slots into calls gives the same outputs. Slots are then read one after another.

    Attributes:
      config: of the level.
      latent: the stack over groups, which the model owns.
    """

    config: LevelConfig
    latent: Stack
    dtype: Any = jnp.float32

    def setup(self) -> None:
        config, dtype = self.config, self.dtype
        self.encoder = Stack(config.encoder, dtype)
        self.router = Router(config.router, 1, config.slots_per_group, dtype)
        self.up = dense(self.latent.config.dim, axes=("embed", "latent"), dtype=dtype, name="up")
        self.down = LatestPatch(dtype)
        self.keep = keep_bytes(dtype, config.encoder.dim)
        self.decoder = Stack(config.decoder, dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"],
        ends: Bool[Array, "B T"],
        slots: int,
        state: LevelState | None = None,
    ) -> tuple[Float[Array, "B T D"], LevelState | None]:
        """Return slots behind the level, and the state (None without one).

        Args:
          x: slots, block after block.
          segment_ids: documents; -s for holes, 0 for slots that a call with a state leaves out.
          ends: the last slot that its block fills, of blocks that are full.
          slots: of a block.
          state: before the call.
        """
        if state is not None:
            return self._stream(x, segment_ids, ends, state)
        h, p = self._score(x, segment_ids, slots)
        cut = self._wanted(p, segment_ids, slots) | ends
        groups = from_closed(
            cut, segment_ids, block_size=slots, capacity=self.config.groups(slots), last=ends
        )
        refused, wanted = jnp.sum(groups.overflow), jnp.sum(cut & (segment_ids > 0), dtype=jnp.float32)
        sow_metric(self, "overflow", refused.astype(jnp.float32) / jnp.maximum(wanted, 1.0))
        at_end = [last_bytes(to_blocks(part, groups), groups) for part in (h, p[..., None])]
        flat = [part.reshape(len(x), -1, part.shape[-1]) for part in at_end]
        ids = groups.segment_ids.reshape(len(x), -1)
        z, _ = self.latent(self.up(flat[0]), segment_ids=ids)
        z, _ = smooth(z, flat[1][..., 0], ids)
        seen = visible_patches(z.reshape(*groups.segment_ids.shape, -1), groups, look_back=1, causal=True)
        read = to_row(self.down(to_blocks(h, groups), *seen), h)
        y = self._merge(h, read, p, to_row(groups.closed, h))
        return self.decoder(y, segment_ids=segment_ids)[0], None

    def route(self, x: Float[Array, "B T D"], *, segment_ids: Int[Array, "B T"]) -> Float[Array, "B T K"]:
        """Return the scores of slots."""
        h, _ = self.encoder(x, segment_ids=segment_ids)
        return self._router(h, segment_ids, None)[1]

    def _router(self, h: Any, segment_ids: Any, state: Any) -> tuple[Any, Any, Any]:
        nothing = jnp.zeros(segment_ids.shape, jnp.int32)
        return self.router(h, nothing, segment_ids=segment_ids, positions=nothing, state=state)

    def _score(
        self, x: Any, segment_ids: Any, slots: int
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
        """Return slots behind the encoder, and p: 1 at a block's first slot, whatever lies before it."""
        h, _ = self.encoder(x, segment_ids=segment_ids)
        p = self._router(h, segment_ids, None)[0]
        first = jnp.arange(x.shape[1], dtype=jnp.int32) % slots == 0
        return h, jnp.where(first[None], 1.0, p)

    def _wanted(
        self, p: Float[Array, "B T"], segment_ids: Int[Array, "B T"], slots: int
    ) -> Bool[Array, "B T"]:
        """Mark where groups are to end, within their limits."""
        config = self.config
        if not config.has_limits:
            return p > MIDDLE
        longest = slots if config.max_slots is None else min(config.max_slots, slots)
        shortest = min(config.min_slots, slots)
        rule = PatcherConfig(mode="learned", block_size=slots, min_length=shortest, max_length=longest)
        return closes(rule, jnp.zeros_like(segment_ids), p, segment_ids)

    def _merge(self, h: Any, read: Any, p: Any, closed: Any) -> Float[Array, "B T D"]:
        kept, read = (x.astype(h.dtype) for x in (self.keep(h), read))
        return kept + confidence(p, closed)[..., None].astype(h.dtype) * read

    def _stream(
        self, x: Any, segment_ids: Any, ends: Any, state: LevelState
    ) -> tuple[Float[Array, "B T D"], LevelState]:
        """Read slots one after another."""
        if x.shape[1] == 1:
            state, y = self._slot(state, (x[:, 0], segment_ids[:, 0], ends[:, 0]))
            return y[:, None], state
        scanned = nn.scan(
            Level._slot,
            variable_broadcast=("params", PREPARED, CHOSEN),
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        state, y = scanned(self, state, (x, segment_ids, ends))
        return y, state

    def _slot(
        self, state: LevelState, slot: tuple[Float[Array, "B D"], Int[Array, "B"], Bool[Array, "B"]]
    ) -> tuple[LevelState, Float[Array, "B D"]]:
        """Read a slot, a hole or nothing in each row."""
        x, segment, last = slot
        room, here, live = self.config.groups(state.slots), segment != 0, segment > 0
        state = _begin(state, segment)
        ids = segment[:, None]
        h, encoder = self.encoder(x[:, None], segment_ids=ids, state=state.encoder)
        p, _, router = self._router(h, jnp.maximum(ids, 0), state.router)
        p = jnp.where(state.in_block == 0, 1.0, p[:, 0])[:, None]
        wanted = p[:, 0] > MIDDLE
        if state.open is not None:
            length = state.open + live.astype(jnp.int32)
            state, wanted = state.replace(open=length), self._within(wanted, length)
        closed = live & (last | (wanted & (state.used + 1 < room)))
        kept = lambda new, old: jnp.where(rows(live, new), new, old)  # noqa: E731
        state = state.replace(encoder=encoder, router=jax.tree.map(kept, router, state.router))
        ends = lambda level, state: level._end(state, h, p, closed)  # noqa: E731
        state = change_in(self, jnp.any(closed), ends, state)
        nowhere = jnp.zeros((len(x), 1, 1), jnp.int32)
        seen = state.smoothed[:, None, None].astype(self.dtype)
        read = self.down(h[:, None], seen, nowhere, jnp.ones(seen.shape[:-1], bool))[:, 0]
        y, decoder = self.decoder(
            self._merge(h, read, p, closed[:, None]), segment_ids=ids, state=state.decoder
        )
        in_block = state.in_block + here.astype(jnp.int32)
        used, full = state.used + closed.astype(jnp.int32), here & (in_block == state.slots)
        unused = jnp.where(full, room - used, 0)
        length = None if state.open is None else jnp.where(closed | full, 0, state.open)
        state = state.replace(
            decoder=decoder,
            in_block=jnp.where(full, 0, in_block),
            used=jnp.where(full, 0, used),
            open=length,
        )
        skips = lambda level, state: level._skip(state, unused)  # noqa: E731
        return change_in(self, jnp.any(unused > 0), skips, state), y[:, 0]

    def _within(self, wanted: Bool[Array, "B"], length: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Mark the rows whose group is to end at its `length`, within the limits."""
        most = self.config.max_slots
        wanted &= length >= self.config.min_slots
        return wanted if most is None else wanted | (length >= most)

    def _end(self, state: LevelState, h: Any, p: Any, closed: Any) -> LevelState:
        """Feed the latent stack one group, in the rows whose group ended."""
        ids = jnp.where(closed, state.document, 0)[:, None]
        z, latent = self.latent(self.up(h), segment_ids=ids, state=state.latent)
        return state.replace(latent=latent, smoothed=smooth(z, p, ids, state.smoothed)[1])

    def _skip(self, state: LevelState, unused: Int[Array, "B"]) -> LevelState:
        """Move the latent stack over the groups that a block left unused."""
        group = jnp.arange(self.config.groups(state.slots), dtype=jnp.int32)[None]
        holes = jnp.where(group < unused[:, None], -state.document[:, None], 0)
        nothing = jnp.zeros((*holes.shape, self.latent.config.dim), self.dtype)
        return state.replace(latent=self.latent(nothing, segment_ids=holes, state=state.latent)[1])


def _begin(state: LevelState, segment: Int[Array, "B"]) -> LevelState:
    """Return the state with nothing of an earlier document, in rows that start another."""
    document = jnp.where(segment != 0, jnp.abs(segment), state.document)
    fresh = document != state.document
    keep = lambda x: jnp.where(rows(fresh, x), jnp.zeros((), x.dtype), x)  # noqa: E731
    return state.replace(
        document=document,
        **{
            name: jax.tree.map(keep, getattr(state, name))
            for name in ("router", "smoothed", "in_block", "used", "open")
        },
    )
