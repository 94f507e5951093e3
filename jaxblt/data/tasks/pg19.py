"""PG19, books first published before 1919 (Rae et al. 2019, 1911.05507): a folder of text files for each split."""

from pathlib import Path

from jaxblt.data.config import DataConfig


def pg19(folder: str, *, seq_len: int = 8192, batch_size: int = 8) -> DataConfig:
    """Return data of the layout train/*.txt, validation/*.txt and test/*.txt.

    Each book is a document.

    Args:
      folder: that holds the three.
      seq_len: bytes of a row.
      batch_size: rows in a batch.
    """
    return DataConfig(
        paths=(str(Path(folder) / "*" / "*.txt"),),
        split="names",
        validation_names=("*/validation/*",),
        test_names=("*/test/*",),
        seq_len=seq_len,
        batch_size=batch_size,
        partial="drop",
    )
