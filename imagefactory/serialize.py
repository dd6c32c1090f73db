"""Frozen values as strict JSON and back: one codec, by the kinds of their fields.

    format_value(value, kind) -> what json.dumps takes
    parse_value(found, kind, where) -> the value that `format_value` made this of
    json.dumps(value, default=plain) -> output that imagefactory does not read again

A dataclass is an object with exactly its fields, a tuple a list, an enumeration its word, a time its text in
UTC, a duration its seconds. What a kind does not say stands beside it: `Annotated[str, Among(WORDS)]`. What
is read may come from a stranger: a text is one printable line, lists and numbers have bounds, and nothing
is mended.
"""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from imagefactory.errors import HIDDEN, StatementError

LONGEST_TEXT = 4096
MOST_ROWS = 256
LARGEST_COUNT = (1 << 53) - 1  # what every reader of JSON takes for a whole number
LARGEST_NUMBER = 1e300
LONGEST = 1e10  # seconds
DEPTH = 64  # lists and objects of a JSON text inside each other
_JSON_MARKS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|$)|[\[\]{}]', re.DOTALL)
"""Strings, as they hide brackets, and brackets."""
_LINE = re.compile(f"[^{HIDDEN}]*")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{6})?Z")


# --- what a kind does not say ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text that matches all of a pattern, or is empty where `empty` says so."""

    pattern: re.Pattern[str]
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """One value alone, such as the version of a format."""

    value: object


@dataclass(frozen=True, slots=True)
class NumberRange:
    """A number from `least` to `most`."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class MaxRows:
    """The rows that a list or an object has at most, in place of `MOST_ROWS`."""

    rows: int


@dataclass(frozen=True, slots=True)
class Choices:
    """One of these words."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PairsAsObject:
    """Pairs of a text and a value, as one object, by the texts in order."""


@dataclass(frozen=True, slots=True)
class TupleAsObject:
    """A tuple of some values, as an object with these fields."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FormattedAs:
    """The JSON that `format_value` writes of this type, or with a version `format_document`."""

    kind: Any
    version: int = 0


DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
CAPABILITY = re.compile(r"[1-9][0-9]?\.[0-9]|gfx[1-9][0-9]?[0-9a-f]{2}")
"""Of a GPU: CUDA's `8.0`, or AMD's `gfx90a`."""
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")

Digest = Annotated[str, Pattern(DIGEST)]
Capability = Annotated[str, Pattern(CAPABILITY)]
Name = Annotated[str, Pattern(NAME)]
AnyText = Annotated[str, Pattern(re.compile("(?s:.*)"))]  # to be cleaned before it is shown
Count = Annotated[int, NumberRange(0, LARGEST_COUNT)]


# --- there and back -------------------------------------------------------------------------------


class _InvalidValueError(Exception):
    """The problem of a value; `path` is its place, from the innermost name outwards."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str] = []


@dataclass(frozen=True, slots=True)
class _Codec:
    format: Callable[[Any], object]
    parse: Callable[[object], Any]


def format_value(value: Any, kind: Any = None) -> Any:
    """Return the value as JSON. `kind` is required if the type does not say all: for a tuple."""
    value_type: Any = type(value)
    return _codec(kind or value_type).format(value)


def parse_value(value: object, kind: Any, location: str) -> Any:
    """Return the value of `kind` from the output of `format_value`. Messages begin with `location`.

    Raises StatementError for an invalid value.
    """
    return _describe_error(_codec(kind).parse, value, location)


def plain(value: object) -> object:
    """Return the next step of a value towards JSON, for `json.dumps(default=plain)`.

    A dataclass with a text of its own (`__str__`) is that text. Raises TypeError for a type without JSON.
    """
    if isinstance(value, datetime):
        return format_time(value)
    if is_dataclass(value) and type(value).__str__ is object.__str__:
        return fields_of(value)
    if is_dataclass(value) or isinstance(value, date | Path):
        return str(value)
    raise TypeError(f"no JSON form is defined for {type(value)}")


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, in order, without going into them."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def format_document(value: object, version: int) -> dict[str, Any]:
    """Return a dataclass's value with the version of its form, as `format`, before its fields."""
    return {"format": version, **format_value(value)}


def parse_document(value: object, kind: Any, version: int, location: str) -> Any:
    """Return the value of `kind` from the output of `format_document`. Raises StatementError if invalid."""
    if not isinstance(value, dict) or "format" not in value:
        raise invalid_value_error(location, "'format' is missing")
    parse_value(value["format"], Annotated[int, Constant(version)], f"{location}: format")
    return parse_value({name: item for name, item in value.items() if name != "format"}, kind, location)


