"""Byte-level decoding with caches: entropy model, patcher and every part of the model move one byte at a time."""

import dataclasses
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.driver.prepared import COLLECTION as PREPARED
from jaxblt.models import LanguageModel, ModelConfig
from jaxblt.models.adapter import CHOSEN
from jaxblt.models.blt_stream import CLOSED, CUT
from jaxblt.patching import PatcherConfig, init_contexts, next_entropies
from jaxblt.show import show
from jaxblt.validation import check_fields


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The static part of decoding: the models and the patcher.

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
    entropy: ModelConfig | None = None
    dtype: Any = jnp.float32

    __repr__ = show

    def __post_init__(self) -> None:
        check_fields(self)
        built = self.build()
        jax.eval_shape(lambda: built.init_state(1, num_bytes=1))
        if self.needs_entropies and self.entropy is None:
            assert self.patcher is not None
            raise ValueError(f"patching mode {self.patcher.mode!r} needs an entropy model")

    @property
    def needs_entropies(self) -> bool:
        """True if an entropy model reads along."""
        return self.patcher is not None and self.patcher.needs_entropies

    def build(self) -> LanguageModel:
        """Build the model, which closes its patches itself."""
        return self.model.build(dtype=self.dtype, patcher=self.patcher)

    def reader(self) -> LanguageModel:
        """Build the entropy model."""
        assert self.entropy is not None
        return self.entropy.build(dtype=self.dtype)

    def variables(self, params: dict[str, Any], name: str) -> dict[str, Any]:
        """Return what `apply` of the "model" or the "entropy" model takes."""
        found = {"params": params[name], PREPARED: params.get(PREPARED, {}).get(name, {})}
        return {**found, CHOSEN: params.get(CHOSEN, {})} if name == "model" else found

    def next_entropies(
        self, params: dict[str, Any], ids: Int[Array, "B T"], state: Any, segment_ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T"] | None, Any]:
        """Return entropies of predictions at each row's next bytes, and the entropy model's state.

        None without an entropy model.
        """
        if not self.needs_entropies:
            return None, None
        assert self.patcher is not None
        apply = partial(self.reader().apply, method="stream")
        variables = self.variables(params, "entropy")
        context = self.patcher.entropy_context
        return next_entropies(apply, variables, ids, state, segment_ids, context=context)


@flax.struct.dataclass
class DecoderState:
    """State of the model, and of the entropy model where there is one."""

    model: Any
    entropy: Any = None

    __repr__ = show


def init_decoder(decoder: Decoder, batch_size: int, *, num_bytes: int) -> DecoderState:
    """Return the state before the first byte, for documents of at most `num_bytes` bytes."""
    model, entropy = decoder.build().init_state(batch_size, num_bytes=num_bytes), None
    if decoder.needs_entropies:
        assert decoder.patcher is not None
        reader = decoder.reader()
        start = lambda rows, capacity: reader.init_state(rows, num_bytes=capacity)  # noqa: E731
        entropy = init_contexts(start, batch_size, num_bytes, decoder.patcher.entropy_context)
    return DecoderState(model=model, entropy=entropy)


def decode_step(
    decoder: Decoder,
    params: dict[str, Any],
    ids: Int[Array, "B"],
    state: DecoderState,
    segment_ids: Int[Array, "B"],
) -> tuple[Float[Array, "B V"], Bool[Array, "B"], DecoderState]:
    """Return logits of the byte after each row's next byte.

    Args:
      decoder: models and patcher.
      params: {"model": ..., "entropy": ...}, as they are or of `prepare_decoding`.
      ids: the next byte of each row.
      state: where each row stands.
      segment_ids: document of each byte; 0 leaves the row as it was.

    Returns:
      Logits in fp32 (NaN where the byte's entropy is not finite), whether the byte closed its patch, and the state
      after it.
    """
    columns = (ids[:, None], state.entropy, segment_ids[:, None])
    entropies, entropy = decoder.next_entropies(params, *columns)
    logits, closed, moved = decoder.build().apply(
        decoder.variables(params, "model"),
        ids,
        state.model,
        segment_ids=segment_ids,
        entropies=None if entropies is None else entropies[:, 0],
        method="step",
    )
    logits = jnp.where(are_sound(entropies, columns[2])[:, None], logits, jnp.nan)
    return logits, closed, DecoderState(model=moved, entropy=entropy)


def decode_bytes(
    decoder: Decoder,
    params: dict[str, Any],
    ids: Int[Array, "B T"],
    state: DecoderState,
    segment_ids: Int[Array, "B T"],
) -> tuple[Float[Array, "B T V"], DecoderState]:
    """Return logits behind each of the next bytes of each row, and the state after them.

    The logits know no bit of what comes behind their byte.

    Args:
      decoder: models and patcher.
      params: {"model": ..., "entropy": ...}, as they are or of `prepare_decoding`.
      ids: the next bytes of each row; no row goes beyond a multiple of the model's `grid`.
      state: where each row stands.
      segment_ids: 1 for the bytes, and 0 behind them.

    Returns:
      Logits in fp32 (NaN from a byte on whose entropy is not finite), and the state.
    """
    logits, _, state = decode_and_cut_bytes(decoder, params, ids, state, segment_ids)
    return logits, state


def decode_and_cut_bytes(
    decoder: Decoder,
    params: dict[str, Any],
    ids: Int[Array, "B T"],
    state: DecoderState,
    segment_ids: Int[Array, "B T"],
) -> tuple[Float[Array, "B T V"], Bool[Array, "B T"], DecoderState]:
    """Return what `decode_bytes` does, and between both whether each byte closed its patch."""
    entropies, entropy = decoder.next_entropies(params, ids, state.entropy, segment_ids)
    (logits, moved), sown = decoder.build().apply(
        decoder.variables(params, "model"),
        ids,
        state.model,
        segment_ids=segment_ids,
        entropies=entropies,
        method="stream",
        mutable=[CUT],
    )
    if entropies is not None:
        broken = jnp.cumsum(~jnp.isfinite(entropies) & (segment_ids != 0), 1) > 0
        logits = jnp.where(broken[..., None], jnp.nan, logits)
    # A model without patches sows nothing
    (closed,) = sown.get(CUT, {}).get(CLOSED, (jnp.zeros(ids.shape, bool),))
    return logits, closed, DecoderState(model=moved, entropy=entropy)


def are_sound(entropies: Float[Array, "B T"] | None, segment_ids: Int[Array, "B T"]) -> Bool[Array, "B"]:
    """Return False for rows with an entropy that is not finite.

    It cuts no patch, so the model's logits would hide it.
    """
    if entropies is None:
        return jnp.ones(segment_ids.shape[:1], bool)
    return jnp.all(jnp.isfinite(entropies) | (segment_ids == 0), 1)
