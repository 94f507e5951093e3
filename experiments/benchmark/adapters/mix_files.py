"""The files behind a mix: books, film reviews, a genome, its proteins, and one text in many languages."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxblt.data.sources import parse_fasta
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.opening import read_all

TEST_SHARE = 0.2
"""The share, at its end, that tests a file without a test file beside it."""


class Texts(NamedTuple):
    """Text of each domain to train on, and to test on."""

    train: dict[str, bytes]
    test: dict[str, bytes]


def read_books(folder: str) -> tuple[bytes, bytes]:
    """Return text to train and to test on: `books/train/*.txt` and `books/test/*.txt`, of other authors."""
    return tuple(_joined(Path(folder) / "books" / split / "*.txt", bytes) for split in ("train", "test"))  # type: ignore[return-value]


def read_natural(folder: str) -> Texts:
    """Return five domains: books; `reviews/train*.tsv` and `reviews/test*.tsv`, text last; DNA; proteins; languages.

    DNA is of `ecoli/*.fa`, proteins of `ecoli/*.faa`, languages of `languages/*.txt`; the last fifth of each file is
    for the test. Names may end in .xz or .gz.
    """
    root = Path(folder)
    books = read_books(folder)
    parts = {
        "books": books,
        "reviews": tuple(_joined(root / "reviews" / f"{s}*.tsv*", _reviews) for s in ("train", "test")),
        "dna": _cut(root / "ecoli" / "*.fa*", lambda text: _records(text, b""), suffix=".fa"),
        "proteins": _cut(root / "ecoli" / "*.faa*", lambda text: _records(text, b"\n"), suffix=".faa"),
        "languages": _cut(root / "languages" / "*.txt*", bytes, suffix=".txt"),
    }
    return Texts({name: part[0] for name, part in parts.items()}, {n: part[1] for n, part in parts.items()})


def _joined(pattern: Path, content: Callable[[bytes], bytes]) -> bytes:
    return b"\n".join(content(read_all(file)) for file in expand(pattern))


def _cut(pattern: Path, content: Callable[[bytes], bytes], suffix: str) -> tuple[bytes, bytes]:
    """Return the first four fifths of every file, and their ends."""
    files = [file for file in expand(pattern) if suffix in file.suffixes]
    if not files:
        raise FileNotFoundError(
            f"{pattern} matches no {suffix} file: see `read_natural` for the folder's layout"
        )
    texts = [content(read_all(file)) for file in files]
    places = [round(len(text) * (1 - TEST_SHARE)) for text in texts]
    train = b"\n".join(text[:place] for text, place in zip(texts, places, strict=True))
    return train, b"\n".join(text[place:] for text, place in zip(texts, places, strict=True))


def _reviews(table: bytes) -> bytes:
    return b"\n".join(line.rsplit(b"\t", 1)[-1] for line in table.splitlines() if line)


def _records(fasta: bytes, between: bytes) -> bytes:
    return between.join(letters for _, letters in parse_fasta(fasta, "FASTA"))
