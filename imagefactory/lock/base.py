"""Locks of base images: which Debian packages, in which versions, with which hashes.

The archive's address is the machine's: what its apt is set to, or `debian-mirror` of the settings.
Solving and downloading is apt's own work, in a private apt root: no root rights are needed, nothing of
the machine's apt is written, its proxy settings hold, and every hash comes from an index that Debian's
keyring has signed. A lock holds no address.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import pairwise
from pathlib import Path

from imagefactory.errors import DownloadError, LockError, ToolError
from imagefactory.model import Base, BaseLock, DebianPackage
from imagefactory.progress import Progress

ARCHITECTURE = "amd64"
FORMAT = "imagefactory-base-lock 1"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# Every base has these beside what is essential in Debian and what its recipe names: apt, because people
# extend images by hand, and the marker package that spares the conversion to a merged /usr (and perl).
ALWAYS = ("apt", "usr-is-merged")

_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_VERSION = re.compile(r"(?:[0-9]+:)?[0-9][A-Za-z0-9.+~-]*")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_SUITE = re.compile(r"[a-z][a-z0-9-]*")
_URI = re.compile(r"(?:https?|file|copy|mirror\+file|mirror\+https?):[A-Za-z0-9._~:/%@+,=-]+")
_SNAPSHOT = re.compile(r"/[0-9]{8}T[0-9]{6}Z(?:/|$)")
_RELEASES = ("bullseye", "bookworm", "trixie", "forky", "duke", "sid")
_CODENAMES = frozenset([*_RELEASES, "oldoldstable", "oldstable", "stable", "testing", "unstable"])
_MIRROR_HINT = (
    'write debian-mirror = "ADDRESS" in imagefactory.toml, where ADDRESS holds Debian\'s dists/ and pool/ '
    '(or "ADDRESS SECURITY-ADDRESS" when the security archive does not lie beside it)'
)


# --- the lock file -------------------------------------------------------------------------------


def base_content_hash(base: Base) -> str:
    """Hash of all that decides a base's packages but the archive's state: `sha256:<64 hex>`."""
    decided = {
        "format": FORMAT,
        "base": base.name,
        "suite": base.suite,
        "architecture": ARCHITECTURE,
        "packages": sorted({*base.packages, *ALWAYS}),
    }
    return "sha256:" + hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()


def format_base_lock(lock: BaseLock) -> str:
    """The text of a lock: a header, an empty line, one line a package, sorted by name."""
    header = (
        f"format: {FORMAT}\n"
        f"base: {lock.base}\n"
        f"suite: {lock.suite}\n"
        f"content-hash: {lock.content_hash}\n"
        f"source-date-epoch: {lock.source_date_epoch}\n\n"
    )
    packages = sorted(lock.packages, key=lambda package: package.name)
    return header + "".join(
        f"{package.name} {package.version} {package.architecture} {package.sha256} {package.size}\n"
        for package in packages
    )


def parse_base_lock(text: str, file: str) -> BaseLock:
    """The lock written in `text`. Raises LockError with `file:line` for what no lock says."""
    lines = text.split("\n")
    fields = [
        _header(lines, number, name, file)
        for number, name in enumerate(("format", "base", "suite", "content-hash", "source-date-epoch"), 1)
    ]
    if fields[0] != FORMAT:
        raise _malformed(file, 1, f"the format is not '{FORMAT}'")
    for number, value, pattern in (
        (2, fields[1], _SUITE),
        (3, fields[2], _SUITE),
        (4, fields[3].removeprefix("sha256:"), _HEX64),
        (5, fields[4], re.compile("[1-9][0-9]{0,10}")),
    ):
        if not pattern.fullmatch(value):
            raise _malformed(file, number, f"'{value}' is not a value that belongs here")
    if lines[5:6] != [""] or lines[-1] != "":
        raise _malformed(file, 6, "an empty line must follow the header and a newline end the file")
    packages = tuple(_package(line, number, file) for number, line in enumerate(lines[6:-1], 7))
    for number, (one, other) in enumerate(pairwise(packages), 8):
        if one.name >= other.name:
            raise _malformed(file, number, f"'{other.name}' is out of order or there twice")
    if not packages:
        raise _malformed(file, 7, "there is no package")
    return BaseLock(
        base=fields[1],
        suite=fields[2],
        content_hash=fields[3],
        source_date_epoch=int(fields[4]),
        packages=packages,
    )


def read_base_lock(path: Path) -> BaseLock | None:
    """The lock at `path`, None when there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(
            f"{path}: cannot be read: {error}", hint="run imagefactory lock to write it again"
        ) from error
    return parse_base_lock(text, str(path))


