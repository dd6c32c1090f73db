"""The meaning of each setting, and whether an untrusted project may set it.

A project may come from anyone. The user trusts one with `imagefactory config --trust` (files.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

REASONS = {
    "store": "a directory in which commands write and remove files",
    "cache": "a directory in which commands write and remove files",
    "registry": "a place that gets images and your credentials for it",
    "engine": "it selects programs of this machine",
    "runner": "it selects what separates images from this machine",
    "certificates": "it decides which servers are genuine",
    "plain-http": "it sends data and passwords unencrypted",
    "mirrors": "it decides which servers are queried",
    "index": "it decides which servers are queried",
    "indexes": "it decides which servers are queried",
    "debian-mirror": "it decides which servers are queried",
    "debian-snapshot": "it decides which servers are queried",
    "channels": "it decides which servers are queried, or which directories are read",
    "sources": "it decides which files count as packages of Debian",
    "solver": "a program to run",
    "cooldown": "it decides which releases are accepted",
    "publishers": "it decides which releases are accepted",
    "codec": "",
    "workers": "it decides how much of this machine is used",
    "signing-key": "a private key",
    "sigstore-bundles": "it decides what is attached to images",
    "catalog": "it decides which servers are queried, or which file is read",
    "catalog-mirrors": "it decides which servers are queried, or which file is read",
    "center": "it decides whose images a name means",
    "site": "",
    "container": "",
    "licenses": "it decides what a check accepts",
    "sif-folder": "a path outside of the project",
    "submit-commands": "it changes what your jobs may do, and who pays for them",
    "site-mounts": "it decides which directories of nodes images get",
    "sbatch-options": "it changes what your jobs may do, and who pays for them",
    "sweep-machines": "it decides whose machines answer for images",
    "sweep-gpu-hours": "it decides how much of a pool your jobs take",
    "sweep-jobs": "it decides how much of a pool your jobs take",
    "trust": "it decides whose verdicts count",
    "policy": "it decides which verdicts count",
}
"""The reason why an untrusted project may not set a setting, by name. An empty reason means that it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestrictedSetting:
    """A setting in the file of an untrusted project. `line` is its line number, 0 if unknown."""

    name: str
    value: str
    line: int

    @property
    def reason(self) -> str:
        return REASONS[self.name]


def may_be_set(name: str, *, trusted: bool) -> bool:
    """Return whether a project may set a setting. It may not if the setting has no row."""
    return trusted or REASONS.get(name, "?") == ""


def find_restricted(
    document: Mapping[str, Any], text: str, known_keys: Collection[str] = ()
) -> tuple[RestrictedSetting, ...]:
    """Return the restricted settings in a file, in the order of the file.

    `[[trust]]` rows with keys that the user or the site knows (`known_keys`, key IDs) are not restricted,
    because the user's row for the same key counts.
    """
    settings = [
        RestrictedSetting(name=name, value=_shorten(value), line=_line_of(name, text))
        for name, value in document.items()
        if name in REASONS
        and not may_be_set(name, trusted=False)
        and not (name == "trust" and set(key_ids(document)) <= set(known_keys))
    ]
    return tuple(sorted(settings, key=lambda setting: setting.line))


