"""All expected errors, each with its exit code and a hint with a fix.

The library raises them; only `cli.main` prints and exits. An exception that is not an `ImagefactoryError` is
a bug and keeps its traceback (exit code 1).
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

DISTRIBUTION = "gpu-imagefactory"
"""This program's name in the package index, where `imagefactory` is another project."""

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_NOTHING_SELECTED = 3
EXIT_STALE = 4
EXIT_LOCK = 5
EXIT_TOOL = 6
EXIT_BUILD = 7
EXIT_REGISTRY = 8
EXIT_CHECK = 9
EXIT_AUDIT = 10
EXIT_UNKNOWN = 11
EXIT_INTERRUPTED = 130
EXIT_LIMIT = 137
EXIT_CODES = {
    EXIT_OK: "success",
    EXIT_BUG: "a bug in imagefactory",
    EXIT_USAGE: "invalid arguments, settings or recipe",
    EXIT_NOTHING_SELECTED: "nothing matches",
    EXIT_STALE: "a file is outdated (--check)",
    EXIT_LOCK: "a lock is missing, invalid or has no solution",
    EXIT_TOOL: "a tool is missing or not permitted",
    EXIT_BUILD: "a build failed",
    EXIT_REGISTRY: "a registry failed or rejected the request",
    EXIT_CHECK: "a check failed, or the result is negative",
    EXIT_AUDIT: "a license or vulnerability was found (image audit)",
    EXIT_UNKNOWN: "the answer is not known",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_LIMIT: "the command reached a limit of `run`",
}
"""The exit codes, as described in `help exit-codes` and the documentation."""


# USER:PASSWORD@ with or without a scheme, USER@ only after one. NAME:TAG@sha256:... is not a login.
_LOGIN = re.compile(
    r"(?<=://)[^\s/'\"]*@(?!sha256:)|(?<![^\s'\"(=,/])[^\s:/@'\"=,(]+:[^\s/@'\"]+@(?!sha256:)"
)


def without_logins(text: str) -> str:
    """Return `text` without the users and passwords in its addresses."""
    return _LOGIN.sub("", text)


_TOKEN = re.compile(r"(://[^\s/]+/t/)[^\s/]+")  # as conda writes one into a channel's address
_QUERY = re.compile(r"(/[^\s?#)]*)[?#][^\s)]*")


def redact(text: str) -> str:
    """Return `text` without the passwords, tokens and queries of its URLs, for messages and logs."""
    return _TOKEN.sub(r"\1****", _QUERY.sub(r"\1", without_logins(text)))


HIDDEN = (
    "\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb"
)
"""Characters that control a terminal or are invisible: controls, bidirectional marks, surrogates."""
STEERING = re.compile(f"(?![\\n\\t])[{HIDDEN}\U000e0000-\U000e007f]")
"""Hidden characters except line ends and tabs, and Unicode tags."""


def printable(text: str) -> str:
    """Return `text` with a `?` for each control or invisible character except line ends and tabs."""
    return STEERING.sub("?", text.replace("\r\n", "\n"))


def own_pip_command(verb: str, message: str) -> str:
    """Return the command that installs or removes packages for the current Python."""
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip"):
        return f"{python} -m pip {verb} {message}"
    return f"uv pip {verb} --python {python} {message}"  # environments of uv have no pip


def extra_hint(extra: str) -> str:
    """Return the command that installs an extra of this program (`build`, `conda`, ...)."""
    return own_pip_command("install", f"'{DISTRIBUTION}[{extra}]'")


class ImagefactoryError(Exception):
    """The base of all expected errors.

    `code` is a name in kebab-case that never changes, because scripts and tests rely on it. `message` states
    the problem, `hint` one fix: a command, or the correct text. Passwords in addresses are removed.
    """

    exit_code: int = EXIT_BUG

    def __init__(self, code: str, message: str, *, hint: str = "") -> None:
        self.code = code
        self.message, self.hint = without_logins(message), without_logins(hint)
        super().__init__(self.message)

    def __reduce__(self) -> tuple[object, ...]:  # errors cross process borders in worker pools
        return (_rebuild, (type(self), self.message, self.__dict__))


def _rebuild(
    error_type: type[ImagefactoryError], message: str, values: dict[str, object]
) -> ImagefactoryError:
    error = error_type.__new__(error_type)
    Exception.__init__(error, message)
    error.__dict__.update(values)
    return error


def os_problem(verb: str, path: object, error: OSError) -> tuple[str, str]:
    """Return the code and the message for an error of the operating system.

    `verb` is the failed action (read, write, create, delete): `StoreError(*os_problem("read", path,
    error))`.
    """
    return f"cannot-{verb}-file", f"cannot {verb} {path}: {os_reason(error)}"


