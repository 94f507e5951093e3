"""Programs of the engine and a piece of `generate`, compiled for an H200: each is one CUDA graph with all its loops."""

import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu"}  # read when JAX starts, which then looks for no GPU

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxblt.inference import Decoder, SamplingConfig, init_decoder
from jaxblt.inference.engine import Lane, programs
from jaxblt.inference.engine.draws import blank_table
from jaxblt.inference.generate import PIECE, Place, _advance
from jaxblt.inference.in_place import advancing
from jaxblt.inference.narrow import narrow_params
from jaxblt.inference.prepare import prepare_decoding
from jaxblt.inference.prompts import begin_prompts
from jaxblt.inference.requests import lay_out
from jaxblt.inference.unroll import unroll_params, unroll_state, unrolled
from jaxblt.mixers import AttentionConfig, HyenaConfig
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.models.adapter import CHOSEN
from jaxblt.models.packed import pack_small
from jaxblt.patching import PatcherConfig
from jaxblt.profiling.targets import devices_of
from pallas_kernels.runtime import compiling_for
from tests.gpu_compile.launches import Launches, read_launches
from tests.mixer_table import table

NUM_BYTES, BLOCK = 1024, 256


def small_decoder() -> Decoder:
    """Entropy patches of a window's bytes, and a latent stack of Hyena and attention."""
    attention, hyena = AttentionConfig(dim=128, num_heads=2), HyenaConfig(dim=128)
    mixers = table(attention=attention, hyena=hyena, window=64)
    small = StackConfig(dim=128, num_layers=1, pattern="W", mlp_dim=128, mixers=mixers)
    model = BLTConfig(small, replace(small, num_layers=2, pattern="HA"), small, hash=None, bridge_heads=2)
    patcher = PatcherConfig(mode="entropy", threshold=1.0, block_size=BLOCK, capacity=BLOCK // 2)
    return Decoder(model, patcher, ByteLMConfig(small), jnp.bfloat16)


def lower(decoder: Decoder, name: str, rows: int) -> Any:
    """Lower a program of some rows."""
    mesh = Mesh(np.array(devices_of("h200", 1)), ("device",))
    there, apart = NamedSharding(mesh, PartitionSpec()), unrolled(decoder)
    _, requests = lay_out([b"a"] * rows, PIECE, SamplingConfig(temperature=1.0), list(range(rows)), None)

    def arrays() -> tuple[Any, ...]:
        ids, static = jnp.zeros((1, BLOCK), jnp.int32), PatcherConfig(mode="static", block_size=BLOCK)
        modules: dict[str, Any] = {"model": decoder.model.build(patcher=static), "entropy": decoder.reader()}
        drawn = {name: module.init(jax.random.key(0), ids) for name, module in modules.items()}
        params = {name: nn.meta.unbox(one)["params"] for name, one in drawn.items()}
        layers = unroll_params(prepare_decoding(decoder, params, rows=rows, num_bytes=NUM_BYTES))
        state = unroll_state(init_decoder(decoder, rows, num_bytes=NUM_BYTES))
        width = decoder.model.vocab_size
        place = Place(state, jnp.zeros((rows, width), jnp.float32), jnp.zeros((rows,), bool))
        narrow = narrow_params(apart, rows, layers, state)
        return narrow, pack_small(place), programs._empty(decoder, Lane(rows, NUM_BYTES))

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=there), tree)

    with jax.set_mesh(mesh), compiling_for(mesh.devices.flat[0]):
        narrow, place, lane = placed(jax.eval_shape(arrays))
        live, start = placed((np.ones(rows, bool), np.int32(0)))
        if name == "round":
            spare = placed(jax.eval_shape(partial(blank_table, rows, programs.STEPS)))
            # Of several rows some wait, which one does not
            traced = programs._decode.trace(apart, None, narrow | {CHOSEN: {}}, lane, live, spare)
        elif name == "prompts":
            asked = programs.ask_for([programs.NOTHING] * rows, [programs.NO_IDS] * rows)
            numbers = np.zeros(rows, np.int32)
            given = (numbers, np.zeros((rows, programs.SHORT_PIECES[0]), np.int32), numbers, [*asked], {})
            held = jax.eval_shape(partial(begin_prompts, decoder, 1, num_bytes=NUM_BYTES))
            others = placed((given, np.int32(1), held, np.int32(0)))
            static = (apart, NUM_BYTES, rows // 2, programs.LanePrograms.part, None)
            traced = programs._read_into_rows.trace(*static, narrow, lane, *others)
        else:
            advance: Any = advancing(_advance, place)
            traced = advance.trace(apart, PIECE, narrow, placed(requests), place, start)
        return traced.lower(lowering_platforms=("cuda",))


def count_launches(lowered: Any) -> Launches:
    """Compile a program, and count what the host launches."""
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(compiler_options={"xla_dump_to": folder})
        (found,) = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        return read_launches(found.read_text(encoding="utf-8"))


def main() -> int:
    """Compiles all, prints a line each; 1 if the host launches more than a graph, or a graph has no order."""
    wrong = 0
    for name, rows in (("round", 4), ("prompts", 4), ("piece", 1)):
        found = count_launches(lower(small_decoder(), name, rows))
        print(f"decode: a {name} of {rows} rows: {found}", flush=True)
        wrong += replace(found, inside=0) != Launches(graphs=1, inside=0, outside=0, loops=0, unordered=0)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
