"""The config of a router: what scores each byte, and how a patch comes back to its bytes."""

from dataclasses import dataclass
from typing import Literal

from jaxblt.validation import check_bounds, check_fields, check_read

Score = Literal["content_similarity", "entropy_based", "pattern_aware"]
Strategy = Literal["content_similarity", "entropy_based", "pattern_aware", "adaptive_hybrid"]
"""What a boundary's score is made of; `BoundaryConfig` says what each is."""
Matrix = tuple[tuple[float, float, float, float], ...]
"""A position weight matrix: a row a place, with weights of A, C, G and T."""

MOST_MOTIF = 64
"""Bytes of the longest motif: each byte's response is a sum over as many."""
IUPAC = {
    "A": "A",
    "C": "C",
    "G": "G",
    "T": "T",
    "U": "T",
    "R": "AG",
    "Y": "CT",
    "S": "CG",
    "W": "AT",
    "K": "GT",
    "M": "AC",
    "B": "CGT",
    "D": "AGT",
    "H": "ACT",
    "V": "ACG",
    "N": "ACGT",
}
"""The bases that each letter of a motif stands for."""


@dataclass(frozen=True, kw_only=True)
class BoundaryConfig:
    """The router of a byte-patched model with `PatcherConfig(mode="learned")` (H-Net, 2507.07955, sec. 2).

    A score s_t is read off bytes up to t. p_t = sigmoid((s_t - theta) / tau), and 1 at a document's first byte. The
    patch of byte t ends there iff p_t > 1/2. s_t is

      content_similarity  (1 - cos(W_q h_t, W_k h_{t-1})) / 2, h the encoder's output, W the identity at first
      entropy_based       H_t of the frozen entropy model
      pattern_aware       the largest response of the motifs that end at t, plus a number by position modulo 3
      adaptive_hybrid     sum over `parts` k of pi_k (s_k - center_k) / spread_k, pi = softmax(W_g h_t + 4 d_k)

    d_k in 0..8 says how clearly score k parts bytes in two (`mixture`), a running mean over steps without a gradient. A
    score that does not part them would be noise in the sum, and predictions tell the gate too little of it.

    Leave dropout out of the encoder where content is compared. Other units are dropped at each byte, so that neighbours
    differ more in training than in use.

    A full match of a given motif has response 1, and a byte that fits no place of it adds 0. Given motifs stay as they
    are. Learned ones begin as strings that the data hold more often than chance, and are trained.

    Attributes:
      strategy: what is scored.
      plain: H-Net's own form, p_t = s_t; an untrained encoder then cuts hardly anywhere. Content alone has it.
      motifs: IUPAC strings such as "TATAAT", of DNA in either case.
      matrices: position weight matrices.
      learned_motifs: filters over all bytes.
      motif_length: bytes of each of those.
      codon_phase: score the position modulo 3 as well.
      parts: scores of the hybrid.
      unmerge: "gather" gives byte t c_t U z_j + W h_t of its latest patch j, W the identity at first; "attention" h_t +
        c_t times what it reads from `look_back` patches. c_t is the router's confidence, 1 with the gradient of p_t or
        of 1 - p_t.
      ratio_weight: of the loss that leads to the patcher's `target` (H-Net, eq. 10).

    Raises:
      ValueError: an option is out of range or is not read; motifs are missing, too long, or say nothing.
    """

    strategy: Strategy = "content_similarity"
    plain: bool = False
    motifs: tuple[str, ...] = ()
    matrices: tuple[Matrix, ...] = ()
    learned_motifs: int = 0
    motif_length: int = 8
    codon_phase: bool = False
    parts: tuple[Score, ...] = ("content_similarity", "pattern_aware")
    unmerge: Literal["gather", "attention"] = "gather"
    ratio_weight: float = 0.03

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "learned_motifs", "ratio_weight", least=0)
        check_bounds(self, "motif_length", least=1, most=MOST_MOTIF)
        check_read(self, "plain", needed="content_similarity", is_read=self.strategy == "content_similarity")
        check_read(self, "parts", needed="adaptive_hybrid", is_read=self.strategy == "adaptive_hybrid")
        if len(set(self.scores)) != len(self.scores) or not self.scores:
            raise ValueError(f"BoundaryConfig.parts must be different scores, at least one, got {self.parts}")
        patterns = "pattern_aware" in self.scores
        for name in ("motifs", "matrices", "learned_motifs", "codon_phase"):
            check_read(self, name, needed="pattern_aware", is_read=patterns)
        check_read(self, "motif_length", needed="learned_motifs above 0", is_read=self.learned_motifs > 0)
        if patterns:
            self._check_motifs()

    @property
    def scores(self) -> tuple[Score, ...]:
        """The scores that are made."""
        return self.parts if self.strategy == "adaptive_hybrid" else (self.strategy,)

    @property
    def reads_entropies(self) -> bool:
        """True if a frozen entropy model is needed."""
        return "entropy_based" in self.scores

    @property
    def given(self) -> tuple[Matrix, ...]:
        """The motifs that are not drawn, as matrices."""
        spelled = tuple(tuple(_row(letter) for letter in motif) for motif in self.motifs)
        return spelled + self.matrices

    @property
    def longest(self) -> int:
        """Bytes of the longest motif."""
        drawn = (self.motif_length,) if self.learned_motifs else ()
        return max((*map(len, self.given), *drawn))

    def _check_motifs(self) -> None:
        if not (self.motifs or self.matrices or self.learned_motifs):
            raise ValueError(
                "pattern_aware has no motifs: set motifs to IUPAC strings such as ('TATAAT',), matrices, or "
                "learned_motifs to a number of filters"
            )
        for motif in self.motifs:
            unknown = sorted(set(motif.upper()) - IUPAC.keys())
            if unknown:
                raise ValueError(
                    f"motif {motif!r} has {', '.join(unknown)}, which are no IUPAC codes ({''.join(IUPAC)}): spell "
                    "DNA, or use learned_motifs for other bytes"
                )
        for matrix in self.given:
            if not 1 <= len(matrix) <= MOST_MOTIF:
                raise ValueError(f"a motif has {len(matrix)} places, and 1..{MOST_MOTIF} are read: cut it")
            if all(len(set(row)) == 1 for row in matrix):
                raise ValueError(
                    f"motif {matrix} weighs all bases alike at every place: it matches everywhere"
                )


def _row(letter: str) -> tuple[float, float, float, float]:
    a, c, g, t = (float(base in IUPAC[letter.upper()]) for base in "ACGT")
    return a, c, g, t
