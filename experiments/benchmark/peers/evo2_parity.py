"""Evo 2 at its true sizes against its own code in fp32: python -m experiments.benchmark evo2_parity --out FILE."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import save
from jaxblt.testing.tolerances import bound, typical, worst
from jaxblt.validation import whole

PROMPT = 128
"""Bytes behind which bytes are written."""


def evo2_parity(
    out: str = "runs/benchmark/evo2_parity.json",
    model: str = "evo2_1b_8k",
    lengths: tuple[int, ...] = (1, 7, 127, 128, 129, 1000, 8192),
    written: int = 512,
) -> dict[str, Any]:
    """Compare logits, log-likelihoods and written bases with those of vortex 1.1.0, with the same drawn weights.

    The peer reads the longest row once in fp32, by PyTorch alone: as it is causal, the starts of that row are its
    shorter ones. Here each length is a call of its own in fp32, and the longest in bf16, too. Errors of bf16 stand
    beside those of the peer's own bf16; `bound` is the table's for one sum of as many terms as bases or channels of an
    MLP. Bases are the most probable bytes, written one by one here; the peer reads them in one pass, and says at how
    many its most probable byte is another.

    Args:
      out: JSON file to write.
      model: name of a released model, or "tiny" to try the script.
      lengths: bases of the rows.
      written: bases that are written behind 128.

    Raises:
      ValueError: there is no such model, or a number is out of range.
      RuntimeError: torch, the peer or a GPU is not there.
    """
    from experiments.benchmark.peers import evo2_vortex as peer
    from experiments.benchmark.peers.evo2_weights import draw, sizes_of
    from experiments.benchmark.peers.torch_calls import import_torch
    from jaxblt.interchange.striped_hyena import embedding_rows
    from jaxblt.models.striped_hyena import striped_hyena

    whole("written", written, least=1)
    for length in lengths:
        whole("lengths", length, least=1)
    sizes, torch = sizes_of(model), import_torch()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    tensors = draw(sizes)
    rows = np.asarray(embedding_rows(striped_hyena(sizes).vocab_size))
    longest = max(*lengths, PROMPT)
    text = np.random.default_rng(0).choice(np.frombuffer(b"ACGT", np.uint8), longest).astype(np.int64)
    text[0] = 0
    narrow = peer.load(torch, peer.settings(sizes, kernels=False), tensors)
    theirs = peer.read(torch, narrow, text)[:, rows]
    del narrow
    net = peer.load(torch, peer.settings(sizes, kernels=False), tensors, precise=True)
    precise = peer.read(torch, net, text)[:, rows]
    ours, half, chosen = _read(sizes, tensors, text, lengths, written)
    full = peer.read(torch, net, np.concatenate([text[:PROMPT], chosen[:-1]]))[PROMPT - 1 :, rows]
    figures: dict[str, Any] = {
        "model": model,
        "peer": peer.versions(torch),
        "lengths": [
            _compare(ours[n], half[:n], precise[:n], theirs[:n], text[:n], rows)
            | {"bound": bound(np.float32, max(n, sizes.mlp_dim))}
            for n in lengths
        ],
        "written": _written(full, chosen, rows),
    }
    save("evo2_parity", out, figures)
    return figures


def _compare(
    ours: np.ndarray, half: np.ndarray, precise: np.ndarray, theirs: np.ndarray, text: Any, rows: Any
) -> dict[str, Any]:
    """Return errors of a row against the peer in fp32, in units of the root mean square of its logits."""
    nats, expected = (_log_likelihood(x, text, rows) for x in (ours, precise))
    return {
        "length": len(text),
        "worst": worst(ours, precise),
        "typical": typical(ours, precise),
        "log_likelihood": {"ours": nats, "theirs": expected},
        "bfloat16": {"ours": typical(half, precise), "theirs": typical(theirs, precise)},
    }


def _log_likelihood(logits: np.ndarray, text: np.ndarray, rows: np.ndarray) -> float:
    """Return log p in nats of the bases behind the first place."""
    wide = logits.astype(np.float64)
    logs = wide - np.logaddexp.reduce(wide, -1, keepdims=True)
    column = np.argsort(rows)[text[1:]]
    return float(np.take_along_axis(logs[:-1], column[:, None], 1).sum())


def _written(logits: np.ndarray, chosen: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    """Return how many of the chosen bytes are not the peer's, and by how much its own lead there, in nats."""
    best, own = logits.max(-1), np.take_along_axis(logits, np.argsort(rows)[chosen][:, None], 1)[:, 0]
    differ = rows[logits.argmax(-1)] != chosen
    return {"bytes": len(chosen), "differ": int(differ.sum()), "largest_lead": float((best - own).max())}


def _read(sizes: Any, tensors: Any, text: np.ndarray, lengths: tuple[int, ...], written: int) -> Any:
    """Return logits by length, those of the longest row in bf16, and the bytes that follow, in the peer's ids."""
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.peers.evo2_ours import params_of
    from jaxblt.data.vocab import BOS, OFFSET
    from jaxblt.inference import Decoder, decode_bytes, decode_step, init_decoder
    from jaxblt.interchange.striped_hyena import embedding_rows
    from jaxblt.models.row_layout import RowLayout
    from jaxblt.models.striped_hyena import striped_hyena

    model = striped_hyena(sizes).in_rows(RowLayout(packed=False), RowLayout(packed=False))
    params = params_of(model, tensors)
    ids = jnp.asarray(np.where(np.arange(len(text)) == 0, BOS, text + OFFSET)[None], jnp.int32)

    def reader(dtype: Any) -> Any:
        module = model.build(dtype=dtype)
        return jax.jit(lambda params, ids: module.apply({"params": params}, ids)[0][0])

    decoder = Decoder(model, dtype=jnp.float32)

    @jax.jit
    def write(params: Any, prompt: Any) -> Any:
        def body(carried: Any, _: Any) -> Any:
            state, ids = carried
            logits, _, state = decode_step(decoder, {"model": params}, ids, state, jnp.ones_like(ids))
            best = jnp.argmax(logits, -1).astype(ids.dtype)
            return (state, best), best[0]

        state = init_decoder(decoder, 1, num_bytes=PROMPT + written)
        logits, state = decode_bytes(decoder, {"model": params}, prompt, state, jnp.ones_like(prompt))
        first = jnp.argmax(logits[:, -1], -1).astype(prompt.dtype)
        _, rest = jax.lax.scan(body, (state, first), None, length=written - 1)
        return jnp.concatenate([first, rest])

    # Let no product of fp32 be rounded to TF32
    with jax.default_matmul_precision("highest"):
        lowered = [reader("float32").lower(params, ids[:, :n]) for n in lengths]
        lowered += [reader("bfloat16").lower(params, ids), write.lower(params, ids[:, :PROMPT])]
    with ThreadPoolExecutor(len(lowered)) as pool:
        *compiled, half, writing = pool.map(lambda x: x.compile(), lowered)
    found = {n: np.asarray(program(params, ids[:, :n])) for n, program in zip(lengths, compiled, strict=True)}
    rows = np.asarray(embedding_rows(model.vocab_size))
    narrow = np.asarray(half(params, ids), np.float32)
    return found, narrow, rows[np.asarray(writing(params, ids[:, :PROMPT]))]
