"""Locks of Python packages: their file format, what makes one stale, and uv as the solver.

A lock names one wheel with one hash for each package: the very file that will be in the image. It is a
requirements file, so pip and uv install it without imagefactory, and it holds no addresses.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import re
import subprocess
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from packaging import tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from imagefactory.errors import LockError, ToolError, UnsolvableError
from imagefactory.lock import LockRequest
from imagefactory.model import Base, Lock, LockedWheel, Target
from imagefactory.progress import Progress

if TYPE_CHECKING:  # solving needs the build extra, reading a lock does not
    from imagefactory.lock.index import PackageIndex

FORMAT = 1
_BIG = 100_000_000  # bytes of a wheel that is not fetched for its metadata alone
MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}

# --- the file ------------------------------------------------------------------------------------

_HEADER = (  # in the file's order; each value is refused unless it matches in full
    ("imagefactory lock", r"[1-9][0-9]{0,3}"),
    ("target:", r"[a-z0-9]+(?:[._-][a-z0-9]+)*"),
    ("content-hash:", r"sha256:[0-9a-f]{64}"),
    ("python:", r"3\.[0-9]{1,2}"),
    ("platform:", rf"manylinux_2_[0-9]{{1,2}}_(?:{'|'.join(MACHINES.values())})"),
    ("solver:", r"[A-Za-z0-9][A-Za-z0-9 .+_-]{0,60}"),
    ("packages:", r"[1-9][0-9]{0,4}"),
    ("to make it anew:", r"imagefactory lock [a-z0-9]+(?:[._-][a-z0-9]+)*"),
)
_WHEEL = re.compile(r"# wheel: ([A-Za-z0-9][A-Za-z0-9._+!-]{0,250}\.whl) ([1-9][0-9]{0,14})")
_PIN = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)==([A-Za-z0-9.+!_-]{1,100}) --hash=sha256:([0-9a-f]{64})")


def format_lock(lock: Lock) -> str:
    """The text of a lock; `parse_lock` gives the same value back."""
    values = (
        str(FORMAT),
        lock.target,
        lock.content_hash,
        lock.python,
        lock.platform,
        lock.solver,
        str(len(lock.wheels)),
        f"imagefactory lock {lock.target}",
    )
    lines = [f"# {key} {value}" for (key, _), value in zip(_HEADER, values, strict=True)]
    for wheel in lock.wheels:
        lines.append(f"# wheel: {wheel.filename} {wheel.size}")
        lines.append(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}")
    return "\n".join(lines) + "\n"


def parse_lock(text: str, file: str) -> Lock:
    """The lock in `text`; `file` is named in faults.

    Raises LockError `file:line: what is wrong`: for a line that is not as `format_lock` writes it, a
    package twice or out of order, a file that is not a wheel, is not this package in this version or
    does not fit the lock's Python and platform, and for a file that was cut short.
    """
    lines = text.split("\n")
    target = _between(lines[1] if len(lines) > 1 else "", "# target: ")

    def fault(index: int, what: str) -> LockError:
        known = re.fullmatch(_HEADER[1][1], target)
        return LockError(
            f"{file}:{index + 1}: {what}", hint=f"imagefactory lock {target if known else 'TARGET'}"
        )

    header = []
    for index, (key, pattern) in enumerate(_HEADER):
        line = lines[index] if index < len(lines) else ""
        value = _between(line, f"# {key} ")
        if not re.fullmatch(pattern, value):
            raise fault(index, f"expected '# {key} ...' and not {_shown(line)}")
        if index == 0 and value != str(FORMAT):
            raise fault(0, f"lock format {value} is not known to this imagefactory (it knows {FORMAT})")
        header.append(value)
    _, _, content_hash, python, platform, solver, count, remake = header
    if remake != f"imagefactory lock {target}":
        raise fault(len(_HEADER) - 1, f"names another target than '{target}'")
    if lines[-1] != "":
        raise fault(len(lines) - 1, "the last line is cut short")

    wheels: list[LockedWheel] = []
    for index in range(len(_HEADER), len(lines) - 1, 2):
        wheel = _parse_wheel(lines[index : index + 2], index, fault)
        misfit = _misfit(wheel, python, platform)
        if misfit:
            raise fault(index, misfit)
        if wheels and wheel.name == wheels[-1].name:
            raise fault(index + 1, f"'{wheel.name}' stands twice")
        if wheels and wheel.name < wheels[-1].name:
            raise fault(index + 1, f"'{wheel.name}' must stand before '{wheels[-1].name}'")
        wheels.append(wheel)
    if len(wheels) != int(count):
        raise fault(len(lines) - 1, f"holds {len(wheels)} packages where its header says {count}")
    return Lock(
        target=target,
        content_hash=content_hash,
        python=python,
        platform=platform,
        solver=solver,
        wheels=tuple(wheels),
    )


def read_lock(path: Path) -> Lock:
    """The lock in a file. Raises LockError for one that is missing, unreadable or malformed."""
    try:
        data = path.read_bytes()
        return parse_lock(data.decode("utf-8"), str(path))
    except FileNotFoundError as error:
        name = path.name.removesuffix(".requirements.txt")
        raise LockError(f"{path} does not exist", hint=f"imagefactory lock {name}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise LockError(f"{path}:{line}: is not UTF-8 text", hint="imagefactory lock TARGET") from error
    except OSError as error:
        raise LockError(f"{path}: cannot be read: {error.strerror}", hint="mend the file's rights") from error


def _between(line: str, prefix: str) -> str:
    return line.removeprefix(prefix) if line.startswith(prefix) else ""


def _shown(line: str) -> str:
    return repr(line if len(line) <= 80 else line[:77] + "...") if line else "nothing"


def _parse_wheel(pair: list[str], index: int, fault: Any) -> LockedWheel:
    described, pin = pair[0], pair[1] if len(pair) > 1 else ""
    first = _WHEEL.fullmatch(described)
    if not first:
        if re.match(r"# wheel: \S+\.(tar\.gz|zip|tar\.bz2) ", described):
            raise fault(index, "names a source distribution; images are made of wheels only")
        raise fault(index, f"expected '# wheel: FILE.whl BYTES' and not {_shown(described)}")
    second = _PIN.fullmatch(pin)
    if not second:
        raise fault(index + 1, f"expected 'name==version --hash=sha256:<64 hex>' and not {_shown(pin)}")
    return LockedWheel(
        name=second[1],
        version=second[2],
        filename=first[1],
        sha256=second[3],
        size=int(first[2]),
    )


def _misfit(wheel: LockedWheel, python: str, platform: str) -> str:
    """What is wrong with a wheel's file name for its pin, Python and platform; empty if nothing is."""
    try:
        name, version, _, offered = parse_wheel_filename(wheel.filename)
        pinned = Version(wheel.version)
    except InvalidWheelFilename as error:
        return f"'{wheel.filename}' is not a wheel's file name: {error}"
    except InvalidVersion as error:
        return str(error)
    if (name, version) != (wheel.name, pinned):
        return f"'{wheel.filename}' is not {wheel.name} {wheel.version}"
    if offered.isdisjoint(fitting_tags(python, platform)):
        return f"'{wheel.filename}' does not fit Python {python} on {platform}"
    return ""


