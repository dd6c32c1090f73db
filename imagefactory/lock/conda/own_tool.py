"""Solve conda packages with the user's own conda, mamba or micromamba, through conda-lock.

conda-lock runs as a separate program, because it changes its environment when it starts a solver. It always
gets the path of an existing solver, so that it never fetches one. Its answer decides only which packages go
together. The locked values of each come from the channels' records.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from imagefactory.errors import LockError, ToolError, UnsolvableError, extra_hint, os_reason, redact
from imagefactory.gpu.capability import SUBDIRS
from imagefactory.lock import LockRequest
from imagefactory.lock.conda.channels import ChannelAccess
from imagefactory.lock.conda.file import merge_depends
from imagefactory.lock.conda.locker import CondaLocker
from imagefactory.lock.conda.solver import CondaRequest, first_question, run
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import LockedCondaPackage, Target

_NO_SOLUTION = re.compile(
    r"UnsatisfiableError|PackagesNotFoundError|ResolvePackageNotFound|Could not solve|Cannot solve"
    r"|solver_problems|nothing provides"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CondaTool:
    """A conda, mamba or micromamba: its absolute path, and the environment it runs in."""

    path: Path
    environ: Mapping[str, str] = field(repr=False)

    def name(self) -> str:
        """The solver's name, `micromamba 2.0.5 by conda-lock 4.0.3`. Raises ToolError if it cannot start."""
        try:
            by = version("conda-lock")
        except PackageNotFoundError as error:
            raise ToolError(
                "extra-not-installed", "conda-lock is not installed", hint=extra_hint("conda")
            ) from error
        try:
            result = subprocess.run(
                [self.path, "--version"],
                capture_output=True,
                text=True,
                check=False,
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise ToolError(
                "solver-not-working", f"cannot start {self.path}: {os_reason(error)}", hint=_OTHER
            ) from error
        match = re.search(r"[0-9]+(?:\.[0-9]+)+", result.stdout)
        if result.returncode or not match:
            raise ToolError(
                "solver-not-working",
                f"cannot start {self.path}: {(result.stderr or result.stdout)[:200]}",
                hint=_OTHER,
            )
        return f"{self.path.name} {match[0]} by conda-lock {by}"


_OTHER = 'install this solver again, or use the built-in one: solver = "rattler"'


def find_tool(setting: str, environ: Mapping[str, str]) -> CondaTool:
    """Return the program of the setting `solver`, from the PATH or a path. Raises ToolError without it."""
    path = setting if "/" in setting else shutil.which(setting, path=environ.get("PATH", os.defpath))
    if path is None or not os.access(path, os.X_OK):
        raise ToolError(
            "tool-missing",
            f"the solver '{setting}' is not installed",
            hint='install it (imagefactory downloads no programs), or write solver = "rattler"',
        )
    return CondaTool(path=Path(path).absolute(), environ=environ)


class CondaLockLocker(CondaLocker):
    """A CondaLocker with another solver of conda packages.

    Such a solver cannot prefer locked packages, so all of them are pinned, except those to update. If that
    has no solution, all packages may change except the parent's. An update of only some packages is rejected
    instead.
    """

    def __init__(
        self, tool: CondaTool, channels: ChannelAccess, cache: Path, pip: Callable[[], UvLocker]
    ) -> None:
        super().__init__(channels, cache, pip)
        self._tool = tool

    def _solver_name(self) -> str:
        return self._tool.name()

    def _solve(
        self, request: LockRequest, update: tuple[str, ...], *, unchanged: bool
    ) -> tuple[LockedCondaPackage, ...]:
        target, below = request.target, request.under.conda if request.under else ()
        if request.cutoff:
            raise LockError(
                "cutoff-not-supported",
                f"{target.name}: {self._tool.path.name} cannot exclude releases by their age",
                hint='write solver = "rattler", or pass --exclude-newer "0 days"',
            )
        previous = () if request.previous is None or request.update_all else request.previous.conda
        self._tool.name()  # raises for a missing tool before conda-lock searches for it
        pinned = {package.name: package for package in (*previous, *below) if package.name not in update}
        try:
            packages = self._ask(target, pinned.values())
        except UnsolvableError as error:
            if update and unchanged:
                raise LockError(
                    "update-not-possible",
                    f"{target.name}: {self._tool.path.name} finds no solution that upgrades only "
                    f"{', '.join(update)}",
                    hint=f"upgrade all packages: imagefactory lock {target.name} --upgrade; "
                    'or write solver = "rattler"',
                ) from error
            if len(pinned) == len(below):
                raise
            packages = self._ask(target, below)
        return tuple(self._sized(package, target) for package in packages)

    def _ask(self, target: Target, pinned: Iterable[LockedCondaPackage]) -> list[LockedCondaPackage]:
        """Return the needed packages of a solution with `pinned`."""
        question = first_question(target)
        fixed = {package.name: package for package in pinned}
        pins = [f"{package.name} =={package.version} {package.build}" for package in fixed.values()]
        answer = self._run(target, question, pins)
        names = sorted({_name(address) for address in answer})
        solver = self._solver(target)
        known = {solver.true_address(record): record for record in run(solver.records(names))}
        packages: dict[str, LockedCondaPackage] = {}
        for address, sha256 in answer.items():
            true = self._channels.true_address(address, target.channels)
            if true not in known:
                raise LockError(
                    "solver-wrong-channel",
                    f"{target.name}: the solver chose {redact(true)}, which is not in the target's channels",
                    hint=f"remove other channels from the settings of {self._tool.path}",
                )
            package = solver.locked(known[true])
            if sha256 and sha256 != package.sha256:
                raise LockError(
                    "solver-wrong-hash",
                    f"{target.name}: {self._tool.path.name} has another sha256 for {package.filename} "
                    f"({sha256[:12]}...) than {true.rsplit('/', 2)[0]} ({package.sha256[:12]}...)",
                    hint="delete the solver's cache of channel records, then run the same command again",
                )
            if package.name in fixed and fixed[package.name].url != package.url:
                raise LockError(
                    "solver-ignored-pin",
                    f"{target.name}: {package.name} was pinned to {fixed[package.name].url}, "
                    f"the solver chose {package.url}",
                    hint='write solver = "rattler", which pins the exact file',
                )
            packages[package.name] = package
        return _needed(packages, [_named(spec) for spec in question.specs])

    def _run(self, target: Target, question: CondaRequest, pins: Iterable[str]) -> dict[str, str]:
        """Return address -> sha256 (empty if unknown) of the packages that conda-lock locks."""
        # conda's `create` installs all bounded packages: unneeded ones are dropped later.
        specs = _merge_specs([*question.specs, *question.constraints, *pins])
        subdir = SUBDIRS[target.platform]
        virtual = {name: f"{of} {build}" if build != "0" else of for name, of, build in question.virtual}
        written: dict[str, dict[str, Any]] = {
            "environment.yml": {
                "channels": [self._channels.place(channel) for channel in target.channels],
                "platforms": [subdir],
                "dependencies": specs,
            },
            "virtual-packages.yml": {"subdirs": {subdir: {"packages": virtual}}},
        }
        with tempfile.TemporaryDirectory(prefix="imagefactory-lock-") as name:
            directory = Path(name)
            for file, value in written.items():  # JSON is YAML, and quotes everything
                (directory / file).write_text(json.dumps(value, indent=1))
            result = subprocess.run(
                [
                    *(sys.executable, "-P", "-m", "conda_lock", "lock", f"--conda={self._tool.path}"),
                    *(f"--file={directory}/environment.yml", f"--platform={subdir}"),
                    *(f"--virtual-package-spec={directory}/virtual-packages.yml",),
                    f"--lockfile={directory}/lock.yml",
                ],
                env=self._environment(directory, strict=question.strict),
                cwd=directory,
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
            )
            if result.returncode:
                raise self._explain(target, result.stderr)
            loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            packages = yaml.load((directory / "lock.yml").read_bytes(), Loader=loader)["package"]  # noqa: S506
        return {row["url"]: row["hash"].get("sha256") or "" for row in packages}

    def _environment(self, directory: Path, *, strict: bool) -> dict[str, str]:
        priority = "strict" if strict else "disabled"
        return {
            **self._tool.environ,
            "CONDA_CHANNEL_PRIORITY": priority,
            "MAMBA_CHANNEL_PRIORITY": priority,
            "TMPDIR": str(directory),  # conda-lock does not delete its files there
        }

    def _explain(self, target: Target, stderr: str) -> LockError:
        """Return conda-lock's failure without its traceback and its repetitions."""
        message, _, command = stderr.partition("    Command: ")
        message = (
            message.partition("Could not lock the environment for platform")[2].partition("\n")[2] or message
        )
        error_text = command.partition("    STDERR:\n")[2].partition("Traceback (most recent call last)")[0]
        account = self._with_true_addresses(target, error_text if "olve" in error_text else message)
        account = redact(account).replace("\r", "").strip()
        lines = [line.strip() for line in account.splitlines() if line.strip()]
        name = self._tool.path.name
        if _NO_SOLUTION.search(stderr):
            return UnsolvableError(
                "no-solution",
                f"{target.name}: {name} finds no solution: {' '.join(lines)[:400]}",
                hint=f"change the recipe at {target.where}; for the reason, run imagefactory lock "
                f"{target.name} --explain",
                tree=account,
            )
        return LockError(
            "solver-failed",
            f"{target.name}: {name} failed in conda-lock: {' '.join(lines[-5:])[-400:] or 'no output'}",
            hint=f"check that `{self._tool.path} info` works and reaches the channels",
        )

    def _with_true_addresses(self, target: Target, text: str) -> str:
        """Return `text` with the channels' true addresses, because it may be written next to the locks."""
        true = {self._channels.place(channel): channel for channel in target.channels}
        places = "|".join(re.escape(address) for address in sorted(true, key=len, reverse=True))
        return re.sub(rf"(?:{places})(?![A-Za-z0-9._%+~-])", lambda match: true[match[0]], text)


def _named(spec: str) -> str:
    """Return the name in a match spec of a recipe."""
    return spec.rpartition("::")[2].split()[0]


def _merge_specs(specs: Iterable[str]) -> list[str]:
    """Return one spec for each package: conda-lock uses the last one of a name."""
    channels: dict[str, str] = {}
    bare = []
    for spec in specs:
        channel, colons, rest = spec.rpartition("::")
        channels |= {_named(spec): f"{channel}{colons}"} if channel else {}
        bare.append(rest)
    return [f"{channels.get(_named(spec), '')}{spec}" for spec in merge_depends(bare)]


def _name(address: str) -> str:
    """Return the package in an archive's address: names may have hyphens, versions and builds have none."""
    return address.rpartition("/")[2].rsplit("-", 2)[0]


def _needed(packages: Mapping[str, LockedCondaPackage], names: Iterable[str]) -> list[LockedCondaPackage]:
    """Return the named packages and all their dependencies, sorted by name."""
    needed: set[str] = set()
    more = list(names)
    while more:
        name = more.pop()
        if name in packages and name not in needed:
            needed.add(name)
            more += [_named(spec) for spec in packages[name].depends]
    return [packages[name] for name in sorted(needed)]
