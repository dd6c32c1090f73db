"""Settings of this machine and site: `imagefactory.toml`, the environment, the built-in default.

Each value remembers where it came from, so that `doctor` and errors can say it. Hosts of package
registries are not among the defaults: they come from the machine's own tools (uv, pip, apt) unless a
site names them here.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from imagefactory.errors import UsageError

FILE_NAME = "imagefactory.toml"
ENVIRONMENT_PREFIX = "IMAGEFACTORY_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value and where it came from: `default`, a file's path, or `$NAME`."""

    value: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`root` is the factory's folder (recipes/, lockfiles/, definitions/).

    `store` is the OCI image layout that holds what is built; `cache` holds what can be fetched again.
    `index` is a Python package index (PEP 503 or 691) and `debian_mirror` a Debian archive; empty
    means what the machine's uv, pip and apt are set to. `codec` is `zstd` or `gzip`, `workers` a
    count of processes (0: one per core).
    """

    root: Setting
    store: Setting
    cache: Setting
    index: Setting
    debian_mirror: Setting
    codec: Setting
    workers: Setting

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


def find_root(start: Path) -> Path | None:
    """The nearest folder upwards that holds imagefactory.toml."""
    for folder in (start, *start.parents):
        if (folder / FILE_NAME).is_file():
            return folder
    return None


def load_settings(*, directory: Path | None, start: Path, environ: Mapping[str, str]) -> Settings:
    """Settings for a call made in `start`; `directory` is what `-C` named, if anything.

    The environment beats the file, the file beats the default. Raises UsageError for a file that
    cannot be read, an unknown key or a value of the wrong kind, naming the file.
    """
    root = (directory or find_root(start) or start).absolute()
    home = Path(environ.get("HOME") or "/")
    written = _read(root / FILE_NAME)
    defaults = {
        "root": str(root),
        "store": str(Path(environ.get("XDG_DATA_HOME") or home / ".local/share") / "imagefactory/store"),
        "cache": str(Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "imagefactory"),
        "index": "",
        "debian_mirror": "",
        "codec": "zstd",
        "workers": "0",
    }
    _refuse_unknown(environ)
    values: dict[str, Setting] = {}
    for field in fields(Settings):
        key, variable = field.name, ENVIRONMENT_PREFIX + field.name.upper()
        if key == "root":
            values[key] = Setting(value=str(root), origin="-C" if directory else str(root / FILE_NAME))
        elif environ.get(variable):
            values[key] = Setting(value=environ[variable], origin=f"${variable}")
        elif key in written:
            values[key] = Setting(value=written[key], origin=str(root / FILE_NAME))
        else:
            values[key] = Setting(value=defaults[key], origin="default")
    for key in ("store", "cache"):
        path = Path(values[key].value).expanduser()
        values[key] = Setting(
            value=str(path if path.is_absolute() else root / path), origin=values[key].origin
        )
    _check(values)
    return Settings(**values)


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = [ENVIRONMENT_PREFIX + field.name.upper() for field in fields(Settings) if field.name != "root"]
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            raise UsageError(
                f"the variable {name} is no setting", hint=f"the settings are {', '.join(known)}"
            )


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(
            f"{path}: cannot be read as TOML: {error}", hint='each line reads: key = "value"'
        ) from error
    known = sorted(field.name.replace("_", "-") for field in fields(Settings) if field.name != "root")
    result = {}
    for key, value in data.items():
        if key not in known:
            raise UsageError(f"{path}: unknown setting '{key}'", hint=f"the settings are {', '.join(known)}")
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise UsageError(f"{path}: '{key}' must be a string", hint=f'write {key} = "..."')
        result[key.replace("-", "_")] = str(value)
    return result


def _check(values: Mapping[str, Setting]) -> None:
    codec, workers = values["codec"], values["workers"]
    if codec.value not in ("zstd", "gzip"):
        raise UsageError(f"codec '{codec.value}' ({codec.origin}) is not known", hint="write zstd or gzip")
    if not workers.value.isascii() or not workers.value.isdigit():
        raise UsageError(
            f"workers '{workers.value}' ({workers.origin}) is not a count", hint="write 0 or more"
        )
