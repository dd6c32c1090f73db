"""Find alternatives for projects without a fitting wheel. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion

from imagefactory.errors import LockError
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.requirements import fitting_set
from imagefactory.model import Lock
from imagefactory.versions import natural

_OTHERWISE = "remove it from the recipe, or write the path of your own wheel (./wheels/NAME.whl)"
_HINTED = re.compile(r"Wheels are required for `([A-Za-z0-9._-]+)`")
_WANTING = (
    r"Wheels are required for `([A-Za-z0-9._-]+)`",
    r"([A-Za-z0-9._-]+?)(?:\[[A-Za-z0-9,._-]*\])?(?:[=<>!~]=?[^ ]*)? has no (?:usable )?wheels",
    r"building from source is disabled for `([A-Za-z0-9._-]+)`",
)


class NoWheelError(LockError):
    """The solver found no wheel of `names`. `account` is its output, with the tested bounds."""

    def __init__(self, code: str, message: str, *, hint: str, names: tuple[str, ...], account: str) -> None:
        super().__init__(code, message, hint=hint)
        self.names, self.account = names, account


def all_without_wheel(stderr: str) -> tuple[str, ...]:
    """Return the normalized names of all projects without a wheel in uv's output."""
    text = " ".join(stderr.split())
    names = [canonicalize_name(name) for name in _HINTED.findall(text)]
    named = without_wheel(stderr).partition("==")[0]
    return tuple(dict.fromkeys((*names, *([named] if named else []))))


def without_wheel(stderr: str) -> str:
    """Return the project without a wheel in uv's output, `demo` or `demo==1.0`; empty for none."""
    text = " ".join(stderr.split())
    name = next(
        (canonicalize_name(match[1]) for pattern in _WANTING if (match := re.search(pattern, text))), ""
    )
    version = re.search(rf"\b{re.escape(name)}==([0-9][0-9A-Za-z.]*) has no ", text) if name else None
    return f"{name}=={version[1]}" if version else name


def working_versions(pin: str, files: Iterable[IndexFile], lock: Lock) -> str:
    """Return a fix for `demo` or `demo==1.0` without a wheel, from the files of its project.

    No other version is suggested: the solver would have used one if the recipe allowed it.
    """
    name = pin.partition("==")[0]
    fits, pythons, others, platform = False, set[str](), False, lock.platform
    for file in files:
        try:
            project, _, _, offered = parse_wheel_filename(file.filename)
        except (InvalidWheelFilename, InvalidVersion):
            continue
        if project != name or file.yanked:
            continue
        others = True
        if offered & fitting_set(lock.python, platform):
            fits = True
        for tag in offered:
            if (python := re.fullmatch(r"cp(3)([0-9]+)", tag.interpreter)) and any(
                tag in fitting_set(f"{python[1]}.{python[2]}", platform) for tag in offered
            ):
                pythons.add(f"{python[1]}.{python[2]}")
    if fits:
        return f"the index has no wheel of {pin} that the recipe allows: {_OTHERWISE}"
    if pythons:
        known = sorted(pythons, key=natural)
        return (
            f"its wheels are for Python {', '.join(known)}, and this image has {lock.python}: "
            "write python: and a base that has it, or remove the package"
        )
    has = (
        f"wheels of {name} only for other platforms, none for {platform.split('_', 3)[-1]}"
        if others
        else f"no wheel of {name}, only its sources"
    )
    return f"the index has {has}: {_OTHERWISE}"
