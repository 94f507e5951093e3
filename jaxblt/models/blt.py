"""The Byte Latent Transformer with any mixer: bytes, patches, a latent stack over patches, and bytes again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.array_checks import check_like, check_whole
from jaxblt.mixers.driver.base import rows
from jaxblt.models.blt_config import BLTOptions
from jaxblt.models.blt_prefill import (
    after_prompt,
    check_split,
    earlier_patches,
    fed_slots,
    last_index,
    prompt_patches,
    prompt_places,
)
from jaxblt.models.blt_state import (
    BLTState,
    OpenByte,
    advance,
    begin,
    check_rule,
    check_state,
    count_unused,
    init_blt_state,
    init_open_byte,
    name_holes,
    name_seen,
    patch_axis,
)
from jaxblt.models.blt_stream import CLOSED, CUT, Cut, after_bytes, cut_bytes, lay_bytes
from jaxblt.models.bridge import (
    BytesToPatches,
    PatchesToBytes,
    last_bytes,
    to_blocks,
    to_row,
    visible_patches,
)
from jaxblt.models.bridge_patterns import patches_around
from jaxblt.models.bridge_turns import in_turns
from jaxblt.models.byte_lm import Head
from jaxblt.models.byte_patched import BytePatched
from jaxblt.models.change import change_in, repeat_in
from jaxblt.models.embeddings import ByteEmbedding
from jaxblt.models.level import Level, LevelState, last_slots
from jaxblt.models.positions import Places, SegmentAwarePosition, document_positions, places
from jaxblt.models.stack import Stack, StackConfig, StackState
from jaxblt.models.unmerge import LatestPatch, keep_bytes, smooth
from jaxblt.patching import PatcherConfig, make_patches, read_entropies
from jaxblt.patching.learned import Router, confidence
from jaxblt.patching.patches import Patches, check_patches
from jaxblt.patching.stream import prefill_patcher, step_patcher, stream_patcher
from jaxblt.show import show

HOLES = 64
"""Unused slots of a block that the latent stack skips at a time, while it decodes."""

ROUTER, LEVEL = "router", "level"
"""The submodules that score boundaries of bytes and group patches, by their names in parameters and metrics."""


@dataclasses.dataclass(frozen=True)
class BLTConfig(BLTOptions):
    """A byte-patched model; its options are those of `BLTOptions`."""

    __repr__ = show

    def build(
        self, *, dtype: Any = jnp.float32, patcher: PatcherConfig | None = None, name: str | None = None
    ) -> "BLT":
        """Build the module; parameters are fp32, computation in `dtype`, logits in fp32.

        Args:
          dtype: to compute in.
          patcher: the rule that closes patches; a model without has to be given its `Patches`.
          name: of the module.

        Raises:
          ValueError: only one of patcher and router is of learned boundaries, or only one of entropies.
        """
        if patcher is not None:
            self.check_patcher(patcher)
        return BLT(self, dtype, patcher, name=name)


class BLT(BytePatched):
    """p(byte t+1 | bytes ≤ t) through patches; with `causal=False` logits of byte t from the whole document.

    `__call__` is the parallel pass, `step` the same model byte by byte, and `prefill` takes a prompt to where `step`
    goes on. All three close patches by `patcher`, unless they are given them.
    """

    config: BLTConfig
    dtype: Any = jnp.float32
    patcher: PatcherConfig | None = None

    patch_stacks = ("latent",)

    @property
    def stacks(self) -> dict[str, StackConfig]:
        """The stacks by the names of their submodules, in the order in which bytes pass them."""
        config = self.config
        return {"encoder": config.encoder, "latent": config.latent, "decoder": config.decoder}

    def setup(self) -> None:
        config, dtype = self.config, self.dtype
        self.embedding = ByteEmbedding(config.embedding, dtype)
        self.position = SegmentAwarePosition(config.positions, config.encoder.dim, dtype)
        self.encoder = Stack(config.encoder, dtype)
        self.up = BytesToPatches(config.slot_dim, config.encoder.dim, config.bridge_heads, dtype)
        self.latent = Stack(config.latent, dtype)
        if config.level is not None:
            self.level = Level(config.level, self.latent, dtype)
        gathers = config.router is not None and config.router.unmerge == "gather"
        if config.router is not None:
            target = None if self.patcher is None else self.patcher.target
            self.router = Router(config.router, config.vocab_size, target, dtype)
        if gathers:
            self.keep = keep_bytes(dtype, config.encoder.dim)
        reads = {"look_back": config.look_back, "distances": config.read_distances}
        reads |= {"width": config.encoder.dim, "heads": config.bridge_heads}
        self.down = LatestPatch(dtype) if gathers else PatchesToBytes(dtype=dtype, **reads)
        self.decoder = Stack(config.decoder, dtype)
        self.head = Head(config.vocab_size, config.tie_head, dtype, config.decoder)

    @property
    def grid(self) -> int:
        """Bytes of a patch block."""
        return self._rule().block_size

    def _decoded(
        self, ids: Int[Array, "B T"], segment_ids: Any, positions: Any, entropies: Any, patches: Any
    ) -> tuple[Float[Array, "B T C"], Patches]:
        """Return byte vectors behind the decoder, and the patches that they used."""
        if positions is None:
            positions = document_positions(ids, segment_ids)
        check_like("positions", positions, ids)
        check_whole("positions", positions)
        if patches is not None:
            check_patches(patches, ids, segment_ids)

        def cut(scores: Any) -> tuple[Patches, Places]:
            own = patches
            if own is None:
                own = make_patches(self._rule(), ids, segment_ids=segment_ids, entropies=scores)
            check_split(own)
            return own, places(own, positions, causal=self.config.causal)

        h, patches, p, _ = self._encode(
            ids, cut, segment_ids=segment_ids, positions=positions, entropies=entropies
        )
        z = self.latent_forward(h, patches, p)
        return self.decoder(self._read_patches(h, z, patches, p), segment_ids=segment_ids)[0], patches

    @nn.nowrap
    def init_state(self, batch_size: int, *, num_bytes: int) -> BLTState:
        """Return the state before the first byte, for documents of at most `num_bytes` bytes.

        Raises:
          ValueError: the model or its patcher sees the future, or there is no patcher.
        """
        return init_blt_state(self.config, self._rule(), batch_size, num_bytes=num_bytes, dtype=self.dtype)

    def route(
        self, ids: Int[Array, "B T"], *, segment_ids: Any = None, entropies: Any = None
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T K"]]:
        """Return the router's p and the scores that it is made of; see `BoundaryConfig`."""
        x, _ = self.embedding(ids, segment_ids=segment_ids)
        h, _ = self.encoder(x, segment_ids=segment_ids)
        positions = document_positions(ids, segment_ids)
        return self.router(h, ids, segment_ids=segment_ids, positions=positions, entropies=entropies)[:2]

    def route_slots(
        self, ids: Int[Array, "B T"], *, segment_ids: Any = None, entropies: Any = None
    ) -> tuple[Float[Array, "B S K"], Bool[Array, "B S"]]:
        """Return the scores of the level's router, and the slots that count: no holes, and no block's first."""
        positions = document_positions(ids, segment_ids)

        def cut(scores: Any) -> tuple[Patches, Places]:
            own = make_patches(self._rule(), ids, segment_ids=segment_ids, entropies=scores)
            return own, places(own, positions, causal=True)

        options = {"segment_ids": segment_ids, "positions": positions, "entropies": entropies}
        h, patches, _, _ = self._encode(ids, cut, **options)
        x = self._slots(to_blocks(h, patches), None, patches, patches.segment_ids)
        slots = patches.segment_ids.reshape(len(ids), -1)
        inside = jnp.arange(slots.shape[1], dtype=jnp.int32)[None] % patches.capacity > 0
        scores = self.level.route(x.reshape(*slots.shape, -1), segment_ids=slots)
        return scores, (slots > 0) & inside

    def _encode[T](
        self,
        ids: Int[Array, "B T"],
        cut: Callable[[Any], tuple[T, Places]],
        *,
        segment_ids: Any,
        positions: Any,
        entropies: Any,
        state: BLTState | None = None,
    ) -> tuple[Float[Array, "B T C"], T, Float[Array, "B T"] | None, dict[str, Any]]:
        """Return byte vectors, what `cut` made of them, the router's p, and states by name.

        Args:
          ids: of the bytes.
          cut: from what the rule reads, entropies or p, to the patches and the bytes' places.
          segment_ids, positions: of the bytes.
          entropies: of the bytes, or None.
          state: before the call, with the open patch of each row's document.
        """
        own = {name: getattr(state, name, None) for name in ("embedding", "encoder", "router")}
        if self.config.features_enter == "input":
            # Cut first: of rows that do not divide among devices, patches say the length that would
            patches, place = cut(entropies)
            x, own["embedding"] = self.embedding(ids, segment_ids=segment_ids, state=own["embedding"])
            h, own["encoder"] = self.encoder(
                x + self.position(place), segment_ids=segment_ids, state=own["encoder"]
            )
            return h, patches, None, own
        x, own["embedding"] = self.embedding(ids, segment_ids=segment_ids, state=own["embedding"])
        h, own["encoder"] = self.encoder(x, segment_ids=segment_ids, state=own["encoder"])
        p, scores = None, entropies
        if self.config.router is not None:
            options = {"segment_ids": segment_ids, "positions": positions, "entropies": entropies}
            p, _, own["router"] = self.router(h, ids, **options, state=own["router"])
            scores = p
        patches, place = cut(scores)
        return h + self.position(place).astype(h.dtype), patches, p, own

    def latent_forward(
        self, h: Float[Array, "B T C"], patches: Patches, p: Float[Array, "B T"] | None = None
    ) -> Float[Array, "B N P D"]:
        """Return patch vectors after the latent stack, smoothed by the router's p if there is one.

        The slots of a row, block after block, are its sequence.
        """
        return self._latent_forward(to_blocks(h, patches), None, patches, patches.segment_ids, p)[0]

    def _latent_forward(
        self,
        blocks: Any,
        keys: Any,
        patches: Patches,
        slots: Int[Array, "B N P"],
        p: Any,
        state: BLTState | None = None,
    ) -> tuple[Float[Array, "B N P D"], dict[str, Any]]:
        """Run the latent stack on bytes in blocks, given their keys or None, the slots' ids, and the router's p.

        Returns patch vectors, and states by name.
        """
        own = {name: getattr(state, name, None) for name in ("latent", "smoothed")}
        x = self._slots(blocks, keys, patches, slots)
        flat, ids = x.reshape(x.shape[0], -1, x.shape[-1]), slots.reshape(x.shape[0], -1)
        ends = last_slots(patches, slots).reshape(ids.shape)
        z, own["latent"] = self._over_slots(flat, ids, ends, patches.capacity, own["latent"])
        if p is not None:
            at_end = last_bytes(to_blocks(p[..., None], patches), patches)
            z, own["smoothed"] = smooth(z, at_end.reshape(ids.shape), ids, own["smoothed"])
        return z.reshape(x.shape), own

    def _slots(self, blocks: Any, keys: Any, patches: Patches, slots: Any) -> Float[Array, "B N P D"]:
        """Return patch vectors of bytes in blocks, given their keys or None."""
        arrays = (last_bytes(blocks, patches), blocks if keys is None else keys, patches.patch_ids, slots > 0)
        pooled = BytesToPatches.read_bytes if keys is None else BytesToPatches.read
        return in_turns(pooled, self.up, arrays, chunk=self.config.bridge_chunk)

    def _over_slots(
        self, x: Any, ids: Any, last: Any, slots: int, state: Any
    ) -> tuple[Float[Array, "B T D"], StackState | LevelState | None]:
        """Run the latent stack on slots, through the level if there is one."""
        if self.config.level is None:
            return self.latent(x, segment_ids=ids, state=state)
        return self.level(x, segment_ids=ids, ends=last, slots=slots, state=state)

    def _read_patches(
        self,
        h: Float[Array, "B T C"],
        z: Float[Array, "B N P D"],
        patches: Patches,
        p: Any,
        earlier: Any = None,
    ) -> Float[Array, "B T C"]:
        """Return bytes with what they read from the patches that they may see."""
        config = self.config
        if config.read_distances is not None and not config.causal:
            seen = patches_around(z, patches, reach=config.look_back - 1)
        else:
            options = {"look_back": config.look_back, "causal": config.causal, "earlier": earlier}
            seen = visible_patches(z, patches, **options)
        call = lambda down, *arrays: down(*arrays)  # noqa: E731
        read = in_turns(call, self.down, (to_blocks(h, patches), *seen), chunk=config.bridge_chunk)
        return self._merge(h, to_row(read, h), p, to_row(patches.closed, h))

    def _merge(
        self, h: Float[Array, "B T C"], read: Float[Array, "B T C"], p: Any, closed: Bool[Array, "B T"]
    ) -> Float[Array, "B T C"]:
        """Return bytes with what they read, weighed by the router's confidence if there is one."""
        router, read = self.config.router, read.astype(h.dtype)
        if router is None:
            return h + read
        kept = self.keep(h).astype(h.dtype) if router.unmerge == "gather" else h
        return kept + confidence(p, closed)[..., None].astype(h.dtype) * read

    def prefill(
        self,
        ids: Int[Array, "B T"],
        state: BLTState,
        *,
        segment_ids: Int[Array, "B T"],
        entropies: Float[Array, "B T"] | None = None,
        closed: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B V"], BLTState]:
        """Read many bytes a row in one pass.

        Returns the logits after the last byte, and the state that `step` would have left.

        Args:
          ids: the next bytes of each row.
          state: from `init_state`, or where each row that goes on stands at a block's edge: the calls before fed it
            whole blocks.
          segment_ids: one document a row, with 0s behind its bytes; a row of 0s keeps its state, and its logits mean
            nothing.
          entropies: as for `__call__`.
          closed: whether a patch ends with each byte, instead of the patcher's decision.

        Raises:
          ValueError: the patcher's entropies are missing, or an array has another shape than ids.
          ValueError: the state is of another patcher or of another number of rows.
          ValueError: the blocks do not divide among the devices of a `seq` axis.
        """
        check_state(self.config, state, ids)
        if closed is not None:
            check_like("closed", closed, ids)
        document, state = begin(state, segment_ids[:, 0])
        positions = state.position[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None]

        def cut(scores: Any) -> tuple[tuple[Any, Patches, Places], Places]:
            patcher, ends = state.patcher, closed
            if ends is None:
                rule = check_rule(self._rule(), state)
                rated = read_entropies(rule, ids, scores)
                patcher, ends = prefill_patcher(rule, patcher, ids, rated, segment_ids)
            patches = prompt_patches(state, ends, segment_ids)
            check_split(patches)
            place = prompt_places(state, patches)
            return (patcher, patches, place), place

        options = {"segment_ids": segment_ids, "positions": positions, "entropies": entropies}
        h, (patcher, patches, place), p, read = self._encode(ids, cut, **options, state=state)
        blocks = to_blocks(h, patches)
        keys = self.up.keys(blocks)
        z, passed = self._latent_forward(blocks, keys, patches, fed_slots(patches), p, state)
        x = self._read_patches(h, z, patches, p, earlier_patches(state, document))
        x, decoder = self.decoder(x, segment_ids=segment_ids, state=state.decoder)
        last = last_index(segment_ids)
        after = after_prompt(state, segment_ids, patches, place, keys, z)
        after = after.replace(**self._reread(state, after, document != 0))
        after = after.replace(patcher=patcher, decoder=decoder, **read, **passed)
        return self.head(jnp.take_along_axis(x, last[:, None, None], 1), self.embedding)[:, 0], after

    def stream(
        self,
        ids: Int[Array, "B T"],
        state: BLTState,
        *,
        segment_ids: Int[Array, "B T"],
        entropies: Float[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T V"], BLTState]:
        """Return logits of the next bytes of each row, and the state that `step` would have left.

        Rows stand at any byte, and none goes beyond the edge of its block.

        Args:
          ids: the next bytes of each row.
          state: from `init_state`, `prefill`, `step` or here.
          segment_ids: one document a row, with 0s behind its bytes; a row of 0s keeps its state.
          entropies: as for `__call__`.

        Returns:
          Logits, NaN in rows that go beyond the edge of a block, and the state.

        Raises:
          ValueError: as of `step`.
        """
        check_state(self.config, state, ids)
        _, state = begin(state, segment_ids[:, 0])
        positions = state.position[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None]

        def close(scores: Any) -> tuple[tuple[Any, Cut], Places]:
            rule = check_rule(self._rule(), state)
            rated = read_entropies(rule, ids, scores)
            patcher, closed = stream_patcher(rule, state.patcher, ids, rated, segment_ids)
            cut = cut_bytes(state, closed, segment_ids)
            return (patcher, cut), cut.places(state)

        options = {"segment_ids": segment_ids, "positions": positions, "entropies": entropies}
        h, (patcher, cut), p, own = self._encode(ids, close, **options, state=state)
        self.sow(CUT, CLOSED, cut.closed)
        keys, (ends, real) = self.up.keys(h), cut.ends
        last = jnp.take_along_axis(h, ends[..., None], 1)[:, None]
        x = self.up.read(last, *lay_bytes(state, cut, keys), real[:, None])[:, 0]
        slots = jnp.where(real, segment_ids[:, :1], 0)
        edge = (cut.num_bytes > 0) & (state.in_block + cut.num_bytes == state.block_size)
        last = edge[:, None] & (jnp.arange(x.shape[1], dtype=jnp.int32)[None] == cut.total[:, None] - 1)
        z, own["latent"] = self._over_slots(x, slots, last, state.capacity, state.latent)
        if p is not None:
            z, own["smoothed"] = smooth(z, jnp.take_along_axis(p, ends, 1), slots, state.smoothed)
        seen = {
            name: jnp.concatenate([state.seen[name], new.astype(state.seen[name].dtype)], patch_axis(name))
            for name, new in self._seen(z, real).items()
        }
        latest = jnp.where(cut.live, cut.visible + self.config.look_back - 1, -1)
        read = self._read_seen(h, seen, latest)
        x = self._merge(h, read, p, cut.closed)
        x, own["decoder"] = self.decoder(x, segment_ids=segment_ids, state=state.decoder)
        beyond = state.in_block + cut.num_bytes > state.block_size
        logits = jnp.where(beyond[:, None, None], jnp.nan, self.head(x, self.embedding))
        state, unused = after_bytes(state.replace(patcher=patcher, **own), segment_ids, cut, keys, seen)
        skipped = self._skip(state.latent, segment_ids[:, 0], unused, state.capacity)
        return logits, state.replace(latent=skipped)

    def step(
        self,
        ids: Int[Array, "B"],
        state: BLTState,
        *,
        segment_ids: Int[Array, "B"] | None = None,
        entropies: Float[Array, "B"] | None = None,
        closed: Bool[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B V"], Bool[Array, "B"], BLTState]:
        """Return logits of the byte after each row's next byte, reusing every cache.

        They equal those of the parallel pass. The latent stack runs only if some row's patch closed, and moves only the
        rows whose patch did. There is no reverse-mode gradient: `jaxblt/models/change.py` says why.

        Args:
          ids: the next byte of each row.
          state: from `init_state`, `prefill` or the step before.
          segment_ids: document of each byte; 0 leaves the row as it was. None continues each row's document.
          entropies: as for `__call__`.
          closed: whether each row's patch ends with the byte (block edges included), instead of the patcher's decision.

        Returns:
          Logits, whether the byte closed its patch, and the state.

        Raises:
          ValueError: the patcher's entropies are missing, an array has another shape than ids, or the state is of
            another patcher or of another number of rows.
        """
        given = {"segment_ids": segment_ids, "entropies": entropies, "closed": closed}
        byte, state = self.open_byte(ids, state, **given)
        logits, state = self.finish_byte(byte, self.close_patches(byte, state))
        return logits, byte.closed, state

    @nn.nowrap
    def init_open_byte(self, batch_size: int) -> OpenByte:
        """Return no byte in any row, for callers that put off `close_patches`."""
        return init_open_byte(self.config, batch_size, dtype=self.dtype)

    def open_byte(
        self,
        ids: Int[Array, "B"],
        state: BLTState,
        *,
        segment_ids: Int[Array, "B"] | None = None,
        entropies: Float[Array, "B"] | None = None,
        closed: Bool[Array, "B"] | None = None,
    ) -> tuple[OpenByte, BLTState]:
        """Read each row's next byte up to where it needs the patches: the first part of `step`, with its arguments.

        Before a row's next byte this one passes `close_patches` and `finish_byte`, together with other rows' or later.
        """
        check_state(self.config, state, ids)
        segments, state = begin(state, segment_ids)
        if closed is not None:
            check_like("closed", closed, ids)
        before = state
        if entropies is not None:
            # Compute offsets before what entropies decide: XLA would make one kernel of both, and so the encoder would
            # wait for the entropy model
            offset, in_block = jax.lax.optimization_barrier((state.offset, state.in_block))
            state = state.replace(offset=offset, in_block=in_block)
        rated = None if entropies is None else entropies[:, None]
        options = {"segment_ids": segments[:, None], "positions": state.position[:, None], "entropies": rated}
        h, scores, p, read = self._encode(
            ids[:, None], lambda scores: (scores, before.place()), **options, state=state
        )
        if closed is None:
            rule = check_rule(self._rule(), state)
            rated = read_entropies(rule, ids, None if scores is None else scores[:, 0])
            patcher, closed = step_patcher(rule, state.patcher, ids, rated, segments)
            state = state.replace(patcher=patcher)
        state = state.replace(**read).remember(self.up.keys(h), segments != 0)
        return OpenByte(segment_ids=segments, closed=closed, h=h, p=p), state

    def close_patches(self, byte: OpenByte, state: BLTState) -> BLTState:
        """Run the latent stack for rows whose patch ends with their byte, if there are any: the second part of `step`.

        Other rows keep every bit.
        """
        unused = count_unused(state, byte.segment_ids, byte.closed)

        # Skip holes inside this loop, not behind it: each looks at its condition on the host
        def close(model: "BLT", before: dict[str, Any]) -> dict[str, Any]:
            after = model._close(state.replace(**before), byte)
            return after | {"latent": model._skip(after["latent"], byte.segment_ids, unused, state.capacity)}

        of_patches = {"latent": state.latent, "smoothed": state.smoothed} | state.seen
        due = jnp.any(byte.stands | (unused > 0))
        return state.replace(**change_in(self, due, close, of_patches))

    def finish_byte(self, byte: OpenByte, state: BLTState) -> tuple[Float[Array, "B V"], BLTState]:
        """Return logits behind each row's byte, and the state after it: the last part of `step`.

        Logits of rows without a byte mean nothing.
        """
        x: Any
        if state.read_keys is None or state.read_values is None or byte.p is not None:
            latest = jnp.full((byte.h.shape[0], 1), self.config.look_back - 1, jnp.int32)
            found = self._read_seen(byte.h, state.seen, latest)
            x = self._merge(byte.h, found, byte.p, byte.closed[:, None])
        else:
            keys = (state.read_keys, state.read_values)
            x = self.down.read_token(byte.h, keys, state.recent_valid)
        options = {"segment_ids": byte.segment_ids[:, None], "state": state.decoder}
        x, decoder = self.decoder(x, **options, leaves_sum=True)
        state = advance(state, byte.segment_ids, byte.closed)
        return self.head(x, self.embedding)[:, 0], state.replace(decoder=decoder)

    def _close(self, state: BLTState, byte: OpenByte) -> dict[str, Any]:
        """Feed the latent stack one patch, in the rows whose patch closed; return what changes, by name."""
        index = jnp.arange(state.block_size, dtype=jnp.int32)[None, None]
        outside = (index > state.offset[:, None, None]).astype(jnp.int32)
        ends = byte.stands[:, None]
        keys = (state.keys[:, None], state.values[:, None])
        slots, smoothed = jnp.where(ends, byte.segment_ids[:, None], 0), state.smoothed
        x = self.up.read(byte.h[:, None], keys, outside, ends[:, None])
        last = ends & (state.in_block[:, None] + 1 == state.block_size)
        z, latent = self._over_slots(x[:, 0], slots, last, state.capacity, state.latent)
        if byte.p is not None:
            z, smoothed = smooth(z, byte.p, slots, smoothed)
        return {"latent": latent, "smoothed": smoothed} | state.see(self._seen(z, ends), ends)

    def _seen(self, z: Float[Array, "B N D"], valid: Bool[Array, "B N"]) -> dict[str, Array]:
        """Return patches by the names of `BLTState.seen`, with their keys and values if bytes read these."""
        return name_seen(z, valid, self.down.keys(z) if isinstance(self.down, PatchesToBytes) else None)

    def _read_seen(
        self, h: Float[Array, "B T C"], seen: dict[str, Array], latest: Int[Array, "B T"]
    ) -> Float[Array, "B T C"]:
        """Return what bytes read from patches by the names of `BLTState.seen`."""
        valid = seen["recent_valid"][:, None]
        if isinstance(self.down, LatestPatch):
            return self.down(h[:, None], seen["recent"][:, None], latest[:, None], valid)[:, 0]
        keys = (seen["read_keys"][:, None], seen["read_values"])
        return self.down.out(self.down.look_up(h[:, None], keys, latest[:, None], valid))[:, 0]

    def _reread(self, before: BLTState, state: BLTState, live: Bool[Array, "B"]) -> dict[str, Array]:
        """Return keys and values of a state's latest patches, in rows that read a prompt."""
        found = self._seen(state.recent, state.recent_valid)
        new = {name: found[name] for name in found if name.startswith("read_")}
        return {
            name: jnp.where(rows(live, x), x.astype(before.seen[name].dtype), before.seen[name])
            for name, x in new.items()
        }

    def _skip(self, latent: Any, segment_ids: Int[Array, "B"], unused: Int[Array, "B"], slots: int) -> Any:
        """Move the latent stack over those of a block's slots that are unused at its end, if there are any."""
        size = min(slots, HOLES)

        # Name holes inside the loop: at each byte the array of all slots would be made for it
        def skip(model: "BLT", carry: tuple[Any, Array]) -> tuple[Array, tuple[Any, Array]]:
            latent, unused = carry
            here = jnp.minimum(unused, size)
            holes = name_holes(segment_ids, here, size)
            nothing = jnp.zeros((*holes.shape, model.config.slot_dim), model.dtype)
            latent = model._over_slots(nothing, holes, jnp.zeros(holes.shape, bool), slots, latent)[1]
            left = unused - here
            return jnp.any(left > 0), (latent, left)

        return repeat_in(self, jnp.any(unused > 0), skip, (latent, unused))[0]
