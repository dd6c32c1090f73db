"""Load the settings from the environment, the files `imagefactory.toml` (files.py), and the defaults.

Each value has its origin, for `config`, `doctor` and errors. No default is the address of a package host:
addresses come from the tools of the machine (uv, pip, apt) unless a site sets them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from imagefactory.errors import UsageError, os_reason
from imagefactory.logs import LOG_VARIABLE
from imagefactory.oci.store import Mirrors, split_place, split_tagged
from imagefactory.recipes.values import RULES, channel_address
from imagefactory.settings.choices import (
    CONTAINERS,
    ENGINES,
    PUBLISHERS,
    RUNNERS,
    SITES,
    SOLVERS,
    SettingValue,
    listed,
)
from imagefactory.settings.files import (
    FILE_NAME,
    UntrustedProjectError,
    center_files,
    check_project_owner,
    files_of,
    is_trusted,
    own_files,
    parse_document,
    parse_values,
    read_content,
    read_document,
    without_secrets,
)
from imagefactory.settings.own_commands import (
    parse_commands,
    parse_limit,
    parse_machines,
    parse_mounts,
    parse_options,
)
from imagefactory.settings.sources import RestrictedSetting, find_restricted, key_ids, may_be_set

_CHANNEL = re.compile(r"(?:(?:https?|file)://)?[A-Za-z0-9_./:%+~-]+")
_INDEX = re.compile(r"(?:https?|file)://[A-Za-z0-9_./:%+~-]+")
_SNAPSHOT = re.compile(r"https?://[A-Za-z0-9_./:@%+~-]+")
_PLACE = re.compile(r"(?:https?|file)://[A-Za-z0-9_./:%+~-]+|/[^,=\x00-\x1f\x7f]*")
CENTER = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
"""The name of a center. It has no `.` or `:`, so that `CENTER/TARGET` is never an address in a registry."""
SIF_DIRECTORY = re.compile(r"(?:osdf://)?(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9_.+-]+)+/?")
"""A directory of .sif files. Submit files contain it. None of its parts is `.` or `..`."""
_PARSERS: dict[str, Callable[[str], object]] = {
    "submit_commands": parse_commands,
    "sbatch_options": parse_options,
    "site_mounts": parse_mounts,
    "sweep_machines": parse_machines,
    "sweep_gpu_hours": parse_limit,
    "sweep_jobs": parse_limit,
}


def check_values(values: Mapping[str, SettingValue]) -> None:
    """Raise UsageError for the first invalid value. The keys are the attribute names of Settings."""
    _check_choices(values)
    _check_places(values)
    for name, parse in _PARSERS.items():
        try:
            parse(values[name].value)
        except UsageError as error:
            setting_location = f"{_toml_name(name)} ({values[name].origin})"
            raise UsageError(error.code, f"{setting_location}: {error.message}", hint=error.hint) from error
    _check_snapshot(values["debian_snapshot"])
    _check_mirrors(values["mirrors"])
    _check_indexes(values["indexes"])
    _check_channels(values["channels"])
    _check_certificates(values["certificates"])


def _check_choices(values: Mapping[str, SettingValue]) -> None:
    if values["codec"].value not in ("zstd", "zstd-9", "gzip"):
        raise _invalid("codec", values["codec"], "a codec", "write zstd, zstd-9 or gzip")
    if values["sigstore_bundles"].value not in ("", "yes", "no"):
        raise _invalid("sigstore-bundles", values["sigstore_bundles"], "yes or no", 'write "yes" or "no"')
    if not re.fullmatch("[0-9]+", values["workers"].value):
        raise _invalid("workers", values["workers"], "a number", "write 0 or more")
    choices = {
        "engine": tuple(ENGINES),
        "runner": ("", *RUNNERS),
        "site": SITES,
        "container": CONTAINERS,
        "publishers": PUBLISHERS,
    }
    for name, known in choices.items():
        if values[name].value not in known:
            raise _invalid(name, values[name], "supported", f"write {' or '.join(filter(None, known))}")
    solver, path = values["solver"], Path(values["solver"].value)
    # A relative path would be another program in each directory.
    if solver.value not in SOLVERS and not (path.is_absolute() and path.is_file()):
        hint = f"write {', '.join(SOLVERS)}, or the absolute path of a conda, mamba or micromamba"
        raise _invalid("solver", solver, "a solver", hint)
    cooldown = values["cooldown"]
    if cooldown.value and not RULES["cooldown"].allows(cooldown.value):
        raise _invalid("cooldown", cooldown, "an age", f"write {RULES['cooldown'].write}")
    center = values["center"]
    if center.value and not CENTER.fullmatch(center.value):
        raise UsageError(
            "center-name-invalid",
            f"center: '{without_secrets(center.value)}' ({center.origin}) is not a center name",
            hint="write 1 to 32 lowercase letters, digits, '_' and '-', such as chtc",
        )


def _check_places(values: Mapping[str, SettingValue]) -> None:
    if values["registry"].value:
        _check_place("registry", values["registry"], values["registry"].value)
    for host in listed(values["plain_http"].value):
        if _check_place("plain-http", values["plain_http"], host)[1]:
            hint = 'write hosts separated by commas: plain-http = "registry.site:5000,other.site"'
            raise _invalid("plain-http", values["plain_http"], "a host", hint, host)
    for name in ("catalog", "catalog_mirrors"):
        texts = listed(values[name].value) if name == "catalog_mirrors" else (values[name].value,)
        for text in texts:
            if text and not text.startswith("/"):
                _check_place(_toml_name(name), values[name], text, tagged=True)
    directory = values["sif_folder"]
    if directory.value and not SIF_DIRECTORY.fullmatch(directory.value):
        hint = "write an absolute path or osdf:///PATH, with letters, digits and . _ + - /, without '..'"
        raise _invalid("sif-folder", directory, "a directory for .sif files", hint)


def _invalid(name: str, setting: SettingValue, expected: str, hint: str, text: str = "") -> UsageError:
    shown = without_secrets(text or setting.value)
    return UsageError("setting-invalid", f"{name}: '{shown}' ({setting.origin}) is not {expected}", hint=hint)


def _check_unique(name: str, setting: SettingValue, keys: Iterable[str], hint: str) -> None:
    seen = set[str]()
    for key in keys:
        if key in seen:
            raise UsageError(
                "setting-duplicate", f"{name}: '{key}' ({setting.origin}) appears twice", hint=hint
            )
        seen.add(key)


def _check_mirrors(setting: SettingValue) -> None:
    for item in listed(setting.value):
        prefix, equals, address = item.partition("=")
        if not equals:
            hint = "write pairs separated by commas: docker.io=registry.example.org/hub,quay.io=..."
            raise _invalid("mirrors", setting, "HOST=MIRROR", hint, item)
        for text in (prefix, address):
            _check_place("mirrors", setting, text)
    prefixes = (prefix for prefix, _ in _pairs(setting))
    _check_unique("mirrors", setting, prefixes, "write one mirror for each host")


def _check_indexes(setting: SettingValue) -> None:
    for item in listed(setting.value):
        name, _, address = item.partition("=")
        if "@" in item:
            raise UsageError(
                "setting-has-credentials",
                f"indexes ({setting.origin}): a user or password is not allowed here",
                hint="put credentials into ~/.netrc, or use uv's keyring provider",
            )
        if not RULES["index name"].allows(name) or not _INDEX.fullmatch(address):
            hint = "separate several by commas: pytorch-cu128=https://packages.example.org/cu128/simple"
            raise _invalid("indexes", setting, "NAME=ADDRESS", hint, item)
    _check_unique(
        "indexes", setting, (name for name, _ in _pairs(setting)), "write one address for each index"
    )


def _check_channels(setting: SettingValue) -> None:
    for item in listed(setting.value):
        channel, equals, address = item.partition("=")
        if "@" in item or "/t/" in item:
            raise UsageError(
                "setting-has-credentials",
                f"channels ({setting.origin}): a user, password or token is not allowed here",
                hint="put credentials into ~/.netrc or ~/.rattler/credentials.json ($RATTLER_AUTH_FILE)",
            )
        if not equals or not _CHANNEL.fullmatch(channel) or not _PLACE.fullmatch(address):
            hint = "separate several by commas: conda-forge=https://mirror.example.org/conda-forge"
            raise _invalid("channels", setting, "CHANNEL=ADDRESS or CHANNEL=DIRECTORY", hint, item)
        if address.startswith("/") and not Path(address).is_dir():
            hint = "write the directory that contains noarch/repodata.json"
            raise _invalid("channels", setting, "a directory", hint, address)
    addresses = (channel_address(channel) for channel, _ in _pairs(setting))
    _check_unique("channels", setting, addresses, "write one address for each channel")


def _check_place(name: str, setting: SettingValue, text: str, *, tagged: bool = False) -> tuple[str, str]:
    try:
        return split_place(split_tagged(text)[0] if tagged else text)
    except UsageError as error:
        raise UsageError(
            "setting-invalid", f"{name} ({setting.origin}): {error.message}", hint=error.hint
        ) from error


def _check_snapshot(setting: SettingValue) -> None:
    if setting.value not in ("", "none") and not _SNAPSHOT.fullmatch(setting.value):
        hint = 'write debian-snapshot = "https://HOST", with archive/debian/TIME/ below it, or "none"'
        raise _invalid("debian-snapshot", setting, "an address of snapshots", hint)


def _check_certificates(setting: SettingValue) -> None:
    if not setting.value:
        return
    hint = "set a file of PEM certificates (-----BEGIN CERTIFICATE-----), such as your site's CA bundle"
    path = Path(setting.value)
    # The path is written to an apt.conf.
    if not path.is_file() or not setting.value.isprintable() or '"' in setting.value:
        raise _invalid("certificates", setting, "a file", hint)
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            "certificates-unusable",
            f"certificates: cannot use {path} ({setting.origin}): {os_reason(error)}",
            hint=hint,
        ) from error


ENVIRONMENT_PREFIX = "IMAGEFACTORY_"
NONCE_STORE_KEY = "IMAGEFACTORY_NONCE_KEY"
"""The variable with the secret key of a portable nonce store.

