"""What is said of the time before the first step, and where compiled programs are kept."""

from types import SimpleNamespace

import jax
import pytest

from jaxblt.training.start import startup
from jaxblt.training.start.startup import Startup, keep_compiled
from jaxblt.training.step import compiler_options
from pallas_kernels.runtime import compiling_for


@pytest.fixture
def asked(monkeypatch):
    found = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: found.__setitem__(name, value))
    return found


def test_stages_are_named_in_order(monkeypatch):
    clock = iter([10.0, 12.0, 15.5])
    monkeypatch.setattr(startup.time, "perf_counter", lambda: next(clock))
    begun = Startup()
    begun.done("data")
    begun.done("tracing")
    assert begun.line() == "first step after 5.5 s: data 2.0, tracing 3.5"


def test_programs_for_cpus_are_not_kept_unless_a_folder_is_named(asked, tmp_path):
    keep_compiled("user")
    keep_compiled(None)
    assert asked == {}
    keep_compiled(str(tmp_path))
    assert asked["jax_compilation_cache_dir"] == str(tmp_path)


def test_small_programs_are_kept_too_except_far_away_and_where_a_user_decides(asked, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5")
    keep_compiled(str(tmp_path))
    assert "jax_persistent_cache_min_compile_time_secs" not in asked
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    asked.clear()
    keep_compiled("gs://bucket/compiled")
    assert asked == {"jax_compilation_cache_dir": "gs://bucket/compiled"}
    keep_compiled(str(tmp_path))
    assert asked["jax_persistent_cache_min_compile_time_secs"] == 0


def test_programs_for_gpus_are_kept_in_the_user_s_cache(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_compiled("user")
    assert asked["jax_compilation_cache_dir"] == str(tmp_path / ".cache/jaxblt/compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "scratch"))
    keep_compiled("user")
    assert asked["jax_compilation_cache_dir"] == str(tmp_path / "scratch/jaxblt/compiled")


def test_a_train_step_on_gpus_tries_few_kernels_and_joins_its_exchanges():
    assert compiler_options() is None
    with compiling_for(SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")):
        asked = compiler_options() or {}
    assert asked.pop("xla_gpu_enable_triton_gemm") is False
    assert asked.pop("xla_gpu_experimental_enable_fusion_autotuner") is False
    assert set(asked.values()) == {2**28}
    assert all(name.endswith("_combine_threshold_bytes") for name in asked)
