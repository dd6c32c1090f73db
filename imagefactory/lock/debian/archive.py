"""Query a Debian archive with apt.

apt itself solves and downloads, in a private apt root. It needs no root permissions, writes nothing of the
machine's apt, uses its proxy settings, and takes every hash from an index signed by Debian's keyring.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import quote

from imagefactory.errors import DownloadError, LockError, ToolError
from imagefactory.gpu.capability import architecture
from imagefactory.http import HttpError, HttpSession, Login, RetryPolicy, read_some
from imagefactory.lock.debian.lock import ALWAYS, base_content_hash, downloaded_filename, lock_architecture
from imagefactory.lock.download import RemoteFile, fetch_files, reporting_sleep
from imagefactory.model import BaseLock, BaseSpec, DebianPackage
from imagefactory.progress import Progress
from imagefactory.trees import remove_tree

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


_URI = re.compile(r"(?:https?|file|copy|mirror\+file|mirror\+https?):[A-Za-z0-9._~:/%@+,=-]+")
_SNAPSHOT = re.compile(r"/[0-9]{8}T[0-9]{6}Z(?:/|$)")
_RELEASES = ("bullseye", "bookworm", "trixie", "forky", "duke", "sid")
_CODENAMES = frozenset([*_RELEASES, "oldoldstable", "oldstable", "stable", "testing", "unstable"])
EXPIRED_HINT = (
    "run the same command again when the archive is current; for a frozen archive, write its date "
    '(debian-mirror = "ADDRESS/archive/debian/20240101T000000Z"), or an apt source with '
    "Check-Valid-Until: no"
)
MIRROR_HINT = (
    'write debian-mirror = "ADDRESS" in imagefactory.toml, where ADDRESS has Debian\'s dists/ and pool/ '
    '(or "ADDRESS SECURITY-ADDRESS" if the security archive is not next to it)'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DebianMirror:
    """The Debian archives of this machine, and the cache of its downloads.

    `main` and `security` are addresses of archives (each has dists/ and pool/). Those in `dated` are
    snapshots, whose indexes have expired on purpose. `debs` is the cache of .deb files. `environ` is the
    caller's environment for apt. `certificates` is a bundle of CA certificates to trust instead of the
    machine's, empty for the machine's. `snapshot` is the address of a snapshot service, which has
    `archive/debian/TIME/` and `archive/debian-security/TIME/`; empty for none.
    """

    main: str
    security: str
    dated: frozenset[str]
    keyring: Path
    debs: Path
    environ: tuple[tuple[str, str], ...]
    certificates: str = ""
    snapshot: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AptSource:
    """One binary source of the machine's apt: an address, a suite, its components and options."""

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str
    check_valid_until: bool


def find_mirror(
    setting: str, debs: Path, environ: Mapping[str, str], *, etc_apt: Path, snapshot: str = ""
) -> DebianMirror:
    """Return the archive of `setting` (`debian-mirror`), else that of the apt sources in `etc_apt`.

    `snapshot` is the setting `debian-snapshot`. Raises ToolError without an archive.
    """
    main, security, dated = choose_archives(setting, read_sources(etc_apt))
    return DebianMirror(
        main=main,
        security=security,
        dated=dated,
        keyring=KEYRING,
        debs=debs,
        environ=apt_environment(environ),
        snapshot=find_snapshot(snapshot, main, environ),
    )


NO_SNAPSHOT = "none"
"""The value of `debian-snapshot` that turns snapshots off."""
SNAPSHOT_HINT = (
    'write debian-snapshot = "ADDRESS" in your settings, where ADDRESS has archive/debian/TIME/ and '
    "archive/debian-security/TIME/ (Debian's snapshot service, or a site's copy of it)"
)
_APT_SNAPSHOTS = re.compile(r"(https?://[^\s@\"]+)/archive/(?:debian|@PATH@)/@SNAPSHOTID@")


_OWN_MIRROR = re.compile(r"(https?://)deb\.([a-z0-9-]+(?:\.[a-z0-9-]+)+)/debian")
"""Debian's own mirror, whose domain has the snapshot service too."""


