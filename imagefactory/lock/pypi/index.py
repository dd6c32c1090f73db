"""The package index of this machine: its address and certificates, its pages, and its attestations.

The index comes from imagefactory.toml, else from uv's own settings, else from pip's, else it is uv's
built-in one. Of pip's settings `index-url`, `cert` and `proxy` are used. `extra-index-url` and `find-links`
are not, because solutions would differ between machines. For the same reason uv gets none of its variables
that change a solution.
"""

from __future__ import annotations

import configparser
import hashlib
import html.parser
import json
import logging
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from imagefactory.errors import (
    ImagefactoryError,
    LockError,
    ToolError,
    UsageError,
    extra_hint,
    os_problem,
    printable,
    redact,
)
from imagefactory.fs import explain_full_disk, replace_bytes
from imagefactory.http import (
    HttpError,
    HttpSession,
    Login,
    RejectedError,
    Response,
    local_path,
    read_some,
    sends_openly,
    without_login,
)
from imagefactory.lock import PublisherReport
from imagefactory.lock.pypi.requirements import PUBLISHERS
from imagefactory.model import Lock, LockedWheel
from imagefactory.progress import Progress
from imagefactory.settings.choices import SettingValue

# Variables of the caller for uv: where its files are, which index, which certificates,
# how to reach the network. Not here on purpose: UV_EXTRA_INDEX_URL, UV_FIND_LINKS, UV_CONSTRAINT,
# UV_OVERRIDE, UV_RESOLUTION, UV_PRERELEASE, UV_TORCH_BACKEND and their like.
_PASSED_TO_UV = re.compile(
    r"HOME|PATH|TMPDIR|NETRC|XDG_(CONFIG|CACHE|DATA)_HOME|XDG_CONFIG_DIRS"
    r"|(?i:https?_proxy|all_proxy|no_proxy)|SSL_CERT_FILE|SSL_CERT_DIR|SSL_CLIENT_CERT"
    r"|UV_DEFAULT_INDEX|UV_INDEX_URL|UV_INDEX_[A-Z0-9_]+_(USERNAME|PASSWORD)|UV_CONFIG_FILE|UV_NO_CONFIG"
    r"|UV_CACHE_DIR|UV_KEYRING_PROVIDER|UV_INSECURE_HOST|UV_OFFLINE|UV_HTTP_[A-Z_]+|UV_REQUEST_TIMEOUT"
    r"|UV_CONCURRENT_DOWNLOADS|UV_SYSTEM_CERTS|UV_NATIVE_TLS"
)

_CERTIFICATE = re.compile(rb"-----BEGIN ([A-Z0-9 ]*CERTIFICATE)-----\n[^-]+-----END \1-----")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageIndex:
    """The package index of this machine.

    `url` may have a user and password; it is empty for uv's built-in index. `origin` is its setting. `named`
    are other indexes by their names in recipes (name, address). `certificates` is a file or directory of CA
    certificates (empty: those of the libraries), `proxy` a URL or empty. `environment` is uv's complete
    environment. `root` is the project's directory, which may have wheels. `sdists` is the cache of source
    distributions.
    """

    url: str
    origin: str
    certificates: str
    proxy: str
    environment: tuple[tuple[str, str], ...]
    named: tuple[tuple[str, str], ...] = ()
    root: Path = Path("/")
    sdists: Path | None = None

    def address(self, name: str, requirer: str) -> str:
        """Return the address of a named index.

        Raises UsageError for an unknown name, with a message that begins with `requirer`.
        """
        if url := dict(self.named).get(name):
            return url.rstrip("/")
        raise UsageError(
            "index-unknown",
            f"{requirer} comes from the index '{name}', which is not in the settings",
            hint=f'add {name} = "https://..." to [indexes] in imagefactory.toml',
        )

    def login(self, url: str) -> Login:
        """Return the index's user and password, which are sent only to its own host.

        Without TLS no login, not even netrc's, is sent to a host that is not in the settings.
        """
        if sends_openly(url, (self.url, *(address for _, address in self.named))):
            return without_login
        ours, target = urlsplit(self.url), urlsplit(url)
        if target.username is not None or ours.username is None:
            return None  # requests uses a URL's own user, or netrc's
        if (ours.scheme, ours.hostname, ours.port) != (target.scheme, target.hostname, target.port):
            return None
        return unquote(ours.username), unquote(ours.password or "")