def write_base_lock(path: Path, lock: BaseLock) -> None:
    """Write beside and rename: a reader sees the old lock or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(format_base_lock(lock), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise LockError(
            f"{path}: cannot be written: {error}", hint="free the disk or mend the rights"
        ) from error


def _header(lines: Sequence[str], number: int, name: str, file: str) -> str:
    line = lines[number - 1] if number <= len(lines) else ""
    key, separator, value = line.partition(": ")
    if key != name or not separator:
        raise _malformed(file, number, f"expected '{name}: ...'")
    return value


def _package(line: str, number: int, file: str) -> DebianPackage:
    fields = line.split(" ")
    if len(fields) != 5:
        raise _malformed(file, number, "expected 'name version architecture sha256 size'")
    name, version, architecture, sha256, size = fields
    for value, good in (
        (name, _NAME.fullmatch(name)),
        (version, _VERSION.fullmatch(version)),
        (architecture, architecture in ("all", ARCHITECTURE)),
        (sha256, _HEX64.fullmatch(sha256)),
        (size, re.fullmatch("[1-9][0-9]{0,11}", size)),
    ):
        if not good:
            raise _malformed(file, number, f"'{value}' is not a value that belongs here")
    return DebianPackage(name=name, version=version, architecture=architecture, sha256=sha256, size=int(size))


def _malformed(file: str, number: int, what: str) -> LockError:
    return LockError(
        f"{file}:{number}: {what}",
        hint="a lock is written by 'imagefactory lock', not by hand: restore it from git or lock again",
    )


# --- where Debian's packages come from -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DebianMirror:
    """Where this machine finds Debian, and where it keeps what it has fetched.

    `main` and `security` are addresses of archives (each holds dists/ and pool/). `dated` is True for an
    archive frozen at a date, whose indexes have expired on purpose. `debs` is the cache of .deb files.
    `environ` is all that apt gets to see of the caller's environment. `certificates` is a bundle of CA
    certificates to trust instead of the machine's, empty for none.
    """

    main: str
    security: str
    dated: bool
    keyring: Path
    debs: Path
    environ: tuple[tuple[str, str], ...]
    certificates: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AptSource:
    """One binary source of the machine's apt: an address, a suite, its components and options."""

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str
    check_valid_until: bool


def find_mirror(setting: str, debs: Path, environ: Mapping[str, str], *, etc_apt: Path) -> DebianMirror:
    """The archive that `setting` names (`debian-mirror`), else the one of the apt sources under `etc_apt`.

    Raises ToolError when neither says, with what to set.
    """
    main, security, dated = choose_archives(setting, read_sources(etc_apt))
    return DebianMirror(
        main=main,
        security=security,
        dated=dated,
        keyring=KEYRING,
        debs=debs,
        environ=apt_environment(environ),
    )


def choose_archives(setting: str, sources: Iterable[AptSource]) -> tuple[str, str, bool]:
    """Addresses of the main and the security archive, and whether they are frozen at a date."""
    if setting:
        addresses = setting.split()
        if len(addresses) > 2 or not all(_URI.fullmatch(address) for address in addresses):
            raise ToolError(f"debian-mirror '{setting}' is not an address", hint=_MIRROR_HINT)
        main = addresses[0].rstrip("/")
        security = addresses[1].rstrip("/") if len(addresses) == 2 else derive_security(main)
        return main, security, bool(_SNAPSHOT.search(main))
    debian = [source for source in sources if _is_debian(source)]
    mains = [source for source in debian if source.suite in _CODENAMES]
    securities = [source for source in debian if source.suite.endswith(("-security", "/updates"))]
    if not mains:
        raise ToolError("this machine's apt sources name no archive of Debian", hint=_MIRROR_HINT)
    # Other archives carry Debian's suite names too: one that Debian's keyring signs, or whose path says so.
    first = min(mains, key=lambda source: not _looks_official(source))
    security = (
        min(securities, key=lambda source: not _looks_official(source)).uri
        if securities
        else derive_security(first.uri)
    )
    return first.uri, security, not first.check_valid_until or bool(_SNAPSHOT.search(first.uri))


def derive_security(main: str) -> str:
    """The security archive beside a main archive: the path's segment `debian` becomes `debian-security`."""
    segments = main.split("/")
    if "debian" not in segments[1:]:
        raise ToolError(f"where the security archive of '{main}' lies cannot be told", hint=_MIRROR_HINT)
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


