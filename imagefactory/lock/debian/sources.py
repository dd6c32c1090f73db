"""Which Debian archive this machine uses: imagefactory.toml says it, else the machine's apt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.errors import ToolError

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


_URI = re.compile(r"(?:https?|file|copy|mirror\+file|mirror\+https?):[A-Za-z0-9._~:/%@+,=-]+")
_SNAPSHOT = re.compile(r"/[0-9]{8}T[0-9]{6}Z(?:/|$)")
_RELEASES = ("bullseye", "bookworm", "trixie", "forky", "duke", "sid")
_CODENAMES = frozenset([*_RELEASES, "oldoldstable", "oldstable", "stable", "testing", "unstable"])
EXPIRED_HINT = (
    "try again when the archive is current; for one that is frozen on purpose write an address with its "
    'date (debian-mirror = "ADDRESS/archive/debian/20240101T000000Z"), or an apt source with '
    "Check-Valid-Until: no"
)
MIRROR_HINT = (
    'write debian-mirror = "ADDRESS" in imagefactory.toml, where ADDRESS has Debian\'s dists/ and pool/ '
    '(or "ADDRESS SECURITY-ADDRESS" if the security archive is not next to it)'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DebianMirror:
    """Where this machine finds Debian, and where it keeps what it has fetched.

    `main` and `security` are addresses of archives (each holds dists/ and pool/). `dated` are those of
    them that are frozen at a date, whose indexes have expired on purpose. `debs` is the cache of .deb files.
    `environ` is all that apt gets to see of the caller's environment. `certificates` is a bundle of CA
    certificates to trust instead of the machine's, empty for the machine's.
    """

    main: str
    security: str
    dated: frozenset[str]
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


def choose_archives(setting: str, sources: Iterable[AptSource]) -> tuple[str, str, frozenset[str]]:
    """Addresses of the main and the security archive, and those of them that are frozen at a date."""
    if setting:
        addresses = setting.split()
        if len(addresses) > 2 or not all(_URI.fullmatch(address) for address in addresses):
            raise ToolError(
                "debian-mirror-invalid", f"debian-mirror '{setting}' is not an address", hint=MIRROR_HINT
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
    # Other archives carry Debian's suite names too: one that Debian's keyring signs, or whose path says so.
    first = min(mains, key=lambda source: not _looks_official(source))
    second = (
        min(securities, key=lambda source: not _looks_official(source))
        if securities
        else replace(first, uri=derive_security(first.uri))
    )
    dated = (one.uri for one in (first, second) if not one.check_valid_until or _SNAPSHOT.search(one.uri))
    return first.uri, second.uri, frozenset(dated)


def derive_security(main: str) -> str:
    """The security archive beside a main archive: the path's segment `debian` becomes `debian-security`."""
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


def _looks_official(source: AptSource) -> bool:
    return "debian-archive" in source.signed_by or bool(
        {"debian", "debian-security"} & set(source.uri.split("/")[3:])
    )


def read_sources(etc_apt: Path) -> tuple[AptSource, ...]:
    """All binary sources of the machine's apt, in apt's own order of files."""
    sources: list[AptSource] = []
    parts = sorted((etc_apt / "sources.list.d").glob("*")) if (etc_apt / "sources.list.d").is_dir() else []
    for path in [etc_apt / "sources.list", *parts]:
        if path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except PermissionError:  # a source with a password in it, that apt of this user cannot read either
            continue
        sources.extend(parse_sources_list(text) if path.suffix == ".list" else parse_deb822_sources(text))
    return tuple(sources)


def parse_sources_list(text: str) -> list[AptSource]:
    """Sources in apt's one-line style (sources.list(5)). Lines that are no binary source are passed over."""
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
    """Sources in apt's deb822 style (sources.list(5)): one for each address and suite."""
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
