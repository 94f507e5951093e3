"""A run as lm-eval calls it, through a stand-in for the package: its base class, its requests, its entry point."""

import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from jaxblt.inference import SamplingConfig
from jaxblt.models import ByteLMConfig
from tests.answers.runs import make_run
from tests.inference.server.conftest import ONE

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


class LM:
    """The base class of lm-eval's models, as far as a model reads it."""

    def __init__(self):
        self.rank, self.world_size = 0, 1


def ask(*rows):
    """Requests, as lm-eval makes them of a task's documents."""
    return [SimpleNamespace(args=row) for row in rows]


@pytest.fixture(scope="module")
def run():
    return make_run(ByteLMConfig(stack=ONE))


@pytest.fixture
def model(run, monkeypatch):
    api = ModuleType("lm_eval.api.model")
    api.LM = LM
    for name, module in (
        ("lm_eval", ModuleType("lm_eval")),
        ("lm_eval.api", ModuleType("a")),
        (api.__name__, api),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    groups = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    place, _, name = groups["lm_eval.models"]["jaxblt"].partition(":")
    made = getattr(importlib.import_module(place), name)
    assert issubclass(made, LM)
    return made(run=run, batch_size="4")


def test_choices_and_bits_per_byte_are_those_of_the_run(model, run):
    context, choices = "the c", [" at", "é", "xyz"]
    found = model.loglikelihood(ask(*((context, choice) for choice in choices), ("", "ab")))
    for (nats, _), (before, text) in zip(found, [*((context, c) for c in choices), ("", "ab")], strict=True):
        [row] = run.score([(before + text).encode()], per_byte=True).per_byte
        start = len(before.encode())
        np.testing.assert_allclose(nats, row[start : start + len(text.encode())].sum(), rtol=1e-5)
    [rolled] = model.loglikelihood_rolling(ask(("the cat",)))
    [row] = run.score([b"the cat"], per_byte=True).per_byte
    # EOS is scored by the run, and by no task
    assert len(row) == 8
    np.testing.assert_allclose(rolled, row[:7].sum(), rtol=1e-5)


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_harness")
def test_the_greedy_continuation_is_told(model, run):
    contexts = ("abc", "xy ")
    best = [
        text.decode("latin-1")
        for text in run.generate(
            [c.encode() for c in contexts],
            max_new_bytes=3,
            sampling=SamplingConfig(temperature=0),
            alphabet=b"abc",
        )
    ]
    told = model.loglikelihood(ask(*zip(contexts, best, strict=True), ("abc", "\x7f\x01")))
    free = run.generate(
        [c.encode() for c in contexts], max_new_bytes=3, sampling=SamplingConfig(temperature=0)
    )
    assert [greedy for _, greedy in told] == [
        *(a.encode() == b for a, b in zip(best, free, strict=True)),
        False,
    ]
    nats = [("", chr(i)) for i in range(128)]
    greedy = [
        pair for pair, (_, is_best) in zip(nats, model.loglikelihood(ask(*nats)), strict=True) if is_best
    ]
    [first] = run.generate([b""], max_new_bytes=1, sampling=SamplingConfig(temperature=0))
    assert greedy == ([("", first.decode())] if first and first[0] < 128 else [])


def test_text_is_written_up_to_a_stop(model, run):
    [whole] = run.generate([b"ab"], max_new_bytes=40, sampling=SamplingConfig(temperature=0))
    text = whole.decode(errors="replace")
    settings = {"max_gen_toks": 40, "do_sample": False}
    [found] = model.generate_until(ask(("ab", settings)))
    assert found == text
    if len(text) > 3:
        stop = text[2:4]
        [cut] = model.generate_until(ask(("ab", settings | {"until": ["never", stop]})))
        assert cut == text[: text.index(stop)]
