"""Many requests at once against batches of them: python -m experiments.benchmark serving --out FILE."""

import time
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

from experiments.benchmark.figures.saved import save
from experiments.benchmark.models.books_model import split_model
from experiments.benchmark.models.drawn_patches import Sizes, count_read_bytes, drawn_patches

Arm = Literal["rates", "once", "first_byte", "prefix", "rounds", "graphs", "kernels", "long_document"]


def serving(
    out: str = "runs/benchmark/serving.json",
    rows: tuple[int, ...] = (1, 64),
    new_bytes: int = 256,
    prompt_bytes: int = 60,
    capacity: int = 4096,
    pattern: str = "HHAH",
    drafts: int | None = None,
    trials: int = 3,
    arms: tuple[Arm, ...] = ("rates",),
    scale: int = 1,
    patches: Literal["static", "entropy"] = "static",
    size: Sizes = "books",
    tiny: bool = False,
) -> dict[str, Any]:
    """Time the engine and `generate` on the `books` model in bf16: bytes a second, by rows.

    Parameters are drawn, bytes are the most probable ones, and patches are static, four bytes each. First as many
    requests come as there are rows. Then three times as many come, of half the length to the whole: the engine fills
    rows that become free, and `generate` waits for the longest row of each batch.

    With `--patches entropy` an entropy model cuts, bytes are drawn at temperature 1, and rows close patches at unlike
    bytes. Then the bytes of weights and states that a byte reads are told, the copy bandwidth of the device, and the
    bytes a second that it allows if no row waits: the latent stack is read where the patch of any row closes.

    The arm `once` leaves the waves out, and compiles in its first call only what that needs. Further arms time delays.
    `first_byte` is behind prompts of 8 KB that come to an idle engine, `prefix` behind 64 KB that were read before and
    that were not. `rounds` compares a round of the engine with its decoding program alone. `graphs` compares that
    program as one CUDA graph with itself where the host steps its loops. `kernels` counts what a byte launches.
    `long_document` compares a byte behind a megabyte of modal Hyena with one behind 4 KB.

    Args:
      out: JSON file to write.
      rows: of the engine's lane and of the batches.
      new_bytes: the most bytes that follow a prompt.
      prompt_bytes: bytes of a prompt.
      capacity: of the lane, bytes.
      pattern: of the latent stack.
      drafts: bytes that both guess and check in one call; None draws byte by byte.
      trials: of each timing.
      arms: what is timed.
      scale: by which prompts of the further arms are shorter, to try the script.
      patches: how bytes are cut, of about four bytes each.
      size: the recipe of a model with entropy patches.
      tiny: a model that a CPU compiles, to try the script.

    Raises:
      ValueError: `scale` leaves no prompt of 8 KB, or a size other than `books` has static patches.
    """
    from jaxblt.validation import whole
    from pallas_kernels.runtime import measure_ceilings

    whole("--scale", scale, least=1, most=8192)
    if patches == "entropy":
        decoder, params = drawn_patches(size, pattern, tiny)
    elif size == "books":
        decoder, params = drawn_model(pattern, tiny)
    else:
        raise ValueError(f"--size {size} has entropy patches: add --patches entropy")
    found: dict[str, Any] = {"new_bytes": new_bytes, "capacity": capacity, "pattern": pattern}
    found |= {"size": size, "patches": patches, "drafts": drafts, "rows": []}
    for arm in arms:
        if arm not in ("rates", "once"):
            found[arm] = _time_delay(arm, decoder, params, rows, capacity, scale, trials, tiny)
            save("serving", out, found)
    ways = ("once", "waves") if "rates" in arms else ("once",) if "once" in arms else ()
    for count in rows if ways else ():
        given = (new_bytes, prompt_bytes, capacity, drafts, trials, ways)
        figures = _compare(decoder, params, count, *given)
        if patches == "entropy":
            read = count_read_bytes(decoder, params, count, prompt_bytes + new_bytes // 2)
            bandwidth, runs = measure_ceilings().bytes_per_second, 1 - (1 - figures["closed_a_byte"]) ** count
            figures |= {"read_bytes": read, "copy_bytes_per_second": bandwidth}
            figures["floor_bytes_per_second"] = count * bandwidth / (read["beside"] + runs * read["latent"])
        found["rows"].append(figures)
        save("serving", out, found)
    return found


def drawn_model(pattern: str, tiny: bool) -> tuple[Any, dict[str, Any]]:
    """Return a decoder of the `books` model, or of a tiny one, and parameters that are drawn."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxblt.inference import Decoder
    from jaxblt.models import BLTConfig, StackConfig
    from jaxblt.patching import PatcherConfig

    small = StackConfig(dim=16, num_layers=1, pattern="W", mlp_dim=16)
    model = BLTConfig(small, small, small, hash=None) if tiny else split_model(pattern, "none")
    patcher = PatcherConfig(mode="static", patch_size=4)
    decoder = Decoder(model, patcher, dtype=jnp.bfloat16)
    ids = jnp.zeros((1, patcher.block_size), jnp.int32)
    drawn = jax.jit(decoder.build().init)(jax.random.key(0), ids)
    return decoder, {"model": nn.meta.unbox(drawn)["params"]}


def _compare(
    decoder: Any,
    params: dict[str, Any],
    rows: int,
    new_bytes: int,
    prompt_bytes: int,
    capacity: int,
    drafts: int | None,
    trials: int,
    come: tuple[str, ...],
) -> dict[str, Any]:
    from jaxblt.data import load_sample
    from jaxblt.inference import Drafts, SamplingConfig, generate
    from jaxblt.inference.engine import Engine, EngineConfig, Lane, Request, Sampling
    from pallas_kernels.runtime import alone

    text, count = load_sample("book"), 3 * rows
    # The most probable bytes of a drawn model repeat, and its entropies with them
    drawn = SamplingConfig(temperature=float(decoder.needs_entropies))
    closed: list[Any] = []
    prompts = [text[97 * i : 97 * i + prompt_bytes] for i in range(count)]
    limits = [new_bytes if i < rows else new_bytes // 2 + i % 8 * new_bytes // 16 for i in range(count)]
    run: Any = SimpleNamespace(recipe=None, decoder=decoder, decoder_params=params)
    guess = None if drafts is None else Drafts(count=drafts)
    config = EngineConfig(lanes=(Lane(rows, capacity),), max_waiting=count, drafts=guess)

    def by_engine(number: int) -> int:
        asked = enumerate(zip(prompts[:number], limits, strict=False))
        sampling = partial(Sampling, temperature=drawn.temperature)
        streams = [engine.submit(Request(*one, sampling(seed=i))) for i, one in asked]
        pieces = [stream.read() for stream in streams]
        closed[:] = [piece.closed.mean() for piece in pieces]
        return sum(len(piece.data) for piece in pieces)

    def by_generate(number: int) -> int:
        found = 0
        for start in range(0, number, rows):
            part = slice(start, start + rows)
            options = {"max_new_bytes": limits[part], "sampling": drawn, "drafts": guess}
            options["seed"] = list(range(start, start + rows))
            found += sum(map(len, generate(decoder, params, prompts[part], **options)))
        return found

    begun = time.perf_counter()
    engine = Engine(run, config, as_trained=False)
    if "waves" in come:
        engine.warm()
    figures: dict[str, Any] = {"rows": rows, "warm_seconds": time.perf_counter() - begun}
    with engine:
        for name in come:
            number = {"once": rows, "waves": count}[name]
            draws = {"engine": partial(by_engine, number), "generate": partial(by_generate, number)}
            # Compile before the device is taken: others may compile beside
            first = {way: _timed(draw) for way, draw in draws.items()}
            with alone():
                figures[name] = {way: _rate(draw, *first[way], trials) for way, draw in draws.items()}
            print(name, figures[name], flush=True)
    return figures | {"closed_a_byte": float(sum(closed) / len(closed))}


def _time_delay(
    arm: Arm,
    decoder: Any,
    params: Any,
    rows: tuple[int, ...],
    capacity: int,
    scale: int,
    trials: int,
    tiny: bool,
) -> Any:
    """Return the figures of an arm."""
    from experiments.benchmark.models.engine_delays import first_byte, long_document, rounds

    if arm == "graphs":
        from experiments.benchmark.models.decode_graphs import decode_graphs

        return [decode_graphs(decoder, params, rows=count, rounds=8 * trials) for count in rows]
    if arm == "kernels":
        from experiments.benchmark.models.decode_kernels import decode_kernels

        given = {"capacity": capacity, "rounds": max(8, trials)}
        return [decode_kernels(decoder, params, rows=count, **given) for count in rows]
    if arm == "rounds":
        given = {"capacity": capacity, "count": 32, "trials": trials}
        return [rounds(decoder, params, rows=count, **given) for count in rows]
    if arm == "long_document":
        decoder, params = drawn_model("H", tiny)
        return long_document(decoder, params, length=2**20 // scale, new_bytes=64, trials=max(20, trials))
    length, kept = (8192, 0) if arm == "first_byte" else (65_536, 2**34)
    return first_byte(decoder, params, prompt_bytes=length // scale, prefix_bytes=kept, trials=trials)


def _timed(draw: Any) -> tuple[int, float]:
    """Return the bytes of a call and its seconds."""
    begun = time.perf_counter()
    drawn = draw()
    return drawn, time.perf_counter() - begun


def _rate(draw: Any, drawn: int, first: float, trials: int) -> dict[str, Any]:
    """Return the bytes of a call, the seconds of the first call, and bytes a second of later ones."""
    rates = [drawn / _timed(draw)[1] for _ in range(trials)]
    return {"bytes": drawn, "first_call_seconds": first, "bytes_per_second": rates}
