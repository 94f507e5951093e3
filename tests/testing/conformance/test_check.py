"""The properties find what is wrong with copies of our layers that are wrong on purpose."""

import subprocess
import sys
from functools import partial

import jax
import pytest

from jaxblt.testing.conformance import PROMISES, PROPERTIES, Layer, Outcome, Subject, check, format_outcomes
from tests.testing.conformance import copies, jax_copies

WITH_GRADIENTS = frozenset(
    ("causal", "batch", "documents", "padding", "nan", "decays", "gradients", "values")
)

FAULTS = [
    ("values", "leaves out its own token"),
    ("values", "sums in bf16"),
    ("values", "swaps decay and write"),
    ("values", "does not decay between chunks"),
    ("values", "drops an odd tail"),
    ("values", "leaves out the last write"),
    ("future", "reads the next token"),
    ("shorter", "reads the next token"),
    ("batch", "reads row 0's carry"),
    ("packed", "leaks between documents"),
    ("packed", "resets a token late"),
    ("packed_first", "resets a token early"),
    ("padding_before_a_call", "padding takes time"),
    ("left_padding", "resets a token late"),
    ("nan_padding", "multiplies padding by 0"),
    ("nan_padding", "reads padding"),
    ("step", "does not decay what it carried"),
    ("step", "keeps sums of bf16"),
    ("prefill", "does not decay what it carried"),
    ("split", "forgets the state of long calls"),
    ("document_in_second_call", "keeps the carry at a call's start"),
    ("reused_state", "writes into the state"),
    ("steady_state", "returns more of the state"),
    ("large_decays", "takes exp of sums apart"),
    ("large_decays", "takes exp before the mask"),
    ("one_large_decay", "clamps decays"),
    ("dtype_kept", "returns f64"),
]
OF_GRADIENTS = [
    ("gradients", "drops the decay's gradient"),
    ("gradients", "scales a gradient by 1.01"),
    ("packed_gradients", "leaks a gradient between documents"),
    ("nan_gradients", "multiplies gradients at padding by 0"),
    ("finite_gradients", "takes a norm at 0"),
    ("large_decay_gradients", "takes exp before the mask"),
]


def subject(fault: str = "", *, gradients: bool = False) -> Subject:
    """The copy in NumPy, or with gradients that in JAX."""

    def make() -> Layer:
        if gradients:
            return Layer(jax.jit(partial(jax_copies.run, fault=fault)), reference=copies.reference)
        return Layer(partial(copies.run, fault=fault), start=copies.start, reference=copies.reference)

    return Subject(
        name=fault or "sound",
        make=make,
        width=copies.WIDTH,
        promises=WITH_GRADIENTS if gradients else frozenset(PROMISES) - {"gradients"},
        decays=slice(4, 5),
        lengths=(4,) if gradients else (1, 2, 3, 6, 9),
    )


def failing(outcomes: list[Outcome]) -> list[str]:
    return [outcome.name for outcome in outcomes if outcome.finding]


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_fault_is_found(name: str, fault: str) -> None:
    assert failing(check(subject(fault), only=[name])) == [name]


@pytest.mark.parametrize(("name", "fault"), OF_GRADIENTS)
def test_a_fault_of_gradients_is_found(name: str, fault: str) -> None:
    assert failing(check(subject(fault, gradients=True), only=[name])) == [name]


def test_thirty_faults_and_every_property_but_one_that_another_includes() -> None:
    assert len({*FAULTS, *OF_GRADIENTS}) >= 30
    assert {*PROPERTIES} - {name for name, _ in FAULTS + OF_GRADIENTS} == {"padding"}


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize("gradients", [False, True])
def test_a_sound_copy_has_no_finding(gradients: bool) -> None:
    outcomes = check(subject(gradients=gradients))
    assert failing(outcomes) == []
    assert sum(outcome.promised for outcome in outcomes) >= 10
    text = format_outcomes(outcomes)
    assert "not promised" in text
    assert "holds" in text


LEAKING = """\
def call(x, documents=None, state=None):
    y = np.cumsum(x, 1) + (0.5 * np.roll(x, -1, 1) if x.shape[1] > 3 else 0)
    return y.astype("float32"), None
def reference(x):
    return np.cumsum(x, 1)
"""


def lines_subject(lines: str, **options: object) -> Subject:
    return Subject(
        **{"name": "lines", "make": lines, "width": 1, "promises": frozenset(["causal"])} | options
    )


@pytest.mark.slow(days=28, group="costly")
def test_a_failure_is_made_as_short_as_it_can_be_and_its_script_shows_it() -> None:
    """The script needs neither this library nor the parts of the bridge that its property does not use."""
    (outcome,) = check(lines_subject(LEAKING, lengths=(1, 9)), only=["future"])
    found = outcome.finding
    assert found is not None
    assert (found.length, found.cut) == (4, 1)
    assert 5 <= len(found.script.splitlines()) <= 15
    assert "reference" not in found.script
    assert "jaxblt" not in found.script
    said = subprocess.run([sys.executable, "-c", found.script], capture_output=True, text=True, check=True)
    assert found.most is not None
    assert float(said.stdout) > found.most


ROUNDED = """\
def call(x, documents=None, state=None):
    small = np.where(np.arange(x.shape[1]) == 0, 1e-3, 1.0)[:, None]
    return (x * small + 1e-4 * x[:, -1:]).astype("float32"), None
"""


def test_in_bf16_an_output_that_nearly_vanishes_is_rounded_like_its_row() -> None:
    for dtype, fails in (("bfloat16", False), ("float32", True)):
        (outcome,) = check(lines_subject(ROUNDED, dtype=dtype, lengths=(3,)), only=["future"])
        assert bool(outcome.finding) == fails


def test_what_a_layer_raises_is_a_finding() -> None:
    (outcome,) = check(lines_subject('def call(x):\n    raise TypeError("no")\n'), only=["future"])
    assert outcome.finding is not None
    assert outcome.finding.says == "raises TypeError: no"


def test_bad_subjects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for promises, said in (
        (frozenset(), "promises nothing, expected some of: causal, "),
        (["fast"], "promises fast, "),
    ):
        with pytest.raises(ValueError, match=said):
            lines_subject(LEAKING, promises=promises)
    with pytest.raises(ValueError, match=r"promises decays: say in which columns, as decays=slice\(...\)"):
        lines_subject(LEAKING, promises=["decays"])
    with pytest.raises(ValueError, match="promises values: give its Layer a reference"):
        check(lines_subject("call = None", promises=["values"]))
    with pytest.raises(
        ImportError, match=r"^subject 'lines' needs nowhere, which is not installed here \(No module"
    ):
        check(lines_subject("import nowhere"))
    with pytest.raises(RuntimeError, match="needs a GPU, and JAX finds none: run it where there is one"):
        check(lines_subject(LEAKING, gpu=True))
    with pytest.raises(ValueError, match="no property is called fast, choose some of: values, future"):
        check(lines_subject(LEAKING), only=["fast"])
