"""The pickle of a torch checkpoint as a description of its tensors, and back: no class is looked up and no code runs.

A state dict is a pickle that names tensors, whose numbers lie beside it. `read_state` follows the few opcodes that such
a pickle is made of, with stand-ins for the seven names that it may hold, and refuses all others.
"""

import pickletools
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxblt.training.stored.safe_files import one_line


class Name(NamedTuple):
    """A name that a pickle would import."""

    module: str
    name: str


class Storage(NamedTuple):
    """Where numbers lie: torch's name of their dtype, the key of their entry, and how many there are."""

    kind: str
    key: str
    size: int


class Tensor(NamedTuple):
    """A view of a storage; `offset` and `stride` count numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Opaque(NamedTuple):
    """What is no tensor and is not looked into, such as the FP8 state of Transformer Engine."""

    kind: str


DICT = Name("collections", "OrderedDict")
TENSOR = Name("torch._utils", "_rebuild_tensor_v2")
OTHER_TENSOR = Name("torch._utils", "_rebuild_tensor_v3")
"""Of dtypes that have no storage of their own, FP8 among them."""
PARAMETER = Name("torch._utils", "_rebuild_parameter")
OPAQUE = (Name("_io", "BytesIO"), Name("_codecs", "encode"))
STORAGES = ("Float", "BFloat16", "Half", "Double", "Byte", "Char", "Short", "Int", "Long", "Bool")
KNOWN = {DICT, TENSOR, PARAMETER, *OPAQUE, *(Name("torch", f"{kind}Storage") for kind in STORAGES)}

VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINFLOAT"),
    *("SHORT_BINBYTES", "BINBYTES"),
}
"""Opcodes of a value that stands beside them."""
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
COUNTS = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_state(data: bytes) -> dict[str, Tensor | Opaque]:
    """Return the entries of a pickled state dict by name.

    Raises:
      ValueError: the pickle is damaged, holds anything but a dict of tensors by name, or asks for a class, a function
        or an opcode that such a dict does not need.
    """
    machine = _Machine()
    try:
        for op, arg, _ in pickletools.genops(data):
            machine.follow(op.name, arg)
        (found,) = machine.stack
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its pickle is damaged: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"it holds {type(found).__name__}, expected tensors by name")
    for name, value in found.items():
        if not (isinstance(name, str) and isinstance(value, Tensor | Opaque)):
            raise ValueError(
                f"entry {name!r:.60} is {type(value).__name__}, expected tensors by name: save model.state_dict()"
            )
    return found


class _Machine:
    """The stack of a pickle, on which plain values and the records above lie."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def follow(self, name: str, arg: Any) -> None:
        """Follow one opcode."""
        if name in VALUES:
            self.stack.append(arg)
        elif name in CONSTANTS:
            self.stack.append(CONSTANTS[name])
        elif name in COUNTS:
            self.stack.append(tuple(self._pop(COUNTS[name])))
        elif (step := getattr(self, f"_on_{name.lower()}", None)) is not None:
            step(arg)
        else:
            raise ValueError(f"its pickle has opcode {name}, which no dict of tensors needs: it is not read")

    def _pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError("its stack is empty")
        at = len(self.stack) - count
        items, self.stack[at:] = self.stack[at:], []
        return items

    def _since_mark(self) -> list[Any]:
        return self._pop(len(self.stack) - self.marks.pop())

    def _on_proto(self, arg: Any) -> None:
        """Do nothing, as at the end."""

    _on_frame = _on_stop = _on_proto

    def _on_mark(self, arg: Any) -> None:
        self.marks.append(len(self.stack))

    def _on_empty_dict(self, arg: Any) -> None:
        self.stack.append({})

    def _on_empty_list(self, arg: Any) -> None:
        self.stack.append([])

    def _on_tuple(self, arg: Any) -> None:
        self.stack.append(tuple(self._since_mark()))

    def _on_binput(self, arg: Any) -> None:
        self.memo[arg] = self.stack[-1]

    _on_long_binput = _on_binput

    def _on_memoize(self, arg: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _on_binget(self, arg: Any) -> None:
        self.stack.append(self.memo[arg])

    _on_long_binget = _on_binget

    def _on_global(self, arg: Any) -> None:
        self.stack.append(_known(*arg.split(" ", 1)))

    def _on_stack_global(self, arg: Any) -> None:
        self.stack.append(_known(*self._pop(2)))

    def _on_binpersid(self, arg: Any) -> None:
        self.stack.append(_storage(self.stack.pop()))

    def _on_reduce(self, arg: Any) -> None:
        self.stack.append(_made(*self._pop(2)))

    _on_newobj = _on_reduce

    def _on_append(self, arg: Any) -> None:
        (item,) = self._pop(1)
        self.stack[-1].append(item)

    def _on_appends(self, arg: Any) -> None:
        items = self._since_mark()
        self.stack[-1].extend(items)

    def _on_setitem(self, arg: Any) -> None:
        key, value = self._pop(2)
        self.stack[-1].update({key: value})

    def _on_setitems(self, arg: Any) -> None:
        items = self._since_mark()
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _on_build(self, arg: Any) -> None:
        """Drop what an object holds besides its items, such as the versions of a dict's modules."""
        self._pop(1)


def _known(module: str, name: str) -> Name:
    found = Name(module, name)
    if found == OTHER_TENSOR:
        raise ValueError(
            "its pickle holds a tensor of FP8 or another late dtype: FP8 numbers mean nothing without their scales, "
            "which are not read: save them as bfloat16 or float32"
        )
    if found not in KNOWN:
        raise ValueError(f"its pickle asks for {module}.{name}, which is no tensor: it is not read")
    return found


def _storage(told: Any) -> Storage:
    match told:
        case ("storage", Name("torch", kind), str(key), str(), int(size)) if key.isdigit() and size >= 0:
            return Storage(kind.removesuffix("Storage"), key, size)
    raise ValueError(f"its pickle names {told!r:.60} as the place of numbers")


def _made(name: Any, given: Any) -> Any:
    """Return what calling a known name would make."""
    match name, given:
        case _ if name == DICT:
            return {}
        case _ if name in OPAQUE:
            return Opaque(name.name)
        case _ if name == PARAMETER and given and isinstance(given[0], Tensor):
            return given[0]
        case _, (Storage() as storage, int(offset), tuple(shape), tuple(stride), *_) if name == TENSOR:
            return _checked(Tensor(storage, offset, shape, stride))
    raise ValueError(f"its pickle calls {name!r:.60} with {given!r:.60}: it is not read")


def _checked(tensor: Tensor) -> Tensor:
    """Return the tensor; raise ValueError if it reaches out of its storage."""
    numbers = (tensor.offset, *tensor.shape, *tensor.stride)
    whole = all(type(n) is int and n >= 0 for n in numbers) and len(tensor.shape) == len(tensor.stride)
    steps = zip(tensor.shape, tensor.stride, strict=True) if whole else ()
    last = tensor.offset + sum((n - 1) * step for n, step in steps)
    if not whole or (0 not in tensor.shape and last >= tensor.storage.size):
        raise ValueError(f"its pickle names a tensor {tensor.shape} that does not fit into its storage")
    return tensor


def write_state(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the pickle of a state dict, as `torch.load` reads it with weights alone."""
    parts = [b"\x80\x02", _called(DICT, b")"), b"("]
    for name, tensor in tensors.items():
        storage = tensor.storage
        place = [_text("storage"), _named(Name("torch", f"{storage.kind}Storage")), _text(storage.key)]
        place += [_text("cpu"), _number(storage.size)]
        given = [b"(", *place, b"tQ", _number(tensor.offset), _numbers(tensor.shape), _numbers(tensor.stride)]
        tuple_of = b"".join([b"(", *given, b"\x89", _called(DICT, b")"), b"t"])
        parts += [_text(name), _called(TENSOR, tuple_of)]
    return b"".join([*parts, b"u."])


def _called(name: Name, given: bytes) -> bytes:
    return _named(name) + given + b"R"


def _named(name: Name) -> bytes:
    return f"c{name.module}\n{name.name}\n".encode()


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    data = value.to_bytes((value.bit_length() + 8) // 8, "little")
    return b"\x8a" + bytes([len(data)]) + data


def _numbers(values: Iterable[int]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"
