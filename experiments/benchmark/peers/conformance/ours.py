"""This library's own layers and operations, held to everything that they promise."""

import string

from experiments.benchmark.peers.conformance.common import MATRIX_STATE, STREAMED
from jaxblt.testing.conformance import Subject

MIXER = string.Template("""\
import jax, jax.numpy as jnp
from jaxblt import mixers
from jaxblt.mixers import *
config = ${config}
module = config.build()
params = {"params": jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 8, ${width})))["params"]}
@jax.jit
def run(x, documents, state):
    return module.apply(params, x, segment_ids=documents, state=state)
def call(x, documents=None, state=None):
    return run(jnp.asarray(x), None if documents is None else jnp.asarray(documents, "int32"), state)
def start(rows):
    return mixers.init_state(config, rows, capacity=256)
""")
"""The lines of a bridge to a mixer."""

RULE = string.Template(
    """\
import jax, jax.numpy as jnp
from pallas_kernels.${op} import ${op} as op
def streams(x, xp):
    q, k, v, *gates = xp.split(x[:, :, None], ${cuts}, -1)
    g, b = (-xp.logaddexp(0, gates[0]), *(1 / (1 + xp.exp(-z)) for z in gates[1:]), None)[:2]
    q, k = (z / xp.sqrt((z * z).sum(-1, keepdims=True) + 1e-6) if ${delta} else z for z in (q, k))
    return q, k, v, ${gates}
@jax.jit
def run(x, documents, state):
    *qkv, gates = streams(x, jnp)
    beta = [gates.pop("beta")] if ${delta} else []
    return op(*qkv, *beta, **gates, segment_ids=documents, initial_state=state, output_final_state=True)
def call(x, documents=None, state=None):
    return run(jnp.asarray(x), None if documents is None else jnp.asarray(documents, "int32"), state)
def reference(x):
    q, k, v, gates = streams(x, np)
    log = gates.get("log_gate", gates.get("log_key_gate"))
    decay = np.exp(log if log.ndim == 4 else log[..., None])[..., None]
"""
    + MATRIX_STATE
)
"""The lines of a bridge to an operation with a matrix of state."""

CAUSAL = STREAMED | {"documents", "documents_in_calls", "padding", "left_padding", "nan"}
WIDTH = 8


def mixer(title: str, config: str) -> Subject:
    """Return a mixer of a config, written as Python."""
    return Subject(
        name=f"jaxblt: {title}",
        make=MIXER.substitute(config=config, width=WIDTH),
        width=WIDTH,
        promises=CAUSAL,
        lengths=(6,),
        peer="jaxblt",
        called=config,
    )


def rule(title: str, op: str, gate: str, *, delta: bool = False, keys: int = 4) -> Subject:
    """Return an operation with a gate of this name, of one head of `keys`."""
    wide = keys if gate == "log_key_gate" else 1
    gates = f'{{"{gate}": g{"" if wide > 1 else "[..., 0]"}{", 'beta': b[..., 0]" if delta else ""}}}'
    cuts = [keys, 2 * keys, 3 * keys] + [3 * keys + wide] * delta
    return Subject(
        name=f"jaxblt: {title}",
        make=RULE.substitute(op=op, cuts=cuts, gates=gates, delta=delta),
        width=3 * keys + wide + delta,
        # The gate of the bridge, not the operation, has a gradient of NaN where x is NaN.
        promises=(CAUSAL - {"documents_in_calls", "nan"}) | {"decays", "values"},
        decays=slice(3 * keys, 3 * keys + wide),
        lengths=(1, 9),
        peer="jaxblt",
        called=f"pallas_kernels.{op}.{op}({gate})",
    )


GROUPS = "num_heads=2, num_key_heads=1, head_dim=4, value_head_dim=4, chunk_size=4"

mixers = (
    mixer("Hyena, modal filters", "HyenaConfig(dim=8, filter=ModalFilter(modes=4, max_timescale=64.0))"),
    mixer("Hyena, filters of 5 taps", "HyenaConfig(dim=8, filter=ExplicitFilter(taps=5))"),
    mixer("attention", "AttentionConfig(dim=8, num_heads=2, num_kv_heads=1)"),
    mixer("gated recurrence", "GatedRecurrenceConfig(dim=8)"),
    mixer("GLA", f"GatedLinearAttentionConfig(dim=8, gate_rank=3, {GROUPS})"),
    mixer("Gated DeltaNet", f"GatedDeltaNetConfig(dim=8, {GROUPS})"),
    mixer("Mamba-2", "Mamba2Config(dim=8, head_dim=8, state_dim=4, chunk_size=4)"),
    mixer("state engine", "StateEngineConfig(dim=8, num_heads=2, head_dim=4, num_slots=6, chunk_size=4)"),
    mixer("neural memory", "NeuralMemoryConfig(dim=8, num_heads=2, chunk_size=4)"),
)
rules = (
    rule("GLA's operation", "gated_linear_attention", "log_key_gate"),
    rule("GLA's operation, one decay", "gated_linear_attention", "log_gate"),
    rule("Gated DeltaNet's operation", "gated_delta_rule", "log_gate", delta=True),
)
subjects = (*mixers, *rules)