def _looks_official(source: AptSource) -> bool:
    return "debian-archive" in source.signed_by or bool(
        {"debian", "debian-security"} & set(source.uri.split("/")[3:])
    )


def read_sources(etc_apt: Path) -> tuple[AptSource, ...]:
    """All binary sources of the machine's apt, in apt's own order of files."""
    found: list[AptSource] = []
    parts = sorted((etc_apt / "sources.list.d").glob("*")) if (etc_apt / "sources.list.d").is_dir() else []
    for path in [etc_apt / "sources.list", *parts]:
        if path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except PermissionError:  # a source with a password in it, that apt of this user cannot read either
            continue
        found.extend(parse_sources_list(text) if path.suffix == ".list" else parse_deb822_sources(text))
    return tuple(found)


def parse_sources_list(text: str) -> list[AptSource]:
    """Sources in apt's one-line style (sources.list(5)). Lines that are no binary source are passed over."""
    found: list[AptSource] = []
    for line in text.splitlines():
        match = re.fullmatch(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)((?:\s+[^\s#]+)*)\s*(?:#.*)?", line)
        if match is None:
            continue
        options = dict(part.split("=", 1) for part in (match[1] or "").lower().split() if "=" in part)
        found.append(
            AptSource(
                uri=match[2].rstrip("/"),
                suite=match[3],
                components=tuple(match[4].split()),
                signed_by=options.get("signed-by", ""),
                check_valid_until=options.get("check-valid-until", "yes") not in ("no", "false"),
            )
        )
    return found


def parse_deb822_sources(text: str) -> list[AptSource]:
    """Sources in apt's deb822 style (sources.list(5)): one for each address and suite."""
    found: list[AptSource] = []
    for stanza in parse_stanzas(text):
        fields = {key.lower(): value for key, value in stanza.items()}
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
            continue
        found.extend(
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
    return found


def parse_stanzas(text: str) -> Iterator[dict[str, str]]:
    """Stanzas of deb822 text: fields by name as written, continuation lines joined by newlines."""
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


# --- a private apt root --------------------------------------------------------------------------


def apt_environment(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What apt sees of the caller's environment: the search path, the folders and the proxies."""
    kept = {
        name: value
        for name, value in environ.items()
        if name in ("HOME", "TMPDIR")
        or name.lower() in ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
    }
    kept["PATH"] = search_path(environ)
    kept["LC_ALL"] = "C.UTF-8"
    return tuple(sorted(kept.items()))


def search_path(environ: Mapping[str, str]) -> str:
    """PATH with the system's folders at its end: an ordinary user's often lacks the sbin ones."""
    folders = environ.get("PATH", "").split(":")
    system = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
    return ":".join([*(f for f in folders if f), *(f for f in system if f not in folders)])


def sources_text(mirror: DebianMirror, suite: str) -> str:
    """apt sources of a suite, its updates and its security suite; only package indexes are fetched."""
    options = f"signed-by={mirror.keyring} arch={ARCHITECTURE} target=Packages"
    if mirror.dated:
        options += " check-valid-until=no"
    return "".join(
        f"deb [{options}] {uri} {name} main\n"
        for uri, name in (
            (mirror.main, suite),
            (mirror.main, f"{suite}-updates"),
            (mirror.security, f"{suite}-security"),
        )
    )


def apt_config(root: Path, certificates: str = "") -> str:
    """apt.conf of a private apt root: its own state, cache and sources, the machine's network settings.

    The machine may have loosened apt's checks for its own use; here they hold.
    """
    trusted = f'Acquire::https::CaInfo "{certificates}";\n' if certificates else ""
    return f"""\
#clear APT::Architectures;
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Install-Pkgs;
APT::Architecture "{ARCHITECTURE}";
APT::Architectures {{ "{ARCHITECTURE}"; }};
APT::Default-Release "";
APT::Install-Recommends "false";
APT::Install-Suggests "false";
APT::Get::AllowUnauthenticated "false";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Acquire::AllowInsecureRepositories "false";
Acquire::AllowDowngradeToInsecureRepositories "false";
Acquire::AllowWeakRepositories "false";
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
class Archive:
    """A suite's signed indexes, read: what it offers and how to get it.

    `released` is the newest Date of its Release files, seconds since 1970.
    """

    root: Path
    suite: str
    released: int
    environ: tuple[tuple[str, str], ...]

    def solve(self, packages: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Names and versions that these packages, all that is essential and ALWAYS need."""
        wanted = sorted({*packages, *ALWAYS})
        result = self._run("apt-get", "-qq", "--simulate", "install", "?essential", *wanted)
        if result.returncode:
            raise LockError(
                f"Debian {self.suite} cannot give this base its packages:\n{error_lines(result.stderr)}",
                hint="mend the names under 'packages' in recipes/bases.yaml",
            )
        return parse_simulation(result.stdout)

    def offered(self, names: Iterable[str]) -> dict[tuple[str, str], DebianPackage]:
        """All that the indexes offer under these names, by name and version. Unknown names are left out."""
        result = self._run("apt-cache", "show", *names)
        return parse_offers(result.stdout)

    def download(self, packages: Sequence[DebianPackage], folder: Path, progress: Progress) -> None:
        """Fetch .debs into `folder`, resuming what lies there. Hashes are the caller's to check."""
        wanted = [f"{package.name}={package.version}" for package in packages]
        total = sum(package.size for package in packages)
        argv = ["apt-get", "-c", str(self.root / "apt.conf"), "-q", "-o", "APT::Status-Fd=1", "download"]
        with progress.task(f"{len(wanted)} Debian packages", total=total) as task:
            done = 0
            for percent in _watch([*argv, *wanted], folder, self.environ):
                now = int(total * percent / 100)
                if now > done:
                    task.advance(now - done)
                    done = now
            task.advance(total - done)

    def _run(self, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tool, "-c", str(self.root / "apt.conf"), *arguments],
            env=dict(self.environ),
            capture_output=True,
            text=True,
            check=False,
        )


def reach(mirror: DebianMirror, suites: Iterable[str], *, seconds: int) -> None:
    """Asks both archives for what they are read by, once. Raises ToolError when one does not give it.

    apt itself asks: with its proxies, its certificates and its kinds of addresses. Archives that apt
    chooses from a list (mirror+...) are not asked.
    """
    environ = dict(mirror.environ)
    helper = shutil.which("apt-helper", path=f"{environ['PATH']}:/usr/lib/apt")
    if helper is None:
        raise ToolError("apt-get is not on this machine", hint="bases are made on Debian or its derivatives")
    options = [f"-oAcquire::{kind}::Timeout={seconds}" for kind in ("http", "https")]
    if mirror.certificates:
        options.append(f"-oAcquire::https::CaInfo={mirror.certificates}")
    asked = [
        f"{archive}/dists/{suite}{ending}/InRelease"
        for archive, ending in ((mirror.main, ""), (mirror.security, "-security"))
        for suite in suites
        if not archive.startswith("mirror+")
    ]
    with tempfile.TemporaryDirectory(prefix="imagefactory-apt-") as folder:
        for number, address in enumerate(asked):
            done = subprocess.run(
                [helper, "-oAcquire::Retries=0", *options, "download-file", address, f"{folder}/{number}"],
                env=environ,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                lines = [line.removeprefix("E: ") for line in error_lines(done.stderr).splitlines()]
                said = "; ".join(line for line in lines if line != "Download Failed")
                raise ToolError(
                    re.sub(r"(?<=://)[^\s/]*@", "", said), hint=f"look at the network, or {_MIRROR_HINT}"
                )


@contextmanager
def open_archive(mirror: DebianMirror, suite: str, progress: Progress) -> Iterator[Archive]:
    """Read the indexes of `suite` into a private apt root under the temporary folder, removed at the end.

    Raises ToolError without apt or Debian's keyring, LockError when the archive cannot be reached or
    its signatures do not hold.
    """
    environ = dict(mirror.environ)
    if shutil.which("apt-get", path=environ["PATH"]) is None:
        raise ToolError("apt-get is not on this machine", hint="bases are made on Debian or its derivatives")
    if not mirror.keyring.is_file():
        raise ToolError(
            f"Debian's keyring {mirror.keyring} is missing", hint="apt-get install debian-archive-keyring"
        )
    root = Path(tempfile.mkdtemp(prefix="imagefactory-apt-", dir=environ.get("TMPDIR") or None))
    try:
        for folder in ("state/lists/partial", "cache/archives/partial"):
            (root / folder).mkdir(parents=True)
        (root / "state/status").touch()
        (root / "sources.list").write_text(sources_text(mirror, suite), encoding="utf-8")
        (root / "apt.conf").write_text(apt_config(root, mirror.certificates), encoding="utf-8")
        argv = ["apt-get", "-c", str(root / "apt.conf"), "-q", "-o", "APT::Status-Fd=1", "update"]
        with progress.task(f"package lists of Debian {suite}", total=100, unit="percent") as task:
            done = 0
            try:
                for percent in _watch(argv, root, mirror.environ):
                    task.advance(max(0, int(percent) - done))
                    done = max(done, int(percent))
            except DownloadError as error:
                raise LockError(
                    f"the package lists of Debian {suite} could not be read:\n{error.message}",
                    hint=f"look at the network and the machine's apt sources, or {_MIRROR_HINT}",
                ) from error
            task.advance(100 - done)
        dates = [
            parse_release_date(path.read_text(encoding="utf-8", errors="replace"))
            for path in sorted((root / "state/lists").glob("*Release"))
        ]
        yield Archive(root=root, suite=suite, released=max(dates), environ=mirror.environ)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _watch(argv: Sequence[str], folder: Path, environ: tuple[tuple[str, str], ...]) -> Iterator[float]:
    """Run an apt command that reports on its standard output; yields percents. Raises DownloadError."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        with subprocess.Popen(
            argv, cwd=folder, env=dict(environ), stdout=subprocess.PIPE, stderr=complaints, text=True
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
        text = complaints.read()
    if process.returncode:
        raise DownloadError(
            error_lines(text) or f"{argv[0]} ended with {process.returncode}",
            hint="look at the network and the machine's apt settings, then run the command again",
        )


def error_lines(stderr: str) -> str:
    """What apt says is wrong: its errors and what explains them, without warnings."""
    errors = [line for line in stderr.splitlines() if line.startswith(("E:", " "))]
    return "\n".join(errors or stderr.strip().splitlines()[-5:])


def parse_simulation(text: str) -> tuple[tuple[str, str], ...]:
    """Names and versions that `apt-get --simulate install` would put in, sorted."""
    found = re.findall(r"^Inst (\S+) \((\S+) ", text, flags=re.MULTILINE)
    return tuple(sorted((name.split(":")[0], version) for name, version in found))


def parse_offers(text: str) -> dict[tuple[str, str], DebianPackage]:
    """Packages of an index's stanzas, by name and version. Stanzas without a SHA256 do not count."""
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
    """Seconds since 1970 of a Release file's Date field."""
    match = re.search(r"^Date: (.+)$", text, flags=re.MULTILINE)
    if match is None:
        raise LockError("a Release file of the archive has no Date", hint=_MIRROR_HINT)
    return int(parsedate_to_datetime(match[1]).timestamp())


# --- locking -------------------------------------------------------------------------------------


def lock_base(
    base: Base,
    previous: BaseLock | None,
    mirror: DebianMirror,
    progress: Progress,
    *,
    update: bool = False,
) -> BaseLock:
    """The lock of `base`: `previous` while it is not stale, else what the archive gives today.

    With `update` the archive is always asked, and `previous` stays when it would give the same packages
    (so its date, and with it the base's digest, does not move for nothing). Raises LockError, ToolError.
    """
    current = previous is not None and previous.content_hash == base_content_hash(base)
    if previous is not None and current and not update:
        return previous
    with open_archive(mirror, base.suite, progress) as archive:
        fresh = solve_base(base, archive)
    return previous if previous is not None and current and previous.packages == fresh.packages else fresh


def solve_base(base: Base, archive: Archive) -> BaseLock:
    """What the archive gives `base` now."""
    chosen = archive.solve(base.packages)
    offers = archive.offered([name for name, _ in chosen])
    missing = [f"{name} {version}" for name, version in chosen if (name, version) not in offers]
    if missing:
        raise LockError(f"the signed indexes give no sha256 for {', '.join(missing)}", hint=_MIRROR_HINT)
    return BaseLock(
        base=base.name,
        suite=base.suite,
        content_hash=base_content_hash(base),
        source_date_epoch=archive.released,
        packages=tuple(offers[key] for key in chosen),
    )


def deb_filename(package: DebianPackage) -> str:
    """The name a package's file has in Debian's pool: without the version's epoch."""
    return f"{package.name}_{package.version.split(':', 1)[-1]}_{package.architecture}.deb"


def downloaded_filename(package: DebianPackage) -> str:
    """The name apt gives to the same file."""
    return f"{package.name}_{package.version.replace(':', '%3a')}_{package.architecture}.deb"
