"""Apptainer, the machine's own or the one of `install`, with caches in a folder of the tests."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.services.processes import ENGINES, ServiceError, find, need_root, search_path

CAP_SYS_RESOURCE = 24
ORDINARY_UID = 65534
"""Apptainer wants ids that the machine knows."""
FUSE = Path("/dev/fuse")

# In a mount namespace: $1 the device node to show at /dev/fuse, or nothing; $2 the engines, and $3 the closed
# folder that they lie in, which shows nothing else then, or nothing; then the command.
AS_OTHERS_HAVE_IT = """\
[ -z "$1" ] || mount --bind "$1" /dev/fuse
if [ -n "$3" ]; then
    hold=$(mktemp -d)
    mount --rbind "$2" "$hold"
    mount -t tmpfs -o mode=755 reach "$3"
    mkdir -p "$2"
    mount --rbind "$hold" "$2"
fi
shift 3
exec "$@"
"""


def lacks_sys_resource() -> bool:
    """Whether root here is one without CAP_SYS_RESOURCE, as in many containers and virtual machines."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapBnd:"):
            return not int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1
    return False


def apptainer_environ(folder: Path) -> dict[str, str]:
    """What apptainer needs in its environment here; its cache and temporary files go into `folder`."""
    environ = {}
    for name in ("CACHEDIR", "TMPDIR", "CONFIGDIR"):
        place = folder / name.lower()
        place.mkdir(parents=True, exist_ok=True)
        environ[f"APPTAINER_{name}"] = str(place)
    if lacks_sys_resource():
        environ["APPTAINER_DROP_CAPS"] = "CAP_SYS_RESOURCE"  # else it stops at raising what it may not
    return environ


def apptainer_command() -> str:
    """The path of an apptainer that runs. Raises ServiceError."""
    command = find("apptainer")
    environ = {**os.environ, "PATH": search_path()}
    done = subprocess.run([command, "--version"], capture_output=True, text=True, env=environ)
    if done.returncode != 0:
        raise ServiceError(f"{command}: {done.stderr.strip()}; run ./setup.sh --tests as root")
    return command


def fuse_for_everyone(folder: Path) -> Path | None:
    """A device node in `folder` to show at /dev/fuse, which every user may open, as udev makes it.

    None where the machine's own is such a one. Without root apptainer mounts a .sif by it. Raises
    ServiceError where the machine has none.
    """
    if not FUSE.exists():
        raise ServiceError(f"{FUSE} is missing, by which apptainer mounts .sif files; as root: modprobe fuse")
    told = FUSE.stat()
    if stat.S_IMODE(told.st_mode) & 0o006 == 0o006:
        return None
    mine = folder / "fuse"
    if not mine.exists():
        os.mknod(mine, 0o666 | stat.S_IFCHR, told.st_rdev)
        mine.chmod(0o666)
    return mine


def as_ordinary_user(folder: Path, argv: Sequence[str | Path]) -> list[str]:
    """`argv` as a user without rights, on a machine set up for apptainer; `folder` is for its device node.

    The checkout's engines can be reached even where they lie in a closed folder (/root).
    """
    need_root("becoming an ordinary user")
    closed = next((each for each in reversed(ENGINES.parents) if not each.stat().st_mode & 0o001), None)
    shown = [
        str(fuse_for_everyone(folder) or ""),
        str(ENGINES),
        str(closed or "") if ENGINES.is_dir() else "",
    ]
    identity = [f"--reuid={ORDINARY_UID}", f"--regid={ORDINARY_UID}", "--clear-groups"]
    return [
        *("unshare", "--mount", "--propagation", "private", "sh", "-ec", AS_OTHERS_HAVE_IT, "sh", *shown),
        *("setpriv", *identity, "--inh-caps=-all", "--bounding-set=-all", *map(str, argv)),
    ]
