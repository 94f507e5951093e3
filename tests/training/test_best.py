"""The best evaluations: which are kept, when a run ends by them, and what a later process knows of them."""

import dataclasses
from pathlib import Path

import pytest

import jaxblt
from jaxblt.training import trainer
from jaxblt.training.best import Standing
from jaxblt.training.loop import fit
from jaxblt.training.stored.checkpoint import list_steps
from jaxblt.training.stored.resolved import checkpoint_dir
from tests.training.tiny import Letters, tiny_recipe

FIGURES = (3.0, 2.0, 2.5, 2.0, 2.2, 2.3, 1.0)


def noted(
    figures: tuple[float, ...], *, keep: int = 2, patience: int | None = 3, higher: bool = False
) -> Standing:
    standing = Standing(keep, patience, higher=higher, meta={}, figure="loss")
    for step, figure in enumerate(figures, 1):
        standing.note(figure, step)
    return standing


def test_the_best_are_remembered_and_equal_figures_do_not_displace() -> None:
    assert noted(FIGURES[:5]).best == [(2.0, 2), (2.0, 4)]
    assert noted(FIGURES).best == [(1.0, 7), (2.0, 2)]
    assert noted(FIGURES, higher=True).best == [(3.0, 1), (2.5, 3)]
    assert noted(FIGURES, keep=0).best == [(1.0, 7)]


def test_patience_counts_evaluations_in_a_row() -> None:
    ended = [count for count in range(1, 8) if noted(FIGURES[:count]).exhausted]
    assert ended == [5, 6]
    assert not noted(FIGURES[:6], patience=None).exhausted


def test_what_is_stored_goes_on_where_it_was() -> None:
    first = noted(FIGURES[:4])
    again = Standing(2, 3, higher=False, meta=first.meta, figure="loss")
    assert (again.best, again.since) == (first.best, first.since)
    again.note(2.2, 5)
    assert again.exhausted


@pytest.fixture
def _figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations that come to `FIGURES`, one after the other."""
    found = iter(FIGURES)
    monkeypatch.setattr(trainer.Validation, "__call__", lambda self, state: {"bits_per_byte": next(found)})


@pytest.mark.slow(days=28, group="whole runs")
@pytest.mark.usefixtures("_figures")
def test_a_run_keeps_its_best_ends_early_and_stays_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "steps": 24,
        "eval_every": 2,
        "checkpoint_every": 100,
        "keep_best": 1,
        "patience": 3,
        "log_every": 2,
    }
    recipe = tiny_recipe(**options)
    stopped = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, time_limit_s=1e-9))
    fit(stopped, tmp_path, source=Letters())  # one step, no evaluation
    ended = fit(recipe, tmp_path, source=Letters())
    assert (ended.finished, ended.step) == (True, 10)
    assert list_steps(checkpoint_dir(tmp_path)) == [4, 10]
    assert jaxblt.load(tmp_path, step="best").step == 4
    assert jaxblt.load(tmp_path).step == 10
    assert "ended at step 10: 3 evaluations in a row were no better" in capsys.readouterr().out
    assert fit(recipe, tmp_path, source=Letters()).step == 10
    assert (
        "is finished: it is at step 10 of 24, and its evaluations no longer improved"
        in capsys.readouterr().out
    )