It is not a setting, since `config` prints settings.
"""
MIN_NONCE_STORE_KEY = 32
SHIPPED = Path(__file__).parents[1] / "shipped"
"""The bundled recipes and locks: links in a checkout, files in a wheel."""
DIRECTORY_SETTINGS = ("store", "cache", "certificates", "signing_key", "catalog", "sif_folder", "sources")
"""Settings that can be paths. Relative paths start at the file that sets them."""


def read_nonce_store_key(environ: Mapping[str, str]) -> str:
    """Return the key in IMAGEFACTORY_NONCE_KEY, empty if it is not set.

    Raises UsageError for a short key: anyone can read its signatures and could guess it.
    """
    key = environ.get(NONCE_STORE_KEY, "")
    if 0 < len(key) < MIN_NONCE_STORE_KEY:
        raise UsageError(
            "nonce-key-too-short",
            f"the key in {NONCE_STORE_KEY} has {len(key)} characters, fewer than {MIN_NONCE_STORE_KEY}",
            hint="create one: openssl rand -hex 32",
        )
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one call. MEANINGS describes each.

    `root` is the directory of the project (recipes/, lockfiles/, definitions/), or SHIPPED. Pairs (`mirrors`,
    `indexes`, `channels`) and lists are one text separated by commas. An empty text means none, or the
    setting of the machine's tools.

    `files` are the files whose keys and policy count, the nearest first, without the file of an untrusted
    project. `untrusted` are the ignored settings of that project. `centers` are the files of additional
    centers that the user joined, empty if a project or the environment sets the catalog. `limits` are the
    user's files if these are the settings of a center: their policy counts too, and can end the period of
    keys earlier.
    """

    root: SettingValue
    store: SettingValue
    cache: SettingValue
    registry: SettingValue
    engine: SettingValue
    runner: SettingValue
    certificates: SettingValue
    plain_http: SettingValue
    mirrors: SettingValue
    index: SettingValue
    indexes: SettingValue
    debian_mirror: SettingValue
    debian_snapshot: SettingValue
    channels: SettingValue
    sources: SettingValue
    solver: SettingValue
    cooldown: SettingValue
    publishers: SettingValue
    codec: SettingValue
    workers: SettingValue
    signing_key: SettingValue
    sigstore_bundles: SettingValue
    catalog: SettingValue
    catalog_mirrors: SettingValue
    center: SettingValue
    site: SettingValue
    container: SettingValue
    licenses: SettingValue
    sif_folder: SettingValue
    submit_commands: SettingValue
    sbatch_options: SettingValue
    site_mounts: SettingValue
    sweep_machines: SettingValue
    sweep_gpu_hours: SettingValue
    sweep_jobs: SettingValue
    files: tuple[Path, ...] = ()
    untrusted: tuple[RestrictedSetting, ...] = ()
    centers: tuple[Path, ...] = ()
    limits: tuple[Path, ...] = ()

    @property
    def root_path(self) -> Path:
        return Path(self.root.value)

    @property
    def shipped(self) -> bool:
        """Return whether the recipes are the bundled ones, which are read-only."""
        return self.root_path == SHIPPED

    @property
    def store_path(self) -> Path:
        return Path(self.store.value)

    @property
    def cache_path(self) -> Path:
        return Path(self.cache.value)

    @property
    def sources_path(self) -> Path | None:
        return Path(self.sources.value) if self.sources.value else None

    @property
    def worker_count(self) -> int:
        return int(self.workers.value) or len(os.sched_getaffinity(0))

    @property
    def certificates_path(self) -> Path | None:
        return Path(self.certificates.value) if self.certificates.value else None

    @property
    def plain_hosts(self) -> tuple[str, ...]:
        return listed(self.plain_http.value)

    @property
    def with_bundles(self) -> bool:
        """Return whether signed statements are attached as Sigstore bundles too."""
        return self.sigstore_bundles.value == "yes"

    @property
    def allowed_licenses(self) -> tuple[str, ...]:
        return listed(self.licenses.value)

    @property
    def mirror_map(self) -> Mirrors:
        return _pairs(self.mirrors)

    @property
    def index_map(self) -> tuple[tuple[str, str], ...]:
        return _pairs(self.indexes)

    def rows(self) -> tuple[tuple[str, SettingValue], ...]:
        """Return the name in imagefactory.toml and the value of each setting, in display order."""
        return tuple((_toml_name(name), getattr(self, name)) for name in _names())


