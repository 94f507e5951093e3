"""The state of a byte-patched model between two bytes: its caches, and each row's open patch."""

from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.layers import stream_dtype
from jaxblt.mixers.driver.base import rows
from jaxblt.models.embeddings import EmbeddingConfig, check_embedding_state, init_embedding_state
from jaxblt.models.level import LevelConfig, LevelState, init_level_state
from jaxblt.models.positions import Places
from jaxblt.models.stack import StackConfig, StackState, init_stack_state
from jaxblt.patching import PatcherConfig, PatcherState, init_patcher
from jaxblt.patching.learned import BoundaryConfig, RouterState, init_router
from jaxblt.show import show

COUNTS = ("position", "last_segment", "offset", "previous", "in_block", "used")
"""Members of a `BLTState` that count in a row, from zero."""


@runtime_checkable
class PatchedConfig(Protocol):
    """The members of `BLTConfig` that a state is made for."""

    @property
    def causal(self) -> bool: ...

    @property
    def embedding(self) -> EmbeddingConfig: ...

    @property
    def encoder(self) -> StackConfig: ...

    @property
    def latent(self) -> StackConfig: ...

    @property
    def decoder(self) -> StackConfig: ...

    @property
    def look_back(self) -> int: ...

    @property
    def router(self) -> BoundaryConfig | None: ...

    @property
    def level(self) -> LevelConfig | None: ...

    @property
    def slot_dim(self) -> int: ...


class BLTState(flax.struct.PyTreeNode):
    """Streaming state of `BLT.step`; every row advances on its own.

    Attributes:
      position: bytes of the document so far.
      last_segment: which document; 0 before the first.
      patcher: where the rule that closes patches stands.
      embedding, encoder, latent, decoder: states of those parts; in a model with a level `latent` is the level's.
      keys, values: of the bytes of the open patch, for the moment it closes.
      offset: bytes of the open patch so far.
      previous: length of the patch before it in the document, 0 for none.
      in_block: bytes of the block so far.
      used: patches of the block that have closed.
      recent: vectors of the W latest patches, oldest first.
      recent_valid: which of them there are.
      read_keys, read_values: of the W latest patches, as bytes read them; None in a model whose bytes read vectors.
      router: what a router remembers of the document; None without one.
      smoothed: the latest patch vector behind the router's smoothing, fp32; None without one.
      block_size, capacity: of the patches the model was trained with.
    """

    position: Int[Array, "B"]
    last_segment: Int[Array, "B"]
    patcher: PatcherState
    embedding: Any
    encoder: StackState
    latent: StackState | LevelState
    decoder: StackState
    keys: Float[Array, "B S C"]
    values: Float[Array, "B S C"]
    offset: Int[Array, "B"]
    previous: Int[Array, "B"]
    in_block: Int[Array, "B"]
    used: Int[Array, "B"]
    recent: Float[Array, "B W D"]
    recent_valid: Bool[Array, "B W"]
    read_keys: Float[Array, "B W C"] | None
    read_values: Float[Array, "B 1 W C"] | None
    router: RouterState | None
    smoothed: Float[Array, "B D"] | None
    block_size: int = flax.struct.field(pytree_node=False)
    capacity: int = flax.struct.field(pytree_node=False)

    __repr__ = show

    def place(self) -> Places:
        """Return the place of the byte that comes now."""
        return Places(
            offset=self.offset[:, None], previous=self.previous[:, None], position=self.position[:, None]
        )

    def remember(self, keys: tuple[Array, Array], live: Bool[Array, "B"]) -> "BLTState":
        """Keep a byte's key and value at its offset in the open patch."""
        rows = jnp.arange(live.shape[0], dtype=jnp.int32)
        slot = jnp.where(live, self.offset, self.block_size)
        k, v = (x[:, 0].astype(self.keys.dtype) for x in keys)
        return self.replace(
            keys=self.keys.at[rows, slot].set(k, mode="drop"),
            values=self.values.at[rows, slot].set(v, mode="drop"),
        )

    @property
    def seen(self) -> dict[str, Array]:
        """The W latest patches: what a closed patch changes, by name."""
        names = ("recent", "recent_valid", "read_keys", "read_values")
        held = {name: getattr(self, name) for name in names}
        return {name: array for name, array in held.items() if array is not None}

    def see(self, new: dict[str, Array], ends: Bool[Array, "B 1"]) -> dict[str, Array]:
        """Return `seen` with one more patch, in the rows where there is one."""
        moved = {}
        for name, old in self.seen.items():
            axis = patch_axis(name)
            rest = jax.lax.slice_in_dim(old, 1, None, axis=axis)
            latest = jnp.concatenate([rest, new[name].astype(old.dtype)], axis)
            moved[name] = jnp.where(rows(ends[:, 0], old), latest, old)
        return moved


