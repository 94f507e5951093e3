"""A byte language model whose state engines are kept as codes between turns, as of a conversation.

    turn 0 ──▶ slots ──▶ codes ──▶ slots ──▶ turn 1 ──▶ slots ──▶ codes ──▶ ...

A code is one whole number a slot. The codes' book is trained by the run's own objective: gradients of the next turn's
bytes pass the choice of a code straight through, and the compressor's loss is sown.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers import StateEngineConfig
from jaxblt.mixers.slots.engine_state import StateEngineState
from jaxblt.mixers.slots.experimental.state_compressor import StateCompressor
from jaxblt.mixers.slots.state_slots import Slots
from jaxblt.models.byte_lm import ByteLMConfig, ByteLMState, init_byte_lm_state
from jaxblt.models.row_layout import RowLayout
from jaxblt.patching.config import PatcherConfig
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields


@dataclasses.dataclass(frozen=True)
class CodedTurnsConfig:
    """A byte language model that compresses the slots of its state engines to codes after each turn of a document.

    A turn is a fixed number of bytes; within a turn states are exact. Rows hold one document each, and no mesh may
    split them. Balance losses of engines are not part of the loss, because engines report them only in calls without a
    state.

    Attributes:
      base: the model; its pattern has state engines without edges, all with one head width.
      turn: number of bytes between compressions.
      code_dim: width of a codebook entry.
      codes: number of codebook entries; all engines share the codebook.
    """

    base: ByteLMConfig
    turn: int = 256
    code_dim: int = 16
    codes: int = 256

    __repr__ = show

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "turn", "code_dim", "codes", least=1)
        if not self.causal:
            raise ValueError(
                "CodedTurnsConfig.base reads both ways, and turns follow each other: set causal=True"
            )
        if len(self._widths) != 1:
            raise ValueError(
                f"CodedTurnsConfig.base has state engines without edges of widths {sorted(self._widths)}, and a book "
                "is of one width: put engines of one head_dim into its pattern"
            )

    def check(self, recipe: Any) -> None:
        """Check that a recipe's rows hold one document each, and lie whole on their devices."""
        if recipe.data.packing not in ("windows", "buckets") or recipe.mesh.seq != 1:
            raise ValueError(
                f"CodedTurnsConfig counts turns from a row's start, got data.packing={recipe.data.packing!r} and "
                f"mesh.seq={recipe.mesh.seq}: use 'windows' or 'buckets', and mesh.seq=1"
            )

    @property
    def causal(self) -> bool:
        """True; position t sees nothing after t."""
        return self.base.causal

    @property
    def vocab_size(self) -> int:
        """Ids of the base."""
        return self.base.vocab_size

    @property
    def width(self) -> int:
        """Numbers of a slot: its key and its value."""
        return 2 * next(iter(self._widths))

    @property
    def _widths(self) -> set[int]:
        """Head widths of the engines without edges."""
        mixers = [self.base.stack.mixer(name) for name in self.base.stack.pattern]
        return {m.shape.keys for m in mixers if isinstance(m, StateEngineConfig) and not m.has_edges}

    def in_rows(self, of_bytes: RowLayout, of_slots: RowLayout) -> "CodedTurnsConfig":
        """Return the config for rows in which documents lie as `of_bytes` says."""
        return dataclasses.replace(self, base=self.base.in_rows(of_bytes, of_slots))

    def build(
        self, *, dtype: Any = jnp.float32, patcher: PatcherConfig | None = None, name: str | None = None
    ) -> "CodedTurns":
        """Build the module, with a base in `dtype`; codes and slots are fp32.

        Raises:
          ValueError: there is a patcher.
        """
        self.base.build(patcher=patcher)  # refuses one
        return CodedTurns(self, dtype, name=name)


@flax.struct.dataclass
class CodedTurnsState:
    """State of the base, and the bytes that each row's document has had."""

    base: ByteLMState
    place: Int[Array, "B"]

    __repr__ = show