def key_ids(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key IDs in the `[[trust]]` rows of a file. Rows without one return an empty ID."""
    rows = document.get("trust", [])
    rows = rows if isinstance(rows, list) else [rows]
    return tuple(str(row.get("keyid", "")) if isinstance(row, dict) else "" for row in rows)


def _shorten(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={address}" for name, address in value.items())
    if isinstance(value, list):
        return ", ".join(str(row.get("name", row)) if isinstance(row, dict) else str(row) for row in value)
    return str(value)


def _line_of(name: str, text: str) -> int:
    pattern = rf"""[ \t]*(\[\[?[ \t]*)?["']?{re.escape(name)}["']?[ \t]*[.=\]]"""
    lines = (number for number, line in enumerate(text.splitlines(), 1) if re.match(pattern, line))
    return next(lines, 0)


MEANINGS = {
    "store": ("`~/.local/share/imagefactory/store`", "the OCI image layout with everything that is kept"),
    "cache": ("`~/.cache/imagefactory`", "what can be fetched or made again"),
    "registry": ("none", "`HOST[:PORT][/PATH]`, where `push` sends images and `pull TARGET` looks"),
    "engine": ("`assemble`", "what builds: or `docker`, `apptainer`"),
    "runner": ("the engine's own", "what starts images: `unshare` (of `assemble`), `docker`, `apptainer`"),
    "certificates": (
        "none",
        "a PEM file with CA certificates to trust besides the machine's: for registries, index, channels, "
        "Debian's archive, inside builds",
    ),
    "plain-http": ("none", "registries without TLS: `HOST:PORT,...`"),
    "mirrors": (
        "none",
        'a table, `"docker.io" = "HOST/PATH"`: where to fetch bases and pulled images from',
    ),
    "index": ("what uv or pip are set to", "a Python package index (PEP 503 or 691)"),
    "indexes": (
        "none",
        'a table, `pytorch-cu128 = "https://..."`: the package indexes that `index` in recipes names',
    ),
    "debian-mirror": ("what apt is set to", "a Debian archive, or two: main and security"),
    "debian-snapshot": (
        "what apt is set to, or that of Debian's own mirror",
        "snapshots of Debian's archive, for packages that the mirror no longer has: an address with "
        "`archive/debian/TIME/`, or `none`",
    ),
    "channels": (
        "none",
        'a table, `"conda-forge" = "https://..."` or a directory that replaces a conda channel',
    ),
    "sources": (
        "none",
        "a directory that `image export --format sources` wrote: builds look there first, and need no "
        "mirror, index or channel for its files",
    ),
    "solver": (
        "`rattler`",
        "of conda's packages: or your own `conda`, `mamba`, `micromamba`, or a path to one",
    ),
    "cooldown": (
        "none",
        "the least age of a release that `lock` takes from an index or a channel: `7 days`, `12 hours`, "
        "`7 days except numpy, torch`",
    ),
    "publishers": (
        "`record`",
        "`lock` verifies and records who published each wheel, if the index [attests](../update-packages.md"
        "#know-who-published-a-wheel) it: or `strict`, which stops at a changed or lost publisher, or `off`",
    ),
    "codec": (
        "`zstd`",
        "of layers: or `zstd-9`, a fifth smaller and slow; or `gzip`, quick, for engines without zstd",
    ),
    "workers": ("`0`", "what works at once; 0 is one per core"),
    "signing-key": (
        "the one key that you have",
        "what signs verdicts: the name of a key, or the path of a `.pem`",
    ),
    "sigstore-bundles": (
        "`no`",
        "`yes` attaches verdicts and provenance also as [Sigstore bundles](../trust.md#other-tools)",
    ),
    "catalog": (
        "that of `registry`",
        "where signed catalogs are found: `HOST[:PORT][/PATH][:TAG]`, or a file (`/...`, `./...`, `~/...`)",
    ),
    "catalog-mirrors": (
        "none",
        "where the catalog is read when its place does not answer: `HOST[:PORT][/PATH][:TAG],...` or files "
        "(`/...`). Ignored if a nearer file sets `catalog`",
    ),
    "center": (
        "the site's name, else made of the catalog's",
        "what the center of `catalog` is called where several are joined: `CENTER/TARGET`",
    ),
    "site": (
        "`generic`",
        "whose rules submit files follow: or `chtc`, `ospool`, `igwn`, `slurm`, `kubernetes`",
    ),
    "container": (
        "`apptainer`",
        "what starts images in Slurm jobs: or `pyxis`, `podman`, `edf` (`job write` only)",
    ),
    "licenses": (
        "none",
        "what `image audit --check licenses` allows: SPDX identifiers and names, `*` and `?` for any, with "
        "commas",
    ),
    "sif-folder": (
        "none",
        "where jobs find .sif files: a directory that the pool's machines share, or `osdf:///...`",
    ),
    "submit-commands": (
        "none",
        "lines of submit files, for the HTCondor jobs of sweeps and `job write`: `accounting_group = ...`, "
        "`priority = ...`, `nice_user = true`, `+NAME = ...`",
    ),
    "sbatch-options": (
        "none",
        "options of sbatch, for the Slurm jobs of sweeps and `job write`: "
        "`--account=... --partition=... --qos=... --time=...`",
    ),
    "site-mounts": (
        "none",
        "absolute paths of the nodes, with commas, that the Slurm jobs of `job write` bind into their image, "
        "read-only: `PATH` or `PATH:PATH-IN-IMAGE`, such as a "
        "[plug-in for NCCL](../write-job.md#several-nodes)",
    ),
    "sweep-machines": (
        "all",
        "where sweeps and nights run: names with commas, `*` and `?` for any, `!` before those to avoid",
    ),
    "sweep-gpu-hours": ("no limit", "GPU hours of one sweep; other cells wait for the next"),
    "sweep-jobs": ("no limit", "jobs of one sweep at once"),
}
"""The default and the meaning of each setting by name, each one line of Markdown."""
