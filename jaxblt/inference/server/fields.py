"""The fields of a request's body: each is read by its type and bounds, and an error names value and limit."""

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxblt.inference.server.errors import ApiError, told
from jaxblt.validation import number, perhaps, whole


class Fields:
    """The fields of a JSON object; None counts as left out, and so does an unknown field that holds nothing."""

    def __init__(self, data: bytes, known: Sequence[str]) -> None:
        """Read a body.

        Args:
          data: the body.
          known: names that a field may have.

        Raises:
          ApiError: it is no JSON object, or has another field.
        """
        if not data.strip():
            raise ApiError(400, "the body is empty: send a JSON object")
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ApiError(400, f"the body must be a JSON object, got {_shown(fields)}")
        # Take OpenAI's fields that ask for nothing: clients send suffix "" and logit_bias {}
        fields = {
            name: value
            for name, value in fields.items()
            if not (value is None or (name not in known and value in ("", [], {})))
        }
        for name in fields:
            if name not in known:
                said = f"unknown field {name!r:.80}{perhaps(name[:80], known)}; known are {', '.join(known)}"
                raise ApiError(400, said, param=name[:80])
        self._fields = fields

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def differs(self, name: str, default: Any) -> bool:
        """Return whether a field was given, and not with its default."""
        return name in self and self._fields[name] != default

    def whole(self, name: str, default: int, *, least: int, most: int) -> int:
        """Return a whole number within the bounds."""
        value = self._fields.get(name, default)
        with told(name):
            whole(name, value, least=least, most=most)
        return value

    def number(self, name: str, default: float, *, least: float, most: float) -> float:
        """Return a finite number within the bounds."""
        value = self._fields.get(name, default)
        with told(name):
            number(name, value, least=least, most=most)
        return float(value)

    def flag(self, name: str) -> bool:
        """Return true or false; false if it is left out."""
        return self._of(name, False, lambda value: isinstance(value, bool), "true or false")

    def option(self, name: str, key: str) -> bool:
        """Return what an object with this one key, true or false, says; false if it is left out."""

        def fits(value: Any) -> bool:
            return isinstance(value, dict) and set(value) <= {key} and isinstance(value.get(key, False), bool)

        return self._of(name, {}, fits, f'an object such as {{"{key}": true}}').get(key, False)

    def choice(self, name: str, choices: Sequence[str | int]) -> Any:
        """Return one of the choices, the first if it is left out; None if there are none."""

        def fits(value: Any) -> bool:
            # Compare types too: JSON's true is no number 1
            return any(type(value) is type(choice) and value == choice for choice in choices)

        expected = f"one of {', '.join(map(str, choices))}" if choices else "left out, the model offers none"
        return self._of(name, choices[0] if choices else None, fits, expected)

    def text(self, name: str, default: str | None = None) -> Any:
        """Return text."""
        return self._of(name, default, lambda value: isinstance(value, str), "text")

    def texts(self, name: str, *, most: int) -> tuple[bytes, ...]:
        """Return one text or a list of texts, as bytes of UTF-8; no text is empty."""
        value = self._fields.get(name, [])
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            raise ApiError(
                400, f"{name} must be text or a list of texts, none empty, got {_shown(value)}", param=name
            )
        if len(items) > most:
            raise ApiError(400, f"{name} must have at most {most} texts, got {len(items)}", param=name)
        return tuple(encode_text(name, item) for item in items)

    def documents(self, name: str, *, most: int) -> tuple[list[bytes], bool]:
        """Return the bytes of documents, and whether they came as base64.

        Field `name` is a text, a list of texts, a list of bytes as numbers, or a list of such lists. Field
        `name`_base64 is a text or a list of texts.
        """
        coded = f"{name}_base64"
        if name in self and coded in self:
            raise ApiError(400, f"{name} and {coded} were both given: leave one out", param=coded)
        if coded in self:
            value = self._fields[coded]
            items = value if isinstance(value, list) else [value]
            found = [_decode_base64(coded, item) for item in items]
        else:
            value = self._fields.get(name, "")
            single = isinstance(value, str) or (bool(value) and _are_bytes(value))
            items = [value] if single else value
            if not isinstance(items, list):
                raise ApiError(400, f"{name} must be text or a list, got {_shown(value)}", param=name)
            # Name the number that is no byte in a list of numbers, not the first one
            items = sorted(items, key=_is_byte) if all(type(item) is int for item in items) else items
            found = [_document(name, item) for item in items]
        if not 1 <= len(found) <= most:
            raise ApiError(400, f"{name} must hold 1..{most} documents, got {len(found)}", param=name)
        return found, coded in self

    def _of(self, name: str, default: Any, fits: Callable[[Any], bool], expected: str) -> Any:
        value = self._fields.get(name, default)
        if name in self and not fits(value):
            raise ApiError(400, f"{name} must be {expected}, got {_shown(value)}", param=name)
        return value


def encode_text(name: str, text: str) -> bytes:
    """Return text as UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        fix = f"send its bytes as {name}_base64" if name in ("prompt", "input") else "leave it out"
        said = f"{name} holds a lone surrogate at character {error.start}, which has no UTF-8 form: {fix}"
        raise ApiError(400, said, param=name) from error


def _document(name: str, item: Any) -> bytes:
    if isinstance(item, str):
        return encode_text(name, item)
    if _are_bytes(item):
        return bytes(item)
    raise ApiError(
        400, f"{name} must hold texts, or lists of bytes as numbers 0..255, got {_shown(item)}", param=name
    )


def _are_bytes(item: Any) -> bool:
    return isinstance(item, list) and all(map(_is_byte, item))


def _is_byte(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 255


def _decode_base64(name: str, item: Any) -> bytes:
    try:
        return base64.b64decode(item, validate=True)
    except (ValueError, TypeError) as error:
        raise ApiError(400, f"{name} must hold base64, got {_shown(item)}: {error}", param=name) from error


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
