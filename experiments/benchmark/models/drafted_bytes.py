"""Drafted bytes against bytes one by one: python -m experiments.benchmark drafted_bytes --out FILE."""

import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from experiments.benchmark.figures.saved import save
from experiments.benchmark.models.serving import drawn_model


def drafted_bytes(
    out: str = "runs/benchmark/drafted_bytes.json",
    run_dir: str | None = None,
    rows: tuple[int, ...] = (1,),
    new_bytes: int = 4096,
    prompt_bytes: int = 256,
    counts: tuple[int, ...] = (4, 8, 16),
    drafters: tuple[str, ...] = ("lookup", "counts"),
    temperatures: tuple[float, ...] = (0.0, 0.8),
    pattern: str = "HHAH",
    trials: int = 3,
    tiny: bool = False,
) -> dict[str, Any]:
    """Time `generate` with and without drafts: bytes a second, bytes that differ, drafts that were right.

    Every setting draws the same rows. Bytes are compared with those of the same program without drafts, of which none
    may differ, and with those drawn one by one, where rounding may turn a draw. The text behind a turned draw is
    another, so that is counted by the first byte too.

    Args:
      out: JSON file to write.
      run_dir: a trained run; None for the `books` model with drawn parameters, whose drafts are seldom right.
      rows: of the batches.
      new_bytes: the most bytes that follow a prompt.
      prompt_bytes: bytes of a prompt, of the book that the library brings along.
      counts: bytes to draft; none come first, by the same program.
      drafters: how bytes are guessed.
      temperatures: of the draws.
      pattern: of the latent stack of drawn parameters.
      trials: of each timing.
      tiny: a model that a CPU compiles, to try the script.

    Raises:
      RuntimeError: a byte differs from those of the same program without drafts.
    """
    decoder, params = _model(run_dir, pattern, tiny)
    found: dict[str, Any] = {"run_dir": run_dir, "new_bytes": new_bytes, "pattern": pattern, "rows": []}
    for count in rows:
        for temperature in temperatures:
            case = _Case(decoder, params, count, new_bytes, prompt_bytes, temperature, trials)
            found["rows"].append(case.compare(counts, drafters))
            save("drafted_bytes", out, found)
    differing = sum(way["differ"]["bytes"] for row in found["rows"] for way in row["drafted"])
    if differing:
        raise RuntimeError(
            f"{differing} bytes differ from those of the same program without drafts: see {out}"
        )
    return found


def _model(run_dir: str | None, pattern: str, tiny: bool) -> tuple[Any, dict[str, Any]]:
    if run_dir is None:
        return drawn_model(pattern, tiny)
    import jaxblt

    run = jaxblt.load(run_dir)
    return run.decoder, run.decoder_params


class _Case:
    """Rows to continue, and the ways to do it."""

    def __init__(self, decoder: Any, params: Any, rows: int, new_bytes: int, prompt_bytes: int, *rest: Any):
        from jaxblt.data import load_sample

        text, (self.temperature, self.trials) = load_sample("book"), rest
        self.decoder, self.params, self.new_bytes = decoder, params, new_bytes
        self.prompts = [text[997 * i : 997 * i + prompt_bytes] for i in range(rows)]

    def compare(self, counts: Sequence[int], drafters: Sequence[str]) -> dict[str, Any]:
        """Return the figures of bytes one by one and of every draft."""
        from jaxblt.inference import Drafts

        single, plain = self._timed(None)
        none, texts = self._timed(Drafts(count=0))
        drafted = [none | {"count": 0, "differ": _differences(texts, texts)}]
        for count in counts:
            for drafter in drafters:
                figures, others = self._timed(Drafts(count=count, drafter=drafter))
                own = {"count": count, "drafter": drafter, "differ": _differences(others, texts)}
                drafted.append(figures | own)
        for way in drafted:
            way["times_one_by_one"] = way["bytes_per_second"] / single["bytes_per_second"]
        rows = {"rows": len(self.prompts), "temperature": self.temperature, "one_by_one": single}
        return rows | {"differ_from_one_by_one": _differences(texts, plain), "drafted": drafted}

    def _timed(self, drafts: Any) -> tuple[dict[str, Any], list[bytes]]:
        from jaxblt.inference import SamplingConfig, generate

        told: list[Any] = []
        options: dict[str, Any] = {"max_new_bytes": self.new_bytes, "drafts": drafts}
        options |= {"sampling": SamplingConfig(temperature=self.temperature)}
        options |= {"report": None if drafts is None else told.append}
        seconds, texts = [], []
        for _ in range(self.trials + 1):
            begun = time.perf_counter()
            texts = generate(self.decoder, self.params, self.prompts, **options)
            seconds.append(time.perf_counter() - begun)
        drawn = sum(map(len, texts))
        figures = {"bytes": drawn, "seconds": seconds[1:], "bytes_per_second": drawn / min(seconds[1:])}
        if told:
            counts = told[-1]
            drafted, accepted = sum(counts.drafted), sum(counts.accepted)
            figures |= {"calls": counts.calls, "drafted": drafted, "accepted": accepted}
            figures |= {"accepted_per_call": accepted / counts.calls}
        return figures, texts


def _differences(texts: Sequence[bytes], others: Sequence[bytes]) -> dict[str, Any]:
    """Return how many bytes differ, of how many, and where the first does in each row that has one."""
    unequal = [
        [i for i, pair in enumerate(zip_longest(*rows)) if pair[0] != pair[1]]
        for rows in zip(texts, others, strict=True)
    ]
    compared = sum(max(map(len, rows)) for rows in zip(texts, others, strict=True))
    return {
        "bytes": sum(map(len, unequal)),
        "of": compared,
        "first": [places[0] for places in unequal if places],
    }
