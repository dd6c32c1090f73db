"""The content of a base: everything here determines its bytes. No I/O.

Remains of a build (logs, caches, locks, device nodes) are removed. Facts about the host (hostname,
resolv.conf, apt sources) are replaced by fixed bytes.

A finished base has no apt source, because the address of an archive belongs to a machine. Its sources.list
explains how to add one.
"""

from __future__ import annotations

import hashlib
import re
import struct

from imagefactory.lock.debian.lock import format_base_lock
from imagefactory.model import BaseLock, BaseSpec

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