class CodedTurns(nn.Module):
    """p(byte t+1 | bytes of its turn up to t, codes of the slots behind the turn before)."""

    config: CodedTurnsConfig
    dtype: Any = jnp.float32

    patcher = None

    @property
    def grid(self) -> int:
        """Bytes of a turn: no call with a state goes beyond a multiple of them, except whole turns of `prefill`."""
        return self.config.turn

    def setup(self) -> None:
        config = self.config
        self.base = config.base.build(dtype=self.dtype)
        self.compressor = StateCompressor(config.width, config.code_dim, config.codes)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        entropies: None = None,
        patches: None = None,
    ) -> tuple[Float[Array, "B T V"], None]:
        """Return logits in fp32, and no patches; arguments are those of `ByteLM`, for rows of one document."""
        segment_ids = jnp.ones_like(ids) if segment_ids is None else segment_ids
        state = self.init_state(ids.shape[0], num_bytes=ids.shape[1])
        return self._turns(ids, state, segment_ids)[0], None

    @nn.nowrap
    def init_state(self, batch_size: int, *, num_bytes: int) -> CodedTurnsState:
        """Return the state before the first byte, for documents of at most `num_bytes` bytes."""
        base = init_byte_lm_state(self.config.base, batch_size, capacity=num_bytes, dtype=self.dtype)
        return CodedTurnsState(base, jnp.zeros((batch_size,), jnp.int32))

    def prefill(
        self,
        ids: Int[Array, "B T"],
        state: CodedTurnsState,
        *,
        segment_ids: Int[Array, "B T"],
        entropies: None = None,
    ) -> tuple[Float[Array, "B V"], CodedTurnsState]:
        """Return logits after each row's last byte, and the state behind it; see `LanguageModel.prefill`."""
        logits, state = self._turns(ids, state, segment_ids)
        last = jnp.maximum(jnp.sum(segment_ids != 0, 1) - 1, 0)[:, None, None]
        return jnp.take_along_axis(logits, last, 1)[:, 0], state

    def step(
        self,
        ids: Int[Array, "B"],
        state: CodedTurnsState,
        *,
        segment_ids: Int[Array, "B"] | None = None,
        entropies: None = None,
    ) -> tuple[Float[Array, "B V"], Bool[Array, "B"], CodedTurnsState]:
        """Return logits of the byte after each row's next byte; see `LanguageModel.step`."""
        column = jnp.ones_like(ids)[:, None] if segment_ids is None else segment_ids[:, None]
        logits, state = self.stream(ids[:, None], state, segment_ids=column)
        return logits[:, 0], jnp.zeros(ids.shape, bool), state

    @nn.nowrap
    def boundaries(self, state: CodedTurnsState) -> None:
        """Return None: there are no patches."""

    def stream(
        self,
        ids: Int[Array, "B T"],
        state: CodedTurnsState,
        *,
        segment_ids: Int[Array, "B T"],
        entropies: None = None,
    ) -> tuple[Float[Array, "B T V"], CodedTurnsState]:
        """Return logits of the next bytes of each row, all of one turn, and the state after them."""
        read = jnp.sum(segment_ids != 0, 1, dtype=jnp.int32)
        logits, base = self.base.stream(ids, state.base, segment_ids=segment_ids)
        place = state.place + read
        ended = (read > 0) & (place % self.config.turn == 0)
        return logits, CodedTurnsState(self._coded(base, ended), place)

    def _turns(
        self, ids: Int[Array, "B T"], state: CodedTurnsState, segment_ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T V"], CodedTurnsState]:
        """Read turn after turn, from the start of one."""
        logits = []
        for start in range(0, ids.shape[1], self.config.turn):
            span = slice(start, start + self.config.turn)
            found, state = self.stream(ids[:, span], state, segment_ids=segment_ids[:, span])
            logits.append(found)
        return jnp.concatenate(logits, 1), state

    def _coded(self, state: ByteLMState, ended: Bool[Array, "B"]) -> ByteLMState:
        """Return the state with what its engines' codes stand for, in the rows whose turn ended."""

        def coded(part: Any) -> Any:
            if not isinstance(part, StateEngineState) or not isinstance(part.engine, Slots):
                return part
            keys, values = part.engine.keys, part.engine.values
            slots = jnp.concatenate([jnp.swapaxes(keys, -1, -2), values], -1)
            decoded, _ = self.compressor(slots)
            chosen = ended.reshape(*(1,) * (slots.ndim - 4), -1, 1, 1, 1)
            keys, values = jnp.split(jnp.where(chosen, decoded, slots), 2, -1)
            return dataclasses.replace(part, engine=Slots(jnp.swapaxes(keys, -1, -2), values))

        return jax.tree.map(coded, state, is_leaf=lambda part: isinstance(part, StateEngineState))