@lru_cache(maxsize=32)
def fitting_tags(python: str, platform: str) -> tuple[tags.Tag, ...]:
    """The wheel tags that CPython `python` takes on `platform`, best first.

    `platform` is `manylinux_2_36_x86_64`: a wheel for this glibc or an older one fits. Sources: PEP 425,
    PEP 600 with its aliases for the older names, and packaging's order.
    """
    found = re.fullmatch(r"manylinux_2_([0-9]+)_(\w+)", platform)
    if not found:
        raise ValueError(f"not a manylinux platform: {platform}")
    machine, oldest = found[2], 5 if found[2] == "x86_64" else 17
    older_names = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    platforms = []
    for minor in range(int(found[1]), oldest - 1, -1):
        platforms.append(f"manylinux_2_{minor}_{machine}")
        if minor in older_names:
            platforms.append(f"{older_names[minor]}_{machine}")
    platforms.append(f"linux_{machine}")
    major, _, minor_text = python.partition(".")
    version, interpreter = (int(major), int(minor_text)), f"cp{major}{minor_text}"
    return (
        *tags.cpython_tags(version, abis=[interpreter], platforms=platforms),
        *tags.compatible_tags(version, interpreter=interpreter, platforms=platforms),
    )


# --- what a lock must hold -----------------------------------------------------------------------


