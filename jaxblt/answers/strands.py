"""Both strands of nucleic acids: which bytes have a complement."""

from jaxblt.data.letters import Letters
from jaxblt.data.sources import DocumentSource, reverse_complement

IUPAC = b"ACGTRYSWKMBDHVN"
"""Nucleotide codes with a complement (IUPAC-IUB 1984); lower case has one too. U has none that can be undone."""

_ALLOWED = IUPAC + IUPAC.lower()
CHUNK = 1 << 20


def check_strands(source: DocumentSource, letters: Letters) -> None:
    """Check that both strands have a reading, and equally many targets that count.

    Raises:
      ValueError: a byte has no complement, or a scored character's complement is not scored.
    """
    check_nucleotides(source)
    scored = (letters.scored or "").encode()
    if set(reverse_complement(scored)) != set(scored):
        raise ValueError(
            f"scored={letters.scored!r} has characters whose complement is not scored: score one strand, or take every "
            "byte with as_trained=False (--no-as-trained)"
        )


def check_nucleotides(source: DocumentSource) -> None:
    """Raise ValueError for the first byte without a complement.

    The message names record, position (from 0) and byte.
    """
    for i in range(len(source)):
        length = int(source.lengths[i])
        for start in range(0, length, CHUNK):
            part = source.read(i, start, min(start + CHUNK, length))
            left = part.translate(None, _ALLOWED)
            if left:
                place = start + part.index(left[:1])
                raise ValueError(
                    f"record {source.names[i]!r} has byte {left[:1]!r} at position {place}, which has no complement: "
                    f"both strands take {IUPAC.decode()} in either case; score one strand, or replace the byte"
                )
