"""For tests that compile the same programs again and run each a few times: compile quickly, and once."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def compiled_once_and_quickly(folder: str) -> Iterator[None]:
    """Keeps compiled programs in `folder`.

    The folder is for one process: another one might read a program that is half written.
    """
    options = {
        "jax_disable_most_optimizations": True,
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    before = {name: jax.config.values[name] for name in options}
    _configure(options)
    yield
    _configure(before)


def _configure(options: dict[str, object]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    # JAX asks once whether there is a cache
    compilation_cache.reset_cache()
