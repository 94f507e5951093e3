"""Bad values of every config are met with one line, and no senseless value or option that nothing reads is accepted."""

import ast
import dataclasses
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblt.data.kmers import KmerVocab
from jaxblt.inference import Decoder
from jaxblt.inference.engine import Request, Sampling
from jaxblt.models import StackConfig
from jaxblt.training.stored.names import NAMES
from jaxblt.training.stored.serialize import from_json, to_json
from tests.config_tables import together
from tests.config_tables.bad import BAD, INF, NAN
from tests.config_tables.good import BYTES, GOOD, by_class

BAD_TOGETHER, MEANT = by_class(together.BAD_TOGETHER), by_class(together.MEANT)
LIBRARY = Path(__file__).parent.parent / "jaxblt"
NEVER_STORED = (Decoder, KmerVocab, Request, Sampling)
"""They hold a dtype and bytes; no recipe holds them."""
NEVER_MEANT = (NAN, INF, -INF, 1e39, 1e-39)
"""Numbers that no field takes: fp32 makes the last two infinite, and 0."""
READ_OTHERWISE = {
    "AdapterLosses": {"decorrelation"},
    "HybridNextByte": {"language", "negatives", "reinforcement"},
    "TrainConfig": {"max_overflow"},
}
"""Fields that are read by `getattr` or `asdict`, or that are checks of runs."""


@pytest.mark.parametrize("kind", dict.fromkeys([*BAD, *BAD_TOGETHER]), ids=lambda kind: kind.__name__)
def test_bad_values_are_named_in_one_line(kind: type) -> None:
    single = ((field, value) for field, values in BAD.get(kind, {}).items() for value in values)
    rows = [({field: value}, (field, shown(value))) for field, value in single]
    wrong = []
    for fields, words in [*rows, *((fields, (said,)) for fields, said in BAD_TOGETHER.get(kind, ()))]:
        try:
            with pytest.raises(ValueError) as error:
                kind(**(GOOD[kind] | fields))
        except BaseException as unlike:  # of another kind, or pytest's own where nothing is raised
            wrong.append(f"{fields!r}: {type(unlike).__name__} {unlike}")
            continue
        said = str(error.value)
        if "\n" in said or len(said) >= 400 or any(word not in said for word in words):
            wrong.append(f"{fields!r}: {said!r} does not say {words} in one line")
    assert not wrong, "\n".join(wrong)


def shown(value: Any) -> str:
    """What a message shows of a value at least: for a tuple, what is wrong in it."""
    if isinstance(value, tuple) and value:
        return str(value[0])[:20]
    return value if isinstance(value, str) else repr(value)[:20]


def test_the_tables_have_every_config() -> None:
    """Those that can be stored, and those whose `__post_init__` checks their fields."""
    stored = {place.partition(":")[2] for place in NAMES.values()}
    assert (stored | library().configs) - {kind.__name__ for kind in GOOD} == set()
    assert len({kind.__name__ for kind in GOOD}) == len(GOOD)
    assert sum(len(values) for fields in BAD.values() for values in fields.values()) >= 1050
    for kind, fields in GOOD.items():
        kind(**fields)


class Library(NamedTuple):
    """Of the library: classes that check their fields, and attributes that are read where nothing is checked."""

    configs: set[str]
    read: set[str]


@cache
def library() -> Library:
    found = Library(set(), set())
    for file in LIBRARY.rglob("*.py"):
        _look(ast.parse(file.read_text(encoding="utf-8")), found, None)
    return found


def _look(node: ast.AST, found: Library, config: str | None) -> None:
    """Add what stands below a node; `config` is the class that it is in, if that is a public frozen dataclass."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            _look(child, found, child.name if _is_made(child) else None)
        elif isinstance(child, ast.FunctionDef) and (child.name == "__post_init__" or "check" in child.name):
            if config and any(isinstance(x, ast.Name) and x.id == "check_fields" for x in ast.walk(child)):
                found.configs.add(config)
        else:
            if isinstance(child, ast.Attribute):
                found.read.add(child.attr)
            _look(child, found, config)


def _is_made(node: ast.ClassDef) -> bool:
    """Whether a class is a frozen dataclass, neither private nor abstract."""
    calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
    frozen = any(option.arg == "frozen" for call in calls for option in call.keywords)
    abstract = any(isinstance(base, ast.Name) and base.id == "ABC" for base in node.bases)
    return frozen and not abstract and not node.name.startswith("_")


def test_every_number_of_every_config_stands_in_the_table() -> None:
    numbers = {
        (kind, field.name)
        for kind in BAD
        for field in dataclasses.fields(kind)
        if any(name in str(field.type) for name in ("int", "float"))
    }
    assert {(k.__name__, f) for k, f in numbers if f not in BAD[k]} == {("PatcherConfig", "num_patches")}


def test_no_senseless_value_is_accepted() -> None:
    """`pytest.raises` would say less: all that is accepted is shown at once."""
    accepted: dict[type, dict[str, tuple[Any, ...]]] = {}
    for kind, needed in GOOD.items():
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            values = [value for value in edges(hints[field.name]) if repr(value) != repr(field.default)]
            if found := tuple(value for value in values if accepts(kind, needed | {field.name: value})):
                accepted.setdefault(kind, {})[field.name] = found
    assert accepted == MEANT


def edges(hint: Any) -> Iterator[Any]:
    """Values of a type that often mean nothing."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        yield from (value for part in parts for value in edges(part))
    elif origin is tuple and parts[1:] == (...,):
        yield ()
        yield from ((value,) for value in edges(parts[0]))
    elif hint is int:
        yield from (0, -1)
    elif hint is float:
        yield from (0.0, -1.0, *NEVER_MEANT)
    elif hint is str:
        yield ""


def accepts(kind: type, fields: dict[str, Any]) -> bool:
    try:
        kind(**fields)
    except ValueError:
        return False
    return True


def test_every_field_is_read_where_it_is_not_checked() -> None:
    unread = {
        kind.__name__: {field.name for field in dataclasses.fields(kind)} - library().read for kind in GOOD
    }
    assert {name: fields for name, fields in unread.items() if fields} == READ_OTHERWISE


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.sampled_from(["", "x", b"x", (), (1,), (1.5, NAN), ["H"], {}, 10**400, BYTES, StackConfig, object()]),
)


@settings(max_examples=400)
@given(data=st.data())
def test_any_value_of_any_field_is_refused_clearly_or_kept_in_json(data: st.DataObject) -> None:
    """Annotations are off here, as wherever `pytest.raises` stands."""
    kind = data.draw(st.sampled_from([kind for kind in GOOD if dataclasses.fields(kind)]))
    field = data.draw(st.sampled_from([field.name for field in dataclasses.fields(kind)]))
    value = data.draw(VALUES)
    made, said = None, ""
    try:
        made = kind(**(GOOD[kind] | {field: value}))
    except ValueError as error:
        said = str(error)
    assert "\n" not in said
    if made is not None and kind not in NEVER_STORED:
        assert from_json(to_json(made)) == made
