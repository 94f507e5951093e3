"""Words of a record as features: how often each run of 1 to k letters occurs, which a linear layer turns into logits.

Of text the features are phrases of 1 to k words.

This is the regression that fine-tuned models are held against (`jaxblt.evaluation.label_baselines.score_kmers`), as a
part of a head. `jaxblt.training.start.word_regression` fits it before the first step.
"""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.data.vocab import OFFSET, VOCAB_SIZE
from jaxblt.layers import Linear, named
from jaxblt.models.phrases import phrase_rows
from jaxblt.validation import check_bounds, check_fields
from pallas_kernels.hash_embedding import ngram_rows

Letters = Literal["dna", "protein", "phrases", "text"]
LETTERS = {"dna": "ACGT", "protein": "ACDEFGHIKLMNPQRSTVWY"}
"""What words are made of; case does not count, and U of RNA is T. A word with another letter does not count."""
BITS, TEXT_BITS = 17, 15
"""log2 of the features for phrases and runs of bytes of one length; those that share a hash share a feature."""
LONGEST = {"dna": 6, "protein": 3, "phrases": 3}
"""Letters of the longest words that are worth their parameters, and words of the longest phrases of text."""
MOST_PLACES = 1024
"""Letters of a record up to which each of its places is worth features of its own."""
MOST_LETTERS, MOST_WORDS = 64, 1 << 20
"""The most letters of words, and the most features."""
GAPS = 5
"""Letters between the letters of pairs in proteins of any length; chosen on superfamilies."""
BOXED, BOX = 4, 6
"""Letters of the longest words that count in boxes, and places of a box; chosen on promoters of two bacteria."""


