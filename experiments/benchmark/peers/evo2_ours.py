"""The parts of `evo2` on jaxblt: programs are traced one after another, and compiled side by side."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.benchmark.adapters.adapter_speed import make_step
from experiments.benchmark.figures.programs import planned_bytes
from experiments.benchmark.models.forward_pass import kernel_sizes
from experiments.benchmark.peers.evo2_setting import Setting, Timed
from jaxblt.adapters import AdapterConfig, attach, split_params
from jaxblt.data.vocab import BOS, OFFSET
from jaxblt.inference import Decoder, decode_bytes, decode_step, init_decoder, take_rows
from jaxblt.interchange.striped_hyena import embedding_rows, entries
from jaxblt.models.row_layout import RowLayout
from jaxblt.models.striped_hyena import Evo2, striped_hyena
from jaxblt.parallel import MeshConfig
from jaxblt.training.flops import PEAK_FLOPS
from jaxblt.training.metrics import cross_entropy

TOGETHER = 6
"""Programs that are compiled side by side."""


class Program(NamedTuple):
    """A part before it is compiled.

    Attributes:
      function: jitted.
      arguments: makes its arguments on the device; its shapes are what is compiled.
      start: (compiled program) -> the call that is timed, with figures.
      mesh: of the devices that share it; None for one.
    """

    function: Any
    arguments: Callable[[], tuple[Any, ...]]
    start: Callable[[Any], Timed]
    mesh: Mesh | None = None


class Ours:
    """Parts of `evo2`, compiled."""

    parts = ("forward", "long", "write", "write_long", "write_rows", "adapters", "substitutions", "split")

    def __init__(self, sizes: Evo2, tensors: dict[str, Any], setting: Setting, parts: Any) -> None:
        model = striped_hyena(sizes)
        self.rows = embedding_rows(model.vocab_size)
        self.model = model.in_rows(RowLayout(packed=False), RowLayout(packed=False))
        self.params, self.setting = params_of(model, tensors), setting
        made = {name: self._program(name) for name in ("checked", *parts)}
        with ThreadPoolExecutor(TOGETHER) as pool:
            waiting = {name: pool.submit(_lower(program).compile) for name, program in made.items()}
            self.compiled = {name: program.result() for name, program in waiting.items()}
        self.programs = made

    def prepare(self, part: str) -> Timed:
        """Return the call of a part."""
        compiled = self.compiled[part]
        planned = sum(planned_bytes(compiled).values()) - compiled.memory_analysis().alias_size_in_bytes
        call, figures = self.programs[part].start(compiled)
        return Timed(call, {"peak_bytes": int(planned)} | figures)

    @staticmethod
    def why(error: Exception) -> str | None:
        """Return what an exception of memory is of; no other is expected."""
        is_memory = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
        return "out_of_memory" if is_memory else None

    def logits(self, text: np.ndarray) -> np.ndarray:
        """Return logits behind the end of a document and each byte but the last, by the reference's ids."""
        ids = np.concatenate([[BOS], text[:-1].astype(np.int32) + OFFSET])[None]
        found = np.asarray(self.compiled["checked"](self.params, jnp.asarray(ids, jnp.int32)), np.float32)
        theirs = np.zeros_like(found[0])
        theirs[:, self.rows] = found[0]
        return theirs

    def _program(self, part: str) -> Program:
        setting = self.setting
        if part in ("checked", "forward", "long"):
            lengths = {"checked": (1, setting.checked), "forward": setting.forward, "long": (1, setting.long)}
            return self._pass(*lengths[part])
        if part == "split":
            return self._split(setting.split)
        if part == "adapters":
            return self._step(*setting.adapters)
        if part == "substitutions":
            return self._mutants(setting.forward[1])
        rows = setting.rows if part == "write_rows" else 1
        return self._writing(rows, setting.long if part == "write_long" else setting.short)

    def _pass(self, rows: int, length: int) -> Program:
        module = self.model.build(dtype=jnp.bfloat16)
        apply = jax.jit(lambda params, ids: module.apply({"params": params}, ids)[0])
        given = lambda: (self.params, ids_of(rows, length))  # noqa: E731

        def start(compiled: Any) -> Timed:
            arguments = given()
            return Timed(lambda: jax.block_until_ready(compiled(*arguments)), {})

        return Program(apply, given, start)

    def _split(self, length: int) -> Program:
        """Read one row whose bytes all devices share."""
        mesh = MeshConfig(data=1, seq=len(jax.devices())).build()
        on_all, shared = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec(None, "seq")))
        module = self.model.build(dtype=jnp.bfloat16)
        apply = lambda params, ids: module.apply({"params": params}, ids)[0]  # noqa: E731
        given = lambda: (self.params, ids_of(1, length))  # noqa: E731

        def start(compiled: Any) -> Timed:
            arguments = jax.device_put(given(), (on_all, shared))
            call = lambda: jax.block_until_ready(compiled(*arguments))  # noqa: E731
            return Timed(call, {"bytes": length, "devices": mesh.size})

        return Program(jax.jit(apply, in_shardings=(on_all, shared)), given, start, mesh)

    def _writing(self, rows: int, behind: int) -> Program:
        decoder = Decoder(self.model, dtype=jnp.bfloat16)
        new = self.setting.new_bytes
        # Leave room for the call that warms up and for each trial, as every call goes on behind the last one
        capacity = behind + new * (self.setting.trials + 1)

        @partial(jax.jit, donate_argnums=(1, 2))
        def write(params: Any, state: Any, ids: Any) -> Any:
            def body(carried: Any, _: Any) -> Any:
                state, ids = carried
                logits, _, state = decode_step(decoder, {"model": params}, ids, state, jnp.ones_like(ids))
                return (state, jnp.argmax(logits, -1).astype(ids.dtype)), None

            return jax.lax.scan(body, (state, ids), None, length=new)[0]

        def given() -> tuple[Any, ...]:
            return self.params, state_behind(decoder, rows, behind, capacity), ids_of(rows, 1)[:, 0]

        def start(compiled: Any) -> Timed:
            _, *carried = given()

            def call() -> None:
                carried[:] = jax.block_until_ready(compiled(self.params, *carried))

            return Timed(call, {"bytes": rows * new})

        return Program(write, given, start)

    def _step(self, rows: int, length: int) -> Program:
        stack = replace(self.model.stack, remat=self.setting.remat)
        adapter = AdapterConfig(sites=("mixer/*", "mlp/*"), rank=self.setting.rank)
        module = attach(replace(self.model, stack=stack), adapter).build(dtype=jnp.bfloat16)
        step, begin = make_step(module)

        @jax.jit
        def drawn() -> Any:
            return split_params(nn.meta.unbox(module.init(jax.random.key(0), ids_of(1, 2)))["params"])[1]

        def given() -> tuple[Any, ...]:
            trained = drawn()
            return self.params, trained, begin(trained), ids_of(rows, length)

        def start(compiled: Any) -> Timed:
            arguments = given()
            call = lambda: jax.block_until_ready(compiled(*arguments))  # noqa: E731
            # Count two products a weight, forward and to the inputs: frozen weights get no gradient
            return Timed(
                call, {"flops": 4.0 * kernel_sizes(self.params) * rows * length, "peak": PEAK_FLOPS["H200"]}
            )

        return Program(step, given, start)

    def _mutants(self, length: int) -> Program:
        """Read mutants from states at each piece's start: mutants of piece k leave out k pieces."""
        decoder, piece, count = (
            Decoder(self.model, dtype=jnp.bfloat16),
            self.setting.piece,
            self.setting.mutants,
        )

        @partial(jax.jit, donate_argnums=1)
        def read(params: Any, state: Any, ids: Any, segment_ids: Any) -> Any:
            logits, state = decode_bytes(decoder, {"model": params}, ids, state, segment_ids)
            return jnp.sum(cross_entropy(logits[:, :-1], ids[:, 1:]), 1), state

        def given() -> tuple[Any, ...]:
            # Give segments as an argument: with a constant, XLA compiles the clock's scans for minutes
            ids = ids_of(count, piece)
            return self.params, state_behind(decoder, count, 0, length), ids, jnp.ones_like(ids)

        def start(compiled: Any) -> Timed:
            pieces, ids = length // piece, ids_of(count, piece)
            ones = jnp.ones_like(ids)
            prefixes = [state_behind(decoder, 1, k * piece, length) for k in range(pieces)]
            spread = jax.jit(lambda state: take_rows(state, jnp.zeros(count, jnp.int32)))

            def call() -> None:
                for k, prefix in enumerate(prefixes):
                    nats, state = jnp.zeros(count), spread(prefix)
                    for _ in range(k, pieces):
                        more, state = compiled(self.params, state, ids, ones)
                        nats = nats + more
                    jax.block_until_ready(nats)

            return Timed(call, {"mutants": count * pieces})

        return Program(read, given, start)


