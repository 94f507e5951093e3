"""What tells data from others of the same size: any byte of small data, and blocks of large ones."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxblt.data import BytesSource, LabelledDataConfig, TaskDataConfig, make_dataset
from jaxblt.data.sampled import BLOCK, BLOCKS, hash_parts, sample_bytes
from jaxblt.data.tasks import MQAR, TextLabels


def digest(documents: list[bytes]) -> str | None:
    return hash_parts(sample_bytes(BytesSource(documents)))


def test_any_byte_of_small_data_and_where_documents_end() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.bytes(length) for length in (0, 3 * BLOCK, 1, 0, 5 * BLOCK + 7, 30, 0)]
    found = digest(documents)
    assert digest(list(documents)) == found
    for document, place in ((1, 0), (1, 2 * BLOCK), (2, 0), (4, BLOCK + 5), (4, -1), (5, 29)):
        changed = bytearray(documents[document])
        changed[place] ^= 1
        assert digest([*documents[:document], bytes(changed), *documents[document + 1 :]]) != found
    assert digest([documents[1] + documents[2], *documents[3:]]) != digest(documents[1:])
    assert digest([]) is not None


def test_of_large_data_blocks_are_read_that_are_spread_evenly() -> None:
    reads = []

    class Large(BytesSource):
        def read(self, i: int, start: int, stop: int) -> bytes:
            reads.append((i, start, stop))
            return super().read(i, start, stop)

    list(sample_bytes(Large([bytes(BLOCK * BLOCKS)] * 3)))
    assert sum(stop - start for _, start, stop in reads) == BLOCK * BLOCKS
    assert (reads[0], reads[-1]) == ((0, 0, BLOCK), (2, BLOCK * (BLOCKS - 1), BLOCK * BLOCKS))
    assert {i for i, _, _ in reads} == {0, 1, 2}


def tsv(rows: list[tuple[str, str]]) -> str:
    return "sequence\tlabel\n" + "".join(f"{sequence}\t{label}\n" for sequence, label in rows)


def samples(config: Any, file: Path, texts: list[str]) -> list[Any]:
    """The hashes of a config's data, one for each text of its file."""
    found = []
    for text in texts:
        file.write_text(text, encoding="utf-8")
        found.append(make_dataset(config).extent["sample"])
    return found


def test_labels_and_the_examples_of_a_task_are_data_too(tmp_path: Path) -> None:
    records = "sequence\tlabel\n" + "ACGT\ta\nGGTT\tb\nCCAA\ta\n" * 4
    texts = "pos\tgood\nneg\tpoor\n"
    options: dict[str, Any] = {"seq_len": 8, "batch_size": 2}
    labelled = LabelledDataConfig(paths=(str(tmp_path / "r.tsv"),), classes=("a", "b"), **options)
    task = TaskDataConfig(task=TextLabels(path=str(tmp_path), max_bytes=6), **options)
    for config, name, text in ((labelled, "r.tsv", records), (task, "train.tsv", texts)):
        changed = [
            text.replace("oo", "uu").replace("A", "T"),
            text.replace("pos", "neg").replace("\ta", "\tb"),
            text,
        ]
        found = samples(config, tmp_path / name, [text, *changed])
        assert len(set(found)) == 3
        assert None not in found
        assert found[0] == found[3]
    drawn = TaskDataConfig(task=MQAR(), seq_len=MQAR().length)
    assert make_dataset(drawn).extent["sample"] is None
