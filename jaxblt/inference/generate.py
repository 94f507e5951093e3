"""Continues prompts a batch at a time: one pass over the prompts, then byte by byte in one compiled loop."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, UInt32

from jaxblt.data.vocab import EOS, PAD, decode, encode
from jaxblt.inference.decode import Decoder, decode_step
from jaxblt.inference.prompts import prefill
from jaxblt.inference.sampling import SamplingConfig, sample
from jaxblt.models.finite import explain_nonfinite
from jaxblt.patching import warn_overflow

ROUND = 64
"""Prompts are filled up to a multiple of as many bytes, so that those of about one length share a program."""

SEEDS = 2**32
"""Seeds lie below it: one word, which means the same with and without jax_enable_x64."""


def generate(
    decoder: Decoder,
    params: dict[str, Any],
    prompts: Sequence[bytes],
    *,
    max_new_bytes: int,
    sampling: SamplingConfig = SamplingConfig(),
    seed: int | Sequence[int] = 0,
) -> list[bytes]:
    """The bytes that follow each prompt, until EOS or `max_new_bytes`.

    The byte at position p behind prompt i is drawn by fold_in(fold_in(key(seed), i), p), where the BOS has position 0.
    With a seed for each prompt it is fold_in(fold_in(key(seed[i]), 0), p): the prompt's place in the list no longer
    matters. The other prompts never do.

    Args:
      decoder: models and patcher.
      params: {"model": ..., "entropy": ...}.
      prompts: may be empty; a BOS comes before each.
      max_new_bytes: bytes to sample a row at the most.
      sampling: how a byte is drawn.
      seed: an integer from 0 to 2**32 - 1, with which equal prompts go on differently, or one for each prompt, with
        which each goes on as it would alone.

    Raises:
      ValueError: no prompts, a prompt that is not bytes, nothing to generate, a seed out of range, or logits that are
        not finite; the message names the prompt and the position.

    Warns:
      PatchOverflowWarning: blocks have fewer slots than the rows' patches ask for.
    """
    rows = [encode(prompt, bos=True) for prompt in _checked_prompts(prompts)]
    if not isinstance(max_new_bytes, int | np.integer) or max_new_bytes < 1:
        raise ValueError(f"max_new_bytes must be an integer of at least 1, got {max_new_bytes!r}")
    seeds, indices = _requests(seed, len(rows))
    lengths = np.array([len(row) for row in rows], np.int32)
    table = np.full((len(rows), -(-int(lengths.max()) // ROUND) * ROUND), PAD, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    arrays = (jnp.asarray(array) for array in (table, lengths, seeds, indices))
    found = _run(decoder, sampling, int(max_new_bytes), params, *arrays)
    drawn, finite, boundaries = jax.device_get(found)
    _check_finite(finite, lengths, params)
    _warn(decoder, boundaries)
    return [decode(row[: int(np.argmax(np.append(row, EOS) == EOS))]) for row in drawn]


def _checked_prompts(prompts: Sequence[bytes]) -> Sequence[bytes]:
    if isinstance(prompts, bytes | str):
        raise ValueError(f"prompts must be a list of bytes, got {prompts!r:.40}: put it in a list")
    if not len(prompts):
        raise ValueError("generate needs at least one prompt (b'' starts a new document)")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, bytes):
            fix = "call its encode()" if isinstance(prompt, str) else "make it bytes"
            raise ValueError(f"prompt {i} must be bytes, got {prompt!r:.40}: {fix}")
    return prompts


def _requests(seed: int | Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Each prompt's seed, and its index: 0 for prompts that have their own seed."""
    own = isinstance(seed, Sequence | np.ndarray)
    seeds = list(seed) if own else [seed] * count
    if len(seeds) != count:
        raise ValueError(
            f"seed must be one integer, or one for each of the {count} prompts, got {len(seeds)}"
        )
    for each in seeds:
        if not isinstance(each, int | np.integer) or not 0 <= each < SEEDS:
            raise ValueError(f"seed must be an integer from 0 to {SEEDS - 1}, got {each!r}")
    return np.array(seeds, np.uint32), np.arange(count, dtype=np.uint32) * np.uint32(not own)


def _check_finite(finite: np.ndarray, lengths: np.ndarray, params: dict[str, Any]) -> None:
    """Raise for the first prompt with logits that are not finite."""
    if finite.all():
        return
    prompt = int(np.argmin(finite.all(1)))
    byte = int(np.argmin(finite[prompt]))
    raise ValueError(
        f"logits are not finite: prompt {prompt}, byte {byte} after its {lengths[prompt] - 1} bytes; "
        f"{explain_nonfinite(params)}"
    )


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
    seeds: UInt32[Array, "B"],
    indices: UInt32[Array, "B"],
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"], tuple[Int[Array, "B"], Int[Array, "B"]] | None]:
    """The bytes drawn for each row, and whether their logits were finite; boundaries refused, and asked for.

    Bytes behind a row's EOS are not to be read.
    """
    segments = (jnp.arange(prompts.shape[1], dtype=jnp.int32)[None] < lengths[:, None]).astype(jnp.int32)
    num_bytes = prompts.shape[1] + max_new_bytes - 1
    keys = _request_keys(seeds, indices)

    def draw(logits: Array, step: Any, done: Any) -> tuple[Array, Array]:
        ids = sample(sampling, jax.vmap(jax.random.fold_in)(keys, lengths + step), logits)
        return ids, jnp.all(jnp.isfinite(logits), -1) | done

    def body(carry: Any, step: Array) -> tuple[Any, tuple[Array, Array]]:
        state, ids, done = carry
        logits, _, state = decode_step(decoder, params, ids, state, jnp.where(done, 0, 1))
        drawn, finite = draw(logits, step, done)
        return (state, drawn, done | (drawn == EOS)), (drawn, finite)

    logits, state = prefill(decoder, params, prompts, segments, num_bytes=num_bytes)
    first, sound = draw(logits, 0, False)
    steps = jnp.arange(1, max_new_bytes, dtype=jnp.int32)
    (state, _, _), (drawn, finite) = jax.lax.scan(body, (state, first, first == EOS), steps)
    boundaries = decoder.build().boundaries(state.model)
    drawn = jnp.concatenate([first[:, None], drawn.T], 1)
    return drawn, jnp.concatenate([sound[:, None], finite.T], 1), boundaries


def _request_keys(seeds: UInt32[Array, "B"], indices: UInt32[Array, "B"]) -> Key[Array, "B"]:
    return jax.vmap(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number))(seeds, indices)
