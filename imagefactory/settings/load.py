"""Settings of this machine and site: the environment, the files `imagefactory.toml`, the built-in default.

Each value remembers where it came from, so that `settings`, `doctor` and errors can say it. Which files
there are, and which of them decides, files.py says. Hosts of
package registries are not among the defaults: they come from the machine's own tools (uv, pip, apt)
unless a site names them here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.oci.mirrors import Mirrors
from imagefactory.settings.checks import CENTER, check_values
from imagefactory.settings.choices import ENGINES, SITES, SOLVERS, Setting, listed
from imagefactory.settings.files import (
    FILE_NAME,
    center_files,
    files_of,
    own_files,
    parse_document,
    parse_values,
    read_content,
    read_document,
)
from imagefactory.settings.sources import RestrictedSetting, find_restricted, key_ids, may_be_set
from imagefactory.settings.trusted import UntrustedProjectError, is_trusted, refuse_foreign_project

ENVIRONMENT_PREFIX = "IMAGEFACTORY_"
LEDGER_KEY = "IMAGEFACTORY_LEDGER_KEY"
"""A secret text, so no setting, which files hold and `settings` shows: the key of a ledger that travels."""
SHORTEST_LEDGER_KEY = 32
SHIPPED = Path(__file__).parents[1] / "shipped"
"""The recipes and locks that come with this program: in a checkout links to its own, in a wheel the files."""
FOLDERS = ("store", "cache", "certificates", "signing_key", "catalogue", "sif_folder")
"""Settings that are paths, or are where they look like one: relative ones begin where they are written."""


def read_ledger_key(environ: Mapping[str, str]) -> str:
    """The key in IMAGEFACTORY_LEDGER_KEY, empty where there is none.

    Raises UsageError for one that can be guessed: everybody may read what it has signed.
    """
    key = environ.get(LEDGER_KEY, "")
    if 0 < len(key) < SHORTEST_LEDGER_KEY:
        raise UsageError(
            "ledger-key-too-short",
            f"the key in {LEDGER_KEY} has {len(key)} characters, fewer than {SHORTEST_LEDGER_KEY}",
            hint="create one: openssl rand -hex 32",
        )
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`root` is the factory's folder (recipes/, lockfiles/, definitions/), SHIPPED where there is none.

    What each other means, MEANINGS says. Pairs (`mirrors`, `indexes`, `channels`) and lists are one text with
    commas; an empty text is the default that is not known here: none, or what the machine's own tools are set
    to.

    `centers` are the files of centers that the user joined beside that of `catalogue`; none where a project
    or the environment names the catalogue.

    `files` are those whose keys and policy count, the nearest first: without that of a project that the user
    does not trust. `untrusted` is what such a project sets in vain.
    `limits` are files whose policy counts too, and in which keys may end earlier: the user's own, of the
    settings of a center.
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
    indexes: Setting
    debian_mirror: Setting
    channels: Setting
    solver: Setting
    codec: Setting
    workers: Setting
    signing_key: Setting
    catalogue: Setting
    catalogue_mirrors: Setting
    center: Setting
    site: Setting
    licences: Setting
    sif_folder: Setting
    submit_commands: Setting
    sbatch_options: Setting
    sweep_machines: Setting
    sweep_gpu_hours: Setting
    sweep_jobs: Setting
    files: tuple[Path, ...] = ()
    untrusted: tuple[RestrictedSetting, ...] = ()
    centers: tuple[Path, ...] = ()
    limits: tuple[Path, ...] = ()

    @property
    def root_path(self) -> Path:
        return Path(self.root.value)

    @property
    def shipped(self) -> bool:
        """Whether the recipes are those that come with this program, which nobody may write to."""
        return self.root_path == SHIPPED

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
        return listed(self.plain_http.value)

    @property
    def allowed_licences(self) -> tuple[str, ...]:
        return listed(self.licences.value)

    @property
    def mirror_map(self) -> Mirrors:
        return _pairs(self.mirrors)

    @property
    def index_map(self) -> tuple[tuple[str, str], ...]:
        return _pairs(self.indexes)

    def rows(self) -> tuple[tuple[str, Setting], ...]:
        """(name as imagefactory.toml writes it, setting), in the order they are told."""
        return tuple((_toml_name(name), getattr(self, name)) for name in _names())


def _pairs(setting: Setting) -> tuple[tuple[str, str], ...]:
    pairs = (item.partition("=") for item in listed(setting.value))
    return tuple((name, place) for name, _, place in pairs)


def find_root(start: Path) -> Path | None:
    """The nearest folder upwards that holds imagefactory.toml."""
    for folder in (start, *start.parents):
        if (folder / FILE_NAME).is_file():
            return folder
    return None


def load_settings(
    *,
    directory: Path | None,
    start: Path,
    environ: Mapping[str, str],
    user: int | None = None,
    strict: bool = True,
) -> Settings:
    """Settings for a call in `start`; `directory` is what `-C` named, if anything.

    The root is `directory`, else the nearest folder upwards with an imagefactory.toml, else SHIPPED.

    The environment beats the files, the nearest file beats the others, a file beats the default. Raises
    UsageError for a file that cannot be read, an unknown key or a value that cannot be used, naming the file
    or the variable; and for a root that was found upwards and that another than `user` (the caller) could
    have put there, as in /tmp. Raises UntrustedProjectError for a project that sets what only a trusted one
    may (settings/sources.py); where not `strict` that is left out, and is in `untrusted`.
    """
    found = directory or find_root(start)
    root = found.absolute() if found else SHIPPED
    here = root if found else start.absolute()
    home = Path(environ.get("HOME") or "/")
    project, files = root / FILE_NAME, files_of(root, environ)
    documents = {path: read_document(path) for path in own_files(environ)}
    trusted, content = True, None
    restricted: tuple[RestrictedSetting, ...] = ()
    if project not in documents:
        content = read_content(project)
        trusted = content is None or is_trusted(root, content, environ)
        if not trusted and not directory:
            refuse_foreign_project(root, os.geteuid() if user is None else user, environ)
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
        "codec": "zstd",
        "workers": "0",
        "site": SITES[0],
    }
    _refuse_unknown(environ)
    values: dict[str, Setting] = {}
    for key in _names():
        variable, folder = ENVIRONMENT_PREFIX + key.upper(), here
        nearest = next((path for path in files if key in written[path]), None)
        if key == "root":
            origin = str(root / FILE_NAME) if found else "comes with imagefactory"
            values[key] = Setting(value=str(root), origin="-C" if directory else origin)
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
            if "://" in values[key].value and key != "sif_folder":
                raise UsageError(
                    "setting-invalid",
                    f"{key}: '{values[key].value}' ({values[key].origin}) is an address, not a path",
                    hint="write a path on this machine",
                )
            path = Path(values[key].value).expanduser()
            values[key] = Setting(
                value=str(path if path.is_absolute() else folder / path), origin=values[key].origin
            )
    check_values(values)
    believed = files if trusted else tuple(path for path in files if path != project)
    own = set(map(str, own_files(environ)))
    named = values["catalogue"] if values["catalogue"].value else values["registry"]
    theirs = named.origin in own or named.origin == "default"
    centers = center_files(environ) if theirs else ()
    return Settings(**values, files=believed, untrusted=restricted, centers=centers, limits=())


OF_CENTERS = ("catalogue", "catalogue-mirrors", "site", "sif-folder", "submit-commands", "sbatch-options")
"""What each center has of its own; all else is the user's for all of them."""


