"""Bad values of every config are met with one line, and no senseless value or option that nothing reads is accepted."""

import ast
import dataclasses
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

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
    """Annotations are off here, as wherever `pytest.raises` stands."""
    single = [
        ({name: value}, words(name, value)) for name, values in BAD.get(kind, {}).items() for value in values
    ]
    together = [(fields, (said,)) for fields, said in BAD_TOGETHER.get(kind, ())]
    found = [(fields, complaint(kind, fields, said)) for fields, said in [*single, *together]]
    assert not [(fields, wrong) for fields, wrong in found if wrong]


ACCEPTED = "accepted"


def complaint(kind: type, fields: dict[str, Any], words: tuple[str, ...]) -> str:
    """Return what is wrong with the refusal of fields; "" of one line with these words."""
    try:
        kind(**(GOOD[kind] | fields))
    except ValueError as error:
        said = str(error)
        is_clear = "\n" not in said and len(said) < 400 and all(word in said for word in words)
        return "" if is_clear else f"{said!r} does not say {words} in one line"
    except BaseException as unlike:
        return repr(unlike)
    return ACCEPTED


def words(field: str, value: Any) -> tuple[str, str]:
    """Return what the refusal of a field's value says at least."""
    return field, shown(value)


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


def test_values_of_other_types_and_senseless_ones_are_named() -> None:
    """`pytest.raises` would say less: all that is accepted is shown at once."""
    accepted: dict[type, dict[str, tuple[Any, ...]]] = {}
    wrong, count = [], 0
    for kind in GOOD:
        hints = get_type_hints(kind)
        for name, default in ((field.name, field.default) for field in dataclasses.fields(kind)):
            senseless = [value for value in edges(hints[name]) if repr(value) != repr(default)]
            for value in [*(value for value in VARIED if not belongs(value, hints[name])), *senseless]:
                said, count = complaint(kind, {name: value}, words(name, value)), count + 1
                if said == ACCEPTED:
                    taken = accepted.setdefault(kind, {})
                    taken[name] = (*taken.get(name, ()), value)
                elif said:
                    wrong.append(f"{kind.__name__}.{name} = {value!r}: {said}")
    assert not wrong, "\n".join(wrong)
    assert accepted == MEANT
    assert count > 8000


VARIED = (None, 1, 2.5, True, "nonsense", b"nonsense", [1], (None,), (2.5,), ("nonsense",), {1: 1})
"""Values of all types; as words and as numbers they mean nothing to a field that takes others."""


def belongs(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; a bool is no number, and a whole number is a float too."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(belongs(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in parts)
    if origin is tuple and type(value) is tuple:
        items = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return len(items) == len(value) and all(map(belongs, value, items))
    if hint is float:
        return type(value) in (int, float)
    if hint in (int, bool, str, bytes):
        return type(value) is hint
    return hint is Any or isinstance(value, origin or hint)


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
