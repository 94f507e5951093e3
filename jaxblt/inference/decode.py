"""Byte-level decoding with caches: entropy model, patcher and every part of the model move one byte at a time."""

import dataclasses
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.models import BLTConfig, ByteLMConfig, ModelConfig, init_blt_state, init_byte_lm_state
from jaxblt.patching import PatcherConfig, init_contexts, init_patcher, next_entropies, step_patcher
from jaxblt.validation import check_fields


@dataclasses.dataclass(frozen=True)
class Decoder:
    """What is static about decoding: the models and the patcher.

    Attributes:
      model: a causal model.
      patcher: how bytes are grouped, for a byte-patched model; must be causal.
      entropy: the entropy model's config, for the patching modes that read entropies.
      dtype: compute and cache dtype.

    Raises:
      ValueError: the model or the patcher sees the future, or one that is needed is missing.
    """

    model: ModelConfig
    patcher: PatcherConfig | None = None
    entropy: ByteLMConfig | None = None
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.model.causal:
            raise ValueError("a bidirectional model cannot generate: train one with causal stacks")
        if not isinstance(self.model, BLTConfig):
            return
        if self.patcher is None:
            raise ValueError("a byte-patched model needs the patcher that it was trained with")
        if not self.patcher.causal:
            raise ValueError(
                f"patching mode {self.patcher.mode!r} sees the future and cannot be used to generate"
            )
        if self.patcher.needs_entropies and self.entropy is None:
            raise ValueError(f"patching mode {self.patcher.mode!r} needs an entropy model")

    def next_entropies(
        self, params: dict[str, Any], ids: Int[Array, "B T"], state: Any, segment_ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T"], Any]:
        """Entropies of the entropy model's predictions at the next bytes of each row, and its state after them."""
        assert self.entropy is not None
        assert self.patcher is not None
        model = self.entropy.build(dtype=self.dtype)
        apply = partial(model.apply, method="stream")
        variables = {"params": params["entropy"]}
        context = self.patcher.entropy_context
        return next_entropies(apply, variables, ids, state, segment_ids, context=context)


@flax.struct.dataclass
class DecoderState:
    """State of the model, and of entropy model and patcher where there are any."""

    model: Any
    entropy: Any = None
    patcher: Any = None


def init_decoder(decoder: Decoder, batch_size: int, *, num_bytes: int) -> DecoderState:
    """The state before the first byte, for documents of at most `num_bytes` bytes."""
    sizes = {"capacity": num_bytes, "dtype": decoder.dtype}
    if isinstance(decoder.model, ByteLMConfig):
        return DecoderState(model=init_byte_lm_state(decoder.model, batch_size, **sizes))
    assert decoder.patcher is not None
    blocks = {"block_size": decoder.patcher.block_size, "capacity": decoder.patcher.slots}
    model = init_blt_state(decoder.model, batch_size, num_bytes=num_bytes, dtype=decoder.dtype, **blocks)
    entropy = None
    if decoder.patcher.needs_entropies:
        config = decoder.entropy
        assert config is not None

        def start(rows: int, capacity: int) -> Any:
            return init_byte_lm_state(config, rows, capacity=capacity, dtype=decoder.dtype)

        entropy = init_contexts(start, batch_size, num_bytes, decoder.patcher.entropy_context)
    return DecoderState(model=model, entropy=entropy, patcher=init_patcher(decoder.patcher, batch_size))


def decode_step(
    decoder: Decoder,
    params: dict[str, Any],
    ids: Int[Array, "B"],
    state: DecoderState,
    segment_ids: Int[Array, "B"],
) -> tuple[Float[Array, "B V"], Bool[Array, "B"], DecoderState]:
    """Logits of the byte after each row's next byte.

    Args:
      decoder: models and patcher.
      params: {"model": ..., "entropy": ...}.
      ids: the next byte of each row.
      state: where each row stands.
      segment_ids: document of each byte; 0 leaves the row as it was.

    Returns:
      Logits in fp32 (NaN where the byte's entropy is not finite), whether the byte closed its patch, and the state
      after it.
    """
    model = decoder.model.build(dtype=decoder.dtype)
    variables = {"params": params["model"]}
    if isinstance(decoder.model, ByteLMConfig):
        logits, moved = model.apply(
            variables, ids[:, None], state.model, segment_ids=segment_ids[:, None], method="stream"
        )
        return logits[:, 0], jnp.zeros(ids.shape, bool), DecoderState(model=moved)
    assert decoder.patcher is not None
    entropies, entropy_state = _entropies(decoder, params, ids, state, segment_ids)
    patcher, closed = step_patcher(decoder.patcher, state.patcher, ids, entropies, segment_ids)
    logits, moved = model.apply(variables, ids, closed, state.model, segment_ids=segment_ids, method="step")
    logits = spoil(logits, entropies[:, None], segment_ids[:, None])
    return logits, closed, DecoderState(model=moved, entropy=entropy_state, patcher=patcher)


def _entropies(
    decoder: Decoder, params: Any, ids: Any, state: DecoderState, segment_ids: Any
) -> tuple[Any, Any]:
    assert decoder.patcher is not None
    if not decoder.patcher.needs_entropies:
        return jnp.zeros(ids.shape, jnp.float32), None
    entropies, moved = decoder.next_entropies(params, ids[:, None], state.entropy, segment_ids[:, None])
    return entropies[:, 0], moved


def spoil(
    logits: Float[Array, "B V"], entropies: Float[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B V"]:
    """NaN for rows with an entropy that is not finite: it cuts no patch, so the model's logits would hide it."""
    sound = jnp.all(jnp.isfinite(entropies) | (segment_ids == 0), 1, keepdims=True)
    return jnp.where(sound, logits, jnp.nan)


def teacher_force(
    decoder: Decoder, params: dict[str, Any], ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> tuple[Float[Array, "B T V"], Bool[Array, "B T"]]:
    """Logits at every byte of given rows, computed one byte at a time, and after which bytes a patch closed."""

    def body(state: DecoderState, column: tuple[Array, Array]) -> tuple[DecoderState, tuple[Array, Array]]:
        logits, closed, state = decode_step(decoder, params, column[0], state, column[1])
        return state, (logits, closed)

    state = init_decoder(decoder, ids.shape[0], num_bytes=ids.shape[1])
    _, (logits, closed) = jax.lax.scan(body, state, (ids.T, segment_ids.T))
    return jnp.moveaxis(logits, 0, 1), closed.T
