"""jax-linear-attention's operations: its chunked JAX in fp32 on the CPU, its kernels in bf16 on a GPU.

Each is called as README's quick start says, with the implementation that `impl="auto"` picks.
"""

import string
from typing import Literal

from experiments.benchmark.peers.conformance.common import MATRIX_STATE, STREAMED
from jaxblt.testing.conformance import Subject

TEMPLATE = string.Template(
    """\
import jax, jax.numpy as jnp
from jla import ops
def streams(x, xp):
    q, k, v, *gates = xp.split(x[:, :, None], ${cuts}, -1)
    g, b = (-xp.logaddexp(0, gates[0]), *(1 / (1 + xp.exp(-z)) for z in gates[1:]), None)[:2]
    return q, k, v, ${gates}
@jax.jit
def run(x, documents, state):
    *qkv, gates = streams(x, jnp)
    qkv = [z.astype("${dtype}") for z in qkv]
    options = dict(gates, segment_ids=documents, initial_state=state, output_final_state=True${norm})
    return ops.linear_attention("${kind}", *qkv, **options)
def call(x, documents=None, state=None):
    return run(jnp.asarray(x), documents, state)
def reference(x):
    q, k, v, gates = streams(x, np)
    q, k = (z / np.sqrt((z * z).sum(-1, keepdims=True) + 1e-6) if ${delta} else z for z in (q, k))
    decay = np.exp(gates["g"] if gates["g"].ndim == 4 else gates["g"][..., None])[..., None]
"""
    + MATRIX_STATE
)
"""The lines of a bridge. `streams` works on arrays of JAX and, for the reference in f64, of NumPy."""

ATTENTION = string.Template("""\
import jax, jax.numpy as jnp
from jla.layers.attention import attention
def call(x, documents=None, state=None):
    q, k, v = jnp.split(jnp.asarray(x).astype("${dtype}")[:, :, None], 3, -1)
    ids = None if documents is None else jnp.asarray(documents)
    return attention(q, k, v, segment_ids=ids), None
def reference(x):
    q, k, v = np.split(x, 3, -1)
    scores = np.einsum("btd,bsd->bts", q, k) / ${keys} ** 0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(x.shape[1])
    return (weights / weights.sum(-1, keepdims=True) @ v)[:, :, None]
""")
"""The lines of a bridge to softmax attention."""

PROMISES = STREAMED | {"documents", "values"}
LENGTHS = {"float32": (1, 2, 3, 17), "bfloat16": (130,)}

Dtype = Literal["float32", "bfloat16"]


def subject(kind: str, dtype: Dtype, keys: int) -> Subject:
    """Return a linear-attention operation of one head of `keys`."""
    delta, vector = kind in ("gated_deltanet", "kda"), kind in ("gla", "kda")
    gate = keys if vector else 1
    gates = f"dict(g=g{'' if vector else '[..., 0]'}{', beta=b[..., 0]' if delta else ''})"
    lines = TEMPLATE.substitute(
        kind=kind,
        dtype=dtype,
        delta=delta,
        gates=gates,
        cuts=[keys, 2 * keys, 3 * keys] + [3 * keys + gate] * delta,
        norm=", use_qk_l2norm=True" if delta else "",
    )
    return Subject(
        name=f"jax-linear-attention: {kind}" + (" on a GPU" if dtype == "bfloat16" else ""),
        make=lines,
        width=3 * keys + gate + delta,
        promises=PROMISES | {"decays"},
        dtype=dtype,
        decays=slice(3 * keys, 3 * keys + gate),
        lengths=LENGTHS[dtype],
        peer="jax-linear-attention",
        called=f'jla.ops.linear_attention("{kind}")',
        gpu=dtype == "bfloat16",
    )


def attention(dtype: Dtype, keys: int) -> Subject:
    """Return softmax attention of one head of `keys`."""
    return Subject(
        name="jax-linear-attention: attention" + (" on a GPU" if dtype == "bfloat16" else ""),
        make=ATTENTION.substitute(dtype=dtype, keys=keys),
        width=3 * keys,
        promises=frozenset(["causal", "lengths", "batch", "documents", "gradients", "dtype", "values"]),
        dtype=dtype,
        lengths=LENGTHS[dtype],
        peer="jax-linear-attention",
        called="jla.layers.attention.attention",
        gpu=dtype == "bfloat16",
    )


KINDS = ("simple_gla", "gla", "gated_deltanet", "kda")

subjects = (*(subject(kind, "float32", 8) for kind in KINDS), attention("float32", 8))
