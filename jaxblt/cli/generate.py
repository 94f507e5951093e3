"""Continues prompts with a trained run: jaxblt generate RUN_DIR --prompts "Once" "The"."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxblt.cli.beams import best_beams, check_beams
from jaxblt.cli.mesh import parse_mesh
from jaxblt.cli.quantize import load_quantized
from jaxblt.cli.streaming import write_as_they_come
from jaxblt.precision.weights import Scheme
from jaxblt.remote import refuse_remote
from jaxblt.training.state import Step, Weights
from jaxblt.validation import MOST_SEED, whole

TEMPERATURE = 0.8
"""Of draws, unless the caller names another."""


def generate(
    run_dir: Annotated[str, tyro.conf.Positional],
    prompts: tuple[str, ...] = (),
    prompts_hex: tuple[str, ...] = (),
    prompts_file: tuple[str, ...] = (),
    max_new_bytes: int = 256,
    temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    alphabet: str | None = None,
    stream: bool = False,
    beams: int | None = None,
    length_exponent: float | None = None,
    adapters: tuple[str, ...] = (),
    drafts: int | None = None,
    drafter: Literal["lookup", "counts"] | None = None,
    as_trained: bool = True,
    mesh: str | None = None,
    quantize: Scheme | None = None,
    weights: Weights | None = None,
    step: Step | None = None,
) -> list[bytes]:
    """Write each prompt and its continuation to standard output, as raw bytes.

    Args:
      run_dir: folder of the run.
      prompts: texts; an empty one starts a new document, as no prompt at all does.
      prompts_hex: prompts of any bytes, as hexadecimal digits: "ff00" is two bytes.
      prompts_file: files, each of which is one prompt.
      max_new_bytes: bytes to sample at the most; EOS ends a document before.
      temperature: 0 takes the most probable byte every time; by default 0.8.
      top_k: keep the k most probable bytes; 0 keeps all.
      top_p: keep the fewest bytes whose probabilities sum to this.
      seed: of the draws.
      alphabet: characters that may be drawn, such as ACGT; an end of the document may be drawn besides.
      stream: write bytes as they come, whole characters of UTF-8 at a time; the output is the same.
      beams: rows of a beam search, which finds the most probable continuation of each prompt; nothing is drawn then.
      length_exponent: of beams: the best has the most log-likelihood over bytes to this power, by default 0.
      adapters: of a run with a router, for all prompts or for each. It is the number of an expert of its bank, "base",
        "static", or "router" for its own code.
      drafts: bytes to guess and check in one call, 0 to 16; standard error says how many were right.
      drafter: how bytes are guessed from those of the row; by default "lookup".
      as_trained: prompts are read in the case of the run's data; without it every byte is taken as it is.
      mesh: sizes of the mesh axes, such as "seq=8", for prompts and caches split over devices; one device by default.
      quantize: read kernels of products in fewer bits: int8, int4, fp8, or w8a8 with activations of 8 bits too.
      weights: "ema" for the parameters' average, "raw" for the parameters; by default the average if the run has one.
      step: of the checkpoint, or "best" for that of the best evaluation; by default the newest.

    Raises:
      ValueError: an option is out of range, a file of prompts cannot be read, a prompt is not hexadecimal, or the mesh
        does not suit.
    """
    from jaxblt.answers import continuations
    from jaxblt.inference import SamplingConfig

    whole("--max-new-bytes", max_new_bytes, least=1)
    whole("--seed", seed, least=0, most=MOST_SEED)
    options = {"top_k": top_k or None, "top_p": None if top_p == 1 else top_p, "seed": seed or None}
    options |= {"drafts": drafts, "drafter": drafter, "stream": stream, "adapters": adapters, "mesh": mesh}
    check_beams(beams, length_exponent, temperature=temperature, **options)
    sampling = SamplingConfig(TEMPERATURE if temperature is None else temperature, top_k, top_p)
    drafting = read_drafts(drafts, drafter)
    given: dict[str, Any] = {"max_new_bytes": max_new_bytes, "as_trained": as_trained}
    data, given["alphabet"] = read_prompts(prompts, prompts_hex, prompts_file), read_alphabet(alphabet)
    run = load_quantized(run_dir, quantize, step=step, weights=weights)
    if beams is not None:
        given |= {"beams": beams, "length_exponent": length_exponent or 0.0}
        return write_whole(data, [best_beams(run, data, **given)])
    given |= {"drafts": drafting, "report": None if drafting is None else write_counts}
    given |= {"adapters": read_adapters(adapters), "mesh": None if mesh is None else parse_mesh(mesh)}
    pieces = continuations(run, data, sampling=sampling, seed=seed, **given)
    return write_as_they_come(data, pieces) if stream else write_whole(data, pieces)


def write_whole(prompts: Sequence[bytes], pieces: Iterable[list[bytes]]) -> list[bytes]:
    """Write each prompt with all bytes that follow it, and return these."""
    found = [b"".join(parts) for parts in zip(*pieces, strict=True)]
    for prompt, continuation in zip(prompts, found, strict=True):
        sys.stdout.buffer.write(prompt + continuation + b"\n")
    return found


def write_counts(counts: Any) -> None:
    """Write to standard error what drafts were good for."""
    sys.stderr.write(f"drafts: {counts}\n")


def read_alphabet(text: str | None) -> bytes | None:
    """Return the bytes of --alphabet.

    Raises:
      ValueError: it is empty.
    """
    if text == "":
        raise ValueError("--alphabet is empty: name characters such as ACGT, or leave it out")
    return None if text is None else text.encode("utf-8", "surrogateescape")


def read_drafts(count: int | None, drafter: Literal["lookup", "counts"] | None) -> Any:
    """Return what --drafts and --drafter ask for, or None.

    Raises:
      ValueError: the count is out of range, or there is none for a drafter.
    """
    from jaxblt.inference.drafts import MOST_DRAFTED, Drafts

    if count is None:
        if drafter is not None:
            raise ValueError(f"--drafter {drafter} needs --drafts: say how many bytes, such as --drafts 8")
        return None
    whole("--drafts", count, least=0, most=MOST_DRAFTED)
    return Drafts(count=count, drafter=drafter or "lookup")


def read_adapters(words: Sequence[str]) -> Any:
    """Return the words of --adapters as `jaxblt.inference.generate` takes them, which refuses other words."""
    known: dict[str, Any] = {"router": None}
    chosen = [int(word) if word.isdecimal() else known.get(word, word) for word in words]
    return chosen[0] if len(chosen) == 1 else chosen or None


def read_prompts(texts: Sequence[str], digits: Sequence[str], files: Sequence[str]) -> list[bytes]:
    """Return the bytes of all prompts, in this order; one empty prompt where there is none.

    Raises:
      ValueError: digits that are not hexadecimal, or no pairs, or a file that cannot be read.
    """
    # Turn surrogates back into bytes: Python hands over bytes of the command line that are no UTF-8 as such.
    found = [text.encode("utf-8", "surrogateescape") for text in texts]
    for number in digits:
        try:
            found.append(bytes.fromhex(number))
        except ValueError as error:
            raise ValueError(
                f"--prompts-hex {number!r} is not made of pairs of hexadecimal digits, such as 'ff00'"
            ) from error
    for file in files:
        refuse_remote("--prompts-file", file)
        try:
            found.append(Path(file).read_bytes())
        except OSError as error:
            raise ValueError(
                f"--prompts-file {file} cannot be read ({error.strerror}): name a file, whose bytes are one prompt"
            ) from error
    return found or [b""]
