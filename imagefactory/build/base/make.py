"""A base's layer tar: mmdebstrap installs the locked .debs, and tar.py rewrites what it writes.

mmdebstrap installs from a local folder that holds exactly the locked packages, so no mirror, host or
network has a say in the result.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from imagefactory.engines.base.builder import builder_facts, choose_ids
from imagefactory.build.base.fetch import FetchedBase, verify_deb
from imagefactory.build.base.look import SETUP_HOOK
from imagefactory.engines.base.tar import WrittenLayer, check_installed, write_layer
from imagefactory.errors import BuildError, DownloadError, FactoryError, StoreError, os_problem
from imagefactory.lock.debian.lock import lock_architecture
from imagefactory.model import BaseLock, DebianPackage
from imagefactory.progress import Progress
from imagefactory.runtime.build_sandbox import INPUT, SYSTEM_PATH, TREE, BuildProcess, IdMaps, prepare_folder
from imagefactory.runtime.emulator import find_emulator
from imagefactory.trees import remove_tree

_LOG_TAIL, _LINE = 30, 4096  # lines that are kept, and their bytes: scripts print what they like
_SCRATCH = "imagefactory-base-"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseTar:
    """An uncompressed layer tar. `sha256` (64 hex digits) is the layer's diffID, `size` its bytes."""

    path: Path
    sha256: str
    size: int


def build_base(
    fetched: FetchedBase, out_tar: Path, progress: Progress, *, environ: Mapping[str, str]
) -> BaseTar:
    """Install the .debs with mmdebstrap and write the base's layer to `out_tar` (beside, then renamed).

    Same lock, same bytes, as root and as an ordinary user. Raises ToolError when this machine cannot do
    it, DownloadError for a .deb that is not the locked one, BuildError with the log's tail otherwise.
    """
    ids, emulator = choose_ids(builder_facts()), find_emulator(lock_architecture(fetched.lock))
    for path, package in zip(fetched.debs, fetched.lock.packages, strict=True):
        try:
            verify_deb(path, package)
        except FileNotFoundError as error:
            raise DownloadError(
                "package-missing", f"{path} is missing", hint="run the command again to fetch it"
            ) from error
    beside = out_tar.with_name(f".{out_tar.name}.{os.getpid()}")
    try:
        with _scratch(environ, ids) as scratch:
            _check_clock(scratch, fetched.lock)
            prepare_folder(scratch)
            _write_repository(fetched, scratch / INPUT)
            process = BuildProcess(
                scratch,
                mmdebstrap_command(fetched.lock),
                environment=build_environment(fetched.lock),
                ids=ids,
                emulator=emulator,
            )
            made = _install(fetched, process, beside, progress)
        beside.replace(out_tar)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                "disk-full",
                f"{fetched.base.name}: no space left in {out_tar.parent} or {scratch.parent}",
                hint="free disk space and run the command again",
            ) from error
        raise BuildError(*os_problem("write", out_tar.parent, error), hint="check its permissions") from error
    finally:
        beside.unlink(missing_ok=True)
    return BaseTar(path=out_tar, sha256=made.sha256, size=made.size)


def mmdebstrap_command(lock: BaseLock) -> tuple[str, ...]:
    """Install every locked package, and nothing that is not locked, from the .debs in /input."""
    return (
        "mmdebstrap",
        "--mode=root",
        "--variant=apt",
        f"--architectures={lock_architecture(lock)}",
        "--format=tar",
        "--verbose",
        f"--include={','.join(package.name for package in lock.packages)}",
        f"--dpkgopt=/{INPUT}/dpkg.cfg",
        f"--setup-hook={SETUP_HOOK}",
        "--skip=check/qemu,output/dev",
        lock.suite,
        "-",
        # the packages have been verified one by one: that is where the trust comes from
        f"deb [trusted=yes] copy:///{INPUT} ./",
    )


def build_environment(lock: BaseLock) -> dict[str, str]:
    """What mmdebstrap and the packages' scripts see: nothing of the caller's."""
    return {
        "PATH": SYSTEM_PATH,
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": str(lock.source_date_epoch),
        "PYTHONHASHSEED": "0",  # packages' scripts compile Python modules
        "TMPDIR": "/tmp",  # noqa: S108 - the build's own
    }


def format_packages(entries: Iterable[tuple[str, str, DebianPackage]]) -> str:
    """A Packages index of a flat repository, from (control file, file name, package)."""
    return "".join(
        f"{control.strip()}\nFilename: ./{name}\nSize: {package.size}\nSHA256: {package.sha256}\n\n"
        for control, name, package in entries
    )