class ObjectSchema:
    """An object with these fields, each of its kind, that becomes a dict and no value of its own.

    The kind `object` takes any JSON; as a note beside it, a Fields is a field of another.
    """

    def __init__(self, **kinds: Any) -> None:
        self.read = _object_codec({name: _codec(kind) for name, kind in kinds.items()}, dict).parse

    def parse(self, value: object, location: str) -> dict[str, Any]:
        """Return the values by their names. Raises StatementError for an invalid value."""
        values = _describe_error(self.read, value, location)
        assert isinstance(values, dict)
        return values


def _describe_error(parse: Callable[[object], Any], value: object, location: str) -> Any:
    try:
        return parse(value)
    except _InvalidValueError as found:
        at = "".join(reversed(found.path)).lstrip(".")
        raise invalid_value_error(f"{location}: {at}" if at else location, str(found)) from None


def invalid_value_error(location: str, message: str) -> StatementError:
    return StatementError(
        "document-invalid",
        f"{printable_value(location)}: {message}",
        hint="the document was changed, or another program wrote it: create it again",
    )


def parse_json(data: bytes | str, *, depth: int = DEPTH) -> Any:
    """Return the value of a JSON text that a stranger wrote.

    Raises ValueError for what is not JSON in UTF-8, and for more than `depth` lists and objects inside each
    other: what reads the value goes down into it.
    """
    text = data if isinstance(data, str) else data.decode()
    level = 0
    for mark in _JSON_MARKS.finditer(text):
        level += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
        if level > depth:
            raise ValueError(f"lists and objects are nested more than {depth} deep")
    return json.loads(text)


def printable_value(text: str) -> str:
    """Return an untrusted text for a message: one short line without terminal control characters."""
    return re.sub(f"[{HIDDEN}]", "?", text[:200])


def printable_line(text: str) -> str:
    """Return a text as one line without hidden characters, for a document."""
    return " ".join(re.sub(f"[{HIDDEN}]", " ", text).split())