def patch_axis(name: str) -> int:
    """Return along which axis a member of `BLTState.seen` has its patches."""
    return 2 if name == "read_values" else 1


def name_seen(
    z: Float[Array, "B N D"],
    valid: Bool[Array, "B N"],
    keys: tuple[Float[Array, "B N C"], Float[Array, "B N C"]] | None,
) -> dict[str, Array]:
    """Return patches by the names of `BLTState.seen`."""
    found = {"recent": z, "recent_valid": valid}
    # Give values an axis more: of one shape both would be packed into one array, and cut out again at each byte
    return found if keys is None else found | {"read_keys": keys[0], "read_values": keys[1][:, None]}


class OpenByte(flax.struct.PyTreeNode):
    """A byte of each row that the encoder has read and the decoder has not.

    Attributes:
      segment_ids: document of the byte; 0 for no byte.
      closed: whether a patch ends with it.
      h: the byte behind the encoder.
      p: of the router; None without one.
    """

    segment_ids: Int[Array, "B"]
    closed: Bool[Array, "B"]
    h: Float[Array, "B 1 C"]
    p: Float[Array, "B 1"] | None

    __repr__ = show

    @property
    def stands(self) -> Bool[Array, "B"]:
        """True for rows whose patch ends with the byte: it reads that patch's latent."""
        return self.closed & (self.segment_ids != 0)

    def only(self, where: Bool[Array, "B"]) -> "OpenByte":
        """Return the bytes of these rows; the others have none."""
        return self.replace(segment_ids=jnp.where(where, self.segment_ids, 0))


def init_open_byte(config: PatchedConfig, batch_size: int, *, dtype: Any = jnp.float32) -> OpenByte:
    """Return no byte in any row."""
    p = None if config.router is None else jnp.zeros((batch_size, 1), jnp.float32)
    h = jnp.zeros((batch_size, 1, config.encoder.dim), stream_dtype(dtype))
    none = jnp.zeros((batch_size,), jnp.int32)
    return OpenByte(segment_ids=none, closed=none != 0, h=h, p=p)