def _pairs(setting: SettingValue) -> tuple[tuple[str, str], ...]:
    pairs = (item.partition("=") for item in listed(setting.value))
    return tuple((name, address) for name, _, address in pairs)


def find_root(start: Path) -> Path | None:
    """Return the nearest directory with an imagefactory.toml: this one or a parent."""
    return next((path for path in (start, *start.parents) if (path / FILE_NAME).is_file()), None)


def load_settings(
    *,
    directory: Path | None,
    start: Path,
    environ: Mapping[str, str],
    user: int | None = None,
    strict: bool = True,
) -> Settings:
    """Load the settings for a call in directory `start`. `directory` is the argument of `-C`.

    The root is `directory`, or the nearest directory with an imagefactory.toml (`start` or a parent), or
    SHIPPED. The environment has priority over files, nearer files over others, files over defaults.

    Raises UsageError for an unreadable file, an unknown key or an invalid value. Raises UsageError for a root
    in a parent directory that another user than `user` could have created, as in /tmp. Raises
    UntrustedProjectError for a project with settings that only a trusted project may set (sources.py).
    Without `strict`, these settings are ignored and listed in `untrusted`.
    """
    project_root = directory or find_root(start)
    root = project_root.absolute() if project_root else SHIPPED
    here = root if project_root else start.absolute()
    home = Path(environ.get("HOME") or "/")
    project, files = root / FILE_NAME, files_of(root, environ)
    documents = {path: read_document(path) for path in own_files(environ)}
    trusted, content = True, None
    restricted: tuple[RestrictedSetting, ...] = ()
    if project not in documents:
        content = read_content(project)
        trusted = content is None or is_trusted(root, content, environ)
        if not trusted and not directory:
            check_project_owner(root, os.geteuid() if user is None else user, environ)
        documents[project] = parse_document(content or b"", project)
        if content is not None and not trusted:
            known_keys = [key for path in files[1:] for key in key_ids(documents[path])]
            restricted = find_restricted(documents[project], content.decode(), known_keys)
    if restricted and strict:
        raise UntrustedProjectError(project, content or b"", restricted)
    known = {_toml_name(name): name for name in _names() if name != "root"}
    written = {
        path: {
            known[key]: text
            for key, text in parse_values(document, path, known).items()
            if may_be_set(key, trusted=trusted or path != project)
        }
        for path, document in documents.items()
    }
    defaults = {
        "root": str(root),
        "store": str(Path(environ.get("XDG_DATA_HOME") or home / ".local/share") / "imagefactory/store"),
        "cache": str(Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "imagefactory"),
        "engine": next(iter(ENGINES)),
        "solver": SOLVERS[0],
        "publishers": PUBLISHERS[0],
        "codec": "zstd",
        "workers": "0",
        "site": SITES[0],
        "container": CONTAINERS[0],
    }
    _check_known_settings(environ)
    values: dict[str, SettingValue] = {}
    for key in _names():
        variable, folder = ENVIRONMENT_PREFIX + key.upper(), here
        nearest = next((path for path in files if key in written[path]), None)
        if key == "root":
            origin = str(root / FILE_NAME) if project_root else "comes with imagefactory"
            values[key] = SettingValue(value=str(root), origin="-C" if directory else origin)
        elif environ.get(variable):
            values[key] = SettingValue(value=environ[variable], origin=f"${variable}")
        elif nearest:
            values[key] = SettingValue(value=written[nearest][key], origin=str(nearest))
            folder = nearest.parent
        else:
            values[key] = SettingValue(value=defaults.get(key, ""), origin="default")
        if key == "channels":
            values[key] = _with_absolute_directories(values[key], folder, home)
        elif key in DIRECTORY_SETTINGS and _is_path(key, values[key].value):
            if "://" in values[key].value and key != "sif_folder":
                raise UsageError(
                    "setting-invalid",
                    f"{key}: '{values[key].value}' ({values[key].origin}) is an address, not a path",
                    hint="write a path on this machine",
                )
            path = Path(values[key].value).expanduser()
            values[key] = SettingValue(
                value=str(path if path.is_absolute() else folder / path), origin=values[key].origin
            )
    check_values(values)
    trusted_files = files if trusted else tuple(path for path in files if path != project)
    own_paths = set(map(str, own_files(environ)))
    named = values["catalog"] if values["catalog"].value else values["registry"]
    theirs = named.origin in own_paths or named.origin == "default"
    centers = center_files(environ) if theirs else ()
    return Settings(**values, files=trusted_files, untrusted=restricted, centers=centers, limits=())


