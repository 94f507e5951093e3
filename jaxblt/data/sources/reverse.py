"""The other strand: reverse complement of nucleic acids, IUPAC codes and case kept."""

from jaxblt.data.sources.base import SourceOver, check_range

_CODES = b"ACGTRYSWKMBDHVN"
_OTHER = b"TGCAYRSWMKVHDBN"
_TABLE = bytes.maketrans(_CODES + _CODES.lower(), _OTHER + _OTHER.lower())


def reverse_complement(bases: bytes) -> bytes:
    """Return the opposite strand, read 5' to 3'.

    RC(RC(x)) = x for every byte string. A<->T, C<->G, R<->Y, K<->M, B<->V, D<->H; S, W, N and every byte that is no
    nucleotide code stay as they are (IUPAC-IUB 1984). U stays too: complementing it would turn RNA into DNA and could
    not be undone.
    """
    return bases.translate(_TABLE)[::-1]


class ReverseComplement(SourceOver):
    """Every document as its reverse complement, read lazily: base j is the complement of base n-1-j."""

    def read(self, i: int, start: int, stop: int) -> bytes:
        check_range(self, i, start, stop)
        length = int(self.source.lengths[i])
        return reverse_complement(self.source.read(i, length - stop, length - start))