def os_reason(error: OSError) -> str:
    """Return the reason of an error of the operating system, which begins with a small letter."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{reason[0].lower()}{reason[1:]}"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One problem in a file that a person wrote, at `location` (`file:line:column`), and its fix."""

    code: str
    location: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        prefix = f"{self.location}: " if self.location else ""
        return f"{prefix}{self.message}{f' ({self.fix})' if self.fix else ''}"


class UsageError(ImagefactoryError):
    """Invalid arguments or settings."""

    exit_code = EXIT_USAGE


class RecipeError(ImagefactoryError):
    """Problems in recipe files. Each reads `file:line:column: problem (fix)`."""

    exit_code = EXIT_USAGE

    def __init__(self, faults: Iterable[Diagnostic], *, hint: str = "") -> None:
        self.diagnostics = tuple(faults)
        super().__init__("recipe-invalid", "\n".join(self.faults), hint=hint)

    @property
    def faults(self) -> tuple[str, ...]:
        """The problems as text, in the order of the files."""
        return tuple(str(diagnostic) for diagnostic in self.diagnostics)


class NothingSelectedError(ImagefactoryError):
    """A selection that matches no target."""

    exit_code = EXIT_NOTHING_SELECTED


class StaleError(ImagefactoryError):
    """A file differs from what the recipes produce, found by `--check`."""

    exit_code = EXIT_STALE


class LockError(ImagefactoryError):
    """A lock that cannot be solved or read, or that is invalid."""

    exit_code = EXIT_LOCK


class UnsolvableError(LockError):
    """No environment fulfills the recipe's requirements.

    `tree` is the solver's output, many lines. `conflict` are the contradicting requirements, if known.
    """

    def __init__(
        self, code: str, message: str, *, hint: str = "", tree: str = "", conflict: tuple[str, ...] = ()
    ) -> None:
        super().__init__(code, message, hint=hint)
        self.tree, self.conflict = tree, conflict


class UnreachableError(LockError):
    """An index or channel that does not answer, so the existence of a solution is unknown."""


class OutdatedPackageRow(TypedDict):
    """A package that is locked at an older release than the newest."""

    name: str
    locked: str
    newest: str
    reason: str
    accept: str
    """The bound that accepts the old release in the recipe."""
    named: bool
    """Whether the recipe names the package; then the lock is rejected."""
    build: str
    """The requirement that has no wheel and could be built; empty for none."""
    uploaded: str
    """The time of a release that the cooldown excluded (`2026-11-26T10:11:12Z`); empty for other reasons."""


class OutdatedError(UnsolvableError):
    """Packages that the recipe names would be locked far older than their newest releases."""

    def __init__(
        self, code: str, message: str, *, outdated: tuple[OutdatedPackageRow, ...], hint: str, tree: str
    ) -> None:
        super().__init__(code, message, hint=hint, tree=tree)
        self.outdated = outdated


class UnbuiltPackageRow(TypedDict):
    """A package that has no wheel yet."""

    name: str
    version: str
    source: str
    """A file of the index, or the entry of the recipe."""
    needs: list[str]
    """The tools that build it: compilers, CUDA."""
    possible: bool
    """Whether imagefactory can build it."""
    requires: list[str]
    """Names of packages."""
    named: bool
    """Whether the recipe names the package."""


class UnbuiltError(LockError):
    """Packages without a wheel, which must be built from source first.

    `pins` (`name==version`) are the other packages of the solution.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        packages: tuple[UnbuiltPackageRow, ...],
        hint: str = "",
        pins: tuple[str, ...] = (),
    ) -> None:
        super().__init__(code, message, hint=hint)
        self.packages, self.pins = packages, pins


class ToolError(ImagefactoryError):
    """An engine or tool that is missing, or that this machine does not allow. The hint has the fix."""

    exit_code = EXIT_TOOL


class LimitError(ImagefactoryError):
    """A command that was ended at a limit, as by signal 9."""

    exit_code = EXIT_LIMIT


class BuildError(ImagefactoryError):
    """A failed build of an image, layer or base. The store has no partial result."""

    exit_code = EXIT_BUILD


class DownloadError(BuildError):
    """A package that could not be downloaded completely and with the locked hash."""


class StoreError(BuildError):
    """A store that is corrupt, full or not writable."""


class NoPlatformError(StoreError):
    """An index in the store that has no image for the requested platform."""


class RegistryError(ImagefactoryError):
    """A registry that rejected a request, failed or was unreachable. No partial image is visible there."""

    exit_code = EXIT_REGISTRY


class NoImageError(RegistryError):
    """A name that is not an image for this platform, or a malformed image."""


class CheckFailedError(ImagefactoryError):
    """A check that ran and failed."""

    exit_code = EXIT_CHECK


class UnknownAnswerError(ImagefactoryError):
    """A question whose answer is not known: neither yes nor no."""

    exit_code = EXIT_UNKNOWN


class NoGpuError(CheckFailedError):
    """A GPU is required, and this machine has no usable GPU."""


class StatementError(CheckFailedError):
    """A report, statement or signature that is invalid or must not be signed."""
