"""The Byte Latent Transformer as its authors released it: its config, and the module."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.layers import dense, stream_dtype
from jaxblt.mixers import AttentionConfig
from jaxblt.models.blt_state import begin, check_rule, check_state, name_seen
from jaxblt.models.blt_stream import CLOSED, CUT, after_bytes, cut_bytes, lay_bytes
from jaxblt.models.bridge import to_blocks, to_row
from jaxblt.models.byte_lm import Head
from jaxblt.models.byte_patched import BytePatched
from jaxblt.models.change import change_in
from jaxblt.models.embeddings import ByteEmbedding, EmbeddingConfig, check_vocab_size
from jaxblt.models.positions import last_index
from jaxblt.models.released_blt.bridge import BytesToVectors, ReadPatch, find_peaks
from jaxblt.models.released_blt.hashing import MOST_IDS, PolynomialHash
from jaxblt.models.released_blt.state import (
    ReleasedState,
    decoder_states,
    init_released_state,
    open_peak,
)
from jaxblt.models.row_layout import RowLayout, promise
from jaxblt.models.stack import Stack, StackConfig, StackState
from jaxblt.parallel.layout import CONTIGUOUS
from jaxblt.parallel.sequence import seq_axis
from jaxblt.patching import PatcherConfig, make_patches, read_entropies, stream_patcher
from jaxblt.patching.patches import Patches, check_patches
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields

BYTES = StackConfig(dim=256, num_layers=1, pattern="W", scan=False)


@dataclasses.dataclass(frozen=True)
class ReleasedBLTConfig:
    """A byte-patched Transformer that computes what the released weights ask for (2412.09871).

    A patch asks its bytes with `vectors` queries, made of their maximum. A byte reads the vectors of the latest patch
    that ended, before each block of the decoder. `BLTConfig` is the model to train anew.

    Attributes:
      encoder: stack of attention over bytes, unrolled; its width, heads and norms are also those of the reads.
      latent: stack over patches.
      decoder: stack of attention over bytes, unrolled, as wide as the encoder.
      hash: n-gram tables added to the byte embedding.
      vectors: query vectors of a patch, which side by side enter the latent stack.
      reads_each_block: bytes read their patch before every block of the decoder; otherwise before the first.
      spare_reads: reads of the encoder's earlier blocks. Their parameters are kept, and no answer depends on them.
      vocab_size: ids.
    """

    encoder: StackConfig = BYTES
    latent: StackConfig = StackConfig(dim=512, num_layers=4, pattern="A")
    decoder: StackConfig = dataclasses.replace(BYTES, num_layers=2)
    hash: PolynomialHash = PolynomialHash()
    vectors: int = 2
    reads_each_block: bool = True
    spare_reads: int = 0
    vocab_size: int = VOCAB_SIZE

    __repr__ = show

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "vectors", least=1, most=64)
        check_bounds(self, "spare_reads", least=0, most=1024)
        check_vocab_size(self)
        check_bounds(self, "vocab_size", most=MOST_IDS, why=": hashes of n-grams are exact up to it")
        if self.encoder.dim != self.decoder.dim:
            raise ValueError(
                f"encoder and decoder share the bytes' width, got {self.encoder.dim} and {self.decoder.dim}"
            )
        for name in ("encoder", "latent", "decoder"):
            self._check_stack(name, getattr(self, name))

    def _check_stack(self, name: str, stack: StackConfig) -> None:
        if not stack.causal or stack.layout != CONTIGUOUS:
            raise ValueError(
                f"ReleasedBLTConfig.{name} has causal={stack.causal} and layout {stack.layout.kind!r}, and the model "
                "predicts the next byte from bytes in order: set causal=True and layout='contiguous'"
            )
        kind = stack.mixer(stack.pattern[0])
        if name == "latent":
            self._check_latent()
        elif stack.scan or len(stack.pattern) > 1 or not isinstance(kind, AttentionConfig):
            raise ValueError(
                f"ReleasedBLTConfig.{name} has pattern {stack.pattern!r} and scan={stack.scan}, expected one attention "
                "and scan=False: bytes read patches between its blocks, with its heads"
            )

    def _check_latent(self) -> None:
        """Check that unused slots of a block are no time to the latent stack, as a stream feeds none."""
        for mixer in map(self.latent.mixer, self.latent.pattern):
            if not _sees_all(mixer):
                raise ValueError(
                    f"ReleasedBLTConfig.latent has {mixer!r:.120}, expected attention to all patches before, without "
                    "window, rule and ALiBi: set pattern='A'"
                )

    @property
    def causal(self) -> bool:
        """True: position t sees nothing after t."""
        return True

    @property
    def look_back(self) -> int:
        """Patches that a byte sees."""
        return 1

    @property
    def router(self) -> None:
        """None: boundaries are not learned."""

    @property
    def level(self) -> None:
        """None: patches are not grouped again."""

    @property
    def slot_dim(self) -> int:
        """Width of the patches."""
        return self.latent.dim

    @property
    def embedding(self) -> EmbeddingConfig:
        """The config of the byte embedding."""
        return EmbeddingConfig(dim=self.encoder.dim, hash=self.hash, vocab_size=self.vocab_size)

    @property
    def decoder_parts(self) -> tuple[StackConfig, ...]:
        """The decoder, cut where bytes read patches."""
        if not self.reads_each_block:
            return (self.decoder,)
        return (dataclasses.replace(self.decoder, num_layers=1),) * self.decoder.num_layers

    def in_rows(self, of_bytes: RowLayout, of_slots: RowLayout) -> "ReleasedBLTConfig":
        """Return the config for rows in which documents lie as said: in bytes, and in latent slots."""
        return dataclasses.replace(promise(self, of_bytes), latent=promise(self.latent, of_slots))

    def build(
        self, *, dtype: Any = jnp.float32, patcher: PatcherConfig | None = None, name: str | None = None
    ) -> "ReleasedBLT":
        """Build the module; parameters are fp32, computation in `dtype`, logits in fp32.

        Args:
          dtype: to compute in.
          patcher: the rule that closes patches; a model without has to be given its `Patches`.
          name: of the module.

        Raises:
          ValueError: boundaries are to be learned.
        """
        if patcher is not None and patcher.mode == "learned":
            raise ValueError(
                "patcher mode 'learned' needs a router, and a ReleasedBLT has none: use a BLTConfig"
            )
        return ReleasedBLT(self, dtype, patcher, name=name)


class ReleasedBLT(BytePatched):
    """p(byte t+1 | bytes ≤ t) through patches of k vectors.

    `__call__` is the parallel pass. `prefill`, `stream` and `step` are one pass over the next bytes of each row, from
    any byte, and end with the state behind them. Positions are not read, as rotary phases go by distance. Of patches
    that are given, a document's first byte should be one: bytes before the first end of a patch read zeros. No mesh may
    split rows.
    """

    config: ReleasedBLTConfig
    dtype: Any = jnp.float32
    patcher: PatcherConfig | None = None

    patch_stacks = ("latent",)
    grid = 1

    @property
    def stacks(self) -> dict[str, StackConfig]:
        """The stacks by the names of their submodules, in the order in which bytes pass them."""
        config = self.config
        parts = {f"decoder_{i}": part for i, part in enumerate(config.decoder_parts)}
        return {"encoder": config.encoder, "latent": config.latent, **parts}

    def setup(self) -> None:
        config, dtype = self.config, self.dtype
        width = config.vectors * config.encoder.dim
        self.embedding = ByteEmbedding(config.embedding, dtype)
        self.encoder = Stack(config.encoder, dtype)
        self.up = BytesToVectors(config.encoder, config.vectors, config.spare_reads, dtype)
        if width != config.latent.dim:
            self.widen = dense(config.latent.dim, axes=("embed", "latent"), dtype=dtype, name="widen")
        self.latent = Stack(config.latent, dtype)
        self.spread = dense(width, axes=("latent", "embed"), dtype=dtype, name="spread")
        parts = config.decoder_parts
        self.reads = [ReadPatch(config.decoder, dtype, name=f"read_{i}") for i in range(len(parts))]
        self.decoders = [Stack(part, dtype, name=f"decoder_{i}") for i, part in enumerate(parts)]
        self.head = Head(config.vocab_size, False, dtype, config.decoder)

    def _decoded(
        self, ids: Int[Array, "B T"], segment_ids: Any, positions: Any, entropies: Any, patches: Any
    ) -> tuple[Float[Array, "B T C"], Patches]:
        """Return byte vectors behind the decoder, and the patches that they used."""
        _refuse_split(ids)
        if patches is None:
            patches = make_patches(self._rule(), ids, segment_ids=segment_ids, entropies=entropies)
        check_patches(patches, ids, segment_ids)
        patches = fit_row(patches)
        x, _ = self.embedding(ids, segment_ids=segment_ids)
        h, _ = self.encoder(x, segment_ids=segment_ids)
        blocks, slots = to_blocks(h, patches), patches.segment_ids
        peaks = find_peaks(blocks, patches.patch_ids, patches.capacity)
        x = self.up(peaks, self.up.keys(blocks), patches.patch_ids, slots > 0)
        rows = slots.reshape(slots.shape[0], -1)
        # Count patches alone: a block's unused slots are no time to the rotary phases
        places = jnp.cumsum(rows > 0, 1, dtype=jnp.int32)
        x = self._enter(x.reshape(*rows.shape, -1))
        z, _ = self.latent(x, segment_ids=rows, positions=places)
        latest = to_row(latest_slot(patches), h)
        own = jnp.ones_like(ids) if segment_ids is None else segment_ids
        sees = (latest >= 0) & (jnp.take_along_axis(rows, jnp.maximum(latest, 0), 1) == own)
        z = jnp.pad(z, ((0, 0), (1, 0), (0, 0)))
        return self._decode(h, z, jnp.where(sees, latest + 1, 0), segment_ids)[0], patches

    def _enter(self, x: Float[Array, "B M E"]) -> Float[Array, "B M D"]:
        """Return vectors of patches as wide as the latent stack."""
        return x if x.shape[-1] == self.config.latent.dim else self.widen(x)

    def _decode(
        self,
        h: Float[Array, "B T C"],
        z: Float[Array, "B M D"],
        latest: Int[Array, "B T"],
        segment_ids: Any,
        state: StackState | None = None,
    ) -> tuple[Float[Array, "B T C"], StackState | None]:
        """Return bytes behind the decoder, given patches and the index of each byte's, and the decoder's state."""
        vectors = self.spread(z).reshape(*z.shape[:2], self.config.vectors, -1)
        count = len(self.decoders)
        states = [None] * count if state is None else decoder_states(state, count)
        after = []
        for read, decoder, own in zip(self.reads, self.decoders, states, strict=True):
            h, own = decoder(read(h, vectors, latest), segment_ids=segment_ids, state=own)
            after.append(own)
        if state is None:
            return h, None
        return h, dataclasses.replace(state, periods=tuple(p for own in after for p in own.periods))

    @nn.nowrap
    def init_state(self, batch_size: int, *, num_bytes: int) -> ReleasedState:
        """Return the state before the first byte, for documents of at most `num_bytes` bytes.

        Raises:
          ValueError: the patcher sees the future, or there is none.
        """
        rule = self._rule()
        return init_released_state(self.config, rule, batch_size, num_bytes=num_bytes, dtype=self.dtype)

    def prefill(
        self,
        ids: Int[Array, "B T"],
        state: ReleasedState,
        *,
        segment_ids: Int[Array, "B T"],
        entropies: Float[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B V"], ReleasedState]:
        """Return logits after each row's last byte, and the state behind it; see `LanguageModel.prefill`."""
        x, _, state = self._read(ids, state, segment_ids, entropies)
        last = last_index(segment_ids)[:, None, None]
        return self.head(jnp.take_along_axis(x, last, 1), self.embedding)[:, 0], state

    def stream(
        self,
        ids: Int[Array, "B T"],
        state: ReleasedState,
        *,
        segment_ids: Int[Array, "B T"],
        entropies: Float[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T V"], ReleasedState]:
        """Return logits of the next bytes of each row, and the state behind them; see `LanguageModel.stream`."""
        x, closed, state = self._read(ids, state, segment_ids, entropies)
        self.sow(CUT, CLOSED, closed)
        return self.head(x, self.embedding), state

    def step(
        self,
        ids: Int[Array, "B"],
        state: ReleasedState,
        *,
        segment_ids: Int[Array, "B"] | None = None,
        entropies: Float[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B V"], Bool[Array, "B"], ReleasedState]:
        """Return logits of the byte after each row's next byte; see `LanguageModel.step`."""
        if segment_ids is None:
            segment_ids = jnp.maximum(state.last_segment, 1)
        rated = None if entropies is None else entropies[:, None]
        x, closed, state = self._read(ids[:, None], state, segment_ids[:, None], rated)
        return self.head(x, self.embedding)[:, 0], closed[:, 0], state

    def _read(
        self, ids: Int[Array, "B T"], state: ReleasedState, segment_ids: Int[Array, "B T"], entropies: Any
    ) -> tuple[Float[Array, "B T C"], Bool[Array, "B T"], ReleasedState]:
        """Return byte vectors behind the decoder, where patches closed, and the state."""
        _refuse_split(ids)
        check_state(self.config, state, ids)
        rule, size = check_rule(self._rule(), state), ids.shape[1]
        _, begun = begin(state, segment_ids[:, 0])
        assert isinstance(begun, ReleasedState)
        assert isinstance(begun.latent, StackState)
        x, embedding = self.embedding(ids, segment_ids=segment_ids, state=begun.embedding)
        h, encoder = self.encoder(x, segment_ids=segment_ids, state=begun.encoder)
        rated = read_entropies(rule, ids, entropies)
        patcher, closed = stream_patcher(rule, begun.patcher, ids, rated, segment_ids)
        cut = cut_bytes(begun, closed, segment_ids)
        keys, real = self.up.keys(h), cut.ends[1]
        peaks = open_peak(begun, cut, h, size + 1)
        slots = jnp.where(real, segment_ids[:, :1], 0)
        laid = lay_bytes(begun, cut, keys)

        def close(model: "ReleasedBLT", before: tuple[Array, StackState]) -> tuple[Array, StackState]:
            return model._close(before[1], peaks[:, :-1], laid, slots)

        nothing = jnp.zeros((*slots.shape, self.config.latent.dim), stream_dtype(self.dtype))
        z, latent = change_in(self, jnp.any(real), close, (nothing, begun.latent))
        recent = jnp.where(begun.recent_valid[..., None], begun.recent, 0).astype(z.dtype)
        seen = (jnp.concatenate([recent, z], 1), jnp.concatenate([begun.recent_valid, real], 1))
        latest = jnp.where(cut.live, cut.visible, 0)
        x, decoder = self._decode(h, seen[0], latest, segment_ids, begun.decoder)
        own = {"patcher": patcher, "embedding": embedding, "encoder": encoder, "latent": latent}
        held = begun.replace(**own, decoder=decoder)
        after, _ = after_bytes(held, segment_ids, cut, keys, name_seen(*seen, None))
        assert isinstance(after, ReleasedState)
        peak = jnp.take_along_axis(peaks, cut.total[:, None, None], 1)[:, 0]
        kept = jnp.where(after.offset[:, None] > 0, peak, 0).astype(begun.peak.dtype)
        return x, cut.closed, after.replace(peak=kept)

    def _close(
        self, state: StackState, peaks: Float[Array, "B T C"], laid: Any, slots: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], StackState]:
        """Feed the latent stack the patches that close, and return them behind it."""
        keys, numbers = laid
        x = self.up(peaks[:, None], keys, numbers, (slots > 0)[:, None])[:, 0]
        z, after = self.latent(self._enter(x), segment_ids=slots, state=state)
        assert after is not None
        return z, after


def _sees_all(mixer: Any) -> bool:
    """Return whether a mixer is attention that cares for no distance but by rotary phases."""
    if not isinstance(mixer, AttentionConfig):
        return False
    return mixer.window is None and mixer.rule is None and mixer.position != "alibi"


def fit_row(patches: Patches) -> Patches:
    """Return the patches of rows of one block without its room behind the row, which the rows do not fill."""
    size = patches.num_bytes
    if patches.block_size <= size or patches.patch_ids.shape[1] > 1:
        return patches
    slots = min(patches.capacity, size)
    return dataclasses.replace(
        patches,
        patch_ids=jnp.minimum(patches.patch_ids[..., :size], slots),
        closed=patches.closed[..., :size],
        starts=jnp.minimum(patches.starts[..., :slots], size),
        lengths=patches.lengths[..., :slots],
        segment_ids=patches.segment_ids[..., :slots],
    )


def latest_slot(patches: Patches) -> Int[Array, "B N S"]:
    """Return the slot in the row of the latest patch that ended at or before each byte; -1 before the first."""
    block = jnp.arange(patches.closed.shape[1], dtype=jnp.int32)[None, :, None] * patches.capacity
    ended = jnp.where(patches.closed, patches.patch_ids + block, -1)
    flat = jax.lax.cummax(ended.reshape(ended.shape[0], -1), axis=1)
    return flat.reshape(ended.shape)


def _refuse_split(ids: Array) -> None:
    if seq_axis(ids) is not None:
        raise ValueError(
            "a ReleasedBLT reads whole rows, and the mesh splits them along seq: use a mesh with seq=1"
        )
