"""Every test runs on 8 virtual CPU devices (unless a GPU is asked for), with strict dtypes, ranks and annotations."""

import gc
import os

from tests import selection

pytest_addoption = selection.pytest_addoption
pytest_configure = selection.pytest_configure
pytest_collection_modifyitems = selection.pytest_collection_modifyitems
pytest_testnodedown = selection.pytest_testnodedown
pytest_terminal_summary = selection.pytest_terminal_summary

OLD_EMITTERS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
# Keep XLA from splitting each program for 32 threads, a fifth of its time: every process of tests has one core
ONE_PART = "--xla_cpu_parallel_codegen_split_count=1"

if selection.ON_GPU:
    # Choosing among Triton's products takes 40 s a program, more than a test
    flags = (os.environ.get("XLA_FLAGS", ""), "--xla_gpu_enable_triton_gemm=false")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
else:
    # the suite's time is compilation, and much of that optimising and the newer fusion emitters
    flags = (os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0", OLD_EMITTERS, ONE_PART)
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

# Keep Python's collector from looking through JAX's caches again and again
gc.set_threshold(100_000, 20, 100)

import functools  # noqa: E402
import inspect  # noqa: E402
import signal  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from typing import Any  # noqa: E402

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

from tests import annotations  # noqa: E402


def _profile_options(make: Callable[[], Any]) -> Any:
    """Return a trace's options: without programs, which only TensorBoard reads."""
    options = make()
    options.enable_hlo_proto = False
    return options


# before anything imports the library
annotations.install("jaxblt", "pallas_kernels")

if not selection.ON_GPU:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Keep the compiler from merging Python's stack of every operation, a tenth of its time
jax.config.update("jax_traceback_in_locations_limit", 0)
# Keep JAX from comparing the path of each frame of each error with its own folders
jax.config.update("jax_traceback_filtering", "off")
# Keep JAX from hashing every program for a cache without a folder; tests/compiled.py gives some tests one
jax.config.update("jax_enable_compilation_cache", False)
# Keep traces from storing every program that earlier tests of the process compiled, which takes seconds
jax.profiler.ProfileOptions = functools.partial(_profile_options, jax.profiler.ProfileOptions)
# an example's time depends on who else is on the machine
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")
# Keep each process from parsing a thousand modules for constants that Hypothesis might draw
providers._get_local_constants = lambda: providers._local_constants


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: the collector need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Of several processes each would look through all that its tests left, for warnings that nobody reads."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names what fails at once: a run that is cut short has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})", flush=True)


@pytest.fixture(autouse=True)
def _annotations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Off in a test that expects an error: it hands over what annotations forbid, to see what the library says."""
    jaxtyping.config.update("jaxtyping_disable", _expects_error(request.function))
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Put handlers of signals back: a run that ends early ignores further signals, for all tests of the process."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for the programs of this process, where `tests.compiled` keeps them."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def symbolic_sizes() -> None:
    """Annotations are off: they say `int` of sizes, which `jax.export` may leave open."""
    jaxtyping.config.update("jaxtyping_disable", True)


@functools.cache
def _expects_error(test: Callable[..., object]) -> bool:
    source = inspect.getsource(test)
    return "pytest.raises" in source and "TypeCheckError" not in source
