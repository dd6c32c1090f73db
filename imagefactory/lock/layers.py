"""The layer lock of a target: the layers of its image, known before any of them is built.

    lockfiles/<target>.layers.txt

The head has their inputs (`lock`, `base`) and tools (`made-with`). Each layer is a line with its digest,
diff id, size and title, the lowest first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from imagefactory.errors import LockError, os_problem
from imagefactory.fs import replace_text
from imagefactory.oci.manifests import Descriptor, OciLayer

LAYERS = "layers.txt"
FORMAT = "imagefactory-layer-lock 1"
_DIGEST = r"sha256:[0-9a-f]{64}"
_TEXT = r"[!-~](?:[ -~]{0,998}[!-~])?"
_HEAD = (
    ("format", re.escape(FORMAT)),
    ("target", r"[a-z0-9]+(?:[._-][a-z0-9]+)*"),
    ("lock", _DIGEST),
    ("base", _DIGEST),
    ("made-with", _TEXT),
    ("media-type", r"[a-z0-9.+/-]+"),
)
_LAYER = re.compile(rf"({_DIGEST}) ({_DIGEST}) ([1-9][0-9]{{0,14}}) ({_TEXT})")
_FIRST = len(_HEAD) + 2
"""The line of the first layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLock:
    """All layers of a target's image, with those of its base.

    `lock` is the digest of the target's lock, `base` names the base. With other values these are layers of
    another image. `toolchain` names the other inputs of their bytes: the codec, the layer format and the
    installers.
    """

    target: str
    lock: str
    base: str
    toolchain: str
    layers: tuple[OciLayer, ...]


def layers_path(directory: Path, target: str) -> Path:
    return directory / f"{target}.{LAYERS}"


def format_layer_lock(lock: LayerLock) -> str:
    """Return the text of a layer lock; `parse_layer_lock` is the inverse."""
    (media_type,) = {layer.descriptor.media_type for layer in lock.layers}
    values = (FORMAT, lock.target, lock.lock, lock.base, lock.toolchain, media_type)
    head = [f"{name}: {value}" for (name, _), value in zip(_HEAD, values, strict=True)]
    rows = [
        f"{layer.descriptor.digest} {layer.diff_id} {layer.descriptor.size} {layer.title}"
        for layer in lock.layers
    ]
    return "\n".join([*head, "", *rows]) + "\n"


def parse_layer_lock(text: str, file: str) -> LayerLock:
    """Return the layer lock in `text`. Raises LockError `file:line: problem`."""
    lines = text.split("\n")
    values = []
    for number, (name, pattern) in enumerate(_HEAD, 1):
        key, _, value = (lines[number - 1] if number <= len(lines) else "").partition(": ")
        if key != name or not re.fullmatch(pattern, value):
            raise _malformed(file, number, f"expected '{name}: ...'")
        values.append(value)
    if lines[_FIRST - 2 : _FIRST - 1] != [""] or lines[-1] != "" or len(lines) <= _FIRST:
        raise _malformed(file, _FIRST - 1, "an empty line, layers and a newline must follow the head")
    layers = []
    for number, line in enumerate(lines[_FIRST - 1 : -1], _FIRST):
        match = _LAYER.fullmatch(line)
        if match is None:
            raise _malformed(file, number, "expected 'digest diff-id size title'")
        digest, diff_id, size, title = match.groups()
        descriptor = Descriptor(media_type=values[5], digest=digest, size=int(size))
        layers.append(OciLayer(descriptor=descriptor, diff_id=diff_id, title=title))
    return LayerLock(
        target=values[1], lock=values[2], base=values[3], toolchain=values[4], layers=tuple(layers)
    )


def read_layer_lock(directory: Path, target: str) -> LayerLock | None:
    """Return the layer lock of a target in `directory`, or None. Raises LockError for a malformed one."""
    path = layers_path(directory, target)
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LockError(*os_problem("read", path, error), hint=_AGAIN.format(target)) from error
    except UnicodeDecodeError as error:
        raise _malformed(
            str(path), error.object.count(b"\n", 0, error.start) + 1, "not UTF-8 text"
        ) from error
    lock = parse_layer_lock(text, str(path))
    if lock.target != target:
        raise _malformed(str(path), 2, f"these are the layers of {lock.target}")
    return lock


def write_layer_lock(directory: Path, lock: LayerLock) -> None:
    """Write a layer lock atomically. Raises LockError."""
    path = layers_path(directory, lock.target)
    try:
        replace_text(path, format_layer_lock(lock))
    except OSError as error:
        hint = "check the disk space and the permissions"
        raise LockError(*os_problem("write", path, error), hint=hint) from error


def wrong_entries(lock: LayerLock, built: Sequence[OciLayer], file: str) -> tuple[str, ...]:
    """Return the entries of a layer lock that differ from built layers. Each begins with `file:line`."""
    wrong = []
    for number, (entry, layer) in enumerate(zip_longest(lock.layers, built), _FIRST):
        if entry is None or layer is None or entry.title != layer.title:
            made_is, says = (f"'{row.title}'" if row else "no more layer" for row in (layer, entry))
            wrong.append(f"{file}:{number}: {made_is} is made here, the file says {says}")
            continue
        for word, has, says in (
            ("diff id", layer.diff_id, entry.diff_id),
            ("digest", layer.descriptor.digest, entry.descriptor.digest),
            ("size", str(layer.descriptor.size), str(entry.descriptor.size)),
        ):
            if has != says:
                wrong.append(f"{file}:{number}: '{layer.title}' has the {word} {has}, the file says {says}")
    return tuple(wrong)


_AGAIN = "restore it from git, or write it again: imagefactory lock --layers {}"


def _malformed(file: str, number: int, message: str) -> LockError:
    return LockError("lock-malformed", f"{file}:{number}: {message}", hint=_AGAIN.format("TARGET"))
