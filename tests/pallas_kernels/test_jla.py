"""What jax-linear-attention needs before any call is looked at, and when explain says that it is lacking."""

import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import gated_delta_rule, gated_linear_attention
from pallas_kernels._linear_state import jla
from pallas_kernels.gated_delta_rule import bench as delta_rule_bench
from pallas_kernels.gated_delta_rule.shapes import DeltaRuleShape
from pallas_kernels.gated_linear_attention import bench as linear_attention_bench
from pallas_kernels.gated_linear_attention.shapes import LinearAttentionShape
from pallas_kernels.runtime import Device, compiling_for
from tests.pallas_kernels.jla import HOPPER, installed

STREAM = jax.ShapeDtypeStruct((1, 256, 4, 128), jnp.bfloat16)
PER_HEAD = jax.ShapeDtypeStruct((1, 256, 4), jnp.float32)


def explain(op: Any, device: Device = HOPPER) -> str:
    beta = (PER_HEAD,) if op is gated_delta_rule else ()
    return op.explain(STREAM, STREAM, STREAM, *beta, log_gate=PER_HEAD, device=device)


@pytest.mark.parametrize("op", [gated_delta_rule, gated_linear_attention])
def test_it_comes_first_where_it_is_installed(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    assert explain(op).endswith(": jla on NVIDIA H200")


@pytest.mark.parametrize("op", [gated_delta_rule, gated_linear_attention])
def test_without_it_explain_says_how_to_get_it(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    expected = "not jla: jax-linear-attention 0.1.0 is not installed: pip install 'jaxblt[jla]'"
    assert expected in explain(op)


def test_another_version_is_refused_by_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, version="0.2.0")
    assert "jax-linear-attention 0.1.0 is what it is tested with, 0.2.0 is installed" in explain(
        gated_delta_rule
    )


def test_another_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    monkeypatch.setattr(jax, "__version__", "0.12.0")
    assert "0.1.0 is written for jax 0.11.2, this is 0.12.0" in explain(gated_delta_rule)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_gpus_are_refused(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    text = explain(gated_delta_rule, Device("gpu", capability, "another GPU"))
    assert "not jla: it is compiled for compute capability 9.0 exactly (H100, H200), this is another" in text


def test_a_machine_without_the_gpu_cannot_compile_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, here=Device("cpu"))
    assert "it compiles on a machine with such a GPU only, this one has cpu" in explain(gated_delta_rule)


def test_the_extra_asks_for_the_version_that_is_tested() -> None:
    """And nothing that is installed for the tests asks for it."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert extras["jla"] == [f"{jla.PACKAGE}=={jla.VERSION}"]
    assert not [name for name in extras if name != "jla" and jla.PACKAGE in " ".join(extras[name])]


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_benchmarks_time_it_against_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """And XLA against a loop where no kernel takes the call."""
    installed(monkeypatch)
    plans = {
        delta_rule_bench: (DeltaRuleShape("small", 1, 64, 2, 1, 64, 64), {"values": 32}, ["xla", "jla"]),
        linear_attention_bench: (
            LinearAttentionShape("small", 1, 64, 2, 2, 64, 64, "key"),
            {"gate": "value", "keys": 640},
            ["xla", "jla", "mosaic_gpu"],
        ),
    }
    target = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
    for bench, (shape, others, names) in plans.items():
        with compiling_for(target):
            taken, refused = bench.plan(shape), bench.plan(replace(shape, **others))
        assert [case.name for case in (taken.plain, *taken.versions)] == names
        assert [case.name for case in (refused.plain, *refused.versions)] == ["plain", "xla"]
