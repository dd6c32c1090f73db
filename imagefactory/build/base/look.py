"""The content of a base: everything here determines its bytes, or how they come about. No I/O.

Remains of a build (logs, caches, locks, device nodes) are removed. Facts about the host (hostname,
resolv.conf, apt sources) are replaced by fixed bytes.

A finished base has no apt source, because the address of an archive belongs to a machine. Its sources.list
explains how to add one.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imagefactory.lock.debian.lock import format_base_lock
from imagefactory.model import BaseLock, BaseSpec, DebianPackage

# Part of every base's key: increment it if the code below writes other bytes for the same lock.
LAYOUT = "imagefactory-base-layout 2"

# Documentation and translations nobody reads in a container, the Python library for static linking and
# gcc's dumper of link-time objects (together 150 MB). Copyright files stay: licenses require them.
DPKG_EXCLUDES = """\
# Written by imagefactory: what its bases leave out of Debian's packages.
path-exclude=/usr/share/man/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/lintian/*
path-exclude=/usr/share/doc/*
path-include=/usr/share/doc/*/copyright
path-exclude=/usr/share/locale/*
path-include=/usr/share/locale/locale.alias
path-exclude=/usr/lib/*/libpython3*.a
path-exclude=/usr/bin/*lto-dump*
"""

SOURCES_LIST = """\
# This base is complete: no package archive is set, because its address belongs to a machine.
# To install more, write the address of a Debian mirror you can reach into a line like
#   deb ADDRESS {suite} main
# (and the same for {suite}-updates, and {suite}-security of the security archive), then apt-get update.
# The keys that verify it are in /etc/apt/trusted.gpg.d or /usr/share/keyrings.
"""

HOSTS = """\
127.0.0.1 localhost
::1 localhost ip6-localhost ip6-loopback
"""

# Remains of a build: the directories stay, empty, because tools expect them.
EMPTIED = (
    "boot",
    "dev",
    "proc",
    "run/lock",
    "sys",
    "tmp",
    "var/backups",
    "var/cache/apt",
    "var/cache/ldconfig",
    "var/lib/apt/lists",
    "var/log",
    "var/tmp",
)
LEFTOVERS = re.compile(
    r"etc/\.pwd\.lock|etc/(?:passwd|group|shadow|gshadow|subuid|subgid)-"
    r"|etc/apt/apt\.conf\.d/99mmdebstrap|etc/dpkg/dpkg\.cfg\.d/99mmdebstrap"
    r"|var/cache/debconf/tmp\.ci|var/lib/dpkg/(?:lock|lock-frontend|triggers/Lock|[a-z]+-old)|var/cache/debconf/[a-z]+\.dat-old"
)


_ZONE = b"TZif2" + bytes(15) + struct.pack(">6L", 0, 0, 0, 0, 1, 4) + struct.pack(">l2B", 0, 0, 0) + b"UTC\0"
UTC_ZONE = _ZONE * 2 + b"\nUTC0\n"
"""UTC as zoneinfo writes it (RFC 9636). Apptainer mounts the host's zone over this file, which must exist."""


def fixed_files(base: BaseSpec) -> dict[str, bytes]:
    """Return the files that are the same in all bases: path without leading slash -> content (mode 0644)."""
    return {
        "etc/apt/sources.list": SOURCES_LIST.format(suite=base.suite).encode(),
        "etc/dpkg/dpkg.cfg.d/imagefactory": DPKG_EXCLUDES.encode(),
        "etc/hostname": b"localhost\n",
        "etc/hosts": HOSTS.encode(),
        "etc/localtime": UTC_ZONE,
        "etc/machine-id": b"",
        "etc/resolv.conf": b"",
    }


def is_included(path: str, *, is_folder: bool) -> bool:
    """Return whether a path (no leading slash) of mmdebstrap's tree belongs in the base."""
    for directory in EMPTIED:
        if path.startswith(directory + "/"):
            return False
    if LEFTOVERS.fullmatch(path):
        return False
    return not is_excluded(path, is_folder=is_folder)


def is_excluded(path: str, *, is_folder: bool) -> bool:
    """Apply the rules of DPKG_EXCLUDES.

    A package's directory or link under doc stays, for its copyright file.
    """
    parts = path.split("/")
    top = "/".join(parts[:3])
    if top in ("usr/share/man", "usr/share/info", "usr/share/lintian"):
        return len(parts) > 3
    if top == "usr/share/doc":
        return len(parts) > 4 and (is_folder or len(parts) > 5 or parts[-1] != "copyright")
    if top == "usr/share/locale":
        return len(parts) > 3 and path != "usr/share/locale/locale.alias"
    if path.startswith("usr/bin/"):
        return "lto-dump" in parts[-1]
    return path.startswith("usr/lib/") and re.fullmatch(r"libpython3.*\.a", parts[-1]) is not None


def base_key(lock: BaseLock) -> str:
    """Return the key of a base's layer: `sha256:...` of the lock and the rules of this file.

    Equal keys mean equal bytes, so a recorded layer need not be built again.
    """
    rules = (LAYOUT, DPKG_EXCLUDES, SOURCES_LIST, HOSTS, SETUP_HOOK, *EMPTIED, LEFTOVERS.pattern)
    text = format_base_lock(lock) + "\0".join(rules)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


# A merged /usr from the start; the first argument by mmdebstrap is the tree's path.
SETUP_HOOK = 'for d in bin lib lib64 sbin; do mkdir -p "$1/usr/$d" && ln -s "usr/$d" "$1/$d"; done'


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlData:
    """The control files of a .deb. `text` is its stanza, `files` the others: content, mode and time."""

    text: str
    fields: Mapping[str, str]
    files: Mapping[str, tuple[bytes, int, int]]

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.fields["Package"], self.fields["Version"], self.fields["Architecture"]

    @property
    def info_name(self) -> str:
        """The beginning of the names of its files in dpkg's database."""
        name, _, architecture = self.identity
        return f"{name}:{architecture}" if self.fields.get("Multi-Arch") == "same" else name

    @property
    def conffiles(self) -> list[str]:
        return self.files["conffiles"][0].decode().splitlines() if "conffiles" in self.files else []

    @property
    def is_plain(self) -> bool:
        """Whether unpacking it only writes its files: no script runs before, and no trigger is declared.

        Diversions are made before unpacking, so a package with one is never plain. dpkg writes md5sums itself
        if a package has none.
        """
        return (
            "preinst" not in self.files
            and "md5sums" in self.files
            and b"interest" not in self.files.get("triggers", (b"",))[0]
            and all(re.fullmatch(r"/[!-~]+", path) for path in self.conffiles)
        )

    @property
    def unpacked_stanza(self) -> str:
        """Its stanza in dpkg's status file after `dpkg --unpack`."""
        lines = [self.text.strip(), "Status: install ok unpacked"]
        if self.conffiles:
            lines += ["Conffiles:", *(f" {path} newinstall" for path in self.conffiles)]
        return "\n".join(lines) + "\n\n"


def essential_packages(controls: Sequence[ControlData]) -> list[ControlData]:
    """Return the essential packages, apt, and all that they depend on, with every alternative that is there.

    They are those that mmdebstrap installs without apt. If there are no others, apt writes no state.
    """
    providers: dict[str, list[ControlData]] = {}
    for control in controls:
        for name in (control.fields["Package"], *_relations(control.fields.get("Provides", ""))):
            providers.setdefault(name, []).append(control)
    pending = [
        control
        for control in controls
        if control.fields.get("Essential") == "yes" or control.fields["Package"] == "apt"
    ]
    essential: dict[str, ControlData] = {}
    while pending:
        control = pending.pop()
        if control.fields["Package"] not in essential:
            essential[control.fields["Package"]] = control
            for field in ("Pre-Depends", "Depends"):
                for name in _relations(control.fields.get(field, "")):
                    pending += providers.get(name, [])
    return [control for control in controls if control.fields["Package"] in essential]


def _relations(text: str) -> list[str]:
    """Return the names in a field of relations between packages (Debian Policy 7.1)."""
    return [name[0] for part in re.split("[,|]", text) if (name := re.match(r"[a-z0-9+.-]+", part.strip()))]


UNPACK, CONFIGURE, INFO = "unpack", "configure", "info"
"""Names in a build's input: the hooks of mmdebstrap, and the directory of dpkg's files about packages."""
SHARED = "packages share "
"""The beginning of the line by which UNPACK_HOOK says that the order of unpacking matters."""


def hook_files(archives: Sequence[tuple[str, DebianPackage, ControlData]]) -> dict[str, str]:
    """Return the hooks and the lists that they read, from file names, packages and control data."""
    controls = [control for _, _, control in archives]
    essential = essential_packages(controls)
    largest_first = sorted(archives, key=lambda archive: -archive[1].size)
    return {
        UNPACK: UNPACK_HOOK,
        CONFIGURE: CONFIGURE_HOOK,
        "status": "".join(control.unpacked_stanza for control in controls if control.is_plain),
        "plain": "".join(
            f"{name} {control.info_name}\n" for name, _, control in largest_first if control.is_plain
        ),
        "first": "".join(f"{name}\n" for name, _, c in archives if c in essential and not c.is_plain),
        "later": "".join(f"{name}\n" for name, _, c in archives if c not in essential and not c.is_plain),
        "essential": "".join(f"{control.fields['Package']}\n" for control in essential),
        "packages": "".join(f"{control.fields['Package']}\n" for control in controls),
        "conffiles": "".join(
            f"{path}\n" for control in controls if control.is_plain for path in control.conffiles
        ),
    }


UNPACK_HOOK = rf"""
set -euo pipefail
exec >&2
cd /input
export root=$1 dpkg=$1/var/lib/dpkg
read_files() {{ # of a package, by a long listing: type and mode, owner, path
    awk '{{
        path = $0
        sub(/^[^ ]+ +[^ ]+ +[^ ]+ +[^ ]+ +[^ ]+ /, "", path)  # mawk has no {{5}}
        if (/^l/) sub(/ -> .*/, "", path)
        if (/^h/) sub(/ link to .*/, "", path)
        print $1, $2, path
    }}'
}}
unpack() {{
    dpkg-deb --fsys-tarfile "$1" |
        tar --file=- --numeric-owner --quoting-style=literal -vv "${{@:3}}" | read_files >"$2"
}}
plain() {{
    unpack "$1" "/tmp/plain/$2" --extract --keep-directory-symlink --directory="$root"
    echo "Unpacking $1"
}}
export -f read_files unpack plain
mkdir /tmp/plain /tmp/scripted
# What the root needs to start is unpacked now, and again by dpkg: first, so that it replaces nothing.
while read -r deb; do
    unpack "$deb" "/tmp/scripted/$deb" --extract --keep-directory-symlink --directory="$root"
