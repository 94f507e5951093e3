"""Scores of answers, against counts in Python."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data import OFFSET, TaskDataConfig, make_dataset
from jaxblt.data.task_data import TaskDataset
from jaxblt.data.tasks import Copy, Parity
from jaxblt.evaluation.tasks import majority_baseline, score
from jaxblt.evaluation.tasks.scores import count_answers, predict_ids, summarise

DATA = TaskDataConfig(task=Copy(max_symbols=5, eval_size=10), seq_len=16, batch_size=4)
TEST = make_dataset(DATA, split="test", mode="eval")


def test_only_answers_count():
    assert score(lambda batch: batch.targets, TEST).figures() == {"accuracy": 1.0, "exact_match": 1.0}
    elsewhere = score(lambda batch: np.where(batch.loss_mask > 0, batch.targets, 0), TEST)
    assert elsewhere.exact == (1.0,)
    assert elsewhere.rows == (10,)
    assert score(lambda batch: np.where(batch.loss_mask > 0, 0, batch.targets), TEST).accuracy == (0.0,)


def test_one_wrong_answer_spoils_its_row_alone():
    def first_answer_wrong(batch):
        predictions = np.array(batch.targets)
        place = int(np.flatnonzero(batch.loss_mask[0])[0])
        predictions[0, place] += 1
        return predictions

    found = score(first_answer_wrong, TEST)  # one row of each of three batches
    answers = sum(int(TEST.batch(step).loss_mask.sum()) for step in range(3))
    assert found.exact == (0.7,)
    assert found.accuracy == ((answers - 3) / answers,)


def test_likeliest_ids_and_counts_of_a_batch():
    batch = TEST.batch(0)
    logits = jnp.asarray(np.eye(260, dtype=np.float32)[batch.targets])
    right, asked = count_answers(predict_ids(logits), TEST_BATCH := _arrays(batch))
    assert right.tolist() == asked.tolist() == np.asarray(TEST_BATCH.loss_mask).sum(1).tolist()


def _arrays(batch):
    return batch.replace(**{name: jnp.asarray(getattr(batch, name)) for name in ("targets", "loss_mask")})


def test_subtasks_are_scored_apart():
    found = summarise(
        np.array([2, 1, 1, 0, 9]), np.array([2, 2, 1, 1, 9]), np.array([0, 0, 1, 1, -1]), ("a", "b")
    )
    assert found.accuracy == (0.75, 0.5)
    assert found.exact == (0.5, 0.5)
    assert found.rows == (2, 2)
    assert (found.mean, found.worst, found.solved) == (0.5, 0.5, 0)
    assert found.figures()["exact_match_b"] == 0.5


def test_a_subtask_is_solved_above_95_percent():
    asked, groups = np.ones(200, int), np.repeat([0, 1], 100)
    right = np.ones(200, int)
    right[:5] = right[100:104] = 0
    assert summarise(right, asked, groups, ("a", "b")).solved == 1


def test_a_subtask_without_rows_is_an_error():
    with pytest.raises(ValueError, match="subtask 'b' has no row"):
        summarise(np.array([1]), np.array([1]), np.array([0]), ("a", "b"))


def test_the_majority_answer_is_near_chance_where_labels_are_balanced():
    assert majority_baseline(Parity(), most=200).accuracy[0] == pytest.approx(0.5, abs=0.11)
    copies = majority_baseline(Copy(symbols=16), most=100)
    assert copies.accuracy[0] == pytest.approx(1 / 16, abs=0.03)
    assert copies.exact[0] < 0.05


def test_the_majority_answer_is_the_commonest_of_training():
    ones = majority_baseline(Parity(min_bits=12, max_bits=12), most=50)
    examples = Parity(min_bits=12, max_bits=12).open("test")
    answers = [
        int(examples.example(i).targets[-1]) - OFFSET for i in np.linspace(0, 999, 50).astype(int).tolist()
    ]
    assert ones.accuracy[0] in (sum(answers) / 50, 1 - sum(answers) / 50)


def test_predictions_are_an_id_for_each_position() -> None:
    for wrong, got in (
        (lambda batch: batch.targets[:1], r"got int32 \(1, "),
        (lambda batch: np.zeros((*batch.targets.shape, 9), np.float32), r"got float32 \(.*, 9\)"),
        (lambda batch: batch.targets.astype(np.float32), "got float32"),
    ):
        with pytest.raises(
            ValueError, match=r"predict must return an id for each position, integers .*" + got
        ):
            score(wrong, TEST)


def test_scores_need_batches() -> None:
    with pytest.raises(ValueError, match="max_batches must be at least 1, got 0"):
        score(lambda batch: batch.targets, TEST, max_batches=0)
    train = make_dataset(TEST.config, split="train", mode="train")
    assert isinstance(train, TaskDataset)
    with pytest.raises(ValueError, match="a split without an end cannot be scored"):
        score(lambda batch: batch.targets, train)