def init_blt_state(
    config: PatchedConfig,
    patcher: PatcherConfig,
    batch_size: int,
    *,
    num_bytes: int,
    dtype: Any = jnp.float32,
) -> BLTState:
    """Return the state before the first byte.

    Args:
      config: the model's config.
      patcher: how its bytes are grouped.
      batch_size: rows.
      num_bytes: the most bytes a document may hold.
      dtype: of the caches. What stacks returned is kept as they add it up (`stream_dtype`).

    Raises:
      ValueError: the model or the patcher sees the future.
    """
    if not config.causal:
        raise ValueError("a bidirectional model cannot generate: build it with causal stacks")
    blocks = -(-num_bytes // patcher.block_size)
    byte_rows = {"capacity": num_bytes, "dtype": dtype}
    # Make an array each, so that the state can be donated
    zeros = {name: jnp.zeros((batch_size,), jnp.int32) for name in COUNTS}
    router = smoothed = None
    if config.router is not None:
        router = init_router(config.router, batch_size, dim=config.encoder.dim, dtype=dtype)
        smoothed = jnp.zeros((batch_size, config.slot_dim), jnp.float32)
    over_slots = {"blocks": blocks, "slots": patcher.slots, "dtype": dtype}
    latent = (
        init_stack_state(config.latent, batch_size, capacity=blocks * patcher.slots, dtype=dtype)
        if config.level is None
        else init_level_state(config.level, config.latent, batch_size, **over_slots)
    )
    open_patch = (batch_size, patcher.block_size, config.encoder.dim)
    read_keys = read_values = None
    if config.router is None or config.router.unmerge != "gather":
        read_keys = jnp.zeros((batch_size, config.look_back, config.encoder.dim), dtype)
        read_values = jnp.zeros((batch_size, 1, config.look_back, config.encoder.dim), dtype)
    return BLTState(
        **zeros,
        patcher=init_patcher(patcher, batch_size),
        embedding=init_embedding_state(config.embedding, batch_size),
        encoder=init_stack_state(config.encoder, batch_size, **byte_rows),
        latent=latent,
        decoder=init_stack_state(config.decoder, batch_size, **byte_rows),
        keys=jnp.zeros(open_patch, dtype),
        values=jnp.zeros(open_patch, dtype),
        recent=jnp.zeros((batch_size, config.look_back, config.slot_dim), stream_dtype(dtype)),
        recent_valid=jnp.zeros((batch_size, config.look_back), bool),
        read_keys=read_keys,
        read_values=read_values,
        router=router,
        smoothed=smoothed,
        block_size=patcher.block_size,
        capacity=patcher.slots,
    )


def check_state(config: PatchedConfig, state: BLTState, ids: Int[Array, "B *T"]) -> None:
    """Raise ValueError unless the state has as many rows as ids, and n-grams if the model has."""
    check_embedding_state(config.embedding, state.embedding)
    if len(state.position) != len(ids):
        raise ValueError(
            f"ids have {len(ids)} rows and the state {len(state.position)}: make it by init_state of as many rows"
        )


def check_rule(patcher: PatcherConfig, state: BLTState) -> PatcherConfig:
    """Return `patcher`, or raise ValueError unless its blocks are those of the state."""
    own, held = (patcher.block_size, patcher.slots), (state.block_size, state.capacity)
    if own != held:
        raise ValueError(
            f"the state is of blocks of {held[0]} bytes in {held[1]} patches, and the patcher's are of {own[0]} in "
            f"{own[1]}: make it by init_state of the same patcher"
        )
    return patcher


def begin(state: BLTState, segment_ids: Int[Array, "B"] | None) -> tuple[Int[Array, "B"], BLTState]:
    """Return the coming byte's document, and the state with its open patch.

    The open patch is empty in rows that start another document.
    """
    if segment_ids is None:
        segment_ids = jnp.maximum(state.last_segment, 1)
    fresh = (segment_ids != 0) & (segment_ids != state.last_segment)
    keep = lambda x: jnp.where(rows(fresh, x), jnp.zeros((), x.dtype), x)  # noqa: E731
    return segment_ids, state.replace(
        position=keep(state.position),
        offset=keep(state.offset),
        previous=keep(state.previous),
        in_block=keep(state.in_block),
        used=keep(state.used),
        recent_valid=state.recent_valid & ~fresh[:, None],
        router=jax.tree.map(keep, state.router),
        smoothed=jax.tree.map(keep, state.smoothed),
    )


def count_unused(state: BLTState, segment_ids: Int[Array, "B"], closed: Bool[Array, "B"]) -> Int[Array, "B"]:
    """Return how many slots of a block stay unused behind the coming byte; 0 where it does not complete the block."""
    used = state.used + (closed & (segment_ids != 0)).astype(jnp.int32)
    return jnp.where(_at_edge(state, segment_ids), state.capacity - used, 0)


def name_holes(segment_ids: Int[Array, "B"], unused: Int[Array, "B"], capacity: int) -> Int[Array, "B P"]:
    """Return -s in the first slots of each row, as many as are unused, and 0 in the others."""
    slot = jnp.arange(capacity, dtype=jnp.int32)[None]
    return jnp.where(slot < unused[:, None], -segment_ids[:, None], 0)


def advance(state: BLTState, segment_ids: Int[Array, "B"], closed: Bool[Array, "B"]) -> BLTState:
    """Return the state behind a byte of each row: its position, its offset in the patch, and the slots in use."""
    live = segment_ids != 0
    ends, edge = live & closed, _at_edge(state, segment_ids)
    one = live.astype(jnp.int32)
    return state.replace(
        position=state.position + one,
        last_segment=jnp.where(live, segment_ids, state.last_segment),
        offset=jnp.where(ends, 0, state.offset + one),
        previous=jnp.where(ends, state.offset + 1, state.previous),
        in_block=jnp.where(edge, 0, state.in_block + one),
        used=jnp.where(edge, 0, state.used + ends.astype(jnp.int32)),
    )


def _at_edge(state: BLTState, segment_ids: Int[Array, "B"]) -> Bool[Array, "B"]:
    """Return whether the coming byte completes a block."""
    return (segment_ids != 0) & (state.in_block + 1 == state.block_size)