def format_time(time: datetime) -> str:
    """Return `2026-11-22T02:15:26Z`, with microseconds unless they are 0."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _parse_time(value: object) -> datetime:
    if isinstance(value, str) and _TIME.fullmatch(value):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            if format_time(time) == value:
                return time
    raise _InvalidValueError("expected a time such as 2026-01-31T12:00:00Z")


@functools.cache
def _codec(kind: Any) -> _Codec:
    """Return how values of a kind are written and read; cached, as a sweep has thousands of them."""
    notes: tuple[Any, ...] = ()
    if get_origin(kind) is Annotated:
        kind, *rest = get_args(kind)
        notes = tuple(rest)
    for note in notes:
        if isinstance(note, ObjectSchema):
            return _Codec(_same, note.read)
        if isinstance(note, Constant):
            return _Codec(_same, _fixed_parser(note.value))
    if get_origin(kind) is Literal:
        (only,) = get_args(kind)
        return _Codec(_same, _fixed_parser(only))
    if get_origin(kind) in (Union, types.UnionType):
        (value_type,) = (item for item in get_args(kind) if item is not types.NoneType)
        inner = _codec(Annotated[value_type, *notes] if notes else value_type)
        return _Codec(
            lambda value: None if value is None else inner.format(value),
            lambda value: None if value is None else inner.parse(value),
        )
    if get_origin(kind) is tuple:
        return _tuple_codec(get_args(kind), notes)
    if isinstance(kind, type) and is_dataclass(kind):
        return _object_codec(
            {
                name: _codec(value_type)
                for name, value_type in get_type_hints(kind, include_extras=True).items()
            },
            kind,
        )
    if kind is datetime:
        return _Codec(format_time, _parse_time)
    if kind is timedelta:
        seconds = _number_parser(float, NumberRange(0, LONGEST))
        return _Codec(lambda value: value.total_seconds(), lambda value: timedelta(seconds=seconds(value)))
    if kind is bool:
        return _Codec(_same, _parse_flag)
    if kind in (int, float):
        usual = (
            NumberRange(-LARGEST_COUNT, LARGEST_COUNT)
            if kind is int
            else NumberRange(-LARGEST_NUMBER, LARGEST_NUMBER)
        )
        return _Codec(_same, _number_parser(kind, _codec_of(NumberRange, notes, usual)))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        parse = _choice_parser(tuple(member.value for member in kind))
        return _Codec(lambda value: value.value, lambda value: kind(parse(value)))
    if kind is str:
        return _Codec(_same, _text_parser(notes))
    if kind is object:
        return _Codec(_same, _same)
    raise TypeError(f"no JSON form is defined for {kind}")


def _codec_of(kind: type[Any], notes: tuple[Any, ...], usual: Any) -> Any:
    return next((note for note in notes if isinstance(note, kind)), usual)


def _same(value: object) -> object:
    return value


def _text_parser(notes: tuple[Any, ...]) -> Callable[[object], str]:
    if words := _codec_of(Choices, notes, None):
        return _choice_parser(words.words)
    form = _codec_of(Pattern, notes, None)
    if form is None:
        return _parse_line
    matches, empty = form.pattern.fullmatch, form.empty

    def parse(value: object) -> str:
        if not isinstance(value, str) or not (matches(value) or (empty and not value)):
            raise _InvalidValueError("the value has an invalid format")
        return value

    return parse


def _parse_line(value: object) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT or not _LINE.fullmatch(value):
        raise _InvalidValueError(f"expected one printable line of at most {LONGEST_TEXT} characters")
    return value


def _choice_parser(words: tuple[str, ...]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise _InvalidValueError(f"expected one of {', '.join(words)}")
        return value

    return parse


def _fixed_parser(only: object) -> Callable[[object], object]:
    def parse(value: object) -> object:
        if value != only or type(value) is not type(only):
            raise _InvalidValueError(
                f"expected {only}, the only value that this version of imagefactory reads"
            )
        return value

    return parse


def _parse_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _InvalidValueError("expected true or false")
    return value


def _number_parser(kind: type[int] | type[float], bounds: NumberRange) -> Callable[[object], Any]:
    def parse(value: object) -> int | float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int if kind is int else (int, float))
            or value != value
        ):
            raise _InvalidValueError(f"expected {'an integer' if kind is int else 'a number'}")
        if not bounds.least <= value <= bounds.most:
            raise _InvalidValueError(f"expected a number from {bounds.least:g} to {bounds.most:g}")
        return kind(value)

    return parse


def _object_codec(codecs: Mapping[str, _Codec], make: Callable[..., Any]) -> _Codec:
    names, parsers = set(codecs), [(name, codec.parse) for name, codec in codecs.items()]

    def parse(value: object) -> Any:
        if not isinstance(value, dict):
            raise _InvalidValueError("expected an object")
        if value.keys() != names:
            name = min(names ^ value.keys())
            raise _InvalidValueError(
                f"'{printable_value(name)}' is {'missing' if name in names else 'not a known field'}"
            )
        fields = {}
        try:
            for name, parse_field in parsers:
                fields[name] = parse_field(value[name])
        except _InvalidValueError as found:
            found.path.append(f".{name}")
            raise
        return fields if make is dict else make(**fields)

    return _Codec(
        lambda value: {name: codec.format(getattr(value, name)) for name, codec in codecs.items()}, parse
    )


def _tuple_codec(kinds: tuple[Any, ...], notes: tuple[Any, ...]) -> _Codec:
    if len(kinds) == 2 and kinds[1] is ...:
        most = _codec_of(MaxRows, notes, MaxRows(MOST_ROWS)).rows
        if _codec_of(PairsAsObject, notes, None):
            name, value_type = get_args(kinds[0])
            return _pairs_codec(_codec(name).parse, _codec(value_type), most)
        return _list_codec(_codec(kinds[0]), most)
    codecs = tuple(_codec(kind) for kind in kinds)
    if named := _codec_of(TupleAsObject, notes, None):
        members = _object_codec(
            dict(zip(named.names, codecs, strict=True)), lambda **values: tuple(values.values())
        )
        return _Codec(
            lambda value: {
                name: codec.format(item) for name, codec, item in zip(named.names, codecs, value, strict=True)
            },
            members.parse,
        )

    def parse(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(codecs):
            raise _InvalidValueError(f"expected a list of {len(codecs)} values")
        return tuple(_error_at(f"[{n}]", codec.parse, value[n]) for n, codec in enumerate(codecs))

    return _Codec(
        lambda value: [codec.format(item) for codec, item in zip(codecs, value, strict=True)], parse
    )


def _list_codec(codec: _Codec, most: int) -> _Codec:
    def parse(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > most:
            raise _InvalidValueError(f"expected a list of at most {most} values")
        return tuple(_error_at(f"[{n}]", codec.parse, item) for n, item in enumerate(value))

    return _Codec(lambda value: [codec.format(item) for item in value], parse)


def _pairs_codec(parse_name: Callable[[object], str], codec: _Codec, most: int) -> _Codec:
    def parse(value: object) -> tuple[tuple[str, Any], ...]:
        if not isinstance(value, dict) or len(value) > most:
            raise _InvalidValueError(f"expected an object of at most {most} fields")
        return tuple(
            (parse_name(name), _error_at(f".{name}", codec.parse, value[name])) for name in sorted(value)
        )

    return _Codec(lambda value: {name: codec.format(item) for name, item in value}, parse)


def _error_at(name: str, parse: Callable[[object], Any], value: object) -> Any:
    try:
        return parse(value)
    except _InvalidValueError as found:
        found.path.append(name)
        raise
