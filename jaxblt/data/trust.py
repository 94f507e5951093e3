"""Trust in URLs that a run's config names: its author decides what is fetched, so its reader has to agree."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxblt.remote import scheme_of, url_of


def check_trusted(own: Any, data: Any, *, trust_sources: bool) -> None:
    """Check that data name no URL that came with a run's config, unless it is trusted.

    Local paths are read: what they hold stays on this machine.

    Args:
      own: data of the run's recipe.
      data: that are to be opened; URLs that `own` does not name are the caller's.
      trust_sources: whether the run's URLs may be fetched.

    Raises:
      ValueError: there is such a URL, and it is not trusted.
    """
    named = set(_urls(own))
    found = [url for url in _urls(data) if url in named]
    if found and not trust_sources:
        raise ValueError(
            f"the run's config names {found[0]}, and nothing is fetched for a config that may be a stranger's: say "
            "--trust-sources (trust_sources=True) if you trust it, or name other data (--files)"
        )


def _urls(value: Any) -> Iterator[str]:
    """Yield the URLs in the fields of a config that lead away from this machine."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _urls(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _urls(item)
    elif isinstance(value, str) and (url := url_of(value)) and scheme_of(url) != "file":
        yield url
