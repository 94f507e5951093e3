"""Bytes as the text and the tokens of a response."""

import codecs
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxblt.data.vocab import OFFSET
from jaxblt.inference.engine import Piece

SPECIAL = {0: "<boe>", 1: "<bos>", 2: "<eos>", 3: "<pad>"}


class Text:
    """The text of a response as its bytes come: whole characters of UTF-8, and U+FFFD for bytes that are none."""

    def __init__(self) -> None:
        """Begin without bytes."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def add(self, data: bytes, *, last: bool) -> str:
        """Return the characters that are whole with the next bytes; with the last bytes all of them."""
        text = self._decoder.decode(data, last)
        self._characters += len(text)
        return text

    @property
    def characters(self) -> int:
        """Characters so far."""
        return self._characters

    def offsets(self, data: bytes) -> list[int]:
        """Return where in the text the character of each of the next bytes begins; call it before `add`."""
        ahead = codecs.getincrementaldecoder("utf-8")("replace")
        ahead.setstate(self._decoder.getstate())
        at, found = self._characters, []
        for i in range(len(data)):
            at += len(ahead.decode(data[i : i + 1]))
            # A byte may end a sequence that is broken off before it, so that two characters come at once
            found.append(at if ahead.getstate()[0] else at - 1)
        return found


def logprobs_of(piece: Piece, offsets: list[int], top: int) -> dict[str, list[Any]]:
    """Return the log-probabilities of a piece as a response has them, with the `top` most probable tokens."""
    tokens = [byte + OFFSET for byte in piece.data]
    return tell_tokens(tokens, piece.logprobs, piece.top_ids, piece.top_logprobs, offsets, top)


def tell_tokens(
    tokens: Sequence[int],
    nats: np.ndarray,
    top_ids: np.ndarray,
    top_nats: np.ndarray,
    offsets: list[int],
    top: int,
) -> dict[str, list[Any]]:
    """Return the log-probabilities of ids as a response has them.

    Args:
      tokens: the ids.
      nats: of each id.
      top_ids: the most probable ids in each place, best first.
      top_nats: of these.
      offsets: where each id begins in the text.
      top: how many of the most probable ids are named.
    """
    return {
        "tokens": [name_token(token) for token in tokens],
        "token_logprobs": [round(x, 6) for x in nats.tolist()],
        "top_logprobs": [
            {name_token(i): round(x, 6) for i, x in zip(ids[:top], values[:top], strict=True)}
            for ids, values in zip(top_ids.tolist(), top_nats.tolist(), strict=True)
        ],
        "text_offset": offsets,
    }


def name_token(token: int) -> str:
    """Return an id as text: the character of an ASCII byte, or "bytes:\\xff"."""
    byte = token - OFFSET
    return SPECIAL[token] if byte < 0 else chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"
