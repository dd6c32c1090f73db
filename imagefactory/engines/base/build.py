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
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import urllib.parse
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from imagefactory.engines.base.builder import ROOT_NAMESPACES, require_mmdebstrap, said_by
from imagefactory.engines.base.fetch import FetchedBase, verify_deb
from imagefactory.engines.base.look import SETUP_HOOK
from imagefactory.engines.base.tar import WrittenLayer, check_installed, write_layer
from imagefactory.errors import BuildError, DownloadError, ToolError
from imagefactory.lock.debian.file import lock_architecture
from imagefactory.lock.debian.sources import search_path
from imagefactory.model import BaseLock, DebianPackage
from imagefactory.progress import Progress
from imagefactory.runners.emulator import Emulator, find_emulator
from imagefactory.trees import remove_tree

OWN_IDS = Path(__file__).with_name("own_ids.py")
_LOG_TAIL = 30
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
    require_mmdebstrap(environ)
    find_emulator(lock_architecture(fetched.lock))
    for path, package in zip(fetched.debs, fetched.lock.packages, strict=True):
        try:
            verify_deb(path, package)
        except FileNotFoundError as error:
            raise DownloadError(f"{path} is not there", hint="run the command again to fetch it") from error
    beside = out_tar.with_name(f".{out_tar.name}.{os.getpid()}")
    try:
        with _scratch(environ) as scratch:
            _check_scratch(scratch, fetched.lock)
            repository = scratch / "debs"
            _write_repository(fetched, repository)
            made = _install(fetched, repository, beside, progress, environ)
        beside.replace(out_tar)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BuildError(
                f"{fetched.base.name}: no space left in {out_tar.parent} or {scratch.parent}",
                hint="free some space and run the same command again",
            ) from error
        raise BuildError(f"{fetched.base.name}: {error}", hint="mend the folder's rights") from error
    finally:
        beside.unlink(missing_ok=True)
    return BaseTar(path=out_tar, sha256=made.sha256, size=made.size)


def mmdebstrap_command(
    lock: BaseLock,
    repository: Path,
    dpkg_options: Path,
    *,
    as_root: bool,
    emulator: Emulator | None = None,
) -> list[str]:
    """Install every locked package, and nothing that is not locked, from a folder of .debs.

    Root mode mounts /proc and the like into the tree: in namespaces of its own, so that nothing stays
    mounted and nothing goes on running when this process is killed. Unshare mode has its own. An emulator
    that the machine has not registered is in a user namespace, which root mode has none of.
    """
    own = emulator is not None and emulator.own
    return [
        *((sys.executable, "-I", "-S", str(OWN_IDS)) if own and as_root else ()),
        *("setpriv", "--pdeathsig", "KILL" if as_root else "TERM", "--"),
        *((*ROOT_NAMESPACES, "--kill-child", "--") if as_root else ()),
        "mmdebstrap",
        f"--mode={'root' if as_root else 'unshare'}",
        "--variant=apt",
        f"--architectures={lock_architecture(lock)}",
        "--format=tar",
        "--verbose",
        f"--include={','.join(package.name for package in lock.packages)}",
        f"--dpkgopt={dpkg_options}",
        f"--setup-hook={SETUP_HOOK}",
        *((f"--setup-hook={emulator_hook(emulator)}",) if emulator and own else ()),
        "--skip=check/qemu,output/dev",
        lock.suite,
        "-",
        # the folder's packages have been verified one by one: that is where the trust comes from
        f"deb [trusted=yes] copy://{urllib.parse.quote(str(repository))} ./",
    ]


def emulator_hook(emulator: Emulator) -> str:
    """Registers it in the user namespace of the process that runs this, as long as its mounts live."""
    table, entry = "/proc/sys/fs/binfmt_misc", f":emulator:{emulator.files}:{emulator.program}:PF"
    return f"mount -t binfmt_misc binfmt_misc {table} && printf %s {shlex.quote(entry)} > {table}/register"