OF_CENTERS = (
    "catalog",
    "catalog-mirrors",
    "site",
    "container",
    "sif-folder",
    "submit-commands",
    "sbatch-options",
    "site-mounts",
)
"""Settings that each center sets. For all others, the user's settings apply to all centers."""


def center_settings(settings: Settings, path: Path) -> Settings:
    """Return the settings for the images of an additional center; `path` is its file.

    Only the keys in that file are trusted. The environment has priority over the file, except for the
    catalog. Raises UsageError for an invalid file.
    """
    document, values = read_document(path), {}
    if not CENTER.fullmatch(path.stem):
        raise UsageError(
            "center-name-invalid",
            f"{path}: '{path.stem}' is not a center name",
            hint="rename the file: 1 to 32 lowercase letters, digits, '_' and '-', then .toml",
        )
    if not isinstance(document.get("catalog"), str) or not document["catalog"]:
        raise UsageError(
            "center-without-catalog",
            f"{path} has no catalog",
            hint='write catalog = "HOST/PATH", or remove the file',
        )
    for key, text in parse_values(document, path, OF_CENTERS).items():
        values[key.replace("-", "_")] = SettingValue(value=text, origin=str(path))
    for key in ("catalog", "sif_folder"):
        if key in values and _is_path(key, values[key].value) and not values[key].value.startswith("/"):
            raise UsageError(
                "setting-invalid",
                f"{path}: {_toml_name(key)} is not an absolute path",
                hint="write a path that starts with /",
            )
    unset = {key.replace("-", "_"): SettingValue(value="", origin="default") for key in OF_CENTERS}
    unset["site"] = SettingValue(value=SITES[0], origin="default")
    unset["container"] = SettingValue(value=CONTAINERS[0], origin="default")
    center_values = {key: getattr(settings, key) for key in ("submit_commands", "sbatch_options")}
    named = {
        key: getattr(settings, key)
        for key in ("site", "container", "sif_folder", "site_mounts", *center_values)
    }
    named = {key: setting for key, setting in named.items() if setting.origin.startswith("$")}
    center = SettingValue(value=path.stem, origin=str(path))
    result = replace(
        settings,
        **{**unset, **center_values, **values, **named, "center": center},
        files=(path,),
        limits=settings.files,
        centers=(),
    )
    check_values({name: getattr(result, name) for name in _names()})
    return result


