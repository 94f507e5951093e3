"""Beam searches in rows of a lane's capacity: programs that are compiled ahead, for all prompts that the lane holds."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.data.vocab import VOCAB_SIZE, encode
from jaxblt.inference.beams import Beam, Bounds, Place, begin_beams, go_on
from jaxblt.inference.engine.config import Request, Sampling
from jaxblt.inference.engine.programs import LanePrograms, ask_for
from jaxblt.inference.generate import PIECE
from jaxblt.inference.prompts import Prefix
from jaxblt.inference.rows import take_rows


class LaneSearch:
    """Searches of up to `rows` beams.

    All run in as many rows, so one program serves every number of beams.

    Attributes:
      lane: whose programs read prompts, and whose capacity the rows have.
    """

    def __init__(self, lane: LanePrograms, rows: int, sizes: Sequence[int]) -> None:
        """Prepare nothing on the device.

        Args:
          lane: see the class.
          rows: of every search.
          sizes: of the pieces that the lane reads prompts in, ascending.
        """
        self.lane, self._rows, self._sizes = lane, rows, sizes

    def holds(self, asked: Request, beams: int) -> bool:
        """Return whether a search fits into these rows."""
        return beams <= self._rows and asked.length + asked.max_new_bytes <= self.lane.lane.capacity

    def search(
        self,
        prompt: bytes,
        *,
        max_new_bytes: int,
        beams: int,
        length_exponent: float,
        alphabet: bytes | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[Beam]:
        """Return what `beam_search` finds, whose options these are, of a search that these rows hold."""
        ids = np.asarray(encode(prompt, bos=True), np.int32)
        asked, _ = ask_for([Request(prompt, max_new_bytes, Sampling(alphabet=alphabet))], [ids])
        bounds = Bounds(asked.alphabet[0], asked.limits[0], np.int32(beams))
        place = self._begin(self._read(ids, check))
        return self._go_on(place, bounds, len(prompt), length_exponent, check)

    def warm(self, prompts: Sequence[Prefix]) -> None:
        """Compile the programs behind prompts that were read."""
        # Go on for two pieces: over devices, a program sees what it returned itself as laid out anew
        bounds = Bounds(np.ones(VOCAB_SIZE, bool), np.int32(2 * PIECE), np.int32(1))
        for prompt in prompts:
            self._go_on(self._begin(prompt), bounds, 0)

    def _read(self, ids: np.ndarray, check: Callable[[], None] | None) -> Prefix:
        """Read a prompt piece by piece, so that lanes go on between two of them."""
        prompt, most = None, self._sizes[-1]
        for start in range(0, len(ids), most):
            if check is not None:
                check()
            piece = ids[start : start + most]
            size = next(size for size in self._sizes if size >= len(piece))
            prompt, done = self.lane.read([prompt], [piece], size)
            jax.block_until_ready(done)
        assert prompt is not None, "a prompt begins with BOS"
        return prompt

    def _go_on(self, place: Place, *given: Any) -> list[Beam]:
        return go_on(self.lane.decoder, self.lane.params, place, *given)

    def _begin(self, prompt: Prefix) -> Place:
        return _begin(self._rows, self.lane.lane.capacity, prompt)


@partial(jax.jit, static_argnums=(0, 1))
def _begin(rows: int, most: int, prompts: Prefix) -> Place:
    state, logits, sound = take_rows(prompts, jnp.zeros((1,), jnp.int32))
    return begin_beams(state, jnp.where(sound[:, None], logits, jnp.nan), rows=rows, most=most)
