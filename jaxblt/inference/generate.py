"""Continues prompts a batch at a time: one pass over the prompts, then byte by byte in one compiled loop."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxblt.data.vocab import EOS, PAD, decode, encode
from jaxblt.inference.decode import Decoder, decode_step
from jaxblt.inference.prompts import prefill
from jaxblt.inference.sampling import SamplingConfig, sample
from jaxblt.patching import warn_overflow

ROUND = 64
"""Prompts are filled up to a multiple of as many bytes, so that those of about one length share a program."""


def generate(
    decoder: Decoder,
    params: dict[str, Any],
    prompts: Sequence[bytes],
    *,
    max_new_bytes: int,
    sampling: SamplingConfig = SamplingConfig(),
    seed: int = 0,
) -> list[bytes]:
    """The bytes that follow each prompt, until EOS or `max_new_bytes`.

    Rows are independent: each starts to sample where its own prompt ends, whatever the length of the others.

    Args:
      decoder: models and patcher.
      params: {"model": ..., "entropy": ...}.
      prompts: may be empty; a BOS comes before each.
      max_new_bytes: bytes to sample a row at the most.
      sampling: how a byte is drawn.
      seed: of the draws.

    Raises:
      ValueError: no prompts, or nothing to generate.

    Warns:
      PatchOverflowWarning: blocks have fewer slots than the rows' patches ask for.
    """
    if not prompts:
        raise ValueError("generate needs at least one prompt (b'' starts a new document)")
    if max_new_bytes < 1:
        raise ValueError(f"max_new_bytes must be at least 1, got {max_new_bytes}")
    rows = [encode(prompt, bos=True) for prompt in prompts]
    lengths = np.array([len(row) for row in rows], np.int32)
    table = np.full((len(rows), -(-int(lengths.max()) // ROUND) * ROUND), PAD, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    drawn, boundaries = _run(
        decoder,
        sampling,
        max_new_bytes,
        params,
        jnp.asarray(table),
        jnp.asarray(lengths),
        jax.random.key(seed),
    )
    _warn(decoder, boundaries)
    return [decode(row[: int(np.argmax(np.append(row, EOS) == EOS))]) for row in np.asarray(drawn)]


def _warn(decoder: Decoder, boundaries: Any) -> None:
    if decoder.patcher is not None and boundaries is not None:
        refused, wanted = (float(np.sum(x)) for x in jax.device_get(boundaries))
        patcher = decoder.patcher
        warn_overflow(refused, wanted, capacity=patcher.slots, block_size=patcher.block_size)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    decoder: Decoder,
    sampling: SamplingConfig,
    max_new_bytes: int,
    params: dict[str, Any],
    prompts: Int[Array, "B L"],
    lengths: Int[Array, "B"],
    key: Array,
) -> tuple[Int[Array, "B T"], tuple[Int[Array, "B"], Int[Array, "B"]] | None]:
    """The bytes drawn for each row; those behind its EOS are not to be read. Boundaries refused, and asked for."""
    segments = (jnp.arange(prompts.shape[1])[None] < lengths[:, None]).astype(jnp.int32)
    num_bytes = prompts.shape[1] + max_new_bytes - 1
    logits, state = prefill(decoder, params, prompts, segments, num_bytes=num_bytes)
    first = sample(sampling, jax.random.fold_in(key, 0), logits)

    def body(carry: Any, step: Array) -> tuple[Any, Array]:
        state, ids, done = carry
        logits, _, state = decode_step(decoder, params, ids, state, jnp.where(done, 0, 1))
        drawn = sample(sampling, jax.random.fold_in(key, step), logits)
        return (state, drawn, done | (drawn == EOS)), drawn

    steps = jnp.arange(1, max_new_bytes, dtype=jnp.int32)
    (state, _, _), drawn = jax.lax.scan(body, (state, first, first == EOS), steps)
    patcher = state.patcher
    boundaries = None if patcher is None else (patcher.overflow, patcher.wanted)
    return jnp.concatenate([first[:, None], drawn.T], 1), boundaries
