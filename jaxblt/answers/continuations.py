"""The next bytes of prompts under a trained run, on one device or a mesh."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from jaxblt.adapters.update.row_adapters import Adapter
from jaxblt.answers.protocol import TrainedRun
from jaxblt.data.letters import letters_of
from jaxblt.inference.beams import Beam, beam_search
from jaxblt.inference.drafts import DraftCounts, Drafts
from jaxblt.inference.generate import generate
from jaxblt.inference.sampling import SamplingConfig
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.training.start.placement import Placement, find_mesh, place_params


def continuations(
    run: TrainedRun,
    prompts: Sequence[bytes],
    *,
    max_new_bytes: int | Sequence[int],
    sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig(),
    seed: int | Sequence[int] = 0,
    alphabet: bytes | Sequence[bytes | None] | None = None,
    adapters: Adapter | Sequence[Adapter] = None,
    drafts: Drafts | None = None,
    report: Callable[[DraftCounts], None] | None = None,
    as_trained: bool = True,
    mesh: MeshConfig | Mesh | None = None,
) -> Iterator[list[bytes]]:
    """Yield the next bytes of each prompt as they come.

    See `jaxblt.inference.generate` with `stream=True`.

    Args:
      run: a causal one.
      prompts: may be empty; a BOS comes before each.
      max_new_bytes: bytes to draw at the most, for all prompts or for each.
      sampling: how a byte is drawn, for all prompts or for each.
      seed: for all prompts or for each.
      alphabet: bytes that may be drawn, such as b"ACGT", for all prompts or for each; None for all bytes.
      adapters: of a run with a router, for all prompts or for each.
      drafts: bytes to guess and to check in one call; None draws byte by byte.
      report: called with what the drafts were good for, when all bytes are drawn.
      as_trained: prompts have the case of the run's data; False takes every byte as it is.
      mesh: of the devices that decode; None for the one in force, or one device.

    Raises:
      ValueError: as of `generate`; or the mesh does not suit the devices, or splits both the batch and the sequence.
    """
    place = Placement(find_mesh(mesh))
    shape = {} if place.mesh is None else place.mesh.shape
    if shape.get("seq", 1) > 1 and shape["data"] * shape["fsdp"] > 1:
        raise ValueError(
            f"mesh {dict(shape)}: a decoder splits the batch or the sequence, not both: use seq alone"
        )
    if as_trained and isinstance(prompts, Iterable) and not isinstance(prompts, bytes | str):
        letters = letters_of(run.recipe.data)
        prompts = [letters.read(prompt) if isinstance(prompt, bytes) else prompt for prompt in prompts]
    if place.mesh is not None:
        params, frozen = place_params(run.recipe, run.params, run.frozen, place.mesh)
        run = replace(run, params=params, frozen=frozen)
    options: dict[str, Any] = {"max_new_bytes": max_new_bytes, "sampling": sampling, "seed": seed}
    options |= {"alphabet": alphabet, "adapters": adapters, "drafts": drafts, "report": report}
    with place.in_force:
        pieces = generate(run.decoder, run.decoder_params, prompts, stream=True, **options)
    return _under(place, pieces)


def search_beams(
    run: TrainedRun,
    prompts: Sequence[bytes],
    *,
    max_new_bytes: int,
    beams: int = 4,
    alphabet: bytes | None = None,
    length_exponent: float = 0.0,
    as_trained: bool = True,
) -> list[list[Beam]]:
    """Return the continuations that a beam search finds behind each prompt, the best first.

    See `jaxblt.inference.beam_search`, which is called for one prompt after another.

    Args:
      run: a causal one.
      prompts: may be empty; a BOS comes before each.
      max_new_bytes: bytes of a continuation at the most.
      beams: rows of a search.
      alphabet: bytes that may be written; None for all.
      length_exponent: orders the results.
      as_trained: prompts have the case of the run's data; False takes every byte as it is.

    Raises:
      ValueError: as of `beam_search`.
    """
    letters = letters_of(run.recipe.data) if as_trained else None
    options: dict[str, Any] = {"max_new_bytes": max_new_bytes, "beams": beams}
    options |= {"alphabet": alphabet, "length_exponent": length_exponent}
    read = prompts if letters is None else [letters.read(prompt) for prompt in prompts]
    return [beam_search(run.decoder, run.decoder_params, prompt, **options) for prompt in read]


def _under(place: Placement, pieces: Iterator[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield pieces that are drawn on the mesh; whoever takes them works outside of it."""
    while True:
        with place.in_force:
            piece = next(pieces, None)
        if piece is None:
            return
        yield piece
