"""A project's page of a package index: PEP 691's JSON, else PEP 503's HTML."""

from __future__ import annotations

import html.parser
import json
from dataclasses import dataclass
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from imagefactory.http import RefusedError, Web, local_path, read_some, redact

_MOST = 1 << 28  # bytes; the longest page of today is a hundredth of that
_SIMPLE = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFile:
    """One file on a project's page; what the index does not tell is empty.

    `python` are the versions of Python that it is for (`>=3.9`), `uploaded` is a day (`2026-11-23`), which
    only PEP 700 tells.
    """

    filename: str
    url: str
    sha256: str
    yanked: bool = False
    python: str = ""
    uploaded: str = ""


def project_files(web: Web, page: str) -> tuple[IndexFile, ...]:
    """All files that a project's page of the index lists. Raises TransientError, RefusedError."""
    local = local_path(page)
    if local:
        path = local / "index.html" if local.is_dir() else local
        if not path.is_file():
            raise RefusedError(f"{path} does not exist", status=404)
        return _parse_html(path.read_text(encoding="utf-8"), local.as_uri() + "/")

    def ask() -> tuple[IndexFile, ...]:
        with web.open(page, headers={"Accept": _SIMPLE}) as response:
            text, kind = (
                read_some(response.raw, _MOST).decode("utf-8"),
                response.headers.get("Content-Type", ""),
            )
            return (_parse_json if "json" in kind else _parse_html)(text, response.url)

    return web.patience.retry(ask)


def _parse_json(text: str, address: str) -> tuple[IndexFile, ...]:
    try:
        return tuple(
            IndexFile(
                filename=str(row["filename"]),
                url=urljoin(address, urldefrag(str(row["url"])).url),
                sha256=str(row["hashes"].get("sha256", "")),
                yanked=row.get("yanked", False) is not False,
                python=str(row.get("requires-python") or ""),
                uploaded=str(row.get("upload-time") or "")[:10],
            )
            for row in json.loads(text)["files"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"{redact(address)} is not a project's page (PEP 691): {error!r}") from error


def _parse_html(text: str, address: str) -> tuple[IndexFile, ...]:
    anchors = _Anchors()
    anchors.feed(text)
    files = []
    for target, told in anchors.targets:
        url, fragment = urldefrag(urljoin(address, target))
        digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
        name = unquote(urlsplit(url).path.rpartition("/")[2])
        python = told.get("data-requires-python") or ""
        files.append(
            IndexFile(
                filename=name, url=url, sha256=digest.lower(), yanked="data-yanked" in told, python=python
            )
        )
    return tuple(files)


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if tag == "a" and (target := told.get("href")):
            self.targets.append((target, told))
