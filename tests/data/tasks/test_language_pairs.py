"""Pairs of excerpts: labels are true, and no part shares a byte with another."""

from jaxblt.data.samples import sample_source
from jaxblt.data.tasks import TextPairs
from jaxblt.data.tasks.language_pairs import EXCERPT, write_language_pairs


def test_labels_say_whether_both_excerpts_are_of_one_language(tmp_path):
    write_language_pairs(tmp_path, {"train": 200, "eval": 20, "test": 20})
    texts = [b" ".join(text.split()) for text in sample_source("udhr").documents]
    seen: dict[str, set[int]] = {}
    for part in ("train", "eval", "test"):
        lines = (tmp_path / f"language_pairs.{part}.tsv").read_bytes().splitlines()
        for line in lines:
            label, first, second, *excerpts = line.split(b"\t")
            assert (first == second) == (label == b"1")
            for which, excerpt in zip((first, second), excerpts, strict=True):
                assert len(excerpt) == EXCERPT
                assert excerpt in texts[int(which)]
            if first == b"0":
                place = texts[0].index(excerpts[0])
                seen.setdefault(part, set()).update(range(place, place + EXCERPT))
    assert not seen["train"] & (seen["eval"] | seen["test"])
    examples = TextPairs(path=str(tmp_path), max_bytes=EXCERPT).open("train")
    assert examples.count == 200
    assert examples.lengths.max() == 2 * EXCERPT + 3
    assert 0.35 < (examples.answers == examples.answers.max()).mean() < 0.65
