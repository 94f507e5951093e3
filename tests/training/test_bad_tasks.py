"""Several tasks that do not go together are refused in one line."""

from dataclasses import replace

import pytest

from jaxblt.data import LabelledDataConfig, LabelTask
from jaxblt.models import LabelHeadConfig, LabellerConfig, TaskHead, TaskHeadsConfig
from jaxblt.training.best import Standing, followed
from jaxblt.training.objectives.objectives import Classify, MultiTask, Regress, TaskLoss
from jaxblt.training.recipe import Recipe
from jaxblt.training.train_config import TrainConfig
from tests.finetuning import MODEL
from tests.training.objectives.test_task_scores import KEY, LABELS, NUMBER, batch_of, tasks_of


def test_bad_objectives_of_several_tasks():
    with pytest.raises(
        ValueError, match="weighting 'uncertainty' learns the weights of tasks, and they are given"
    ):
        tasks_of("uncertainty", kind=2.0)
    with pytest.raises(ValueError, match=r"every task of MultiTask\.tasks has weight 0"):
        tasks_of(kind=0.0, size=0.0)
    with pytest.raises(ValueError, match=r"must be at least one, with different names, got \('a', 'a'\)"):
        MultiTask((TaskLoss("a", Classify()), TaskLoss("a", NUMBER)))
    with pytest.raises(
        ValueError, match=r"task 'size' needs its labels in batch\.labels, got \['kind'\]: set data"
    ):
        tasks_of()(KEY, batch_of({"kind": LABELS["kind"]}))
    with pytest.raises(ValueError, match="of task 'a' asks for 'positions', and tasks are of rows"):
        TaskHead("a", LabelHeadConfig(target="positions"))


TASKS = (LabelTask("kind", classes=("a", "b")), LabelTask("size", "number"))
RECIPE = Recipe(
    name="r",
    model=LabellerConfig(
        MODEL, TaskHeadsConfig((TaskHead("kind"), TaskHead("size", LabelHeadConfig("number", 1))))
    ),
    data=LabelledDataConfig(paths=("r.csv",), tasks=TASKS),
    objective=tasks_of(),
)


def test_heads_labels_and_losses_go_together():
    kind = replace(RECIPE.data, tasks=TASKS[:1])
    with pytest.raises(
        ValueError, match=r"has tasks \['kind', 'size'\], data\.tasks \['kind'\] and model\.head \['ki"
    ):
        replace(RECIPE, data=kind)
    with pytest.raises(ValueError, match=r"objective has tasks \[\], data\.tasks \['kind', 'size'\]"):
        replace(RECIPE, objective=Classify())
    with pytest.raises(
        ValueError, match=r"weighting is 'uncertainty' and model\.head\.uncertainty is False: only"
    ):
        replace(RECIPE, objective=tasks_of("uncertainty"))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"classes": ("a", "b", "c")}, r"head has 2 outputs for a 'class', and .* 'class' of 3"),
        ({"target": "number"}, "head has 2 outputs for a 'class', and .* 'number' of 2"),
        (
            {"tasks": (LabelTask("kind", classes=("a", "b", "c")), TASKS[1])},
            "head of task 'kind' has 2 outputs",
        ),
    ],
)
def test_a_head_has_an_output_for_each_class(labels, said):
    """Else losses of classes without one would be NaN, and a run would end for no cause that it could name."""
    data = LabelledDataConfig(paths=("r.csv",), **labels)
    one = {"model": LabellerConfig(MODEL, LabelHeadConfig()), "objective": Classify()}
    with pytest.raises(ValueError, match=said):
        replace(RECIPE, data=data, **({} if data.tasks else one))


def test_a_run_is_judged_by_one_named_figure():
    assert followed(RECIPE) == ("loss", False)
    by = lambda figure, **fields: replace(RECIPE, train=TrainConfig(best_by=figure), **fields)  # noqa: E731
    assert followed(by("kind/mcc")) == ("kind/mcc", True)
    assert followed(by("size/rmse")) == ("size/rmse", False)
    with pytest.raises(
        ValueError, match=r"train\.best_by = 'size/mcc' is no figure of MultiTask: take one of loss, kin"
    ):
        by("size/mcc")
    data = LabelledDataConfig(paths=("r.csv",), target="number")
    model = LabellerConfig(MODEL, LabelHeadConfig("number", 1))
    with pytest.raises(
        ValueError, match=r"train\.best_by = 'mcc' is no figure of Regress: take one of loss, rmse, p"
    ):
        by("mcc", data=data, objective=Regress(), model=model)
    first = Standing(2, 3, higher=True, meta={}, figure="kind/mcc")
    first.note(0.5, 1)
    assert Standing(2, 3, higher=True, meta=first.meta, figure="kind/mcc").best == [(0.5, 1)]
    assert Standing(2, 3, higher=False, meta=first.meta, figure="size/rmse").best == []
