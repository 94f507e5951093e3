"""Stories of bAbI's layout and books, made up."""

from pathlib import Path

BOOK = b"# Title\n\nIt was late.  Who\ncame? Nobody!\n" + b"".join(b"Line %d. " % i for i in range(400))
PLACES = ("attic", "barn", "cellar")


def write_stories(folder: Path) -> None:
    """Task 1 with three answers and task 2 with eleven, of subset "en", and a book for each split in `books`."""
    (folder / "en").mkdir()
    stories = {"train": [f"Ann{i}" for i in range(60)], "test": ["Eve", "Joe", "Una"]}
    for part, names in stories.items():
        text = "".join(story(name, PLACES[i % 3]) for i, name in enumerate(names))
        (folder / "en" / f"qa1_{part}.txt").write_text(text)
    (folder / "en" / "qa2_test.txt").write_text("".join(story(f"A{i}", f"place{i}") for i in range(11)))
    for part in ("train", "validation", "test"):
        (folder / "books" / part).mkdir(parents=True)
        (folder / "books" / part / "1.txt").write_bytes(BOOK.replace(b"Line", part.encode()))


def story(name: str, place: str) -> str:
    """Two statements and a question."""
    return f"1 {name} woke up.\n2 {name} went to the {place}.\n3 Where is {name}? \t{place}\t2\n"
