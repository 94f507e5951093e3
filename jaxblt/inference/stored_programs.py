"""Compiled programs in a folder: another process takes them from there in place of compiling."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

EVENTS = {"/jax/compilation_cache/cache_misses": "compiled", "/jax/compilation_cache/cache_hits": "taken"}


@dataclass
class Programs:
    """The programs that a process has needed.

    Attributes:
      compiled: those that the folder did not have; it has them now.
      taken: those that it had.
    """

    compiled: int = 0
    taken: int = 0

    def __str__(self) -> str:
        """Return one line for people."""
        return f"{self.compiled} programs compiled, {self.taken} taken from the folder"


@contextmanager
def storing_programs(folder: Path) -> Iterator[Programs]:
    """Keep all programs that are compiled within in a folder, and take those that are there.

    A program is found by its text, its options, the device and the version of XLA: no other is ever taken.
    """
    options = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before, found = {name: jax.config.values[name] for name in options}, Programs()

    def count(event: str, **_: str | int) -> None:
        if event in EVENTS:
            name = EVENTS[event]
            setattr(found, name, getattr(found, name) + 1)

    _configure(options)
    jax.monitoring.register_event_listener(count)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_listener(count)
        _configure(before)


def _configure(options: dict[str, object]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    # Make JAX look again: it asks once whether there is a folder
    compilation_cache.reset_cache()
