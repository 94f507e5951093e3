"""A run on a task: trained, read back and scored as any other."""

from dataclasses import replace

import pytest

import configs
import jaxblt
from jaxblt.data import LabelledDataConfig, TaskDataConfig
from jaxblt.data.tasks import (
    MQAR,
    Babi,
    Babilong,
    Copy,
    ListOps,
    ListOpsFiles,
    Parity,
    Pathfinder,
    PatternMatching,
    PixelClasses,
    TextLabels,
    TextPairs,
)
from jaxblt.evaluation.tasks.evaluate import score_run
from jaxblt.models import ByteClassifierConfig, ByteLMConfig, LabelHeadConfig, LabellerConfig, StackConfig
from jaxblt.training.loop import fit
from jaxblt.training.objectives.objectives import Classify
from jaxblt.training.stored.resolved import recipe_from_json
from jaxblt.training.stored.serialize import to_json
from tests.training.tiny import TinyConfig, tiny_recipe

DATA = TaskDataConfig(task=Copy(symbols=4, max_symbols=4, eval_size=20), seq_len=12, batch_size=8)


def test_a_task_is_trained_and_scored(tmp_path):
    fit(replace(tiny_recipe(steps=6, eval_every=6, mesh={"data": 8}), data=DATA), tmp_path / "run")
    run = jaxblt.load(tmp_path / "run")
    assert run.recipe.data == DATA
    scores = score_run(run)
    answers = sum(int(task.scored.sum()) for task in map(Copy.open(DATA.task, "test").example, range(20)))
    assert scores.rows == (20,)
    assert scores.accuracy[0] * answers == pytest.approx(round(scores.accuracy[0] * answers))
    assert run.evaluate("test")["bytes"] == answers


def test_a_run_on_documents_has_no_task(tmp_path):
    class OnDocuments:
        recipe = tiny_recipe()

    with pytest.raises(ValueError, match="run 'tiny' learned no task: its data is a DataConfig"):
        score_run(OnDocuments())


def test_a_run_on_labels_is_scored_by_its_evaluation():
    """Its logits are a row's, not a position's."""

    class OnLabels:
        recipe = replace(tiny_recipe(), data=TaskDataConfig(task=ListOps(), seq_len=2001, labels="symbol"))

    with pytest.raises(ValueError, match=r"was trained on labels: run\.evaluate\('test'\) scores it"):
        score_run(OnLabels())


def test_a_model_needs_an_id_for_everything_the_task_shows():
    data = TaskDataConfig(task=MQAR(symbols=1000), seq_len=64)
    with pytest.raises(
        ValueError, match=r"model.vocab_size must be at least 1004, the ids of the data, got 260"
    ):
        replace(tiny_recipe(), data=data)
    assert replace(tiny_recipe(model=TinyConfig(vocab_size=1004)), data=data).data.vocab_size == 1004


@pytest.mark.parametrize(
    ("task", "labels", "classes"),
    [
        (ListOps(), "symbol", 10),
        (ListOpsFiles(path="data"), "symbol", 10),
        (Parity(), "symbol", 2),
        (PatternMatching(), "symbol", 2),
        (TextLabels(path="data", labels=("a", "b", "c")), "digit", 3),
        (TextPairs(path="data"), "digit", 2),
        (Pathfinder(), "symbol", 2),
        (PixelClasses(path="data"), "symbol", 10),
        (Babilong(path="data", books="books"), "digit", 10),
        (Babi(path="data"), "symbol", 256),
    ],
)
def test_a_classifier_needs_an_output_for_each_answer(task, labels, classes):
    """Else the loss of an answer without one is NaN."""
    data = TaskDataConfig(task=task, seq_len=task.length, labels=labels)
    assert data.num_classes == classes

    def recipe(model):
        return replace(tiny_recipe(), data=data, model=model, objective=Classify())

    assert recipe(ByteClassifierConfig(num_classes=classes)).data == data
    assert recipe(LabellerConfig(ByteLMConfig(), LabelHeadConfig(outputs=classes))).data == data
    if classes > 2:
        said = f"labels of data may be of {classes} classes, and model.num_classes is 2: set it to {classes}"
        with pytest.raises(ValueError, match=said):
            recipe(ByteClassifierConfig())
        with pytest.raises(ValueError, match=f"of {classes} classes, and model.head.outputs is 2: set it"):
            recipe(LabellerConfig(ByteLMConfig(), LabelHeadConfig()))


def test_a_classifier_of_labelled_records_needs_an_output_for_each_class():
    data = LabelledDataConfig(paths=("r.csv",), classes=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"may be of 3 classes, and model\.num_classes is 2: set it to 3"):
        replace(tiny_recipe(), data=data, model=ByteClassifierConfig(), objective=Classify())


def test_a_model_is_asked_for_what_it_answers():
    """Else shapes of logits and targets differ, which jax tells without naming either."""
    data = TaskDataConfig(task=Parity(max_bits=10), seq_len=12, labels="symbol")
    said = (
        "ByteClassifierConfig answers with a class for each row, and the objective is NextByte: use Classify"
    )
    with pytest.raises(ValueError, match=said):
        replace(tiny_recipe(), data=data, model=ByteClassifierConfig())
    stack = StackConfig(dim=8, num_layers=1, pattern=("recurrence",))
    with pytest.raises(
        ValueError, match="objective Classify asks for labels, and model ByteLMConfig answers"
    ):
        replace(tiny_recipe(), data=data, model=ByteLMConfig(stack=stack), objective=Classify())


@pytest.mark.parametrize(
    ("name", "task"),
    [
        *((name, name) for name in ("mqar", "copy", "repeat_copy", "parity", "babi")),
        *(("listops", "listops_files"), ("imdb", "text_labels"), ("pattern", "pattern_matching")),
    ],
)
def test_recipes_of_tasks_are_stored_under_short_names(name, task):
    text = to_json(configs.get(name))
    assert recipe_from_json(text) == configs.get(name)
    assert '"class": "task_data"' in text
    assert f'"class": "{task}"' in text