def _names() -> tuple[str, ...]:
    """Return the attribute names of the settings, in display order."""
    return tuple(
        field.name
        for field in fields(Settings)
        if field.name not in ("files", "untrusted", "centers", "limits")
    )


def _is_path(key: str, text: str) -> bool:
    """Return whether a value is a path, not a name, an address or empty."""
    if key == "catalog":
        return text.startswith(("/", "./", "../", "~/"))
    if key == "signing_key":
        return "/" in text
    return bool(text) and not text.startswith("osdf://")


def _check_known_settings(environ: Mapping[str, str]) -> None:
    known = [ENVIRONMENT_PREFIX + name.upper() for name in _names() if name != "root"]
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in (*known, NONCE_STORE_KEY, LOG_VARIABLE):
            raise UsageError(
                "setting-unknown",
                f"the environment variable {name} is not a setting",
                hint=f"the settings are {', '.join(known)}",
            )


def _with_absolute_directories(setting: SettingValue, root: Path, home: Path) -> SettingValue:
    """Return the channels with absolute directories: relative ones start at the root, like `store`."""
    items = []
    for item in listed(setting.value):
        channel, equals, address = item.partition("=")
        if address and "://" not in address:
            path = home / address[2:] if address.startswith("~/") else Path(address)
            address = str(path if path.is_absolute() else root / path)
        items.append(f"{channel}{equals}{address}")
    return SettingValue(value=",".join(items), origin=setting.origin)


def _toml_name(field: str) -> str:
    return field.replace("_", "-")