def _lower(program: Program) -> Any:
    with nullcontext() if program.mesh is None else jax.set_mesh(program.mesh):
        return program.function.lower(*jax.eval_shape(program.arguments))


def params_of(model: Any, tensors: dict[str, Any]) -> Any:
    """Return a checkpoint's tensors as parameters: kernels in bf16, as runs hold a frozen base, all others in fp32."""
    found: dict[tuple[str, ...], Any] = {}
    for name, entry in entries(model).items():
        for param, x in zip(entry.params, entry.ours(tensors[name]), strict=True):
            path = tuple(param.split("."))
            found[path] = jnp.asarray(x, jnp.bfloat16 if path[-1] == "kernel" else jnp.float32)
    return unflatten_dict(found)


def ids_of(rows: int, length: int) -> Any:
    """Return rows of bases behind BOS."""
    drawn = jax.random.choice(jax.random.key(1), jnp.frombuffer(b"ACGT", jnp.uint8), (rows, length))
    return (drawn.astype(jnp.int32) + OFFSET).at[:, 0].set(BOS)


def state_behind(decoder: Decoder, rows: int, count: int, capacity: int) -> Any:
    """Return a state of zeros that stands behind `count` bytes, which nothing was read of."""

    def moved(path: Any, x: Any) -> Any:
        name = getattr(path[-1], "name", "")
        if name in ("time", "position"):
            return jnp.full_like(x, count)
        if name == "last_segment":
            return jnp.ones_like(x)
        if name == "times":
            places = jnp.arange(x.shape[1], dtype=x.dtype)
            return jnp.where(places < count, places, x)
        return x

    make = lambda: jax.tree_util.tree_map_with_path(moved, init_decoder(decoder, rows, num_bytes=capacity))  # noqa: E731
    return jax.jit(make)()