def format_release(lock: BaseLock, index: bytes) -> str:
    """Its Release file: mmdebstrap looks for essential packages under the suite's name."""
    return (
        f"Suite: {lock.suite}\nCodename: {lock.suite}\nArchitectures: {lock_architecture(lock)}\n"
        f"SHA256:\n {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n"
    )


def _write_repository(fetched: FetchedBase, repository: Path) -> None:
    entries = []
    for path, package in zip(fetched.debs, fetched.lock.packages, strict=True):
        try:
            (repository / path.name).hardlink_to(path)
        except OSError:  # another file system, or a file of another owner
            shutil.copyfile(path, repository / path.name)
            (repository / path.name).chmod(0o644)
        control = subprocess.run(
            ["dpkg-deb", "--field", path],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if control.returncode:
            raise BuildError("deb-invalid", f"{path.name} is not a Debian package: {control.stderr.strip()}")
        entries.append((control.stdout, path.name, package))
    index = format_packages(entries)
    for file, text in (
        (repository / "Packages", index),
        (repository / "Release", format_release(fetched.lock, index.encode())),
        (repository / "dpkg.cfg", "force-unsafe-io\n"),
    ):
        file.write_text(text, encoding="utf-8")
        file.chmod(0o644)


def _install(fetched: FetchedBase, build: BuildProcess, out: Path, progress: Progress) -> WrittenLayer:
    log: deque[str] = deque(maxlen=_LOG_TAIL)
    title = f"installing {fetched.base.name}"
    with (
        progress.task(title, total=2 * len(fetched.lock.packages), unit="steps") as task,
        build.process as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None

        def follow(stream: IO[bytes]) -> None:
            for raw in iter(lambda: stream.readline(_LINE), b""):
                line = raw.decode("utf-8", "replace").rstrip()
                log.append(line)
                if line.startswith(("Unpacking ", "Setting up ")):
                    task.advance(1)

        follower = threading.Thread(target=follow, args=(process.stderr,), daemon=True)
        follower.start()
        try:
            result, broken = write_layer(process.stdout, out, fetched), None
        except tarfile.TarError as error:
            result, broken = None, error
            process.stdout.close()  # so that whoever still writes ends
        except BaseException:
            build.kill()
            follower.join()
            raise
        follower.join()
        code = build.wait()
    if code or result is None:
        raise BuildError(
            "mmdebstrap-failed",
            f"{fetched.base.name}: mmdebstrap ended with {code}"
            f"{f' ({broken})' if broken else ''}; its last lines:\n" + "\n".join(log),
            hint="run imagefactory doctor, which shows what this machine lacks",
        )
    check_installed(result.installed, fetched.lock)
    return result


@contextmanager
def _scratch(environ: Mapping[str, str], ids: IdMaps) -> Iterator[Path]:
    """A folder for one build, removed at the end; those of killed builds are removed at the start.

    A running build holds a lock on its folder, which the kernel takes from a killed one.
    """
    parent = Path(environ.get("TMPDIR") or tempfile.gettempdir())
    for old in parent.glob(f"{_SCRATCH}*"):
        try:
            found = old.lstat()  # anyone may put a link here
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                with (old / ".lock").open("r") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(old, ids)
        except (FileNotFoundError, BlockingIOError):  # just made, just removed or at work
            continue
    # It gets the name that others look for once it is locked, and is locked until it is gone.
    hidden = Path(tempfile.mkdtemp(prefix=f".{_SCRATCH}", dir=parent))
    with (hidden / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        scratch = hidden.rename(parent / hidden.name.removeprefix("."))
        try:
            yield scratch
        finally:
            _remove(scratch, ids)


def _remove(scratch: Path, ids: IdMaps) -> None:
    """Remove a build's folder. What is in its tree belongs to the ids of the build, which root may remove."""
    if os.geteuid() != 0 and (scratch / TREE).is_dir() and any((scratch / TREE).iterdir()):
        argv = ("find", "/tmp", "-mindepth", "1", "-delete")  # noqa: S108 - the build's own
        removal = BuildProcess(scratch, argv, environment={"PATH": SYSTEM_PATH}, ids=ids)
        with removal.process:
            removal.process.communicate()
            with contextlib.suppress(FactoryError):
                removal.wait()
    for path in scratch.iterdir():
        if path.name != ".lock":
            with contextlib.suppress(OSError):
                remove_tree(path)
    if [path.name for path in scratch.iterdir()] == [".lock"]:  # else a later build tries again
        remove_tree(scratch)


def _check_clock(scratch: Path, lock: BaseLock) -> None:
    """Raises BuildError if the clock is behind the lock's."""
    if scratch.stat().st_mtime < lock.source_date_epoch:
        raise BuildError(
            "clock-behind",
            f"this machine's clock is behind the lock of {lock.base}, so times in the base would vary",
            hint="set the clock",
        )
