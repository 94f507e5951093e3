"""Long prompts and the bytes after them: python -m experiments.benchmark generation --out FILE."""

from functools import partial
from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import save, timed
from experiments.benchmark.models.books_model import split_model

WITHIN = 0.05
"""Relative difference of logits in bf16, by the norm, that passes; what it is, is reported."""


def generation(
    out: str = "runs/benchmark/generation.json",
    lengths: tuple[int, ...] = (8192, 65_536, 1_048_576),
    new_bytes: int = 64,
    devices: int = 1,
    pattern: str = "HHAH",
    trials: int = 20,
) -> dict[str, Any]:
    """Time reading a prompt and each byte after it, by the `books` model in bf16.

    Parameters are drawn. Patches are static, four bytes each. Before anything is timed, the logits behind the prompt
    are compared with those that feeding its last `new_bytes` bytes one by one leaves.

    Args:
      out: JSON file to write.
      lengths: of the prompts, bytes.
      new_bytes: how many follow.
      devices: over which prompts and caches are split.
      pattern: of the latent stack.
      trials: of each timing, at least 20.

    Raises:
      RuntimeError: those logits differ by more than WITHIN.
      ValueError: there are fewer devices than asked for, or no prompt, or one no longer than what follows.
    """
    import jax

    if not 1 <= devices <= jax.device_count():
        raise ValueError(
            f"devices must lie in 1..{jax.device_count()}, the devices that are here, got {devices}"
        )
    if new_bytes < 1 or not lengths or min(lengths) <= new_bytes:
        raise ValueError(
            f"prompts must be longer than the {new_bytes} bytes that follow, at least 1: {lengths}"
        )
    options = {"devices_of_sequence": devices, "new_bytes": new_bytes, "pattern": pattern}
    found: dict[str, Any] = options | {"prompts": []}
    for length in lengths:
        found["prompts"].append(_prompt(split_model(pattern, "none"), length, new_bytes, devices, trials))
        save("generation", out, found)
    return found


def _prompt(config: Any, length: int, new_bytes: int, devices: int, trials: int) -> dict[str, Any]:
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxblt.data import load_sample, vocab
    from jaxblt.inference import Decoder, decode_step, prefill, unroll
    from jaxblt.parallel import make_mesh, replicated
    from jaxblt.patching import PatcherConfig
    from jaxblt.profiling import measure
    from jaxblt.training.log.meter import peak_memory

    patcher = PatcherConfig(mode="static", patch_size=4)
    decoder = Decoder(config, patcher, dtype=jnp.bfloat16)
    text = np.resize(vocab.encode(load_sample("book")), length).astype(np.int32)

    @jax.jit
    def read(params: Any, ids: Any, segments: Any) -> Any:
        return prefill(decoder, params, ids, segments, num_bytes=length + new_bytes)

    @partial(jax.jit, static_argnums=0)
    def write(decoder: Any, params: Any, ids: Any, state: Any) -> Any:
        def body(state: Any, column: Any) -> Any:
            logits, _, state = decode_step(decoder, params, column, state, jnp.ones_like(column))
            return state, logits

        return jax.lax.scan(body, state, ids.T)[1][-1]

    mesh = make_mesh(data=1, seq=devices, devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        ids = jnp.zeros((1, patcher.block_size * devices), jnp.int32)
        drawn = jax.jit(decoder.build().init, out_shardings=replicated(mesh))(jax.random.key(0), ids)
        params = {"model": nn.meta.unbox(drawn)["params"]}
        ids, ones = jnp.asarray(text)[None], jnp.ones((1, length), jnp.int32)
        last = ids[:, -new_bytes:]
        cut = jnp.arange(length)[None] < length - new_bytes
        whole, _ = read(params, ids, ones)
        _, state = read(params, jnp.where(cut, ids, 0), cut.astype(jnp.int32))
        apart, narrow, state = unroll(decoder, params, state, rows=1)
        fed = write(apart, narrow, last, state)
        difference = float(jnp.linalg.norm(fed - whole) / jnp.linalg.norm(whole))
        if not difference <= WITHIN:
            raise RuntimeError(
                f"behind a prompt of {length} bytes logits differ by {difference} of themselves from those of "
                f"single bytes: {WITHIN} is allowed"
            )
        times = {}
        for name, call in (
            ("read", lambda: read(params, ids, ones)),
            ("write", lambda: write(apart, narrow, last, state)),
        ):
            waited = partial(lambda call: jax.block_until_ready(call()), call)
            times[name] = timed(measure(waited, trials=trials, method="host"))
    return {
        "bytes": length,
        "difference_of_logits": difference,
        "read_seconds": times["read"],
        "bytes_read_per_second": length / times["read"]["median"],
        "write_seconds": times["write"],
        "seconds_a_byte_written": times["write"]["median"] / new_bytes,
        **peak_memory(),
    }