def center_settings(settings: Settings, path: Path) -> Settings:
    """Return the settings for the images of a center that was joined beside the first; `path` is its file.

    Its keys are those of that file alone; the environment goes before it, but for the catalogue. Raises
    UsageError for a file that cannot be used.
    """
    document, values = read_document(path), {}
    if not CENTER.fullmatch(path.stem):
        raise UsageError(
            "center-name-invalid",
            f"{path}: '{path.stem}' is not a center name",
            hint="rename the file: 1 to 32 lowercase letters, digits, '_' and '-', then .toml",
        )
    if not isinstance(document.get("catalogue"), str) or not document["catalogue"]:
        raise UsageError(
            "center-without-catalog",
            f"{path} has no catalog",
            hint='write catalogue = "HOST/PATH", or remove the file',
        )
    for key, text in parse_values(document, path, OF_CENTERS).items():
        values[key.replace("-", "_")] = Setting(value=text, origin=str(path))
    for key in ("catalogue", "sif_folder"):
        if key in values and _is_path(key, values[key].value) and not values[key].value.startswith("/"):
            raise UsageError(
                "setting-invalid",
                f"{path}: {_toml_name(key)} is not an absolute path",
                hint="write a path that starts with /",
            )
    unset = {key.replace("-", "_"): Setting(value="", origin="default") for key in OF_CENTERS}
    unset["site"] = Setting(value=SITES[0], origin="default")
    own = {key: getattr(settings, key) for key in ("submit_commands", "sbatch_options")}
    named = {key: getattr(settings, key) for key in ("site", "sif_folder", *own)}
    named = {key: one for key, one in named.items() if one.origin.startswith("$")}
    center = Setting(value=path.stem, origin=str(path))
    found = replace(
        settings,
        **{**unset, **own, **values, **named, "center": center},
        files=(path,),
        limits=settings.files,
        centers=(),
    )
    check_values({name: getattr(found, name) for name in _names()})
    return found


def _names() -> tuple[str, ...]:
    """The settings' names as attributes, in the order they are told."""
    return tuple(
        field.name
        for field in fields(Settings)
        if field.name not in ("files", "untrusted", "centers", "limits")
    )


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
        if name.startswith(ENVIRONMENT_PREFIX) and name not in (*known, LEDGER_KEY):
            raise UsageError(
                "setting-unknown",
                f"the variable {name} is not a setting",
                hint=f"the settings are {', '.join(known)}",
            )


def _with_absolute_folders(setting: Setting, root: Path, home: Path) -> Setting:
    """Folders of channels are written from the factory's root, as `store` is."""
    items = []
    for item in listed(setting.value):
        channel, equals, place = item.partition("=")
        if place and "://" not in place:
            path = home / place[2:] if place.startswith("~/") else Path(place)
            place = str(path if path.is_absolute() else root / path)
        items.append(f"{channel}{equals}{place}")
    return Setting(value=",".join(items), origin=setting.origin)


def _toml_name(field: str) -> str:
    return field.replace("_", "-")
