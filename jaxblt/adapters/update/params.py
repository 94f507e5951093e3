"""Which parameters are the base's and which are trained: adapters, routers, and what is asked for besides."""

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from jaxblt.adapters.code.router import ROUTER
from jaxblt.adapters.retrieval.neighbours import INDEX
from jaxblt.adapters.update.forms import FORM
from jaxblt.adapters.update.site import ADAPTER, SCALE
from jaxblt.mixers.attention.key_bias import BY_CODE, KEY_BIAS

STACK_PARTS = ("periods", "rest", "period_0")
"""Children of a stack, by which a router of its own is told from a module of another's that has the same name."""
BLOCK = re.compile(r"(?:.*/)?(?:periods|rest|period_\d+)/block_\d+")
"""Path of a block, by which its router is told."""
PARTS, OTHERS = ({"u", "v"}, {SCALE}), {"tau"}
"""What an adapter holds: its matrices or a gate's scale, and what it may hold besides."""
Condition = Callable[[tuple[str, ...], Any, Mapping[str, Any]], bool]
"""Whether parameters are meant, by their path, what is below it, and what they lie in."""


def split_params(params: Any, also_train: Sequence[str] = ()) -> tuple[Any, Any]:
    """Return (base, trained): the parameters of the model without adapters, and the others.

    The index that a router searches is the base's, as nothing trains it. What `also_train` names is in both: the base
    stays whole, and where both hold an array, the trained one counts.

    Args:
      params: of a model, with or without boxes; arrays or shapes.
      also_train: patterns of paths such as "embedding/bytes"; a path is also matched by one of a folder above it.

    Raises:
      ValueError: a pattern matches no parameter of the base.
    """
    base = _without(params, _is_added)
    return base, _lay_over(_selected(params, _is_added), _matching(base, also_train))


def join_params(base: Any, trained: Any) -> Any:
    """Return the whole model's parameters: the base with the trained ones laid over it."""
    if not (isinstance(base, Mapping) and isinstance(trained, Mapping)):
        return trained
    both = {name: join_params(base[name], trained[name]) for name in base if name in trained}
    return {**base, **trained, **both}


def routers(params: Any) -> Any:
    """Return the parameters of routers alone."""
    return _selected(params, _is_router)


def without_routers(params: Any) -> Any:
    """Return the parameters of all else, without what routers search."""
    return _without(params, _is_router, index=False)


def without_codes(params: Any) -> Any:
    """Return the parameters without routers, and without biases of logits: at one code all keys have the same."""
    return without_routers(_without(params, _is_key_bias))


def _is_added(path: tuple[str, ...], tree: Any, above: Mapping[str, Any]) -> bool:
    """Return whether a child is an adapter or a form, beside a kernel, a bias of logits, or a router."""
    if path[-1] == ADAPTER:
        return "kernel" in above and isinstance(tree, Mapping) and set(tree) - OTHERS in PARTS
    if path[-1] == FORM:
        return "kernel" in above and isinstance(tree, Mapping)
    return _is_key_bias(path, tree, above) or _is_router(path, tree, above)


def _is_key_bias(path: tuple[str, ...], tree: Any, above: Mapping[str, Any]) -> bool:
    """Return whether a child is the bias of a block's attention."""
    of_block = BLOCK.fullmatch("/".join(path[:-2])) is not None
    return path[-1] == KEY_BIAS and of_block and isinstance(tree, Mapping) and set(tree) == {BY_CODE}


def _is_router(path: tuple[str, ...], tree: Any, above: Mapping[str, Any]) -> bool:
    """Return whether a child is the router of a stack, beside its parts, or that of a block."""
    of_stack = any(part in above for part in STACK_PARTS)
    return path[-1] == ROUTER and (of_stack or BLOCK.fullmatch("/".join(path[:-1])) is not None)


def _without(tree: Any, removed: Condition, path: tuple[str, ...] = (), *, index: bool = True) -> Any:
    """Return the tree without what is removed; of a router its index stays."""
    if not isinstance(tree, Mapping):
        return tree
    found = {}
    for name, below in tree.items():
        if not removed((*path, name), below, tree):
            found[name] = _without(below, removed, (*path, name), index=index)
        elif index and name == ROUTER and INDEX in below:
            found[name] = {INDEX: below[INDEX]}
    return found


def without_index(params: Any) -> Any:
    """Return parameters without the indexes of routers."""
    if not isinstance(params, Mapping):
        return params
    return {
        name: without_index(below)
        for name, below in params.items()
        if not (name == ROUTER and isinstance(below, Mapping) and set(below) == {INDEX})
    }


def _selected(tree: Mapping[str, Any], is_meant: Condition, path: tuple[str, ...] = ()) -> Any:
    found = {}
    for name, below in tree.items():
        here = (*path, name)
        if is_meant(here, below, tree):
            own = {n: b for n, b in below.items() if n != INDEX} if name == ROUTER else below
            found |= {name: own} if own else {}
        elif isinstance(below, Mapping) and (kept := _selected(below, is_meant, here)):
            found[name] = kept
    return found


def _lay_over(a: Any, b: Any) -> Any:
    return join_params(a, b) if b else a


def _matching(base: Any, patterns: Sequence[str]) -> Any:
    """Return the part of a tree whose paths match."""
    paths = _paths(base)
    for pattern in patterns:
        if not any(_matches(path, pattern) for path in paths):
            near = get_close_matches(pattern, paths, 4, 0.0)
            raise ValueError(
                f"also_train pattern {pattern!r} matches no parameter; the nearest names are {near}"
            )

    def pick(tree: Any, above: str) -> Any:
        found = {}
        for name, below in tree.items():
            path = f"{above}{name}"
            if isinstance(below, Mapping):
                if kept := pick(below, f"{path}/"):
                    found[name] = kept
            elif any(_matches(path, pattern) for pattern in patterns):
                found[name] = below
        return found

    return pick(base, "") if patterns else {}


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}/*")


def _paths(tree: Any, above: str = "") -> list[str]:
    found = []
    for name, below in tree.items():
        path = f"{above}{name}"
        found += _paths(below, f"{path}/") if isinstance(below, Mapping) else [path]
    return found
