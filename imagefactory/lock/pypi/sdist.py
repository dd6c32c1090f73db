"""Source distributions: which one of an index a requirement means, its file, and what it builds with."""

from __future__ import annotations

import hashlib
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import InvalidSdistFilename, parse_sdist_filename
from packaging.version import Version

from imagefactory.errors import DownloadError, LockError, UsageError
from imagefactory.files import replacing
from imagefactory.lock.pypi.local import digest
from imagefactory.lock.pypi.project_page import IndexFile
from imagefactory.web import RefusedError, TransientError, Web, WebAccess, redact

CHUNK = 1 << 20
DEFAULT_REQUIRES = ("setuptools>=40.8", "wheel")
"""What PEP 518 says a project without its own list builds with."""


def choose_sdist(requirement: Requirement, files: Iterable[IndexFile]) -> tuple[IndexFile, Version]:
    """The newest source distribution that fits. Raises LockError where the index has none."""
    found: dict[Version, IndexFile] = {}
    for file in files:
        try:
            _, version = parse_sdist_filename(file.filename)
        except InvalidSdistFilename:
            continue
        if not file.yanked and file.sha256:
            found.setdefault(version, file)
    if not (fitting := list(requirement.specifier.filter(found))):
        raise LockError(
            f"the index has no source distribution of {requirement}",
            hint="name another version, a folder, or git+https://HOST/REPOSITORY@COMMIT",
        )
    version = max(fitting)
    return found[version], version


def fetch_sdist(source: WebAccess, file: IndexFile, folder: Path) -> Path:
    """The file in `folder`, fetched if it is not there with its hash. Raises DownloadError."""
    path = folder / file.sha256[:2] / file.sha256 / file.filename
    if path.is_file() and digest(path) == file.sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    web = Web(source)
    try:
        with web.open(file.url) as response, replacing(path) as out:
            content = hashlib.sha256()
            while data := response.raw.read(CHUNK):
                content.update(data)
                out.write(data)
            if content.hexdigest() != file.sha256:
                raise DownloadError(f"{file.filename} is not what the index said", hint="try again")
    except (RefusedError, TransientError) as error:
        raise DownloadError(f"{file.filename}: {redact(str(error))}", hint="try again") from error
    finally:
        web.close()
    return path


def build_requires(source: Path) -> tuple[str, ...]:
    """What a source archive or folder says it is built with (PEP 518). Raises UsageError for what is none."""
    try:
        text = _pyproject(source)
        told = tomllib.loads(text).get("build-system", {}).get("requires", DEFAULT_REQUIRES)
        return tuple(str(Requirement(one)) for one in told)
    except (tarfile.TarError, zipfile.BadZipFile, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{source} cannot be read as a package's source: {error}",
            hint="give an archive with a pyproject.toml or setup.py below its one folder, or a folder",
        ) from error


def _pyproject(source: Path) -> str:
    if source.is_dir():
        path = source / "pyproject.toml"
        if not path.exists() and not (source / "setup.py").exists():
            raise ValueError("it has neither pyproject.toml nor setup.py")
        return path.read_text(encoding="utf-8") if path.exists() else ""
    if source.suffix == ".zip":
        with zipfile.ZipFile(source) as archive:
            inside = [name for name in archive.namelist() if _is_top(name)]
            return archive.read(inside[0]).decode() if inside else ""
    with tarfile.open(source) as tar:
        members = [member for member in tar if member.isreg() and _is_top(member.name)]
        content = tar.extractfile(members[0]) if members else None
        return content.read().decode() if content else ""


def _is_top(name: str) -> bool:
    return name.removeprefix("./").split("/")[1:] == ["pyproject.toml"]
