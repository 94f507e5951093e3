import os
import pkgutil
import subprocess
import sys

import pytest

import pallas_kernels
from jaxblt import doctor
from jaxblt.doctor import Finding, examine, main


def test_all_is_well_here(capsys: pytest.CaptureFixture[str]) -> None:
    status = main([])
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.rstrip().endswith("all is well")
    for word in ("python 3.", "jax ", "orbax-checkpoint", "arrow:", "GiB of memory", "largest error"):
        assert word in out
    for op in doctor._sample_calls():
        assert f"\n  ok {op}" in out
    assert "not cudnn: it needs an NVIDIA GPU" in out


def test_no_op_is_forgotten() -> None:
    folders = {module.name for module in pkgutil.iter_modules(pallas_kernels.__path__) if module.ispkg}
    folders = {name for name in folders if not name.startswith("_")}
    assert set(doctor._sample_calls()) == folders


@pytest.mark.slow(days=28, group="processes of their own")
def test_help_and_exit_status_from_the_shell() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxblt.doctor", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0
    assert "exit status 1" in done.stdout
    assert main.__doc__ is not None


@pytest.mark.parametrize(
    "broken",
    [lambda: [Finding("ok", "fine"), Finding("bad", "jax is missing")], lambda: 1 / 0],
    ids=["finding", "crash"],
)
def test_something_broken_fails(
    broken: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: examine({"versions": broken}))  # type: ignore[dict-item]
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "  !! " in out
    assert "1 broken" in out


def test_a_missing_essential_package_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ESSENTIAL", ("jax", "no-such-package"))
    bad = [finding.text for finding in doctor.check_versions() if finding.verdict == "bad"]
    assert bad == ["no-such-package is missing: pip install jaxblt"]


def test_an_absent_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", {"plot": ("no_such_module",), "core": ("numpy",)})
    assert doctor.check_extras() == [
        Finding("note", "plot: lacks no_such_module (pip install 'jaxblt[plot]')"),
        Finding("ok", "core: present"),
    ]


def test_a_gpu_without_its_plugin_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of the wheel: who installed it has no checkout."""
    monkeypatch.setattr(doctor.os.path, "exists", lambda path: path == "/dev/nvidia0")
    notes = [finding.text for finding in doctor.check_devices() if finding.verdict == "note"]
    assert notes == [
        "an NVIDIA GPU is here but JAX has no plugin for it: pip install 'jaxblt[cuda13]'",
    ]