def content_hash(target: Target, base: Base) -> str:
    """`sha256:...` of all that decides a target's solution; a lock with another one is stale.

    Not in it: name, description, checks and environment (they change no package), the order in which
    requirements are written, and the version of uv (a newer one must not make every lock stale).
    """
    decides = {
        "format": FORMAT,
        "source": target.source,
        "requirements": sorted(set(target.requirements)),
        "constraints": sorted(set(target.constraints)),
        "python": target.python,
        "platform": target.platform,
        "glibc": base.glibc,
    }
    canonical = json.dumps(decides, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def cuda_runtimes(lock: Lock) -> tuple[LockedWheel, ...]:
    """The packages that bring a CUDA runtime library; an image must have one only."""
    pattern = re.compile(r"nvidia-cuda-runtime(-cu[0-9]+)?")
    found = tuple(wheel for wheel in lock.wheels if pattern.fullmatch(wheel.name))
    return found or tuple(wheel for wheel in lock.wheels if wheel.name == "cuda-toolkit")


def cuda_version(lock: Lock) -> str | None:
    """The CUDA version that a lock brings, as `12.1`; None if it brings no CUDA runtime."""
    versions = [Version(wheel.version) for wheel in cuda_runtimes(lock)]
    return f"{max(versions).major}.{max(versions).minor}" if versions else None


def check_facts(lock: Lock, target: Target) -> None:
    """Raise LockError unless `lock` holds the target's framework version and CUDA version."""
    framework = next((w for w in lock.wheels if w.name == canonicalize_name(target.framework)), None)
    if framework is None:
        raise LockError(
            f"{target.name}: the lock does not hold the framework '{target.framework}'",
            hint=f"imagefactory lock {target.name}",
        )
    came = f"{framework.name} {framework.version}"
    if not _agrees(target.version, framework.version):
        raise LockError(
            f"{target.name}: {came} was locked, the recipe asks for {target.version}",
            hint=f"let the packages at {target.where} agree with version {target.version}",
        )
    runtimes, cuda = cuda_runtimes(lock), cuda_version(lock)
    if cuda is None:
        raise LockError(
            f"{target.name}: {came} and its dependencies bring no CUDA runtime: "
            "the image would silently compute on the CPU",
            hint=f"add the extra or the nvidia-cuda-runtime package that brings CUDA at {target.where}",
        )
    brought = " and ".join(f"{wheel.name} {wheel.version}" for wheel in runtimes)
    if len(runtimes) > 1:
        raise LockError(
            f"{target.name}: {came} comes with more than one CUDA runtime ({brought})",
            hint=f"constrain the packages at {target.where} to one of them",
        )
    if not _agrees(target.cuda, cuda):
        raise LockError(
            f"{target.name}: {came} comes with CUDA {cuda} ({brought}), the recipe asks {target.cuda}",
            hint=f'write cuda: ["{cuda}"] at {target.where}, or constrain {runtimes[0].name}',
        )


def _agrees(asked: str, came: str) -> bool:
    """Whether release `came` begins with the parts of `asked`: 2.3 agrees with 2.3.1, not with 2.30."""
    wanted = asked.split(".")
    return [str(part) for part in Version(came).release[: len(wanted)]] == wanted


# --- solving with uv -----------------------------------------------------------------------------

# What a machine's uv settings may not decide. Its index, certificates and caches it may.
_SOLVE = (
    "--only-binary=:all:",
    "--resolution=highest",
    "--prerelease=if-necessary-or-explicit",
    "--index-strategy=first-index",
    "--no-sources",
    "--no-header",
    "--no-annotate",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A file that the index offers for a pin."""

    filename: str
    url: str
    sha256: str
    size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What uv is asked: the wheels of `lock`, which has none yet, for its Python and platform.

    The versions and files of `previous` are preferred, but for those named in `update`; with `update_all`
    only files are, of whatever version comes out. `fixed` are in the answer as they are. `given`
    are pins (`numpy==1.26.4+given`) of packages that something else brings: uv finds them as wheels in the
    folder `stubs`, and they are not in the answer.
    """

    lock: Lock
    requirements: tuple[str, ...]
    constraints: tuple[str, ...] = ()
    previous: Lock | None = None
    update: tuple[str, ...] = ()
    update_all: bool = False
    fixed: tuple[LockedWheel, ...] = ()
    given: tuple[str, ...] = ()
    stubs: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """uv's solution: `lines` as `name==version`, and in `lacking` extras that were asked (package, extra)
    and that the package's metadata does not have."""

    lines: tuple[str, ...]
    lacking: tuple[tuple[str, str], ...]


class UvLocker:
    """Solves with uv, the program that comes with its PyPI package.

    `python` is the interpreter that uv asks about this machine; the target's own is only simulated.
    """

    def __init__(self, index: PackageIndex, *, python: Path) -> None:
        self._index = index
        self._python = python
        self._platforms: list[tuple[str, str]] = []

    def require(self) -> str:
        """uv's version. Raises ToolError without uv."""
        done = self._run(["--version"])
        found = re.search(r"\d+\.\d+\.\d+\S*", done.stdout)
        if done.returncode != 0 or not found:
            raise ToolError(
                f"uv does not start: {(done.stderr or done.stdout).strip()[:200]}",
                hint="pip install --force-reinstall 'imagefactory[build]'",
            )
        return found[0]

    def lock(self, request: LockRequest, progress: Progress) -> Lock:
        """The lock of a target.

        While the previous lock's content hash holds and no update is asked it is returned as it is and
        nothing is solved. Otherwise previous pins are preferences: only what must move moves. A target that
        is built on another keeps every wheel of that one's lock. Raises UnsolvableError if there is no
        solution, LockError if it is not what the target names, ToolError without uv.
        """
        target, previous, under = request.target, request.previous, request.under
        decided = _decided(request)
        update = _known_updates(request)
        if previous and previous.content_hash == decided and not update and not request.update_all:
            kept = previous if previous.target == target.name else replace(previous, target=target.name)
            check_facts(kept, target)
            return kept
        empty = Lock(
            target=target.name,
            content_hash=decided,
            python=target.python,
            platform=under.platform if under else self.platform(target, request.base.glibc),
            solver=f"uv {self.require()}",
            wheels=(),
        )
        wanted = Wanted(
            lock=empty,
            requirements=target.requirements,
            constraints=target.constraints,
            previous=previous,
            update=update,
            update_all=request.update_all,
            fixed=under.wheels if under else (),
        )
        try:
            lock = replace(empty, wheels=self.wheels(wanted, self.solve(wanted), progress))
        except UnsolvableError as error:
            raise _explain_on(error, under) if under else error from error
        check_facts(lock, target)
        return lock

    def wheels(self, wanted: Wanted, pins: Pins, progress: Progress) -> tuple[LockedWheel, ...]:
        """The very wheels of a solution, sorted by name.

        A file of `wanted.previous` stays while its version does and the index has it. Raises LockError for
        a package without a fitting wheel.
        """
        offers = self.offers(pins.lines, wanted.lock)
        kept = _kept(wanted.previous, wanted.lock, wanted.update)
        chosen = self._sizes(self._choose(offers, wanted.lock, kept), offers, progress)
        return tuple(sorted((*wanted.fixed, *chosen), key=lambda wheel: wheel.name))

    def addresses(self, lock: Lock) -> dict[str, str]:
        """Where each locked wheel is now: file name -> URL (which may hold the index's credentials).

        A file is known by its hash: a better wheel uploaded later changes nothing, and a yanked version
        is still found. Raises LockError for a file that the index no longer has or has changed.
        """
        offers = self.offers([f"{wheel.name}=={wheel.version}" for wheel in lock.wheels], lock)
        found, missing = {}, []
        for wheel in lock.wheels:
            url = _address(wheel, offers.get(wheel.name, ()), lock)
            if url:
                found[wheel.filename] = url
            else:
                missing.append(wheel)
        return found | self._search(missing, lock)

    def solve(self, wanted: Wanted) -> Pins:
        """uv's solution without what is fixed or given. Raises UnsolvableError, or ToolError without uv."""
        # A pin among the requirements also lets uv take a version that has been yanked since.
        fixed = tuple(f"{wheel.name}=={wheel.version}" for wheel in wanted.fixed)
        with tempfile.TemporaryDirectory(prefix="imagefactory-lock-") as folder:
            asked, bounds, out = (Path(folder) / name for name in ("in.txt", "bounds.txt", "out.txt"))
            asked.write_text(_lines({*wanted.requirements, *fixed}))
            bounds.write_text(_lines({*wanted.constraints, *wanted.given}))
            if wanted.previous and not wanted.update_all:  # uv prefers the versions of the file it replaces
                out.write_text(_lines({f"{one.name}=={one.version}" for one in wanted.previous.wheels}))
            more = [f"--upgrade-package={name}" for name in wanted.update]
            more += [f"--find-links={wanted.stubs}"] if wanted.stubs else []
            arguments = [str(asked), f"--constraints={bounds}", f"--output-file={out}", *more]
            told = self._compile(arguments, wanted.lock).stderr
            pins = [line for line in out.read_text().splitlines() if "==" in line]
        elsewhere = {canonicalize_name(pin.partition("==")[0]) for pin in (*fixed, *wanted.given)}
        lacking = re.findall(r"The package `([^`=]+)==[^`]*` does not have an extra named `([^`]+)`", told)
        return Pins(
            lines=tuple(pin for pin in pins if canonicalize_name(pin.partition("==")[0]) not in elsewhere),
            lacking=tuple(sorted({(canonicalize_name(name), extra) for name, extra in lacking})),
        )

    def metadata(self, pin: str, lock: Lock) -> str:
        """METADATA of the wheel that fits a pin (`name==version`), beside it (PEP 658) or inside.

        Raises LockError where the index has no such wheel, or only one too big to fetch for this.
        """
        from imagefactory.lock.index import RefusedError, TransientError, Web, local_path, redact

        offered = self.offers([pin], lock)
        best = _best((offer for files in offered.values() for offer in files), lock)
        if best is None:
            raise LockError(f"{lock.target}: the index has no wheel of {pin} that fits")
        url, web = best[1].url, Web(self._index)

        def fetch(address: str) -> bytes:
            with web.open(address) as response:
                content: bytes = response.content
                return content

        try:
            if path := local_path(url):
                return _metadata_inside(path.read_bytes())
            try:
                return web.patience.retry(lambda: fetch(f"{url}.metadata")).decode("utf-8")
            except RefusedError:
                if web.size(url) > _BIG:
                    raise
                return _metadata_inside(web.patience.retry(lambda: fetch(url)))
        except (RefusedError, TransientError, OSError, zipfile.BadZipFile, KeyError) as error:
            raise LockError(
                f"{lock.target}: the metadata of {pin} could not be read: {redact(str(error))}",
                hint="try again",
            ) from error
        finally:
            web.close()

    def reach(self) -> None:
        """Asks the index for one project, as a solve would. Raises LockError when it does not answer."""
        with tempfile.TemporaryDirectory(prefix="imagefactory-lock-") as folder:
            given = Path(folder) / "asked.txt"
            given.write_text("pip\n")
            options = ["--no-deps", "--no-cache", "--quiet", f"--python={self._python}"]
            done = self._run(["pip", "compile", str(given), *options])
        # An index without that project has answered too.
        if done.returncode and "not found in the" not in done.stderr:
            raise _unreached(done.stderr, self._index)

    def offers(self, pins: Iterable[str], lock: Lock) -> dict[str, tuple[Offer, ...]]:
        """For each pin (`name==version`) the fitting files that the index offers, by normalised name."""
        text = "".join(f"{pin}\n" for pin in pins)
        if not text:
            return {}
        with tempfile.TemporaryDirectory(prefix="imagefactory-lock-") as folder:
            given, out = Path(folder) / "pins.txt", Path(folder) / "pylock.toml"
            given.write_text(text)
            self._compile([str(given), "--no-deps", "--format=pylock.toml", f"--output-file={out}"], lock)
            return _parse_pylock(out.read_text(), out, lock.target)

    def _compile(self, arguments: list[str], lock: Lock) -> subprocess.CompletedProcess[str]:
        machine = next(machine for machine in MACHINES.values() if lock.platform.endswith(f"_{machine}"))
        glibc = lock.platform.removesuffix(f"_{machine}").removeprefix("manylinux_").replace("_", ".")
        done = self._run(
            [
                "pip",
                "compile",
                *arguments,
                *_SOLVE,
                f"--python={self._python}",
                f"--python-version={lock.python}",
                f"--python-platform={machine}-manylinux_2_{self._minor(machine, glibc, lock.target)}",
            ]
        )
        if done.returncode != 0:
            raise _explain(lock, done.stderr, self._index)
        return done

    def _run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        try:
            from uv import find_uv_bin

            program = find_uv_bin()
        except (ImportError, FileNotFoundError) as error:
            raise ToolError("uv is not installed", hint="pip install 'imagefactory[build]'") from error
        # From `/`: uv reads a uv.toml of the folder it stands in and of those above, and in a shared
        # temporary folder anyone could have put one.
        return subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            cwd="/",
            env=dict(self._index.environment),
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def platform(self, target: Target, glibc: str) -> str:
        """The newest manylinux platform that uv knows and `glibc` (`2.36`) fulfils."""
        machine = MACHINES.get(target.platform)
        if machine is None:
            raise LockError(
                f"{target.name}: platform '{target.platform}' cannot be locked",
                hint=f"the platforms are {', '.join(MACHINES)}",
            )
        return f"manylinux_2_{self._minor(machine, glibc, target.name)}_{machine}"

    def _minor(self, machine: str, glibc: str, target: str) -> int:
        """The newest C library `2.<minor>` that uv has a platform for and `glibc` fulfils."""
        if not self._platforms:
            told = self._run(["pip", "compile", "--help"]).stdout
            self._platforms = re.findall(r"(\w+)-manylinux_2_(\d+)", told)
        known = [int(minor) for name, minor in self._platforms if name == machine]
        fitting = [minor for minor in known if minor <= int(glibc.partition(".")[2])]
        if not fitting:
            raise LockError(
                f"{target}: uv knows no platform for glibc {glibc} on {machine}",
                hint="pip install --upgrade uv",
            )
        return max(fitting)

    def _choose(
        self, offers: Mapping[str, tuple[Offer, ...]], empty: Lock, kept: Mapping[str, LockedWheel]
    ) -> tuple[LockedWheel, ...]:
        wheels = []
        for name, offered in sorted(offers.items()):
            best = _best(offered, empty)
            if best is None:
                raise LockError(
                    f"{empty.target}: '{name}' has no wheel for Python {empty.python} on {empty.platform}",
                    hint=f"images are made of wheels only: constrain '{name}' to a version that has one",
                )
            wheel, offer = best
            old = kept.get(name)
            # The file locked before stays while it is offered, even if a better one came after it.
            if old and old.version == wheel.version and any(one.sha256 == old.sha256 for one in offered):
                wheels.append(old)
                continue
            if not offer.sha256:
                raise LockError(
                    f"{empty.target}: the index gives no sha256 for {offer.filename}",
                    hint="use an index that does (setting 'index' in imagefactory.toml)",
                )
            wheels.append(wheel)
        return tuple(wheels)

    def _sizes(
        self, wheels: tuple[LockedWheel, ...], offers: Mapping[str, tuple[Offer, ...]], progress: Progress
    ) -> tuple[LockedWheel, ...]:
        """The wheels with their sizes: what the index said of them, else asked from the server."""
        from imagefactory.lock.index import RefusedError, TransientError, Web, redact

        known = {o.sha256: o for offered in offers.values() for o in offered}
        web = Web(self._index)
        try:
            with (
                progress.task("sizes", total=len(wheels), unit="packages") as task,
                ThreadPoolExecutor(8) as pool,
            ):

                def sized(wheel: LockedWheel) -> LockedWheel:
                    size = wheel.size or known[wheel.sha256].size or web.size(known[wheel.sha256].url)
                    task.advance(1)
                    return replace(wheel, size=size)

                return tuple(pool.map(sized, wheels))
        except (RefusedError, TransientError) as error:
            raise LockError(
                f"the size of a wheel could not be asked: {redact(str(error))}", hint="try again"
            ) from error
        finally:
            web.close()

    def _search(self, missing: list[LockedWheel], lock: Lock) -> dict[str, str]:
        """Addresses of files that uv did not list, from the projects' own pages of the index."""
        if not missing:
            return {}
        from imagefactory.lock.index import RefusedError, TransientError, Web, redact

        web = Web(self._index)
        try:
            found, pages = {}, self._pages(missing, lock)
            for wheel in missing:
                listed = web.files(pages[wheel]) if wheel in pages else ()
                offers = [
                    Offer(filename=file.filename, url=file.url, sha256=file.sha256, size=None)
                    for file in listed
                ]
                url = _address(wheel, offers, lock)
                if not url:
                    raise LockError(
                        f"{lock.target}: the index no longer has {wheel.filename} "
                        f"(sha256 {wheel.sha256[:12]}...)",
                        hint=f"imagefactory lock {lock.target} --update {wheel.name}",
                    )
                found[wheel.filename] = url
            return found
        except (RefusedError, TransientError) as error:
            raise LockError(
                f"{lock.target}: a project's page could not be read: {redact(str(error))}", hint="try again"
            ) from error
        finally:
            web.close()

    def _pages(self, wheels: list[LockedWheel], lock: Lock) -> dict[LockedWheel, str]:
        """Each wheel's project page. uv knows which index each pin comes from, and tells in a comment."""
        with tempfile.TemporaryDirectory(prefix="imagefactory-lock-") as folder:
            given = Path(folder) / "pins.txt"
            given.write_text("".join(f"{wheel.name}=={wheel.version}\n" for wheel in wheels))
            text = self._compile([str(given), "--no-deps", "--emit-index-annotation"], lock).stdout
        told: list[tuple[str, str]] = re.findall(
            r"^([A-Za-z0-9._-]+)==\S+.*\n\s*# from (\S+)", text, re.MULTILINE
        )
        indexes: dict[str, str] = {canonicalize_name(name): url.rstrip("/") for name, url in told}
        return {wheel: f"{indexes[wheel.name]}/{wheel.name}/" for wheel in wheels if wheel.name in indexes}


def _metadata_inside(wheel: bytes) -> str:
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        name = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        return archive.read(name).decode("utf-8")


def _lines(entries: set[str]) -> str:
    return "".join(f"{entry}\n" for entry in sorted(entries))


def _decided(request: LockRequest) -> str:
    """The content hash that the request's lock must have."""
    if request.under is None:
        return content_hash(request.target, request.base)
    from imagefactory.lock import files

    return files.content_hash(request.target, request.base, request.under)


def _known_updates(request: LockRequest) -> tuple[str, ...]:
    """The normalised names to update. Raises LockError for one that the target's lock cannot move."""
    target, under = request.target, request.under
    names = [wheel.name for wheel in request.previous.wheels] if request.previous else []
    below = {wheel.name for wheel in under.wheels} if under else frozenset()
    update = tuple(sorted({canonicalize_name(name) for name in request.update}))
    for name in update:
        if name in below and under:
            raise LockError(
                f"{target.name} has '{name}' from {under.target}, on which it is built",
                hint=f"imagefactory lock {under.target} --update {name}",
            )
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            held = "has no lock yet" if request.previous is None else f"holds no package '{name}'"
            raise LockError(
                f"{target.name} {held}, so there is nothing to update",
                hint=f"did you mean '{near[0]}'?" if near else f"imagefactory lock {target.name}",
            )
    return update


def _kept(previous: Lock | None, empty: Lock, update: tuple[str, ...]) -> dict[str, LockedWheel]:
    """The files of the previous lock that may stay as they are, by package."""
    if previous is None or (previous.python, previous.platform) != (empty.python, empty.platform):
        return {}
    return {wheel.name: wheel for wheel in previous.wheels if wheel.name not in update}


def _parse_pylock(text: str, path: Path, target: str) -> dict[str, tuple[Offer, ...]]:
    """The files of a pylock.toml (PEP 751) that uv wrote at `path`."""
    offers: dict[str, tuple[Offer, ...]] = {}
    for package in tomllib.loads(text).get("packages", []):
        name = canonicalize_name(package["name"])
        if "version" not in package or "archive" in package or "vcs" in package or "directory" in package:
            raise LockError(
                f"{target}: '{name}' does not come from a package index",
                hint=f"write '{name}' with a version, not with an address",
            )
        found = []
        for wheel in package.get("wheels", []):
            url = wheel.get("url") or (path.parent / wheel["path"]).as_uri()
            filename = wheel.get("name") or unquote(urlsplit(url).path.rpartition("/")[2])
            sha256 = wheel.get("hashes", {}).get("sha256", "").lower()
            found.append(Offer(filename=filename, url=url, sha256=sha256, size=wheel.get("size")))
        offers[name] = tuple(found)
    return offers


def _best(offers: Iterable[Offer], lock: Lock) -> tuple[LockedWheel, Offer] | None:
    """The wheel an installer would take: the most specific tag, then the highest build number (PEP 427)."""
    rank = {tag: place for place, tag in enumerate(fitting_tags(lock.python, lock.platform))}
    ranked: list[tuple[int, tuple[int, str], str, LockedWheel, Offer]] = []
    for offer in offers:
        try:
            name, version, build, offered = parse_wheel_filename(offer.filename)
        except (InvalidWheelFilename, InvalidVersion):
            continue
        places = [rank[tag] for tag in offered if tag in rank]
        if places:
            number = (build[0], build[1]) if build else (-1, "")
            wheel = LockedWheel(
                name=name, version=str(version), filename=offer.filename, sha256=offer.sha256, size=0
            )
            ranked.append((-min(places), number, offer.filename, wheel, offer))
    if not ranked:
        return None
    *_, wheel, offer = max(ranked, key=lambda one: one[:3])
    return wheel, offer


def _address(wheel: LockedWheel, offers: Iterable[Offer], lock: Lock) -> str:
    """The URL of the locked file among `offers`, empty if it is not there."""
    for offer in offers:
        if offer.sha256 == wheel.sha256:
            return offer.url
    for offer in offers:
        if offer.filename == wheel.filename:
            if offer.sha256:
                raise LockError(
                    f"{lock.target}: the index now has other bytes under the name {wheel.filename}: "
                    f"sha256 {offer.sha256}, locked was {wheel.sha256}",
                    hint="do not trust this file; ask the index's keeper or the package's authors",
                )
            return offer.url  # an index that tells no hashes: the download is checked against the lock
    return ""


def _one_line(stderr: str) -> str:
    """uv's complaint without its ornaments and without passwords."""
    from imagefactory.lock.index import redact

    lines = [re.sub(r"^[\s×│╰─▶├]*(error|cause|hint):\s*", "", line) for line in stderr.splitlines()]
    lines = [re.sub(r"^[\s×│╰─▶├]+", "", line).strip() for line in lines if not line.startswith("warning:")]
    text = redact(" ".join(line for line in lines if line))
    return text[:500] + " ... " + text[-180:] if len(text) > 700 else text


def _explain_on(error: UnsolvableError, under: Lock) -> UnsolvableError:
    return UnsolvableError(
        error.message,
        hint=f"every package of {under.target} stays as it is locked: ask other versions of what comes on "
        f"top, or move that one first: imagefactory lock {under.target} --update PACKAGE",
        tree=error.tree,
    )


def _unreached(stderr: str, index: PackageIndex) -> LockError:
    from imagefactory.lock.index import redact

    where = f"{redact(index.url)} ({index.origin})" if index.url else index.origin
    return LockError(
        _one_line(stderr), hint=f"is the network up, and is this the right package index: {where}?"
    )


def _explain(lock: Lock, stderr: str, index: PackageIndex) -> LockError:
    """uv's failure in one line and what to do about it. A `lock` with wheels was solved before."""
    text = _one_line(stderr)
    if re.search(r"no usable wheels|has no wheels with|building from source is disabled", text):
        hint = "images are made of wheels only: constrain that package to a version that has one"
    elif "No solution found" in text and lock.wheels:
        text = f"the index no longer has what is locked: {text}"
        hint = f"imagefactory lock {lock.target} --update PACKAGE"
    elif "No solution found" in text and "could not be queried" not in text:
        from imagefactory.lock.index import redact

        hint = "change the recipe's versions, packages or constraints"
        tree = "\n".join(line for line in stderr.splitlines() if not line.startswith("warning:"))
        return UnsolvableError(f"{lock.target}: {text}", hint=hint, tree=redact(tree).strip())
    else:
        hint = _unreached("", index).hint
    return LockError(f"{lock.target}: {text}", hint=hint)