@dataclasses.dataclass(frozen=True)
class WordsConfig:
    """Words of a record beside its pooled state.

    Attributes:
      letters: what records are made of. "phrases" of text are hashed into a table a length (Weinberger et al. 2009,
        0902.2206, section 2, without signs). So are the runs of bytes that "text" stands for, in heads that were stored
        before there were phrases.
      longest: letters of the longest words, or words of the longest phrases; all shorter ones count too.
      both_strands: of DNA, count the words of the other strand as well, so that both strands have one answer.
      places: the first places of a record whose letters are features too, each letter at each place. They serve records
        that are aligned, such as mutants of one sequence or windows around one kind of site.
      box: places of a box. Words of 1 to 4 letters count again in the box of their last letter, for motifs near a
        place. 0 for none.
      gaps: letters between two letters up to which the pair counts too, for each number of letters between.
    """

    letters: Letters = "dna"
    longest: int = 6
    both_strands: bool = False
    places: int = 0
    box: int = 0
    gaps: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "longest", least=1, most=MOST_LETTERS)
        check_bounds(self, "places", least=0)
        check_bounds(self, "box", least=0)
        check_bounds(self, "gaps", least=0, most=MOST_WORDS)
        if self.both_strands and self.letters != "dna":
            raise ValueError(
                f"WordsConfig.both_strands is of DNA, and letters = {self.letters!r}: set it to False"
            )
        if self.gaps and self.is_text:
            raise ValueError(
                f"WordsConfig.gaps = {self.gaps} are of DNA or proteins, and letters = {self.letters!r}: set it to 0"
            )
        if self.places and self.is_text:
            raise ValueError(
                f"WordsConfig.places = {self.places} are of aligned DNA or proteins, and letters = {self.letters!r}: "
                "set it to 0"
            )
        if self.both_strands and self.places:
            raise ValueError(
                f"WordsConfig.places = {self.places} are of one strand, and both_strands is True: set places to 0, or "
                "both_strands to False"
            )
        if self.box and not self.places:
            raise ValueError(
                f"WordsConfig.box = {self.box} parts places, and places = 0: set places to 1 or more, or box to 0"
            )
        if self.size > MOST_WORDS:
            raise ValueError(
                f"WordsConfig.longest = {self.longest}, places = {self.places}, box = {self.box} and gaps = "
                f"{self.gaps} make {self.size:,} features of {self.letters}, and {MOST_WORDS:,} are the most: "
                "lower longest, places or gaps, or raise box"
            )

    @property
    def is_text(self) -> bool:
        """True if features are rows of hash tables."""
        return self.letters not in LETTERS

    @property
    def base(self) -> int:
        """Letters that there are."""
        return len(LETTERS[self.letters])

    @property
    def edges(self) -> tuple[int, ...]:
        """Where words of 1, 2, ... letters begin, pairs by gap, letters at places, words in boxes; and the end."""
        hashed = 1 << (BITS if self.letters == "phrases" else TEXT_BITS)
        words = [hashed if self.is_text else self.base**k for k in range(1, self.longest + 1)]
        apart = [self.base**2] * self.gaps if self.gaps else []
        placed = [self.places * self.base] if self.places else []
        boxed = [self.boxes * self.base**k for k in range(1, BOXED + 1)] if self.boxes else []
        return tuple(np.cumsum([0, *words, *apart, *placed, *boxed]).tolist())

    @property
    def boxes(self) -> int:
        """Boxes that there are."""
        return -(-self.places // self.box) if self.box else 0

    @property
    def words(self) -> int:
        """Words and pairs that there are; behind them come letters at places."""
        return self.edges[self.longest + self.gaps]

    @property
    def size(self) -> int:
        """Features that there are."""
        return self.edges[-1]


def letter_digits(letters: Letters) -> np.ndarray:
    """Return the digit of each id as a letter, Int32[vocabulary]; -1 for ids that are none."""
    digits = np.full(VOCAB_SIZE, -1, np.int32)
    if letters not in LETTERS:
        digits[OFFSET : OFFSET + 256] = np.frombuffer(bytes(range(256)).lower(), np.uint8)
        return digits
    for digit, letter in enumerate(LETTERS[letters]):
        digits[[ord(letter) + OFFSET, ord(letter.lower()) + OFFSET]] = digit
    if letters == "dna":
        digits[[ord("U") + OFFSET, ord("u") + OFFSET]] = LETTERS["dna"].index("T")
    return digits


def word_rows(ids: Int[Array, "B T"], there: Bool[Array, "B T"], config: WordsConfig) -> Int[Array, "B N"]:
    """Return the features that each row has, as often as it has them; `config.size` stands for none.

    A word reads k places next to each other that are all there. Letters at places come behind words.
    """
    digits = jnp.where(there, jnp.asarray(letter_digits(config.letters))[ids], -1)
    if config.is_text:
        own = (
            _byte_rows(digits, config)
            if config.letters == "text"
            else phrase_rows(digits, ids, there, longest=config.longest, bits=BITS)
        )
        begins = jnp.asarray(config.edges[: config.longest])[None, None]
        return jnp.where(own < 0, config.size, own + begins).reshape(len(ids), -1)
    rows = _letter_rows(digits, there, config)
    if not config.both_strands:
        return rows
    complement = jnp.where(digits < 0, -1, config.base - 1 - digits)
    return jnp.concatenate([rows, _letter_rows(complement[:, ::-1], there[:, ::-1], config)], 1)


def count_words(
    ids: Int[Array, "B T"], there: Bool[Array, "B T"], config: WordsConfig
) -> Float[Array, "B W"]:
    """Return how often each row has each feature of `word_rows`."""
    rows = word_rows(ids, there, config)
    return jax.vmap(lambda row: jnp.zeros(config.size, jnp.float32).at[row].add(1.0, mode="drop"))(rows)


def _letter_rows(
    digits: Int[Array, "B T"], there: Bool[Array, "B T"], config: WordsConfig
) -> Int[Array, "B N"]:
    length, size, edges = digits.shape[1], config.size, config.edges
    reach = max(config.longest, BOXED if config.box else 0) - 1
    place = jnp.cumsum(there, 1, dtype=jnp.int32) - 1
    code, whole, found = jnp.zeros_like(digits), jnp.ones(digits.shape, bool), []
    padded = jnp.pad(digits, ((0, 0), (reach, 0)), constant_values=-1)
    for k in range(reach + 1):
        digit = padded[:, reach - k : reach - k + length]
        code, whole = code + digit * config.base**k, whole & (digit >= 0)
        if k < config.longest:
            found.append(jnp.where(whole, edges[k] + code, size))
        if config.box and k < BOXED:
            own = (
                edges[config.longest + config.gaps + 1 + k]
                + place // config.box * config.base ** (k + 1)
                + code
            )
            found.append(jnp.where(whole & (place < config.places), own, size))
    for gap in range(1, config.gaps + 1):
        first = jnp.pad(digits, ((0, 0), (gap + 1, 0)), constant_values=-1)[:, :length]
        pair = edges[config.longest + gap - 1] + first * config.base + digits
        found.append(jnp.where((first >= 0) & (digits >= 0), pair, size))
    if config.places:
        is_placed = (digits >= 0) & (place < config.places)
        found.append(jnp.where(is_placed, config.words + place * config.base + digits, size))
    return jnp.concatenate(found, 1)


def _byte_rows(digits: Int[Array, "B T"], config: WordsConfig) -> Int[Array, "B T K"]:
    """Return the rows of the runs of 1 to k bytes that end at each place; -1 across a hole."""
    size = 1 << TEXT_BITS
    history = jnp.zeros((len(digits), config.longest - 1), jnp.uint32)
    rows = ngram_rows(digits, history, None, sizes=range(1, config.longest + 1), table_size=size)
    at = jnp.arange(digits.shape[1], dtype=jnp.int32)[None]
    run = at - jax.lax.cummax(jnp.where(digits < 0, at, -1), axis=1)
    return jnp.where(run[..., None] > jnp.arange(config.longest)[None, None], rows, -1)


def weigh_words(
    counts: Float[Array, "B W"], rarity: Float[Array, "W"], config: WordsConfig
) -> Float[Array, "B W"]:
    """Return features: (1 + log c) times the word's rarity, 0 for c = 0.

    Those of words of one length are scaled to length 1, and so are those of letters at places.

    Args:
      counts: c of each word in each row.
      rarity: of each word, its inverse frequency among records.
      config: of the words.
    """
    x = jnp.where(counts > 0, 1 + jnp.log(jnp.maximum(counts, 1)), 0) * rarity[None]
    parts = [x[:, a:b] for a, b in zip(config.edges, config.edges[1:], strict=False)]
    return jnp.concatenate(
        [p / jnp.maximum(jnp.linalg.norm(p, axis=1, keepdims=True), 1e-9) for p in parts], 1
    )


class WordLogits(nn.Module):
    """x W + b of a row's words x, in fp32; 0 before W and b are fitted or trained.

    The parameter `rarity` is 1 until it is fitted, and has no gradient.
    """

    config: WordsConfig
    outputs: int

    @nn.compact
    def __call__(self, ids: Int[Array, "B T"], there: Bool[Array, "B T"]) -> Float[Array, "B C"]:
        """Return what the words say of each row's classes, or its number."""
        config = self.config
        ones: Any = named(nn.initializers.ones, None)
        rarity = self.param("rarity", ones, (config.size,), jnp.float32)
        x = weigh_words(count_words(ids, there, config), jax.lax.stop_gradient(rarity), config)
        zeros = nn.initializers.zeros
        sizes, names = {"c": self.outputs}, (None, None)
        return Linear("bw,wc->bc", sizes, names, bias=zeros, kernel_init=zeros, name="outputs")(x)
