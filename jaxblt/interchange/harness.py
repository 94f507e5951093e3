"""A run as a model of EleutherAI's lm-eval, which finds it by the entry point "jaxblt" of `lm_eval.models`.

    lm-eval run --model jaxblt --model_args run=runs/books --tasks wikitext

Texts are read as UTF-8. Tokens are bytes, so that `bits_per_byte` needs no tokenizer, and choices are compared by their
log-likelihood or by that of each byte (`acc`, `acc_norm`). EOS is never part of a score.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.inference.sampling import SamplingConfig

if TYPE_CHECKING:
    from jaxblt.run import Run

NEW_BYTES = 1024
"""Bytes to write where a task does not say."""


def rate_continuations(
    run: "Run", pairs: Sequence[tuple[str, str]], **options: Any
) -> list[tuple[float, bool]]:
    """Return log-likelihoods of continuations behind their contexts in nats, and whether each is the greedy one.

    Args:
      run: trained to predict the next byte.
      pairs: context, which may be empty, and continuation.
      options: of `run.score`.
    """
    coded = [(context.encode(), text.encode()) for context, text in pairs]
    scores = run.score([context + text for context, text in coded], per_byte=True, **options)
    assert scores.per_byte is not None
    nats = [
        row[len(context) : len(context) + len(text)]
        for row, (context, text) in zip(scores.per_byte, coded, strict=True)
    ]
    # The likeliest of so many ids has at least this probability, and one above a half is the likeliest
    greedy = [_is_surely_greedy(row) for row in nats]
    open_ones = [i for i, known in enumerate(greedy) if known is None]
    if open_ones:
        limits = [len(coded[i][1]) for i in open_ones]
        prompts, best = [coded[i][0] for i in open_ones], SamplingConfig(temperature=0)
        written = run.generate(prompts, max_new_bytes=limits, sampling=best)
        for i, text in zip(open_ones, written, strict=True):
            greedy[i] = text == coded[i][1]
    return [(float(np.nansum(row)), bool(known)) for row, known in zip(nats, greedy, strict=True)]


def _is_surely_greedy(nats: np.ndarray) -> bool | None:
    """Return whether each byte was the likeliest id; None where probabilities alone do not tell."""
    if (nats > math.log(1 / 2)).all():
        return True
    return False if (nats < math.log(1 / VOCAB_SIZE)).any() else None


def rate_texts(run: "Run", texts: Sequence[str], **options: Any) -> list[float]:
    """Return log-likelihoods of whole texts in nats; options are those of `run.score`."""
    coded = [text.encode() for text in texts]
    scores = run.score(coded, per_byte=True, **options)
    assert scores.per_byte is not None
    return [float(np.nansum(row[: len(text)])) for row, text in zip(scores.per_byte, coded, strict=True)]


def write_until(run: "Run", context: str, settings: dict[str, Any]) -> str:
    """Return what follows a context up to the first of the texts in `settings["until"]`, which is left out.

    Args:
      run: a causal one.
      context: may be empty.
      settings: of lm-eval: "until", "max_gen_toks" (bytes), "do_sample", "temperature", "top_k", "top_p".
    """
    until = settings.get("until") or []
    stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    warm = float(settings.get("temperature", 1.0)) if settings.get("do_sample", False) else 0.0
    sampling = SamplingConfig(warm, int(settings.get("top_k", 0)), float(settings.get("top_p", 1.0)))
    limit = int(settings.get("max_gen_toks", NEW_BYTES))
    [data] = run.generate([context.encode()], max_new_bytes=limit, sampling=sampling)
    text = data.decode(errors="replace")
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def __getattr__(name: str) -> Any:
    """Make the class that lm-eval loads; nothing but lm-eval needs it."""
    if name != "HarnessModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _make_class()


def _make_class() -> Any:
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

    class HarnessModel(LM):
        """A run as lm-eval calls it."""

        def __init__(
            self, run: Any, batch_size: int | str = 8, max_batch_size: Any = None, device: Any = None
        ):
            """Open a run, by its folder or its name; `device` is JAX's own matter."""
            from jaxblt.run import load

            super().__init__()
            self.run = load(run) if isinstance(run, str) else run
            self._options = {"batch_size": int(batch_size)}

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            """Return log-likelihoods of continuations, and whether each is greedy."""
            return rate_continuations(self.run, [one.args for one in requests], **self._options)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            """Return log-likelihoods of texts."""
            return rate_texts(self.run, [one.args[0] for one in requests], **self._options)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            """Return what follows contexts."""
            return [write_until(self.run, *one.args) for one in requests]

    return HarnessModel
