"""Many requests at once against batches of them: python -m experiments.benchmark serving --out FILE."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any, Literal

from experiments.benchmark.figures.saved import save
from experiments.benchmark.models.books_model import split_model
from experiments.benchmark.models.drawn_patches import Sizes, count_read_bytes, drawn_patches
from experiments.benchmark.models.drawn_text import BYTES_PER_PATCH, make_prompts

Arm = Literal["rates", "once", "first_byte", "prefix", "rounds", "graphs", "kernels", "long_document"]
Way = Literal["engine", "generate"]


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
    ways: tuple[Way, ...] = ("engine", "generate"),
    tiny: bool = False,
) -> dict[str, Any]:
    """Time the engine and `generate` on the `books` model in bf16: bytes a second, by rows.

    Parameters are drawn, bytes are the most probable ones, and patches are static, four bytes each. First as many
    requests come as there are rows. Then three times as many come, of half the length to the whole: the engine fills
    rows that become free, and `generate` waits for the longest row of each batch.

    With `--patches entropy` an entropy model cuts, and bytes are drawn at temperature 1. Rows close patches at unlike
    bytes, four in words of 18 (`drawn_text`). The result then has the bytes of weights and states that a byte reads,
    the copy bandwidth of the device, and the bytes a second that both allow if no row waits. The latent stack is read
    where the patch of any row closes. `share_of_floor` is the share of this bound that medians reach.

    The arm `once` leaves the waves out, and compiles in its first call only what that needs. First calls of all rows
    and ways compile side by side. Further arms time delays.
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
      ways: what the arms `rates` and `once` time; `--ways engine` does not compile `generate`.
      tiny: a model that a CPU compiles, to try the script.

    Raises:
      ValueError: `scale` leaves no prompt of 8 KB, or a size other than `books` has static patches.
    """
    from jaxblt.validation import whole

    whole("--scale", scale, least=1, most=8192)
    if patches == "static" and size != "books":
        raise ValueError(f"--size {size} has entropy patches: add --patches entropy")
    is_cut = patches == "entropy"
    decoder, params = drawn_patches(size, pattern, tiny) if is_cut else drawn_model(pattern, tiny)
    found: dict[str, Any] = {"new_bytes": new_bytes, "capacity": capacity, "pattern": pattern}
    found |= {"size": size, "patches": patches, "drafts": drafts, "rows": []}
    for arm in arms:
        if arm not in ("rates", "once"):
            found[arm] = _time_delay(arm, decoder, params, rows, capacity, scale, trials, tiny)
            save("serving", out, found)
    waves = ("once", "waves") if "rates" in arms else ("once",) if "once" in arms else ()
    given = {"new_bytes": new_bytes, "prompt_bytes": prompt_bytes, "drafts": drafts, "ways": ways}
    with ExitStack() as running, ThreadPoolExecutor() as pool:
        begin = partial(_Waves, decoder, params, running, capacity=capacity, waves=waves, **given)
        # Compile all before the first is timed: the device would be shared
        for begun in list(pool.map(begin, rows if waves else ())):
            figures = begun.time(trials)
            if is_cut:
                read = count_read_bytes(decoder, params, begun.rows, prompt_bytes + new_bytes // 2)
                figures |= _compare_with_floor(figures, read)
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


class _Waves:
    """Requests that come to an engine and to `generate`; all is compiled once it is made."""

    def __init__(
        self,
        decoder: Any,
        params: dict[str, Any],
        running: ExitStack,
        rows: int,
        *,
        new_bytes: int,
        prompt_bytes: int,
        capacity: int,
        drafts: int | None,
        ways: tuple[Way, ...],
        waves: tuple[str, ...],
    ) -> None:
        from jaxblt.inference import Drafts, SamplingConfig
        from jaxblt.inference.engine import Engine, EngineConfig, Lane

        self.rows, count = rows, 3 * rows
        self._decoder, self._params = decoder, params
        # The most probable bytes of a drawn model repeat, and its entropies with them
        self._sampling = SamplingConfig(temperature=float(decoder.needs_entropies))
        self._drafts = None if drafts is None else Drafts(count=drafts)
        self._prompts = make_prompts(decoder, count, prompt_bytes)
        unlike = [new_bytes // 2 + i % 8 * new_bytes // 16 for i in range(rows, count)]
        self._limits = [new_bytes] * rows + unlike
        self._numbers = {name: {"once": rows, "waves": count}[name] for name in waves}
        self._closed: list[float] = []
        write = {"engine": self._by_engine, "generate": self._by_generate}
        self._draws: dict[str, Callable[[int], int]] = {way: write[way] for way in ways}
        config = EngineConfig(lanes=(Lane(rows, capacity),), max_waiting=count, drafts=self._drafts)
        begun = time.perf_counter()
        if "engine" in ways:
            run: Any = SimpleNamespace(recipe=None, decoder=decoder, decoder_params=params)
            self._engine = Engine(run, config, as_trained=False)
            if "waves" in waves:
                self._engine.warm()
            running.enter_context(self._engine)
        self._warm_seconds = time.perf_counter() - begun
        with ThreadPoolExecutor() as pool:
            self._first = {
                name: dict(zip(ways, pool.map(partial(self._timed, number=number), ways), strict=True))
                for name, number in self._numbers.items()
            }

    def time(self, trials: int) -> dict[str, Any]:
        """Return bytes a second of each way, by how requests come, and the patches that a byte closed."""
        from pallas_kernels.runtime import alone

        figures: dict[str, Any] = {"rows": self.rows, "warm_seconds": self._warm_seconds}
        for name, number in self._numbers.items():
            figures[name] = {}
            for way, (drawn, first) in self._first[name].items():
                with alone():
                    rates = [drawn / self._timed(way, number)[1] for _ in range(trials)]
                timed = {"bytes": drawn, "first_call_seconds": first, "bytes_per_second": rates}
                figures[name][way] = timed
            print(name, figures[name], flush=True)
        return figures | ({"closed_a_byte": sum(self._closed) / len(self._closed)} if self._closed else {})

    def _timed(self, way: str, number: int) -> tuple[int, float]:
        """Return the bytes of a call and its seconds."""
        begun = time.perf_counter()
        drawn = self._draws[way](number)
        return drawn, time.perf_counter() - begun

    def _by_engine(self, number: int) -> int:
        from jaxblt.inference.engine import Request, Sampling

        asked = enumerate(zip(self._prompts[:number], self._limits, strict=False))
        sampling = partial(Sampling, temperature=self._sampling.temperature)
        streams = [self._engine.submit(Request(*one, sampling(seed=i))) for i, one in asked]
        pieces = [stream.read() for stream in streams]
        self._closed = [float(piece.closed.mean()) for piece in pieces]
        return sum(len(piece.data) for piece in pieces)

    def _by_generate(self, number: int) -> int:
        from jaxblt.inference import generate

        found = 0
        for start in range(0, number, self.rows):
            part = slice(start, start + self.rows)
            options: dict[str, Any] = {"max_new_bytes": self._limits[part], "sampling": self._sampling}
            options |= {"drafts": self._drafts, "seed": list(range(start, start + self.rows))}
            texts = generate(self._decoder, self._params, self._prompts[part], **options)
            found += sum(map(len, texts))
        return found


def _compare_with_floor(figures: dict[str, Any], read: dict[str, int]) -> dict[str, Any]:
    """Return what a byte of all rows reads, the bytes a second that it allows, and each way's share of them."""
    from pallas_kernels.runtime import measure_ceilings

    rows, closed = figures["rows"], figures.get("closed_a_byte", 1 / BYTES_PER_PATCH)
    bandwidth, runs = measure_ceilings().bytes_per_second, 1 - (1 - closed) ** rows
    floor = rows * bandwidth / (read["beside"] + runs * read["latent"])
    ways = figures["once"].items()
    share = {way: median(timed["bytes_per_second"]) / floor for way, timed in ways}
    found = {"read_bytes": read, "copy_bytes_per_second": bandwidth, "floor_bytes_per_second": floor}
    return found | {"share_of_floor": share}


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

        # Trace 256 bytes where rows are few: in fewer the patches of a word's part would tell
        rounds = {count: max(8 if count > 8 else 32, trials) for count in rows}
        given = {"capacity": capacity}
        return [decode_kernels(decoder, params, rows=count, rounds=rounds[count], **given) for count in rows]
    if arm == "rounds":
        given = {"capacity": capacity, "count": 32, "trials": trials}
        return [rounds(decoder, params, rows=count, **given) for count in rows]
    if arm == "long_document":
        decoder, params = drawn_model("H", tiny)
        return long_document(decoder, params, length=2**20 // scale, new_bytes=64, trials=max(20, trials))
    length, kept = (8192, 0) if arm == "first_byte" else (65_536, 2**34)
    return first_byte(decoder, params, prompt_bytes=length // scale, prefix_bytes=kept, trials=trials)
