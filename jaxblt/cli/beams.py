"""Beams of `jaxblt generate`: the most probable continuation of each prompt in the place of a drawn one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxblt.run import Run

WHY = {
    "temperature": "a beam search draws nothing",
    "top_k": "a beam search draws nothing",
    "top_p": "a beam search draws nothing",
    "seed": "a beam search draws nothing",
    "drafts": "a beam search guesses no bytes",
    "drafter": "a beam search guesses no bytes",
    "stream": "a beam search knows the best bytes at its end only",
    "adapters": "the rows of a beam search have the router's own codes",
    "mesh": "a beam search runs on one device",
}
"""Why an option of `generate` does not go with beams."""


def check_beams(beams: int | None, length_exponent: float | None, **others: Any) -> None:
    """Raise ValueError, naming the option, for one that beams do not go with, or that needs beams.

    Args:
      beams: as given.
      length_exponent: as given.
      others: options of `WHY` as given, None or False where one was left out.
    """
    from jaxblt.inference.beams import MOST_BEAMS, MOST_EXPONENT
    from jaxblt.validation import number, whole

    if beams is None:
        if length_exponent is not None:
            raise ValueError(f"--length-exponent {length_exponent} needs --beams, such as --beams 4")
        return
    whole("--beams", beams, least=1, most=MOST_BEAMS)
    number("--length-exponent", length_exponent or 0.0, least=0, most=MOST_EXPONENT)
    for name, value in others.items():
        if value is not None and value is not False and value != ():
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} and --beams were both given, and {WHY[name]}: leave one out")


def best_beams(run: "Run", prompts: Sequence[bytes], **options: Any) -> list[bytes]:
    """Return the best continuation of each prompt; for options see `jaxblt.answers.search_beams`."""
    from jaxblt.answers import search_beams

    return [found[0].data for found in search_beams(run, prompts, **options)]
