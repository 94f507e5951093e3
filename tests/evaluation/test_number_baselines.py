"""Numbers by words and neighbours: a share of letters is found again, near-copies have their neighbour's number."""

import numpy as np
import pytest

from jaxblt.cli.label_comparison import compare, is_comparable
from jaxblt.data import LabelledDataConfig
from jaxblt.evaluation.number_baselines import number_baselines, score_numbers


@pytest.fixture
def shares(tmp_path):
    """Records of DNA with their share of G and C."""
    rng, rows = np.random.default_rng(0), []
    for i in range(150):
        odds = rng.dirichlet([2, 2, 2, 2])
        letters = "".join(rng.choice(list("ACGT"), 40, p=odds))
        part = ("train", "train", "train", "validation", "test")[i % 5]
        rows.append(f"{letters},{sum(c in 'GC' for c in letters) / 40},{part}")
    path = tmp_path / "shares.csv"
    path.write_text("\n".join(["sequence,label,split", *rows]) + "\n", encoding="utf-8")
    return LabelledDataConfig(paths=(str(path),), target="number", split="column", seq_len=64, batch_size=16)


def test_words_find_a_share_of_letters_and_the_mean_tells_nothing(shares):
    found = number_baselines(shares)
    assert list(found) == ["mean", "nearest", "words"]
    assert found["mean"]["spearman"] == 0
    assert found["words"]["spearman"] > 0.9
    assert found["words"]["rmse"] < found["nearest"]["rmse"] < found["mean"]["rmse"]
    assert is_comparable(shares)
    for own, said in (
        ({"rmse": 0.2}, "a simple baseline is ahead: words has spearman 0.9"),
        ({"rmse": 0.0, "spearman": 1.0}, "this run is no worse than the baselines: spearman 1.0000"),
    ):
        comparison = compare(shares, own)
        assert comparison.lines[-1].startswith(said)
        assert comparison.lines[0].split() == ["test", "split", "rmse", "spearman"]


def test_a_copy_of_a_training_record_has_its_number(tmp_path):
    rows = [f"{'ACGT'[i % 4]}MKVLINQ{'ACDEFGHIKLMNPQRSTVWY'[i]}WERTY,{i},train" for i in range(20)]
    copies = [row.replace("train", part) for row in rows[:8] for part in ("validation", "test")]
    path = tmp_path / "copies.csv"
    path.write_text("\n".join(["sequence,label,split", *rows, *copies]) + "\n", encoding="utf-8")
    data = LabelledDataConfig(paths=(str(path),), target="number", split="column", seq_len=64, batch_size=16)
    assert number_baselines(data)["nearest"] == pytest.approx({"rmse": 0, "pearson": 1, "spearman": 1})
    with pytest.raises(ValueError, match=r"data.target is 'class': use label_baselines"):
        number_baselines(LabelledDataConfig(paths=(str(path),), split="column"))
    path.write_text("\n".join(["sequence,label,split", *rows, *copies[1::2]]) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="data has no validation record: change the split"):
        number_baselines(data)


def test_rows_of_other_lengths_keep_their_own_numbers(tmp_path):
    """Buckets bring records in another order than files do."""
    rng, rows = np.random.default_rng(1), []
    for i in range(100):
        letters = "".join(rng.choice(list("ACGT"), 20 + 30 * (i // 5 % 2), p=rng.dirichlet([2, 2, 2, 2])))
        share = sum(c in "GC" for c in letters) / len(letters)
        rows.append(f"{letters},{share},{('train', 'train', 'train', 'validation', 'test')[i % 5]}")
    path = tmp_path / "lengths.csv"
    path.write_text("\n".join(["sequence,label,split", *rows]) + "\n", encoding="utf-8")
    options = {"target": "number", "split": "column", "seq_len": 64, "batch_size": 16, "buckets": (32,)}
    assert number_baselines(LabelledDataConfig(paths=(str(path),), **options))["words"]["spearman"] > 0.8


def test_figures_by_hand():
    found = score_numbers(np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 4.0]))
    assert found["rmse"] == pytest.approx((1 / 3) ** 0.5)
    assert found["spearman"] == pytest.approx(1)