def build_environment(lock: BaseLock, scratch: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What mmdebstrap and the packages' scripts see: nothing of the caller's but the search path."""
    return {
        "PATH": search_path(environ),
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": str(lock.source_date_epoch),
        "PYTHONHASHSEED": "0",  # packages' scripts compile Python modules
        "TMPDIR": str(scratch),
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
    repository.mkdir(mode=0o755)
    repository.chmod(0o755)  # mmdebstrap reads it as another user; the umask may not get in the way
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
            raise BuildError(f"{path.name} is no Debian package: {control.stderr.strip()}")
        entries.append((control.stdout, path.name, package))
    index = format_packages(entries)
    for file, text in (
        (repository / "Packages", index),
        (repository / "Release", format_release(fetched.lock, index.encode())),
        (repository.parent / "dpkg.cfg", "force-unsafe-io\n"),
    ):
        file.write_text(text, encoding="utf-8")
        file.chmod(0o644)


def _install(
    fetched: FetchedBase, repository: Path, out: Path, progress: Progress, environ: Mapping[str, str]
) -> WrittenLayer:
    as_root = os.geteuid() == 0
    options = repository.parent / "dpkg.cfg"
    emulator = find_emulator(lock_architecture(fetched.lock))
    argv = mmdebstrap_command(fetched.lock, repository, options, as_root=as_root, emulator=emulator)
    log: deque[str] = deque(maxlen=_LOG_TAIL)
    title = f"installing {fetched.base.name}"
    with (
        progress.task(title, total=2 * len(fetched.lock.packages), unit="steps") as task,
        subprocess.Popen(
            argv,
            env=build_environment(fetched.lock, repository.parent, environ),
            cwd="/",
            umask=0o022,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # When it cannot write its tar it sends SIGHUP to its whole process group, and in ours stands the
            # script that called us: so it has its own.
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None

        def follow(stream: IO[bytes]) -> None:
            for raw in stream:
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
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL if as_root else signal.SIGTERM)
            process.stdout.close()  # whoever outlives the signal ends at its next write
            process.wait()
            follower.join()
            raise
        process.wait()
        follower.join()
    if process.returncode or result is None:
        raise BuildError(
            f"{fetched.base.name}: mmdebstrap ended with {process.returncode}"
            f"{f' ({broken})' if broken else ''}; its last words:\n" + "\n".join(log),
            hint="imagefactory doctor says what this machine lacks for it",
        )
    check_installed(result.installed, fetched.lock)
    return result


@contextmanager
def _scratch(environ: Mapping[str, str]) -> Iterator[Path]:
    """A folder for one build, removed at the end; those of killed builds are removed at the start.

    A running build holds a lock on its folder, which the kernel takes from a killed one.
    """
    parent = Path(environ.get("TMPDIR") or tempfile.gettempdir())
    for old in parent.glob(f"{_SCRATCH}*"):
        try:
            if old.stat().st_uid == os.geteuid():
                with (old / ".lock").open("r") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(old, environ)
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
            _remove(scratch, environ)


def _remove(scratch: Path, environ: Mapping[str, str]) -> None:
    """Remove a build's folder; what an ordinary user's namespace left in it belongs to subordinate ids."""
    left = [str(path) for path in scratch.glob("mmdebstrap.*")]
    if left and os.geteuid() != 0:
        said_by(["mmdebstrap", "--unshare-helper", "rm", "-rf", "--", *left], search_path(environ))
    for path in scratch.iterdir():
        if path.name != ".lock":
            with contextlib.suppress(OSError):
                remove_tree(path)
    if [path.name for path in scratch.iterdir()] == [".lock"]:  # else a later build tries again
        remove_tree(scratch)


def _check_scratch(scratch: Path, lock: BaseLock) -> None:
    """The clock must be past the lock's, and an ordinary user's namespace must reach the folder."""
    if scratch.stat().st_mtime < lock.source_date_epoch:
        raise BuildError(
            f"this machine's clock is behind the lock of {lock.base}, so times in the base would vary",
            hint="set the clock",
        )
    scratch.chmod(0o755)
    closed = [str(folder) for folder in scratch.parents if not folder.stat().st_mode & 0o001]
    if closed and os.geteuid() != 0:
        raise ToolError(
            f"{closed[0]} is closed to other users, so mmdebstrap's namespace cannot reach {scratch}",
            hint="set TMPDIR to a folder that others may enter",
        )