done <first
while read -r deb; do
    unpack "$deb" "/tmp/scripted/$deb" --list
done <later
cores=$(nproc) failed=""
xargs --arg-file=plain --max-args=2 --max-procs=$((cores < 8 ? cores : 8)) \
    bash -euo pipefail -c 'plain "$@"' plain || failed=yes
# dpkg keeps a directory as the first package has it, and one file of several by rules of its own.
shared=$(awk '
    function report(what) {{ print what; reported = 1; exit }}
    {{
        path = $0
        sub(/^[^ ]+ [^ ]+ /, "", path)
        sub(/\/$/, "", path)
        sub(/^\.\/(bin|sbin|lib|lib32|lib64|libx32)\//, "./usr/&", path)
        sub(/^\.\/usr\/\.\//, "./usr/", path)
        if (/^d/) {{
            if (path in modes && modes[path] != $1 " " $2) report("a directory with other modes: " path)
            modes[path] = $1 " " $2
        }} else if (FILENAME ~ /^\/tmp\/plain\//) {{
            if (path in files) report("a file: " path)
            files[path]
        }}
    }}
    END {{ if (!reported) for (path in files) if (path in modes) report("a file and directory: " path) }}
' /tmp/plain/* /tmp/scripted/*)
[ -z "$shared" ] || echo "{SHARED}$shared"
[ -z "$shared$failed" ] || exit 1
cp --recursive --preserve=mode,timestamps {INFO} "$dpkg"
cp status "$dpkg"
echo 1 >"$dpkg/info/format"
cd /tmp/plain
awk '{{
    sub(/^[^ ]+ [^ ]+ \./, "")
    if ($0 != "/") sub(/\/$/, "")
    else $0 = "/."
    print >("'"$dpkg"'/info/" FILENAME ".list")
}}' *
rm -r /tmp/plain /tmp/scripted
while read -r path; do
    [ ! -e "$root$path" ] || echo "${{path#/}}"
done </input/conffiles >/tmp/conffiles
tar --create --file=- --directory="$root" --files-from=/tmp/conffiles |
    tar --extract --file=- --directory="$root" --transform='s/$/.dpkg-new/'
rm /tmp/conffiles
"""
CONFIGURE_HOOK = r"""
set -euo pipefail
exec >&2
cd /input
root=$1
xargs --arg-file=first cp --target-directory="$root/tmp"
chroot "$root" sh -c 'dpkg --force-depends --unpack /tmp/*.deb'
rm "$root"/tmp/*.deb
xargs --arg-file=essential chroot "$root" dpkg --force-depends --configure
export APT_CONFIG=$MMDEBSTRAP_APT_CONFIG TMPDIR=$root/tmp
xargs --arg-file=packages apt-get --yes -o Dir::Bin::dpkg=env -o DPkg::Options::=--unset=TMPDIR \
    -o DPkg::Options::=dpkg -o "DPkg::Chroot-Directory=$root" install
"""
