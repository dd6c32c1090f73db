"""Source distributions: which one of an index a requirement means, and its file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import InvalidSdistFilename, parse_sdist_filename
from packaging.version import Version

from imagefactory.errors import DownloadError, LockError
from imagefactory.fs import replacing
from imagefactory.lock.pypi.local import digest
from imagefactory.lock.pypi.project_page import IndexFile
from imagefactory.http import RefusedError, TransientError, Web, WebAccess, arriving, redact

LARGEST = 4 << 30  # bytes of a source distribution


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
            "sdist-not-found",
            f"the index has no source distribution of {requirement}",
            hint="write another version, a directory, or git+https://HOST/REPOSITORY@COMMIT",
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
            content, left = hashlib.sha256(), LARGEST
            for data in arriving(response.raw):
                left -= len(data)
                if left < 0:
                    raise DownloadError(
                        "sdist-too-large",
                        f"{file.filename} has more than {LARGEST:,} bytes",
                        hint="download it yourself, and pass the file",
                    )
                content.update(data)
                out.write(data)
            if content.hexdigest() != file.sha256:
                raise DownloadError(
                    "hash-mismatch",
                    f"{file.filename} has the wrong hash: "
                    f"expected sha256 {file.sha256}, found {content.hexdigest()}",
                    hint="try again",
                )
    except (RefusedError, TransientError) as error:
        raise DownloadError(
            "download-failed", f"{file.filename}: {redact(str(error))}", hint="try again"
        ) from error
    finally:
        web.close()
    return path
