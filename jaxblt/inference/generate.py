"""Continues prompts byte by byte, a batch at a time, in one compiled loop."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxblt.data.vocab import EOS, PAD, decode, encode
from jaxblt.inference.decode import Decoder, decode_step, init_decoder
from jaxblt.inference.sampling import SamplingConfig, sample


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
    """
    if not prompts:
        raise ValueError("generate needs at least one prompt (b'' starts a new document)")
    if max_new_bytes < 1:
        raise ValueError(f"max_new_bytes must be at least 1, got {max_new_bytes}")
    rows = [encode(prompt, bos=True) for prompt in prompts]
    lengths = np.array([len(row) for row in rows], np.int32)
    table = np.full((len(rows), int(lengths.max())), PAD, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    drawn = _run(
        decoder,
        sampling,
        max_new_bytes,
        params,
        jnp.asarray(table),
        jnp.asarray(lengths),
        jax.random.key(seed),
    )
    drawn = np.asarray(drawn)
    continuations = (drawn[i, n - 1 : n - 1 + max_new_bytes] for i, n in enumerate(lengths))
    return [decode(row[: int(np.argmax(np.append(row, EOS) == EOS))]) for row in continuations]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    decoder: Decoder,
    sampling: SamplingConfig,
    max_new_bytes: int,
    params: dict[str, Any],
    prompts: Int[Array, "B L"],
    lengths: Int[Array, "B"],
    key: Array,
) -> Int[Array, "B T"]:
    """The byte drawn after each step; steps inside a prompt and after the end hold what is not to be read."""
    batch, longest = prompts.shape
    steps = longest - 1 + max_new_bytes

    def body(carry: Any, step: Array) -> tuple[Any, Array]:
        state, previous, done = carry
        prompt = prompts[:, jnp.minimum(step, longest - 1)]
        ids = jnp.where(step < lengths, prompt, previous)
        segments = jnp.where(done, 0, 1).astype(jnp.int32)
        logits, _, state = decode_step(decoder, params, ids, state, segments)
        drawn = sample(sampling, jax.random.fold_in(key, step), logits)
        sampled = step + 1 - lengths
        done = done | ((sampled >= 0) & (drawn == EOS)) | (sampled + 1 >= max_new_bytes)
        return (state, drawn, done), drawn

    carry = (
        init_decoder(decoder, batch, num_bytes=steps),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, bool),
    )
    _, drawn = jax.lax.scan(body, carry, jnp.arange(steps, dtype=jnp.int32))
    return drawn.T