def find_index(
    setting: SettingValue, *, environ: Mapping[str, str], prefix: Path, etc: Path = Path("/etc")
) -> PackageIndex:
    """Return the index of `setting` (imagefactory.toml), or of uv's or pip's settings, in this order.

    `prefix` is `sys.prefix`, where pip has the settings of a virtual environment. `etc` has the machine's
    settings. Raises UsageError for an unreadable settings file or a missing certificate file.
    """
    pip = _pip_settings(environ, prefix, etc)
    uv_file = _uv_file_index(environ, etc)
    choices = (
        (setting.value, setting.origin),
        (environ.get("UV_DEFAULT_INDEX", ""), "$UV_DEFAULT_INDEX"),
        (environ.get("UV_INDEX_URL", ""), "$UV_INDEX_URL"),
        uv_file,
        pip.get("index-url", ("", "")),
        ("", "uv's default"),
    )
    url, origin = next(choice for choice in choices if choice[0] or choice is choices[-1])
    certificates = _certificates(environ, pip.get("cert", ("", "")))
    variables = {name: value for name, value in environ.items() if _PASSED_TO_UV.fullmatch(name)}
    if setting.value:
        variables.pop("UV_INDEX_URL", None)
    if url and (url, origin) != uv_file:  # uv reads uv.toml itself, with its credentials
        variables["UV_DEFAULT_INDEX"] = url
    if certificates and not {"SSL_CERT_FILE", "SSL_CERT_DIR"} & variables.keys():
        if Path(certificates).is_dir():
            variables |= {"SSL_CERT_DIR": certificates, "UV_SYSTEM_CERTS": "1"}
        else:
            variables["SSL_CERT_FILE"] = certificates
    proxy = pip.get("proxy", ("", ""))[0]
    if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in variables):
        proxy = ""
    if proxy:
        variables |= {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy}
    # A solution must not depend on a Python that uv would fetch, nor on terminal colors.
    variables |= {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    return PackageIndex(
        url=url,
        origin=origin,
        certificates=certificates,
        proxy=proxy,
        environment=tuple(sorted(variables.items())),
    )


def trusting(index: PackageIndex, bundle: Path | None, directory: Path) -> PackageIndex:
    """Return `index` with the CA certificates of `bundle` trusted as well, also by uv.

    Programs use one file, so all certificates are written to a file in `directory`, named by its content. If
    `index` has no certificates of this machine, those of certifi are used. Raises UsageError and StoreError.
    """
    if bundle is None:
        return index
    variables = dict(index.environment)
    directories = variables.pop("SSL_CERT_DIR", "").split(":")
    import certifi

    files = _pem_files([index.certificates, variables.get("SSL_CERT_FILE", ""), *directories])
    data = _join_pem([*(files or [Path(certifi.where())]), bundle])
    path = directory / f"{hashlib.sha256(data).hexdigest()}.pem"
    if not path.is_file():
        with explain_full_disk(directory, setting="cache"):
            directory.mkdir(parents=True, exist_ok=True)
            replace_bytes(path, data)
    variables["SSL_CERT_FILE"] = str(path)
    return replace(index, certificates=str(path), environment=tuple(sorted(variables.items())))


def _pem_files(places: Iterable[str]) -> list[Path]:
    """Return the PEM files at these paths, each once; in a directory those that OpenSSL reads."""
    paths = [Path(pem_path) for pem_path in places if pem_path]
    files = (sorted(path.glob("*.[0-9]")) if path.is_dir() else [path] for path in paths)
    return list(dict.fromkeys(path for group in files for path in group if path.is_file()))


def _join_pem(files: Iterable[Path]) -> bytes:
    """Return the certificates of all files in order, each once, without the text around them."""
    certificates: dict[bytes, None] = {}
    for path in files:
        try:
            text = path.read_bytes().replace(b"\r", b"")
        except OSError as error:
            raise UsageError(
                *os_problem("read", f"the certificates {path}", error), hint="fix the path or its permissions"
            ) from error
        certificates |= dict.fromkeys(match[0] for match in _CERTIFICATE.finditer(text))
    return b"".join(certificate + b"\n" for certificate in certificates)


def _pip_settings(environ: Mapping[str, str], prefix: Path, etc: Path) -> dict[str, tuple[str, str]]:
    """Return pip's settings, later files and `[install]` first: name -> (value, its file or variable).

    Source of the order: pip's documentation, "Configuration files" (global, user, site, PIP_CONFIG_FILE,
    environment; an existing PIP_CONFIG_FILE replaces the user's, the null device turns all off).
    """
    settings: dict[str, tuple[str, str]] = {}
    for path in _pip_files(environ, prefix, etc):
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(path.read_text(encoding="utf-8"), source=str(path))
        except (OSError, UnicodeDecodeError, configparser.Error) as error:
            raise UsageError(
                "pip-config-invalid", f"cannot read the pip settings {path}: {error}", hint=f"fix {path}"
            ) from error
        for section in ("global", "install"):
            for name, value in parser.items(section) if parser.has_section(section) else ():
                key = name.lower().replace("_", "-").removeprefix("--")
                settings[key] = (value.strip().strip("\"'"), str(path))
    for key in ("index-url", "cert", "proxy"):
        variable = "PIP_" + key.upper().replace("-", "_")
        if environ.get(variable):
            settings[key] = (environ[variable], f"${variable}")
    return settings


def _pip_files(environ: Mapping[str, str], prefix: Path, etc: Path) -> list[Path]:
    named = environ.get("PIP_CONFIG_FILE", "")
    if named == "/dev/null":
        return []
    directories = [*(directory / "pip" for directory in reversed(_config_dirs(environ, etc))), etc]
    if not (named and Path(named).exists()) and environ.get("HOME"):
        home = Path(environ["HOME"])
        directories += [home / ".pip", Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip"]
    files = [directory / "pip.conf" for directory in (*directories, prefix)] + (
        [Path(named)] if named else []
    )
    return [path for path in files if path.is_file()]


def _config_dirs(environ: Mapping[str, str], etc: Path) -> list[Path]:
    named = environ.get("XDG_CONFIG_DIRS", "")
    return [Path(directory) for directory in named.split(":")] if named else [etc / "xdg"]


def _uv_file_index(environ: Mapping[str, str], etc: Path) -> tuple[str, str]:
    """Return the default index of a uv.toml, and that file; two empty strings for none."""
    home = Path(environ.get("HOME") or "/")
    user = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [directory / "uv/uv.toml" for directory in (user, *_config_dirs(environ, etc), etc)]
    if environ.get("UV_CONFIG_FILE"):
        files = [Path(environ["UV_CONFIG_FILE"])]
    if environ.get("UV_NO_CONFIG", "").lower() in ("1", "true", "yes"):
        files = []
    for path in files:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            continue  # uv itself reports errors of its file
        pip = data.get("pip")
        urls = [data.get("index-url"), pip.get("index-url") if isinstance(pip, dict) else None]
        rows = data.get("index")
        if isinstance(rows, list):
            urls += [row.get("url") for row in rows if isinstance(row, dict) and row.get("default") is True]
        for url in urls:
            if isinstance(url, str) and url:
                return url, str(path)
    return "", ""


def _certificates(environ: Mapping[str, str], pip: tuple[str, str]) -> str:
    """Return the CA certificates to trust: those set for requests, pip or OpenSSL, else the system's."""
    named = [(environ.get(name, ""), f"${name}") for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")]
    for value, origin in (*named, pip, (environ.get("SSL_CERT_FILE", ""), "$SSL_CERT_FILE")):
        if value and not Path(value).exists():
            raise UsageError(
                "certificate-file-missing",
                f"the certificate file {value} ({origin}) does not exist",
                hint=f"fix its path in {origin}",
            )
        if value:
            return value
    import ssl

    system = ssl.get_default_verify_paths()
    if Path(system.openssl_cafile).is_file():
        return system.openssl_cafile
    directory = Path(system.openssl_capath)
    return str(directory) if directory.is_dir() and next(directory.glob("*.0"), None) else ""


_MOST = 1 << 28  # bytes; today's longest page is a hundredth of that
_SIMPLE = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFile:
    """A file on a project's page. Values that the index lacks are empty.

    `python` are its supported Python versions (`>=3.9`). `uploaded` is a time
    (`2026-11-23T10:11:12.123456Z`), only with PEP 700. `provenance` is the address of its attestations, None
    if the index does not say whether there are some (PEP 740).
    """

    filename: str
    url: str
    sha256: str
    yanked: bool = False
    python: str = ""
    uploaded: str = ""
    provenance: str | None = None

    @property
    def upload_time(self) -> datetime | None:
        """Return the time of upload, None if the index has none."""
        try:
            time = datetime.fromisoformat(self.uploaded)
        except ValueError:
            return None
        return time if time.tzinfo else time.replace(tzinfo=UTC)


def project_files(web: HttpSession, page: str) -> tuple[IndexFile, ...]:
    """Return all files on a project's page of the index. Raises HttpError."""
    local = local_path(page)
    if local:
        path = local / "index.html" if local.is_dir() else local
        if not path.is_file():
            raise RejectedError(f"{path} does not exist", status=404)
        return _parse_html(path.read_text(encoding="utf-8"), local.as_uri() + "/")

    def parse(response: Response) -> tuple[IndexFile, ...]:
        text = read_some(response.raw, _MOST).decode("utf-8")
        is_json = "json" in response.headers.get("Content-Type", "")
        return (_parse_json if is_json else _parse_html)(text, response.url)

    return web.request(page, parse, headers={"Accept": _SIMPLE})


def files_before(name: str, files: Iterable[IndexFile], lock: Lock) -> tuple[IndexFile, ...]:
    """Return the files of a project that the lock's cutoff allows.

    Raises LockError for a file without a time of upload.
    """
    if lock.cutoff is None or name in lock.cutoff.allowed:
        return tuple(files)
    allowed = []
    for file in files:
        time = file.upload_time
        if time is None:
            raise no_upload_time(lock, file.filename, name)
        allowed += [file] if time <= lock.cutoff.time else []
    return tuple(allowed)


def no_upload_time(lock: Lock, filename: str, name: str) -> LockError:
    """Return the error of an index without times of upload."""
    return LockError(
        "upload-time-missing",
        f"{lock.target}: the index has no upload time for {filename}, so its age is unknown",
        hint=f"use an index with upload times (PEP 700), or exempt the package: "
        f'--exclude-newer "7 days except {name}"',
    )


def _parse_json(text: str, address: str) -> tuple[IndexFile, ...]:
    try:
        return tuple(
            IndexFile(
                filename=str(row["filename"]),
                url=urljoin(address, urldefrag(str(row["url"])).url),
                sha256=str(row["hashes"].get("sha256", "")),
                yanked=row.get("yanked", False) is not False,
                python=str(row.get("requires-python") or ""),
                uploaded=str(row.get("upload-time") or ""),
                provenance=_provenance(row, address),
            )
            for row in json.loads(text)["files"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RejectedError(f"{redact(address)} is not a project's page (PEP 691): {error!r}") from error


def _provenance(row: Mapping[str, object], address: str) -> str | None:
    if "provenance" not in row:
        return None
    return urljoin(address, str(row["provenance"])) if row["provenance"] else ""


def _parse_html(text: str, address: str) -> tuple[IndexFile, ...]:
    anchors = _Anchors()
    anchors.feed(text)
    files = []
    for target, attributes in anchors.targets:
        url, fragment = urldefrag(urljoin(address, target))
        digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
        name = unquote(urlsplit(url).path.rpartition("/")[2])
        python = attributes.get("data-requires-python") or ""
        provenance = attributes.get("data-provenance")
        files.append(
            IndexFile(
                filename=name,
                url=url,
                sha256=digest.lower(),
                yanked="data-yanked" in attributes,
                python=python,
                provenance=urljoin(address, provenance) if provenance else None,
            )
        )
    return tuple(files)


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "a" and (target := attributes.get("href")):
            self.targets.append((target, attributes))


# --- publishers: an index may serve attestations of a file, which Sigstore's keys verify (PEP 740)

_MOST_PROVENANCE = 1 << 20  # bytes; one attestation has about 10,000
_INTEGRITY = "application/vnd.pypi.integrity.v1+json, application/json;q=0.5"
_IDENTITY = ("kind", "repository", "workflow", "workflow_filepath", "email", "project_id")


def read_publishers(
    index: PackageIndex, provenances: Mapping[LockedWheel, str], progress: Progress
) -> PublisherReport:
    """Read and verify the attestations of wheels, by the addresses of their provenance objects.

    Raises LockError for an attestation that is invalid, or is not of this file and publisher.
    """
    problem = _check_library()
    if problem:
        return PublisherReport(known={}, attests=True, problem=problem)

    def read(url: str) -> bytes | HttpError:
        try:
            if sends_openly(url, (index.url, *(address for _, address in index.named))):
                raise RejectedError(f"{redact(url)} is not an https address")
            return web.request(
                url,
                lambda response: read_some(response.raw, _MOST_PROVENANCE),
                headers={"Accept": _INTEGRITY},
            )
        except HttpError as error:
            return error
        finally:
            task.advance(1)

    known = dict[str, str]()
    with (
        HttpSession(index) as web,
        progress.task("publishers", total=len(provenances), unit="packages") as task,
        ThreadPoolExecutor(8) as pool,
    ):
        for wheel, data in zip(provenances, pool.map(read, provenances.values()), strict=True):
            if isinstance(data, bytes):
                known[wheel.name] = verify_provenance(data, wheel)
            elif data.status not in (404, 410):
                problem = LockError(
                    "index-read-failed",
                    f"the publisher of {wheel.filename} is not known: {redact(str(data))}",
                    hint="run the same command again later",
                )
    return PublisherReport(known=known, attests=True, problem=problem)


def _check_library() -> ImagefactoryError | None:
    """Return why attestations cannot be verified on this machine, None if they can."""
    off = 'or set publishers = "off" in imagefactory.toml'
    if find_spec("pypi_attestations") is None:
        return ToolError(
            "extra-not-installed",
            "publishers of wheels are not checked: pypi-attestations is not installed",
            hint=f"{extra_hint('sigstore')}, {off}",
        )
    from sigstore.verify import Verifier

    # It would warn that the trust root is not updated, each time.
    logging.getLogger("sigstore").setLevel(logging.ERROR)
    try:
        Verifier.production(offline=True)
    except Exception as error:  # of its cache and of the file in it
        return ToolError(
            "trust-root-unreadable",
            f"publishers of wheels are not checked: cannot read the keys of Sigstore: {_flat_message(error)}",
            hint=f"set XDG_CACHE_HOME to a directory that you can write, run {_update_command()}, {off}",
        )
    return None


def _update_command() -> str:
    return f"{shlex.quote(sys.executable)} -m sigstore plumbing update-trust-root"


def _flat_message(error: Exception) -> str:
    return " ".join(printable(str(error)).split())[:400]


def verify_provenance(data: bytes, wheel: LockedWheel) -> str:
    """Return the publishers in a provenance object of a wheel, after all of its attestations were verified.

    The trust root is the library's on this machine, and nothing is fetched. Raises LockError.
    """
    from pypi_attestations import Distribution, Provenance

    publishers = set()
    try:
        file = Distribution(name=wheel.filename, digest=wheel.sha256)
        for bundle in Provenance.model_validate_json(data).attestation_bundles:
            for attestation in bundle.attestations:
                attestation.verify(bundle.publisher, file, offline=True)
                publishers.add(_publisher_text(bundle.publisher.model_dump()))
        text = ", ".join(sorted(publishers))
        if not re.fullmatch(PUBLISHERS, text):
            raise ValueError("it has no publisher that a lock can name")
    except Exception as error:  # the library raises many types for malformed input
        raise LockError(
            "publisher-invalid",
            f"the attestation of {wheel.filename} is invalid: {_flat_message(error)}",
            hint=f"use another version of {wheel.name}; if this machine's Sigstore keys may be outdated, run "
            f"{_update_command()}, and install the newest pypi-attestations",
        ) from error
    return text


def _publisher_text(publisher: Mapping[str, object]) -> str:
    """Return the fields of a publisher that its certificate has. Its environment is not one."""
    fields = (publisher[name] for name in (*_IDENTITY, "pipeline_definition_id") if name in publisher)
    return " ".join(quote(str(value), safe="/@:+") for value in fields)
