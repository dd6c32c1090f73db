"""Settings of this machine and site: the environment, the files `imagefactory.toml`, the built-in default.

Each value remembers where it came from, so that `settings`, `doctor` and errors can say it. Which files
there are, and which of them decides, settings_files.py says. Hosts of
package registries are not among the defaults: they come from the machine's own tools (uv, pip, apt)
unless a site names them here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from imagefactory.engines import ENGINES
from imagefactory.errors import UsageError
from imagefactory.match_spec import channel_address
from imagefactory.oci.mirrors import Mirrors, split_place, split_tagged
from imagefactory.settings_files import (
    FILE_NAME,
    ROOT,
    files_of,
    parse_values,
    read_document,
    refuse_strangers,
    without_secrets,
)
from imagefactory.verify.runners import RUNNERS

ENVIRONMENT_PREFIX = "IMAGEFACTORY_"
SOLVERS = ("rattler", "conda", "mamba", "micromamba")
SITES = ("generic", "chtc", "ospool")
"""Whose rules submit files follow, the default first."""
FOLDERS = ("store", "cache", "certificates", "signing_key", "catalogue", "sif_folder")
"""Settings that are paths, or are where they look like one: relative ones begin where they are written."""

_CHANNEL = re.compile(r"(?:(?:https?|file)://)?[A-Za-z0-9_./:%+~-]+")
_PLACE = re.compile(r"(?:https?|file)://[A-Za-z0-9_./:%+~-]+|/[^,=\x00-\x1f\x7f]*")
SIF_FOLDER = re.compile(r"(?:osdf://)?(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9_.+-]+)+/?")
"""Where .sif files may lie; a path of it reaches submit files. No part of it is `.` or `..`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value and where it came from: `default`, a file's path, or `$NAME`."""

    value: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`root` is the factory's folder (recipes/, lockfiles/, definitions/).

    `store` is the OCI image layout that holds what is built; `cache` holds what can be fetched again.
    `registry` (`host[:port][/path]`) is where `push` sends images, `engine` what `build` uses, `runner`
    what starts images (empty: the engine's own). `certificates` is a PEM bundle trusted instead of the
    machine's for registries, the package index, Debian's archive and inside builds. `plain_http` is
    hosts of registries spoken to without TLS, `mirrors` pairs `host[/prefix]=host[:port][/path]`, both
    with commas. `index` is a Python package index (PEP 503 or 691) and `debian_mirror` a Debian archive;
    empty means what the machine's uv, pip and apt are set to. `channels` pairs `channel=place`, both with
    commas: conda channels (a name or an address, or the beginning of addresses) and where they are asked
    instead (an address or a folder). `solver` solves conda's packages: `rattler`, or the user's own `conda`,
    `mamba` or `micromamba`, or the path of one. `codec` is `zstd` or `gzip`, `workers` a
    count of processes (0: one per core). `signing_key` is the file of the private key that signs verdicts, or
    the name of one of this user's; empty: the only one there. `catalogue` is where the signed catalogue lies:
    `HOST[/PATH][:TAG]` (the registry's place, in it the repository `catalogue`), or a file (`/...`, `./...`,
    `../...`, `~/...`); empty: in `registry`. `site` says whose rules submit files follow (SITES).
    `sif_folder` is where jobs find .sif files: a folder that the pool's machines share, or `osdf:///...`.

    `files` are those that settings and trust may be written in, the nearest first.
    """

    root: Setting
    store: Setting
    cache: Setting
    registry: Setting
    engine: Setting
    runner: Setting
    certificates: Setting
    plain_http: Setting
    mirrors: Setting
    index: Setting
    debian_mirror: Setting
    channels: Setting
    solver: Setting
    codec: Setting
    workers: Setting
    signing_key: Setting
    catalogue: Setting
    site: Setting
    sif_folder: Setting
    files: tuple[Path, ...] = ()

    @property
    def root_path(self) -> Path:
        return Path(self.root.value)

    @property
    def store_path(self) -> Path:
        return Path(self.store.value)

    @property
    def cache_path(self) -> Path:
        return Path(self.cache.value)

    @property
    def worker_count(self) -> int:
        return int(self.workers.value) or len(os.sched_getaffinity(0))

    @property
    def certificates_path(self) -> Path | None:
        return Path(self.certificates.value) if self.certificates.value else None

    @property
    def plain_hosts(self) -> tuple[str, ...]:
        return _items(self.plain_http.value)

    @property
    def mirror_map(self) -> Mirrors:
        pairs = (item.partition("=") for item in _items(self.mirrors.value))
        return tuple((prefix, place) for prefix, _, place in pairs)

    def rows(self) -> tuple[tuple[str, Setting], ...]:
        """(name as imagefactory.toml writes it, setting), in the order they are told."""
        return tuple((_toml_name(name), getattr(self, name)) for name in _names())


def find_root(start: Path) -> Path | None:
    """The nearest folder upwards that holds imagefactory.toml."""
    for folder in (start, *start.parents):
        if (folder / FILE_NAME).is_file():
            return folder
    return None


def load_settings(
    *, directory: Path | None, start: Path, environ: Mapping[str, str], user: int = ROOT
) -> Settings:
    """Settings for a call of the user with this id in `start`; `directory` is what `-C` named, if anything.

    The environment beats the files, the nearest file beats the others, a file beats the default. Raises
    UsageError for a file that cannot be read, an unknown key or a value that cannot be used, naming the file
    or the variable; and for a root that was found upwards and is another user's, as one in /tmp may be.
    """
    root = (directory or find_root(start) or start).absolute()
    if not directory:
        refuse_strangers(root / FILE_NAME, user)
    home = Path(environ.get("HOME") or "/")
    files = files_of(root, environ)
    known = {_toml_name(name): name for name in _names() if name != "root"}
    written = {
        path: {known[key]: text for key, text in parse_values(read_document(path), path, known).items()}
        for path in files
    }
    defaults = {
        "root": str(root),
        "store": str(Path(environ.get("XDG_DATA_HOME") or home / ".local/share") / "imagefactory/store"),
        "cache": str(Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "imagefactory"),
        "engine": ENGINES[0],
        "solver": SOLVERS[0],
        "codec": "zstd",
        "workers": "0",
        "site": SITES[0],
    }
    _refuse_unknown(environ)
    values: dict[str, Setting] = {}
    for key in _names():
        variable, folder = ENVIRONMENT_PREFIX + key.upper(), root
        nearest = next((path for path in files if key in written[path]), None)
        if key == "root":
            found = str(root / FILE_NAME) if (root / FILE_NAME).is_file() else "default"
            values[key] = Setting(value=str(root), origin="-C" if directory else found)
        elif environ.get(variable):
            values[key] = Setting(value=environ[variable], origin=f"${variable}")
        elif nearest:
            values[key] = Setting(value=written[nearest][key], origin=str(nearest))
            folder = nearest.parent
        else:
            values[key] = Setting(value=defaults.get(key, ""), origin="default")
        if key == "channels":
            values[key] = _with_absolute_folders(values[key], folder, home)
        elif key in FOLDERS and _is_path(key, values[key].value):
            path = Path(values[key].value).expanduser()
            values[key] = Setting(
                value=str(path if path.is_absolute() else folder / path), origin=values[key].origin
            )
    _check(values)
    return Settings(**values, files=files)


def _names() -> tuple[str, ...]:
    """The settings' names as attributes, in the order they are told."""
    return tuple(field.name for field in fields(Settings) if field.name != "files")


def _is_path(key: str, text: str) -> bool:
    """Whether it stands for a path; else it is a name, an address or nothing."""
    if key == "catalogue":
        return text.startswith(("/", "./", "../", "~/"))
    if key == "signing_key":
        return "/" in text
    return bool(text) and not text.startswith("osdf://")


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = [ENVIRONMENT_PREFIX + name.upper() for name in _names() if name != "root"]
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            raise UsageError(
                f"the variable {name} is no setting", hint=f"the settings are {', '.join(known)}"
            )


def _check(values: Mapping[str, Setting]) -> None:
    codec, workers = values["codec"], values["workers"]
    if codec.value not in ("zstd", "gzip"):
        raise UsageError(f"codec '{codec.value}' ({codec.origin}) is not known", hint="write zstd or gzip")
    if not workers.value.isascii() or not workers.value.isdigit():
        raise UsageError(
            f"workers '{workers.value}' ({workers.origin}) is not a count", hint="write 0 or more"
        )
    for name, known in (("engine", ENGINES), ("runner", ("", *RUNNERS)), ("site", SITES)):
        setting = values[name]
        if setting.value not in known:
            raise UsageError(
                f"{name} '{setting.value}' ({setting.origin}) is not known",
                hint=f"write {' or '.join(word for word in known if word)}",
            )
    if values["registry"].value:
        _check_place("registry", values["registry"], values["registry"].value)
    for host in _items(values["plain_http"].value):
        if _check_place("plain-http", values["plain_http"], host)[1]:
            raise UsageError(
                f"plain-http: '{host}' ({values['plain_http'].origin}) is not a host alone",
                hint='write hosts with commas: plain-http = "registry.site:5000,other.site"',
            )
    if values["catalogue"].value and not values["catalogue"].value.startswith("/"):
        _check_place("catalogue", values["catalogue"], values["catalogue"].value, tagged=True)
    folder = values["sif_folder"]
    if folder.value and not SIF_FOLDER.fullmatch(folder.value):
        raise UsageError(
            f"sif-folder: '{without_secrets(folder.value)}' ({folder.origin}) is no place for .sif files",
            hint="write an absolute path or osdf:///PATH, of letters, digits and . _ + - / and without '..'",
        )
    _check_mirrors(values["mirrors"])
    _check_channels(values["channels"])
    _check_solver(values["solver"])
    if values["certificates"].value:
        _check_certificates(values["certificates"])


def _check_mirrors(setting: Setting) -> None:
    seen = set()
    for item in _items(setting.value):
        prefix, equals, place = item.partition("=")
        if not equals:
            raise UsageError(
                f"mirrors: '{item.rpartition('@')[2]}' ({setting.origin}) is not HOST=MIRROR",
                hint="write pairs with commas: docker.io=registry.example.org/hub,quay.io=...",
            )
        for text in (prefix, place):
            _check_place("mirrors", setting, text)
        if prefix in seen:
            raise UsageError(
                f"mirrors: '{prefix}' ({setting.origin}) stands there twice", hint="write one mirror each"
            )
        seen.add(prefix)


def _with_absolute_folders(setting: Setting, root: Path, home: Path) -> Setting:
    """Folders of channels are written from the factory's root, as `store` is."""
    items = []
    for item in _items(setting.value):
        channel, equals, place = item.partition("=")
        if place and "://" not in place:
            path = home / place[2:] if place.startswith("~/") else Path(place)
            place = str(path if path.is_absolute() else root / path)
        items.append(f"{channel}{equals}{place}")
    return Setting(value=",".join(items), origin=setting.origin)


def _check_channels(setting: Setting) -> None:
    seen = set()
    for item in _items(setting.value):
        channel, equals, place = item.partition("=")
        if "@" in item or "/t/" in item:
            raise UsageError(
                f"channels ({setting.origin}): a user, password or token does not belong here",
                hint="credentials come from ~/.netrc or ~/.rattler/credentials.json ($RATTLER_AUTH_FILE)",
            )
        if not equals or not _CHANNEL.fullmatch(channel) or not _PLACE.fullmatch(place):
            raise UsageError(
                f"channels: '{without_secrets(item)}' ({setting.origin}) is not CHANNEL=ADDRESS or "
                "CHANNEL=FOLDER",
                hint="write conda-forge=https://mirror.example.org/conda-forge, several with commas",
            )
        if channel_address(channel) in seen:
            raise UsageError(
                f"channels: '{channel}' ({setting.origin}) stands there twice", hint="write one place each"
            )
        seen.add(channel_address(channel))
        if place.startswith("/") and not Path(place).is_dir():
            raise UsageError(
                f"channels: {place} ({setting.origin}) is not a folder",
                hint="name the folder that holds noarch/repodata.json",
            )


def _check_solver(setting: Setting) -> None:
    if setting.value in SOLVERS or ("/" in setting.value and Path(setting.value).is_file()):
        return
    raise UsageError(
        f"solver '{setting.value}' ({setting.origin}) is not known",
        hint=f"write {', '.join(SOLVERS)}, or the absolute path of a conda, mamba or micromamba",
    )


def _check_place(name: str, setting: Setting, text: str, *, tagged: bool = False) -> tuple[str, str]:
    try:
        return split_place(split_tagged(text)[0] if tagged else text)
    except UsageError as error:
        raise UsageError(f"{name} ({setting.origin}): {error.message}", hint=error.hint) from error


def _check_certificates(setting: Setting) -> None:
    import ssl

    hint = "name a file of PEM certificates (-----BEGIN CERTIFICATE-----), such as your site's CA bundle"
    path = Path(setting.value)
    if (
        not path.is_file() or not setting.value.isprintable() or '"' in setting.value
    ):  # it goes into an apt.conf
        raise UsageError(f"certificates: {path} ({setting.origin}) is not a file", hint=hint)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"certificates: {path} ({setting.origin}) cannot be used: {error.strerror or error}", hint=hint
        ) from error


def _items(text: str) -> tuple[str, ...]:
    return tuple(item for part in text.split(",") if (item := part.strip()))


def _toml_name(field: str) -> str:
    return field.replace("_", "-")
