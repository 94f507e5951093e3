"""The requests of `generate`, checked on the host and laid out as arrays, a row a prompt."""

from collections.abc import Iterable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, UInt32

from jaxblt.data.vocab import PAD, encode
from jaxblt.inference.sampling import SamplingArrays, SamplingConfig, alphabet_table, sampling_arrays
from jaxblt.random_keys import make_key

ROUND = 64
"""Prompts are filled up to a multiple of as many bytes, so that those of about one length share a program."""

MOST_BYTES = 2**31 - 1
"""Positions are counted in 32 bits."""

SEEDS = 2**32
"""Seeds lie below it: one word, which means the same with and without jax_enable_x64."""


@flax.struct.dataclass
class Requests:
    """The requests of each row; all of them are values to the compiled programs.

    Attributes:
      lengths: bytes of the prompt, its BOS included.
      limits: the most bytes to draw.
      seeds, indices: of the draws.
      sampling: how bytes are drawn.
      alphabet: which ids may be drawn.
    """

    lengths: Int[Array | np.ndarray, "B"]
    limits: Int[Array | np.ndarray, "B"]
    seeds: UInt32[Array | np.ndarray, "B"]
    indices: UInt32[Array | np.ndarray, "B"]
    sampling: SamplingArrays
    alphabet: Bool[Array | np.ndarray, "B N"]


def lay_out(
    prompts: Sequence[bytes],
    max_new_bytes: int | Sequence[int],
    sampling: SamplingConfig | Sequence[SamplingConfig],
    seed: int | Sequence[int],
    alphabet: bytes | Sequence[bytes | None] | None = None,
) -> tuple[Int[Array, "B L"], Requests]:
    """Return the prompts' ids, filled up with PAD, and what is asked behind them.

    Raises:
      ValueError: as of `generate`.
    """
    rows = [encode(prompt, bos=True) for prompt in _checked_prompts(prompts)]
    limits = each_of("max_new_bytes", max_new_bytes, len(rows))
    for limit in limits:
        if not isinstance(limit, int | np.integer) or not 1 <= limit <= MOST_BYTES:
            raise ValueError(f"max_new_bytes must be an integer from 1 to {MOST_BYTES}, got {limit!r}")
    configs = each_of("sampling", sampling, len(rows))
    for config in configs:
        if not isinstance(config, SamplingConfig):
            raise ValueError(f"sampling must be a SamplingConfig, got {config!r:.80}")
    seeds, indices = _seeds(seed, len(rows))
    alphabets = each_of("alphabet", alphabet, len(rows))
    for item in alphabets:
        if item is not None and not (isinstance(item, bytes) and item):
            raise ValueError(f"alphabet must be bytes such as b'ACGT', or None for all, got {item!r:.80}")
    lengths = np.array([len(row) for row in rows], np.int32)
    table = np.full((len(rows), -(-int(lengths.max()) // ROUND) * ROUND), PAD, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return jnp.asarray(table), Requests(
        *(jnp.asarray(x) for x in (lengths, np.array(limits, np.int32), seeds, indices)),
        sampling=sampling_arrays(configs),
        alphabet=alphabet_table(alphabets),
    )


def request_keys(requests: Requests) -> Key[Array, "B"]:
    """Return the key of each row, of which the keys of its bytes are made."""
    one = lambda seed, number: jax.random.fold_in(make_key(seed), number)  # noqa: E731
    return jax.vmap(one)(requests.seeds, requests.indices)


def bucket(count: int) -> int:
    """Round `count` bytes up to room in caches: by up to 63 bytes, or a quarter.

    Then few programs serve all lengths.
    """
    step = max(ROUND, (1 << count.bit_length()) // 8)
    return -(-count // step) * step


def _checked_prompts(prompts: Sequence[bytes]) -> Sequence[bytes]:
    if isinstance(prompts, bytes | str) or not isinstance(prompts, Iterable):
        fix = "[b''] starts a new document" if prompts is None else "put it in a list"
        raise ValueError(f"prompts must be a list of bytes, got {prompts!r:.40}: {fix}")
    if not len(prompts):
        raise ValueError("generate needs at least one prompt (b'' starts a new document)")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, bytes):
            fix = "call its encode()" if isinstance(prompt, str) else "make it bytes"
            raise ValueError(f"prompt {i} must be bytes, got {prompt!r:.40}: {fix}")
    return prompts


def each_of(name: str, given: Any, count: int) -> list[Any]:
    """Return one item for each prompt, where one for all or one for each was given."""
    own = isinstance(given, Sequence | np.ndarray) and not isinstance(given, str | bytes)
    items = list(given) if own else [given] * count
    if len(items) != count:
        what = {
            "sampling": "one SamplingConfig",
            "adapters": "one adapter",
            "alphabet": "bytes",
        }.get(name, "one integer")
        raise ValueError(f"{name} must be {what}, or one for each of the {count} prompts, got {len(items)}")
    return items


def _seeds(seed: int | Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each prompt's seed, and its index: 0 for prompts that have their own seed."""
    own, seeds = isinstance(seed, Sequence | np.ndarray), each_of("seed", seed, count)
    for each in seeds:
        if not isinstance(each, int | np.integer) or not 0 <= each < SEEDS:
            raise ValueError(f"seed must be an integer from 0 to {SEEDS - 1}, got {each!r}")
    return np.array(seeds, np.uint32), np.arange(count, dtype=np.uint32) * np.uint32(not own)