def find_snapshot(setting: str, main: str, environ: Mapping[str, str]) -> str:
    """Return the address of `setting` (`debian-snapshot`), else that of this machine; empty for none.

    Newer versions of apt have one (`Acquire::Snapshots::URI`, apt.conf(5)). If `main`, the archive of this
    machine, is Debian's own, the service is `snapshot` in the same domain.
    """
    if setting:
        return "" if setting == NO_SNAPSHOT else setting.rstrip("/")
    argv = ["apt-config", "dump", "Acquire::Snapshots::URI"]
    try:
        result = subprocess.run(
            argv,
            env=dict(apt_environment(environ)),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        configured = _APT_SNAPSHOTS.search(result.stdout)
    except OSError:  # not a machine with apt
        configured = None
    if configured:
        return configured[1]
    own = _OWN_MIRROR.fullmatch(main)
    return f"{own[1]}snapshot.{own[2]}" if own else ""


def choose_archives(setting: str, sources: Iterable[AptSource]) -> tuple[str, str, frozenset[str]]:
    """Return the addresses of the main and the security archive, and those of them that are snapshots."""
    if setting:
        addresses = setting.split()
        if len(addresses) > 2 or not all(_URI.fullmatch(address) for address in addresses):
            raise ToolError(
                "debian-mirror-invalid", f"debian-mirror '{setting}' is not a valid address", hint=MIRROR_HINT
            )
        main = addresses[0].rstrip("/")
        security = addresses[1].rstrip("/") if len(addresses) == 2 else derive_security(main)
        return main, security, frozenset(filter(_SNAPSHOT.search, (main, security)))
    debian = [source for source in sources if _is_debian(source)]
    mains = [source for source in debian if source.suite in _CODENAMES]
    securities = [source for source in debian if source.suite.endswith(("-security", "/updates"))]
    if not mains:
        raise ToolError(
            "debian-archive-unknown", "this machine's apt sources have no Debian archive", hint=MIRROR_HINT
        )
    # Other archives use Debian's suite names too: require Debian's keyring, or its path.
    first = min(mains, key=lambda source: not _is_official(source))
    second = (
        min(securities, key=lambda source: not _is_official(source))
        if securities
        else replace(first, uri=derive_security(first.uri))
    )
    dated = (
        archive.uri
        for archive in (first, second)
        if not archive.check_valid_until or _SNAPSHOT.search(archive.uri)
    )
    return first.uri, second.uri, frozenset(dated)


def derive_security(main: str) -> str:
    """Return the security archive of a main archive: the segment `debian` becomes `debian-security`."""
    segments = main.split("/")
    if "debian" not in segments[1:]:
        raise ToolError(
            "security-archive-unknown", f"the security archive of '{main}' is unknown", hint=MIRROR_HINT
        )
    last = len(segments) - 1 - segments[::-1].index("debian")
    return "/".join([*segments[:last], "debian-security", *segments[last + 1 :]])


def _is_debian(source: AptSource) -> bool:
    codename = re.split("-|/", source.suite)[0]
    suffixes = ("", "-updates", "-security", "/updates")
    return (
        codename in _CODENAMES
        and source.suite.removeprefix(codename) in suffixes
        and "main" in source.components
        and bool(_URI.fullmatch(source.uri))
    )


def _is_official(source: AptSource) -> bool:
    return "debian-archive" in source.signed_by or bool(
        {"debian", "debian-security"} & set(source.uri.split("/")[3:])
    )


def read_sources(etc_apt: Path) -> tuple[AptSource, ...]:
    """Return all binary sources of the machine's apt, in apt's order of files."""
    sources: list[AptSource] = []
    parts = sorted((etc_apt / "sources.list.d").glob("*")) if (etc_apt / "sources.list.d").is_dir() else []
    for path in [etc_apt / "sources.list", *parts]:
        if path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except PermissionError:  # a source with a password, which this user's apt cannot read either
            continue
        sources.extend(parse_sources_list(text) if path.suffix == ".list" else parse_deb822_sources(text))
    return tuple(sources)


def parse_sources_list(text: str) -> list[AptSource]:
    """Return the sources in apt's one-line style (sources.list(5)). Other lines are skipped."""
    sources: list[AptSource] = []
    for line in text.splitlines():
        match = re.fullmatch(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)((?:\s+[^\s#]+)*)\s*(?:#.*)?", line)
        if match is None:
            continue
        options = dict(part.split("=", 1) for part in (match[1] or "").lower().split() if "=" in part)
        sources.append(
            AptSource(
                uri=match[2].rstrip("/"),
                suite=match[3],
                components=tuple(match[4].split()),
                signed_by=options.get("signed-by", ""),
                check_valid_until=options.get("check-valid-until", "yes") not in ("no", "false"),
            )
        )
    return sources


def parse_deb822_sources(text: str) -> list[AptSource]:
    """Return the sources in apt's deb822 style (sources.list(5)): one for each address and suite."""
    sources: list[AptSource] = []
    for stanza in parse_stanzas(text):
        fields = {key.lower(): value for key, value in stanza.items()}
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
            continue
        sources.extend(
            AptSource(
                uri=uri.rstrip("/"),
                suite=suite,
                components=tuple(fields.get("components", "").split()),
                signed_by=fields.get("signed-by", ""),
                check_valid_until=fields.get("check-valid-until", "yes").lower() not in ("no", "false"),
            )
            for uri in fields.get("uris", "").split()
            for suite in fields.get("suites", "").split()
        )
    return sources


def parse_stanzas(text: str) -> Iterator[dict[str, str]]:
    """Yield the stanzas of deb822 text: fields by name, with continuation lines joined by newlines."""
    stanza: dict[str, str] = {}
    key = ""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if not line.strip():
            if stanza:
                yield stanza
            stanza, key = {}, ""
        elif line[0] in " \t":
            if key:
                stanza[key] += "\n" + line.strip()
        else:
            key, _, value = line.partition(":")
            stanza[key] = value.strip()
    if stanza:
        yield stanza


def apt_environment(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the environment for apt: the search path, directories and proxies."""
    variables = {
        name: value
        for name, value in environ.items()
        if name in ("HOME", "TMPDIR")
        or name.lower() in ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
    }
    variables["PATH"] = search_path(environ)
    variables["LC_ALL"] = "C.UTF-8"
    return tuple(sorted(variables.items()))


def search_path(environ: Mapping[str, str]) -> str:
    """Return PATH with the system's directories at its end, because users' PATH often lacks the sbin ones."""
    directories = environ.get("PATH", "").split(":")
    system = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
    return ":".join([*(f for f in directories if f), *(f for f in system if f not in directories)])


PAUSES = (5.0, 20.0, 60.0)
"""Seconds before retries at an archive that limits requests by address.

apt 2.6 fails at once at 429, 503 and 509.
"""
_LIMITED = re.compile(r"^E: Failed to fetch \S+\s+(?:429|503|509)\b|\b509\s+Bandwidth", re.MULTILINE)
# Only for indexes: a package that differs from its index may be manipulated.
_SYNCING = re.compile(
    r"^E: Failed to fetch \S+/dists/\S+\s+(?:File has unexpected size|Hash Sum mismatch)", re.MULTILINE
)
_EXPIRED = re.compile(r"^E: Release file for \S+ is expired\b", re.MULTILINE)
_NOT_FOUND = re.compile(r"^E: Failed to fetch \S+/pool/\S+\s+404\b", re.MULTILINE)


class StaleIndexError(DownloadError):
    """An index lists a file that the archive does not have (any more)."""


def sources_text(mirror: DebianMirror, suite: str, architecture: str) -> str:
    """Return apt sources of a suite, its updates and its security suite, for package indexes only."""
    options = f"signed-by={mirror.keyring} arch={architecture} target=Packages"
    return "".join(
        f"deb [{options}{' check-valid-until=no' if uri in mirror.dated else ''}] {uri} {name} main\n"
        for uri, name in (
            (mirror.main, suite),
            (mirror.main, f"{suite}-updates"),
            (mirror.security, f"{suite}-security"),
        )
    )


def apt_config(root: Path, architecture: str, certificates: str = "") -> str:
    """Return apt.conf of a private apt root, with the machine's network settings.

    All of apt's checks apply, even if the machine has disabled some for its own use.
    """
    trusted = f'Acquire::https::CaInfo "{certificates}";\n' if certificates else ""
    return f"""\
#clear APT::Architectures;
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Install-Pkgs;
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Default-Release "";
APT::Install-Recommends "false";
APT::Install-Suggests "false";
APT::Get::AllowUnauthenticated "false";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Acquire::AllowInsecureRepositories "false";
Acquire::AllowDowngradeToInsecureRepositories "false";
Acquire::AllowWeakRepositories "false";
Acquire::Check-Date "true";
Acquire::Check-Valid-Until "true";
Acquire::Languages "none";
Acquire::Retries "3";
Dir::State "{root}/state";
Dir::State::lists "{root}/state/lists";
Dir::State::status "{root}/state/status";
Dir::Cache "{root}/cache";
Dir::Etc::sourcelist "{root}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::Etc::trusted "/dev/null";
Dir::Etc::trustedparts "/dev/null";
{trusted}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AptArchive:
    """The signed indexes of a suite.

    `released` is the newest Date of its Release files, in seconds since 1970.
    """

    root: Path
    suite: str
    released: int
    environ: tuple[tuple[str, str], ...]

    def solve(self, packages: Iterable[str], location: str) -> tuple[tuple[str, str], ...]:
        """Return names and versions of packages, all essential ones and ALWAYS, with their dependencies.

        `location` is the location of the packages in the recipe. Raises LockError.
        """
        names = sorted({*packages, *ALWAYS})
        result = self._run("apt-get", "-qq", "--simulate", "install", "?essential", *names)
        if result.returncode:
            raise LockError(
                "debian-no-solution",
                f"Debian {self.suite} cannot install the packages of this base:\n"
                f"{error_lines(result.stderr)}",
                hint=f"fix the names at {location}",
            )
        return parse_simulation(result.stdout)

    def unknown(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names without a real or virtual package in the indexes."""
        result = self._run("apt-get", "-qq", "--simulate", "install", "--", *names)
        return parse_missing_packages(result.stderr) if result.returncode else ()

    def offered(self, names: Iterable[str]) -> dict[tuple[str, str], DebianPackage]:
        """Return the packages of these names in the indexes, by name and version.

        Unknown names are skipped.
        """
        result = self._run("apt-cache", "show", *names)
        return parse_offers(result.stdout)

    def download(self, packages: Sequence[DebianPackage], directory: Path, progress: Progress) -> None:
        """Fetch .debs into `directory`, resuming partial files. The caller checks hashes."""
        pins = [f"{package.name}={package.version}" for package in packages]
        total = sum(package.size for package in packages)
        argv = ["apt-get", "-c", str(self.root / "apt.conf"), "-q", "-o", "APT::Status-Fd=1", "download"]
        with progress.task(f"{len(pins)} Debian packages", total=total) as task:
            result = 0
            for percent in _watch([*argv, *pins], directory, self.environ, progress):
                now = int(total * percent / 100)
                if now > result:
                    task.advance(now - result)
                    result = now
            task.advance(total - result)

    def uris(self, packages: Iterable[DebianPackage]) -> dict[str, str]:
        """Return the address of each package's file by apt's name of the file."""
        pins = [f"{package.name}={package.version}" for package in packages]
        result = self._run("apt-get", "-q", "--print-uris", "download", *pins)
        if result.returncode:
            raise DownloadError("download-failed", error_lines(result.stderr), hint=MIRROR_HINT)
        rows = re.findall(r"^'([^']+)' (\S+) ", result.stdout, re.MULTILINE)
        return {filename: uri for uri, filename in rows}

    def _run(self, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tool, "-c", str(self.root / "apt.conf"), *arguments],
            env=dict(self.environ),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )


def reach(mirror: DebianMirror, suites: Iterable[str], *, seconds: int) -> None:
    """Check that apt can read both archives, in one attempt each. Raises ToolError otherwise.

    apt itself sends the requests, with its proxies, certificates and address types. Archives that apt
    chooses from a list (mirror+...) are skipped.
    """
    environ = dict(mirror.environ)
    helper = shutil.which("apt-helper", path=f"{environ['PATH']}:/usr/lib/apt")
    if helper is None:
        raise ToolError(
            "tool-missing", "apt-get is not installed", hint="build bases on Debian or its derivatives"
        )
    options = [f"-oAcquire::{kind}::Timeout={seconds}" for kind in ("http", "https")]
    if mirror.certificates:
        options.append(f"-oAcquire::https::CaInfo={mirror.certificates}")
    url = [
        f"{archive}/dists/{suite}{ending}/InRelease"
        for archive, ending in ((mirror.main, ""), (mirror.security, "-security"))
        for suite in suites
        if not archive.startswith("mirror+")
    ]
    with tempfile.TemporaryDirectory(prefix="imagefactory-apt-") as directory:
        for number, address in enumerate(url):
            result = subprocess.run(
                [helper, "-oAcquire::Retries=0", *options, "download-file", address, f"{directory}/{number}"],
                env=environ,
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
            )
            if result.returncode:
                lines = [line.removeprefix("E: ") for line in error_lines(result.stderr).splitlines()]
                message = "; ".join(line for line in lines if line != "Download Failed")
                raise ToolError(
                    "archive-unreachable",
                    re.sub(r"(?<=://)[^\s/]*@", "", message),
                    hint=f"check the network, or {MIRROR_HINT}",
                )


@contextmanager
def open_archive(
    mirror: DebianMirror, suite: str, architecture: str, progress: Progress, *, fresh: bool = False
) -> Iterator[AptArchive]:
    """Read the indexes of `suite` for `architecture` (`arm64`) into a private apt root, removed at the end.

    With `fresh` intermediate caches must not answer. Raises ToolError without apt or Debian's keyring,
    LockError if the archive cannot be reached or its signatures are invalid.
    """
    environ = dict(mirror.environ)
    if shutil.which("apt-get", path=environ["PATH"]) is None:
        raise ToolError(
            "tool-missing", "apt-get is not installed", hint="build bases on Debian or its derivatives"
        )
    if not mirror.keyring.is_file():
        raise ToolError(
            "keyring-missing",
            f"the Debian keyring {mirror.keyring} is missing",
            hint="apt-get install debian-archive-keyring",
        )
    root = Path(tempfile.mkdtemp(prefix="imagefactory-apt-", dir=environ.get("TMPDIR") or None))
    try:
        for directory in ("state/lists/partial", "cache/archives/partial"):
            (root / directory).mkdir(parents=True)
        (root / "state/status").touch()
        (root / "sources.list").write_text(sources_text(mirror, suite, architecture), encoding="utf-8")
        (root / "apt.conf").write_text(apt_config(root, architecture, mirror.certificates), encoding="utf-8")
        argv = ["apt-get", "-c", str(root / "apt.conf"), "-q", "-o", "APT::Status-Fd=1"]
        argv += [
            option
            for kind in ("http", "https")
            if fresh
            for option in ("-o", f"Acquire::{kind}::No-Cache=true")
        ]
        argv.append("update")
        with progress.task(f"package lists of Debian {suite}", total=100, unit="percent") as task:
            result = 0
            try:
                for percent in _watch(argv, root, mirror.environ, progress):
                    task.advance(max(0, int(percent) - result))
                    result = max(result, int(percent))
            except DownloadError as error:
                check = f"check the network and the machine's apt sources, or {MIRROR_HINT}"
                raise LockError(
                    "archive-read-failed",
                    f"cannot read the package lists of Debian {suite}:\n{error.message}",
                    hint=EXPIRED_HINT if _EXPIRED.search(error.message) else check,
                ) from error
            task.advance(100 - result)
        dates = [
            parse_release_date(path.read_text(encoding="utf-8", errors="replace"))
            for path in sorted((root / "state/lists").glob("*Release"))
        ]
        yield AptArchive(root=root, suite=suite, released=max(dates), environ=mirror.environ)
    finally:
        with suppress(OSError):
            remove_tree(root)


def unavailable_packages(
    lock: BaseLock, packages: Sequence[DebianPackage], mirror: DebianMirror, progress: Progress
) -> tuple[tuple[DebianPackage, ...], tuple[DebianPackage, ...]]:
    """Return those of `packages` that the mirror lacks, and those of them that snapshots lack too.

    Reads only indexes. Raises LockError or DownloadError for an archive that cannot be read, unless its
    snapshots can.
    """
    processor = lock_architecture(lock)
    gone = tuple(packages)
    try:
        for fresh in (False, True):
            if gone:
                with open_archive(mirror, lock.suite, processor, progress, fresh=fresh) as archive:
                    gone = _lacking(packages, archive)
    except LockError as error:
        if error.code != "archive-read-failed" or not mirror.snapshot:
            raise
        progress.note(f"base:{lock.base}: {error.message}")
    lost = gone
    try:
        for moment in snapshot_moments(lock) if mirror.snapshot else ():
            if lost:
                with open_snapshot(mirror, moment, lock.suite, processor, progress) as snapshot:
                    lost = _lacking(lost, snapshot)
    except (DownloadError, LockError) as error:
        names = ", ".join(f"{package.name} {package.version}" for package in lost[:5])
        names += f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        error.message = f"base:{lock.base}: the mirror lacks {names}, and {error.message}"
        raise
    return gone, lost


def _lacking(
    packages: Sequence[DebianPackage], archive: AptArchive | SnapshotArchive
) -> tuple[DebianPackage, ...]:
    offers = archive.offered([package.name for package in packages])
    return tuple(package for package in packages if offers.get((package.name, package.version)) != package)


def snapshot_moments(lock: BaseLock) -> tuple[str, ...]:
    """Return the times of the snapshots that may have the packages of a lock, the best first.

    A time selects the newest older snapshot, and they are about six hours apart. So the first is the next one
    after the lock's indexes. The others help if a package was replaced within hours, or a snapshot was
    skipped.
    """
    then = datetime.fromtimestamp(lock.source_date_epoch, UTC)
    return tuple(f"{then + timedelta(hours=hours):%Y%m%dT%H%M%SZ}" for hours in (6, 0, 24))


SNAPSHOT_POLICY = RetryPolicy(attempts=5, first_wait=2.0, longest_wait=1800.0, threads=2)
"""The policy for a snapshot service, which limits what one address may fetch (429, 503, 509)."""
_LARGEST_RELEASE, _LARGEST_INDEX = 8 << 20, 256 << 20  # bytes; those of Debian have 0.2 and 50 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotAccess:
    """The access to a snapshot service: a WebAccess with the proxy of the environment."""

    certificates: str
    proxy: str = ""

    def login(self, url: str) -> Login:  # noqa: ARG002
        """Return None: a login is read from ~/.netrc."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotArchive:
    """The archives of one moment, at a snapshot service. `index` has their signed indexes.

    `addresses` are (local copy of the indexes, address of the archive).
    """

    index: AptArchive
    addresses: tuple[tuple[str, str], ...]
    access: SnapshotAccess

    def offered(self, names: Iterable[str]) -> dict[tuple[str, str], DebianPackage]:
        """Return the packages of these names at that moment, as AptArchive does."""
        return self.index.offered(names)

    def download(self, packages: Sequence[DebianPackage], directory: Path, progress: Progress) -> None:
        """Fetch .debs into `directory`, resuming partial files. Waits as long as the service requires."""
        uris = self.index.uris(packages)
        files = [
            RemoteFile(
                title=f"{package.name} {package.version}",
                url=self._address(uris[filename := downloaded_filename(package)]),
                path=directory / filename,
                size=package.size,
                sha256=package.sha256,
                denied=SNAPSHOT_HINT,
                gone=SNAPSHOT_HINT,
            )
            for package in packages
        ]
        label = f"{len(files)} Debian packages of a snapshot"
        fetch_files(files, self.access, progress, label=label, retry_policy=SNAPSHOT_POLICY)

    def _address(self, uri: str) -> str:
        return next(
            f"{address}{uri.removeprefix(local)}"
            for local, address in self.addresses
            if uri.startswith(local)
        )


@contextmanager
def open_snapshot(
    mirror: DebianMirror, moment: str, suite: str, architecture: str, progress: Progress
) -> Iterator[SnapshotArchive]:
    """Read the indexes of `suite` as they were at `moment` (`20240101T000000Z`).

    apt checks their signatures like those of a mirror, but not their age. Raises DownloadError if the
    service cannot be read, and as `open_archive`.
    """
    access = SnapshotAccess(certificates=mirror.certificates)
    with tempfile.TemporaryDirectory(
        prefix="imagefactory-snapshot-", dir=dict(mirror.environ).get("TMPDIR") or None
    ) as directory:
        copies = {name: Path(directory) / name for name in ("debian/", "debian-security/")}
        addresses = {name: f"{mirror.snapshot}/archive/{name}{moment}/" for name in copies}
        suites = (
            ("debian/", suite),
            ("debian/", f"{suite}-updates"),
            ("debian-security/", f"{suite}-security"),
        )
        with HttpSession(access, retry_policy=SNAPSHOT_POLICY) as web:
            files = [
                _fetch_release(web, addresses[name], copies[name], each, architecture, progress)
                for name, each in suites
            ]
        label = f"package lists of Debian {suite} at {moment}"
        fetch_files(files, access, progress, label=label, retry_policy=SNAPSHOT_POLICY)
        main, security = (f"file:{quote(str(copy))}" for copy in copies.values())
        local = replace(mirror, main=main, security=security, dated=frozenset((main, security)))
        with open_archive(local, suite, architecture, progress) as index:
            pairs = zip((f"{main}/", f"{security}/"), addresses.values(), strict=True)
            yield SnapshotArchive(index=index, addresses=tuple(pairs), access=access)


def _fetch_release(
    web: HttpSession, address: str, copy: Path, suite: str, architecture: str, progress: Progress
) -> RemoteFile:
    """Fetch the InRelease of a suite into `copy`, and return its package index, which is to fetch."""

    def once() -> bytes:
        with web.open(f"{address}dists/{suite}/InRelease") as response:
            return read_some(response.raw, _LARGEST_RELEASE)

    sleep = reporting_sleep(time.sleep, f"Debian {suite}", progress)
    try:
        data = web.retry_policy.retry(once, sleep=sleep)
    except HttpError as error:
        raise DownloadError(
            "snapshot-unreadable", f"cannot read the snapshot: {error}", hint=SNAPSHOT_HINT
        ) from error
    path = f"main/binary-{architecture}/Packages.xz"
    row = re.search(
        rf"^ ([0-9a-f]{{64}}) +([0-9]{{1,9}}) {re.escape(path)}$", data.decode(errors="replace"), re.MULTILINE
    )
    if row is None or int(row[2]) > _LARGEST_INDEX:
        raise DownloadError(
            "snapshot-unreadable", f"{address}: Debian {suite} has no list {path}", hint=SNAPSHOT_HINT
        )
    release = copy / "dists" / suite / "InRelease"
    (index := release.parent / path).parent.mkdir(parents=True)
    release.write_bytes(data)
    return RemoteFile(
        title=f"the packages of Debian {suite}",
        url=f"{address}dists/{suite}/{path}",
        path=index,
        size=int(row[2]),
        sha256=row[1],
        denied=SNAPSHOT_HINT,
        gone=SNAPSHOT_HINT,
    )


def _watch(
    argv: Sequence[str], directory: Path, environ: tuple[tuple[str, str], ...], progress: Progress
) -> Iterator[float]:
    """Run an apt command and yield its percents. Retries after PAUSES if the archive limits requests."""
    for pause in (*PAUSES, None):
        code, text = yield from _watch_once(argv, directory, environ)
        if not code:
            return
        limited = _LIMITED.search(text)
        if pause is None or not (limited or (pause == PAUSES[0] and _SYNCING.search(text))):
            break
        reason = "limits downloads of this address" if limited else "is being updated"
        progress.note(f"the archive {reason}: waiting {pause:.0f} seconds")
        time.sleep(pause)
    line = error_lines(text) or f"{argv[0]} ended with {code}"
    if _NOT_FOUND.search(text):
        raise StaleIndexError(
            "archive-index-outdated",
            line,
            hint=f"run the same command again later (the archive is being updated), or {MIRROR_HINT}",
        )
    raise DownloadError(
        "download-failed",
        line,
        hint="check the network and this machine's apt settings, then run the same command again",
    )


def _watch_once(
    argv: Sequence[str], directory: Path, environ: tuple[tuple[str, str], ...]
) -> Generator[float, None, tuple[int, str]]:
    """Yield percents; return the exit code and the messages."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        with subprocess.Popen(
            argv,
            cwd=directory,
            env=dict(environ),
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            stdin=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    match = re.match(r"dlstatus:[0-9]+:([0-9.]+):", line)
                    if match:
                        yield float(match[1])
            except BaseException:
                process.terminate()
                raise
        complaints.seek(0)
        return process.returncode, complaints.read()


def error_lines(stderr: str) -> str:
    """Return apt's errors with their explanations, without warnings."""
    errors = [line for line in stderr.splitlines() if line.startswith(("E:", " "))]
    return "\n".join(errors or stderr.strip().splitlines()[-5:])


def parse_missing_packages(stderr: str) -> tuple[str, ...]:
    """Return the names for which `apt-get install` found no package, in the order of its errors."""
    pattern = r"^E: (?:Unable to locate package (\S+)|Package '([^']+)' has no installation candidate)"
    return tuple(dict.fromkeys(match or other for match, other in re.findall(pattern, stderr, re.MULTILINE)))


def parse_simulation(text: str) -> tuple[tuple[str, str], ...]:
    """Return names and versions that `apt-get --simulate install` would install, sorted."""
    match = re.findall(r"^Inst (\S+) \((\S+) ", text, flags=re.MULTILINE)
    return tuple(sorted((name.split(":")[0], version) for name, version in match))


def parse_offers(text: str) -> dict[tuple[str, str], DebianPackage]:
    """Return the packages of an index's stanzas by name and version. Stanzas without a SHA256 are skipped."""
    offers: dict[tuple[str, str], DebianPackage] = {}
    for stanza in parse_stanzas(text):
        if {"Package", "Version", "Architecture", "SHA256", "Size"} <= stanza.keys():
            package = DebianPackage(
                name=stanza["Package"],
                version=stanza["Version"],
                architecture=stanza["Architecture"],
                sha256=stanza["SHA256"],
                size=int(stanza["Size"]),
            )
            offers.setdefault((package.name, package.version), package)
    return offers


def parse_release_date(text: str) -> int:
    """Return the Date of a Release file in seconds since 1970."""
    match = re.search(r"^Date: (.+)$", text, flags=re.MULTILINE)
    if match is None:
        raise LockError(
            "release-file-malformed", "a Release file of the archive has no Date", hint=MIRROR_HINT
        )
    return int(parsedate_to_datetime(match[1]).timestamp())


def lock_base(
    base: BaseSpec,
    previous: BaseLock | None,
    mirror: DebianMirror,
    progress: Progress,
    *,
    parent_base: BaseLock | None = None,
) -> BaseLock:
    """Solve the lock of a base on the parent lock `parent_base`. Raises LockError, ToolError.

    `previous` is returned if its packages are the same, so that its date and the base's digest do not
    change.
    """
    required = base_content_hash(base, parent_base)
    with open_archive(mirror, base.suite, architecture(base.platform), progress) as archive:
        lock = solve_base(base, archive, required)
    if previous and (previous.content_hash, previous.packages) == (required, lock.packages):
        return previous
    return lock


def solve_base(base: BaseSpec, archive: AptArchive, content_hash: str) -> BaseLock:
    """Return the archive's current packages for a base."""
    chosen = archive.solve(base.packages, str(base.where))
    offers = archive.offered([name for name, _ in chosen])
    missing = [f"{name} {version}" for name, version in chosen if (name, version) not in offers]
    if missing:
        raise LockError(
            "hash-not-published",
            f"the signed indexes have no sha256 for {', '.join(missing)}",
            hint=MIRROR_HINT,
        )
    return BaseLock(
        base=base.name,
        suite=base.suite,
        content_hash=content_hash,
        source_date_epoch=archive.released,
        packages=tuple(offers[key] for key in chosen),
    )
