"""The run `genes` beside counts of codons: python -m experiments.benchmark reading_frames --data D --out FILE."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import save
from experiments.genes import STOPS

BASES = np.frombuffer(b"ACGT", np.uint8)
PSEUDOCOUNT = 1.0


def read_genes(path: Path) -> bytes:
    """Return the genes of a file that `experiments.genes` wrote, one after another: each is of whole codons."""
    return b"".join(path.read_bytes().split(b"\n")[1::2])


def fit_counts(genes: bytes, order: int, period: int) -> np.ndarray:
    """Return log2 p(base | place in the codon, last `order` bases), Float[period, 4^order, 4].

    Args:
      genes: whole codons of A, C, G, T.
      order: bases of context.
      period: 3 counts each place of a codon by itself, 1 all alike.
    """
    codes = np.searchsorted(BASES, np.frombuffer(genes, np.uint8))
    counts = np.bincount(keys_of(codes, order, period), minlength=period * 4 ** (order + 1))
    smoothed = counts.reshape(period, 4**order, 4) + PSEUDOCOUNT
    return np.log2(smoothed / smoothed.sum(-1, keepdims=True))


def keys_of(codes: np.ndarray, order: int, period: int) -> np.ndarray:
    """Return the entry of `fit_counts`' table of each base that has `order` bases before it."""
    count = len(codes) - order
    keys = (np.arange(count) + order) % period
    for offset in range(order + 1):
        keys = keys * 4 + codes[offset : offset + count]
    return keys


def bits_of(table: np.ndarray, genes: bytes) -> float:
    """Return bits a base of genes under `fit_counts`' table."""
    period, contexts, _ = table.shape
    codes = np.searchsorted(BASES, np.frombuffer(genes, np.uint8))
    return float(-table.reshape(-1)[keys_of(codes, round(np.log(contexts) / np.log(4)), period)].mean())


def draw(table: np.ndarray, prompts: list[bytes], count: int, seed: int) -> list[bytes]:
    """Draw `count` bases after each prompt; the prompts are as long as each other."""
    period, contexts, _ = table.shape
    rows = np.searchsorted(BASES, np.array([list(p) for p in prompts], np.uint8))
    rng, drawn = np.random.default_rng(seed), []
    order = round(np.log(contexts) / np.log(4))
    for t in range(rows.shape[1], rows.shape[1] + count):
        last = np.concatenate([rows, *drawn], 1)[:, t - order :] if order else rows[:, :0]
        context = last @ 4 ** np.arange(order)[::-1]
        chances = np.exp2(table[t % period, context]).cumsum(-1)
        drawn.append((rng.random((len(rows), 1)) > chances).sum(-1, keepdims=True).clip(max=3))
    return [BASES[row].tobytes() for row in np.concatenate(drawn, 1)]


def share_open(prompts: list[bytes], continuations: list[bytes]) -> float:
    """Return the share of continuations that hold no stop codon in the frame of their gene."""
    rows = [prompt + more for prompt, more in zip(prompts, continuations, strict=True)]
    return float(
        np.mean([not any(row[i : i + 3] in STOPS for i in range(0, len(row) - 2, 3)) for row in rows])
    )


def reading_frames(
    data: str, out: str, prompt: int = 30, bases: int = 300, count: int = 256, batches: int = 64
) -> dict[str, Any]:
    """Score the run `genes`, order-k counts and counts of codons on the test part, and draw genes from each.

    Args:
      data: folder of train.fa and test.fa, as `experiments.genes` writes them.
      out: JSON file to write.
      prompt: first bases of each test gene that are given.
      bases: that are drawn after them.
      count: of test genes that are continued.
      batches: the most that the run scores, spread evenly over the test part.
    """
    from dataclasses import replace

    import jaxblt

    run = jaxblt.load("genes")
    rows = replace(run.recipe.data, paths=(f"{data}/*.fa",))
    train, test = (read_genes(Path(data) / f"{part}.fa") for part in ("train", "test"))
    tables = {
        "order-5 counts": fit_counts(train, 5, 1),
        "order-8 counts": fit_counts(train, 8, 1),
        "order-5 counts of each place in the codon": fit_counts(train, 5, 3),
        "order-8 counts of each place in the codon": fit_counts(train, 8, 3),
    }
    genes = (Path(data) / "test.fa").read_bytes().split(b"\n")[1::2]
    prompts = [gene[:prompt] for gene in genes if len(gene) >= prompt + bases + 3][:count]
    drawn = {
        "genes": run.generate(prompts, max_new_bytes=bases, alphabet=b"ACGT", seed=list(range(len(prompts))))
    }
    drawn |= {name: draw(table, prompts, bases, seed=0) for name, table in tables.items()}
    scored = run.evaluate("test", data=rows, max_batches=batches)
    found = {
        "test_bases": len(test),
        "bits_per_base": {"genes": scored["bits_per_byte"]}
        | {name: bits_of(t, test) for name, t in tables.items()},
        "scored_bases": scored["bytes"],
        "drawn": {"prompt": prompt, "bases": bases, "count": len(prompts)},
        "open_frames": {name: share_open(prompts, rows) for name, rows in drawn.items()},
    }
    save("reading_frames", out, found)
    return found
