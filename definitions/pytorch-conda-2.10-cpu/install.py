"""Installs an explicit list of conda packages, each with its sha256, by py-rattler. A program by itself.

    python conda_install.py --explicit FILE --prefix DIR [--as /opt/env] [--packages FOLDER]
                            [--channels FILE] [--cache FOLDER] [--scripts | --scripts-later] [--tell]
    python conda_install.py --run-scripts TOLD --prefix DIR

All three engines run it, so that they link alike: the assemble engine for a staging folder, with the
archives at hand; docker and apptainer inside their build stage, where it also fetches. It needs the
standard library and py-rattler, nothing of imagefactory.

- An explicit list is conda's `@EXPLICIT`: a URL a line, `#sha256:<hex>` or `#<md5>` behind it. Without a
  sha256 a line is refused. `--explicit` may be given several times; then the packages of an earlier list
  keep every path that a later one claims too.
- `--prefix` must not exist or be empty. It is made beside and renamed. `--as` is the path written into
  files where the environment will lie somewhere else.
- `--packages` holds archives by file name; what is not there is fetched. `--channels` is JSON:
  {"mirrors": {address or beginning of one: where to ask instead}, "auth": {host: credentials}}, the
  credentials as rattler and pixi write them (BearerToken, CondaToken, BasicHTTP). It may also hold
  "proxies": {variable: value}, such as https_proxy and no_proxy, as environments have them.
- `--scripts` runs post-link scripts. Without it packages that have one are refused, by name; with
  `--scripts-later` they are only told, for a caller that runs them elsewhere. `--run-scripts` runs those
  that such a call told on its standard output, and nothing else.
- `--cache` keeps unpacked packages for the next time. Files of the prefix may be links to them.
- Every record in conda-meta is written anew: the package's own address, nothing of this machine or time,
  so the same list gives the same files. Shipped byte code whose source is there too is left out: its times
  fit no image.

On standard output comes JSON: {"claims": [...], "lost": {name: [paths]}, "scripts": [[name, version, build
number]]}; with `--tell` before it a line "+" for each package unpacked and each one linked. A failure is
one JSON line on standard error, {"error": kind, "message": ..., "packages": [...]}, and exit code 1 (2 for
wrong arguments).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import http.client
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LINKER = 1
"""The rules of this file. Another number where the same packages give other files."""
CHUNK = 1 << 20
ATTEMPTS = 6
THREADS = 6


class Failure(Exception):
    """What stops an installation: its kind, words for a person, and the packages it is about."""

    def __init__(self, kind: str, message: str, packages: list[str] | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.packages = kind, message, packages or []

    def __str__(self) -> str:
        return json.dumps({"error": self.kind, "message": self.message, "packages": self.packages})


class Wanted:
    """One line of an explicit list. `group` is the number of its list."""

    def __init__(self, url: str, sha256: str, group: int) -> None:
        self.url, self.sha256, self.group = url, sha256, group
        self.folder, _, name = url.rpartition("/")
        self.filename = urllib.parse.unquote(name)
        self.channel = self.folder.rpartition("/")[0]
        if not re.fullmatch(r"[^/\x00-\x1f]+(\.conda|\.tar\.bz2)", self.filename):
            raise Failure("explicit", f"{url} is not the address of a conda package")


def parse_explicit(text: str, group: int) -> list[Wanted]:
    """The packages of an `@EXPLICIT` list."""
    items = []
    for line in (line.strip() for line in text.splitlines()):
        if not line or line.startswith(("#", "@")):
            continue
        url, _, digest = line.partition("#")
        sha256 = digest[len("sha256:") :] if digest.startswith("sha256:") else ""
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise Failure("explicit", f"{url} has no sha256 (write URL#sha256:<64 hex digits>)")
        items.append(Wanted(url, sha256, group))
    return items


# --- archives ------------------------------------------------------------------------------------


class Channels:
    """How this machine reaches channels: mirrors and credentials."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.mirrors = settings.get("mirrors") or {}
        self.auth = settings.get("auth") or {}

    def address(self, url: str) -> str:
        """Where to ask for `url`: by its longest prefix among the mirrors."""
        fitting = [old for old in self.mirrors if url == old or url.startswith(old.rstrip("/") + "/")]
        if not fitting:
            return url
        longest = max(fitting, key=len)
        return str(self.mirrors[longest]).rstrip("/") + url[len(longest.rstrip("/")) :]

    def request(self, url: str, start: int) -> urllib.request.Request:
        """A request for the bytes from `start` on, with the credentials of its host."""
        parts = urllib.parse.urlsplit(url)
        headers = {"User-Agent": "imagefactory", "Accept-Encoding": "identity"}
        given = self._credentials(parts.netloc.rpartition("@")[2], parts.hostname or "")
        if parts.username:
            user, password = urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")
            given = {"BasicHTTP": {"username": user, "password": password}}
            url = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
            parts = urllib.parse.urlsplit(url)
        if "BearerToken" in given:
            headers["Authorization"] = "Bearer " + given["BearerToken"]
        elif "BasicHTTP" in given:
            pair = given["BasicHTTP"]["username"] + ":" + given["BasicHTTP"]["password"]
            headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        elif "CondaToken" in given:
            url = urllib.parse.urlunsplit(parts._replace(path="/t/" + given["CondaToken"] + parts.path))
        if start:
            headers["Range"] = f"bytes={start}-"
        # Redirects to another host must not carry the credentials along.
        request = urllib.request.Request(url)  # noqa: S310
        for name, value in headers.items():
            add = request.add_unredirected_header if name == "Authorization" else request.add_header
            add(name, value)
        return request

    def _credentials(self, host: str, name: str) -> dict[str, Any]:
        parts = name.split(".")
        wildcards = ["*." + ".".join(parts[n:]) for n in range(len(parts))]
        for key in (host, name, *wildcards):
            if isinstance(self.auth.get(key), dict):
                return dict(self.auth[key])
        return {}


def find_archive(item: Wanted, packages: Path | None, downloads: Path, channels: Channels) -> Path:
    """The archive of one package: at hand, or fetched, with the right sha256."""
    local = packages / item.filename if packages else None
    if local is None or not local.is_file():
        address = channels.address(item.url)
        if address.startswith("file:"):
            local = Path(urllib.parse.unquote(urllib.parse.urlsplit(address).path))
            if not local.is_file():
                raise Failure("fetch", f"{local} does not exist", [item.filename])
        else:
            local = downloads / item.filename
            _fetch(item, address, local, channels)
    got = hash_file(local)
    if got != item.sha256:
        words = f"{item.filename} has the wrong hash: expected sha256 {item.sha256}, got {got}"
        raise Failure("hash", words, [item.filename])
    return local.resolve()


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _fetch(item: Wanted, address: str, path: Path, channels: Channels) -> None:
    """Goes on where a connection broke. The address told is the channel's: a mirror's may hold a password."""
    error: Exception | None = None
    for attempt in range(ATTEMPTS):
        if error is not None:
            time.sleep(min(2.0 ** (attempt - 1), 30.0))
        start = path.stat().st_size if path.exists() else 0
        try:
            with urllib.request.urlopen(channels.request(address, start), timeout=60) as answer:  # noqa: S310
                mode = "ab" if start and answer.status == 206 else "wb"
                expected = answer.headers.get("Content-Length", "")
                size = 0
                with path.open(mode) as file:
                    while chunk := answer.read(CHUNK):
                        size += len(chunk)
                        file.write(chunk)
                if expected.isdigit() and size < int(expected):
                    raise OSError(f"ended after {size} of {expected} bytes")
                return
        except urllib.error.HTTPError as refused:
            if refused.code == 416:  # a whole file, or one that the server does not know how to continue
                if start and hash_file(path) == item.sha256:
                    return
                path.unlink()
            elif refused.code not in (408, 425, 429, 500, 502, 503, 504):
                raise Failure(
                    "fetch", f"{item.url}: the server answered {refused.code}", [item.filename]
                ) from None
            error = refused
        # URLError, time-outs, broken connections, answers that are none
        except (OSError, ValueError, http.client.HTTPException) as fault:
            error = fault
    reason = getattr(error, "reason", None) or error
    raise Failure("fetch", f"{item.url}: {reason} ({ATTEMPTS} times)", [item.filename])


# --- what a package may hold ---------------------------------------------------------------------


class Package:
    """What a package says of itself: `info` its files of metadata by name, `script` whether it has a
    post-link script, `commands` what programs its entry points make, and of what."""

    def __init__(self, archive: Path, info: dict[str, bytes], paths: list[str]) -> None:
        self.archive, self.info, self.index = archive, info, info["info/index.json"]
        told = json.loads(self.index)
        self.name = str(told["name"])
        self.stem = "-".join((self.name, str(told["version"]), str(told["build"])))
        self.python = told.get("noarch") == "python"
        self.paths = paths
        self.script = f"bin/.{self.name}-post-link.sh" in paths
        self.commands: list[tuple[str, str]] = []


def unsound(item: Wanted, error: Exception) -> Failure:
    words = f"{item.filename} is no sound package: {str(error) or type(error).__name__}"
    return Failure("package", words, [item.filename])


async def read_package(archive: Path, item: Wanted) -> Package:
    """The package of `archive`. Refuses paths that lead out of the prefix.

    py-rattler joins the paths of info/paths.json to the prefix as they are. What its own extraction and
    its rule for claimed paths guard against (files below links that lead out) is left to it; what it
    unpacked is looked at by `check_unpacked`.
    """
    from rattler.package_streaming import PackageArchive

    try:
        opened = await PackageArchive.from_path(archive)
        read = dict(await opened.read_files(["info/index.json", "info/paths.json"]))
        if read["info/paths.json"] is not None:
            paths = [str(row["_path"]) for row in json.loads(read["info/paths.json"])["paths"]]
        else:
            read.update(await opened.read_files(["info/files", "info/has_prefix"]))
            paths = (read["info/files"] or b"").decode().splitlines()
        info = {name: data or b"" for name, data in read.items()}
        package = Package(archive, info, paths)
        site_packages = str(json.loads(package.index).get("python_site_packages_path") or "lib")
        if package.python:
            info["info/link.json"] = await opened.read_file("info/link.json") or b""
            link = json.loads(info["info/link.json"] or b"{}").get("noarch") or {}
            points = [str(text).partition("=") for text in link.get("entry_points") or ()]
            package.commands = [(command.strip(), of.strip()) for command, _, of in points]
    except Exception as error:
        raise unsound(item, error) from None
    if re.sub(r"\.conda$|\.tar\.bz2$", "", item.filename) != package.stem:
        raise Failure("package", f"{item.filename} holds {package.stem}", [item.filename])
    for path in (*paths, site_packages):
        if _leads_out(path):
            words = f"{item.filename} holds {path!r}, which is no path of a prefix"
            raise Failure("path", words, [item.filename])
    for command, _ in package.commands:
        if not re.fullmatch(r"[^/\x00-\x1f\x7f]+", command) or command in (".", ".."):
            words = f"{item.filename} has an entry point called {command!r}"
            raise Failure("path", words, [item.filename])
    return package


def _leads_out(path: str) -> bool:
    parts = path.split("/")
    # A name that begins with .wh. would take another's file away: it is how layers say "removed".
    odd = re.search(r"[\x00-\x1f\x7f]|(^|/)\.wh\.", path)
    return bool({"", ".", ".."} & set(parts)) or parts[0] in ("conda-meta", "__clobbers__") or odd is not None


def check_commands(packages: list[Package]) -> None:
    """Refuses a program that an entry point makes where another package has something.

    py-rattler knows no claim of that kind: it writes the program through a link that lies there, be it to
    a file of this machine or to one in the cache.
    """
    taken: dict[str, str] = {}
    for package in packages:
        for path in package.paths:
            if package.python and path.startswith("python-scripts/"):
                path = "bin" + path[len("python-scripts") :]
            taken["/".join(path.split("/")[:2])] = package.name
    made: dict[str, tuple[str, str]] = {}
    for package in packages:
        for command, of in package.commands:
            path = f"bin/{command}"
            other = taken.get("bin") or taken.get(path)
            first = made.setdefault(path, (package.name, of))
            if not other and first[1] != of:
                other = first[0]
            if other:
                words = f"{path} is an entry point of {package.name}, and {other} has something else there"
                raise Failure("path", words, [package.name, other])


def check_unpacked(package: Package, folder: Path) -> None:
    """Refuses an unpacked package that is not what `read_package` saw, or that links would mislead about.

    An archive may hold a name twice, and a list may call a link a file: py-rattler then reads what the
    link leads to, a file of this machine.
    """
    filename = package.archive.name
    for name, data in package.info.items():
        file = folder / name
        if file.is_symlink() or (file.read_bytes() if file.exists() else b"") != data:
            words = f"{filename} holds {name} twice, or what was unpacked of it has changed since"
            raise Failure("path", words, [filename])
    rows = json.loads(package.info.get("info/paths.json") or b"{}").get("paths") or ()
    links = {str(row["_path"]) for row in rows if row.get("path_type") == "softlink"}
    changed = {str(row["_path"]) for row in rows if "prefix_placeholder" in row}
    # Before there was info/paths.json: paths, each behind its placeholder and mode, perhaps in quotes.
    told = package.info.get("info/has_prefix", b"").decode(errors="replace").splitlines()
    top = folder.resolve()
    sound = {""}
    for path in package.paths:
        above = path.rpartition("/")[0]
        if above not in sound:
            if (folder / above).resolve() != top / above:
                raise Failure("path", f"{filename} holds {path!r} below a link", [filename])
            sound.add(above)
        if not (folder / path).is_symlink():
            continue
        old = "info/has_prefix" in package.info
        written = path in changed or any(row.strip(" \"'").endswith(path) for row in told)
        if written or not (old or path in links):
            raise Failure("path", f"{filename} holds the link {path!r} as if it were a file", [filename])


# --- linking -------------------------------------------------------------------------------------


class Order:
    """Where to install and how. `shown` is the prefix that files speak of."""

    def __init__(self, scratch: Path, options: argparse.Namespace) -> None:
        self.scratch, self.prefix = scratch, scratch / "prefix"
        self.shown = str(options.shown or options.prefix)
        self.cache = options.cache or scratch / "cache"
        self.scripts_fit = options.scripts or options.scripts_later
        self.hard_links = not options.scripts  # a script must not write into the cache
        self.tell = bool(options.tell)


def install(items: list[Wanted], archives: list[Path], order: Order) -> dict[str, Any]:
    """Links all packages into `order.prefix`; gives what a caller wants to know of it."""
    from rattler import Config
    from rattler.exceptions import InstallerError  # type: ignore[attr-defined,unused-ignore]
    from rattler.install import InstallerReporter
    from rattler.install import install as link
    from rattler.repo_data import PackageRecord

    read: dict[str, Package] = {}

    class Watcher(InstallerReporter):
        def on_populate_cache_complete(self, cache_entry: int) -> None:  # noqa: ARG002
            if order.tell:
                print("+", flush=True)

        def on_link_start(self, operation: int, package_name: str) -> int:
            # Here a package is unpacked, and nothing of it linked. Errors of this method would be lost.
            try:
                package = read[package_name]
                check_unpacked(package, order.cache / package.stem)
            except Failure as failure:
                _remove(order.cache / package.stem)  # sound next time if the disk or somebody changed it
                give_up(failure, order.scratch)
            except Exception as error:
                give_up(Failure("link", f"{package_name}: {error!r}", [package_name]), order.scratch)
            return operation

        def on_link_complete(self, index: int) -> None:  # noqa: ARG002
            if order.tell:
                print("+", flush=True)

    async def run() -> tuple[list[Any], list[str]]:
        packages = [await read_package(archive, item) for archive, item in zip(archives, items, strict=True)]
        check_commands(packages)
        read.update({package.name.lower(): package for package in packages})
        scripted = [package.name for package in packages if package.script]
        if scripted and not order.scripts_fit:
            names = ", ".join(scripted)
            raise Failure("scripts", f"packages with a post-link script, which is not run: {names}", scripted)
        records = [
            _record(package, item, order.scratch) for package, item in zip(packages, items, strict=True)
        ]
        try:
            await link(
                records,
                target_prefix=order.prefix,
                cache_dir=order.cache,
                installed_packages=[],
                execute_link_scripts=False,
                show_progress=False,
                reporter=Watcher(),  # type: ignore[abstract]
                alternative_target_prefix=order.shown,
                config=Config() if order.hard_links else Config.from_toml("allow-hard-links = false"),
            )
        except InstallerError as error:
            raise Failure("link", str(error)) from None
        return records, scripted

    records, scripted = asyncio.run(run())
    result = normalise(order.prefix, {item.filename: item for item in items})
    result["scripts"] = [
        [record.name.normalized, str(record.version), record.build_number]
        for record in PackageRecord.sort_topologically(records)
        if record.name.normalized in scripted
    ]
    return result


def give_up(failure: Failure, scratch: Path) -> None:
    """Ends the process at once, so that nothing more is linked."""
    shutil.rmtree(scratch, ignore_errors=True)
    print(failure, file=sys.stderr)
    end(1)


def _record(package: Package, item: Wanted, scratch: Path) -> Any:
    """The record that py-rattler installs: of the archive at hand, checked against the sha256 of the list."""
    from rattler.repo_data import PackageRecord, RepoDataRecord

    index = scratch / "index.json"
    index.write_bytes(package.index)
    size = package.archive.stat().st_size
    try:
        described = PackageRecord.from_index_json(index, size=size, sha256=item.sha256)
    except OSError as error:
        raise unsound(item, error) from None
    return RepoDataRecord(described, item.filename, package.archive.as_uri(), item.channel)


def normalise(prefix: Path, items: dict[str, Wanted]) -> dict[str, Any]:
    """Settles claimed paths and writes conda-meta anew, the same whatever machine and day it is."""
    meta = prefix / "conda-meta"
    records = {path: json.loads(path.read_text("utf-8")) for path in sorted(meta.glob("*.json"))}
    claims, lost = _settle(prefix, list(records.values()), items)
    _remove(prefix / "__clobbers__")
    # Of each path the list that brought it: what a later one brings changes nothing of an earlier one.
    groups = {
        row["_path"]: items[record["fn"]].group
        for record in records.values()
        for row in record["paths_data"]["paths"]
    }
    if "CACHEDIR.TAG" not in groups:
        _remove(prefix / "CACHEDIR.TAG")
    for path, record in records.items():
        item = items[record["fn"]]
        kept = []
        for row in sorted(record["paths_data"]["paths"], key=lambda row: str(row["_path"])):
            source = source_of(row["_path"])
            if source and groups.get(source, item.group + 1) <= item.group:
                _remove(prefix / row["_path"])
                continue
            _even_mode(prefix / row["_path"])
            if row["path_type"] == "softlink":  # py-rattler tells of what the link leads to, here
                row = {key: row[key] for key in ("_path", "path_type")}
            kept.append(row)
        record["paths_data"] = {"paths": kept, "paths_version": 1}
        record["files"] = [row["_path"] for row in kept]
        record["url"], record["channel"], record["sha256"] = item.url, item.channel, item.sha256
        for key in ("extracted_package_dir", "package_tarball_full_path", "requested_spec", "link"):
            record.pop(key, None)
        record["requested_specs"] = []
        text = json.dumps(record, sort_keys=True, indent=2, ensure_ascii=False) + "\n"
        path.unlink()  # never written through a link to a cache
        path.write_text(text, "utf-8")
    _remove(meta / "history")
    (meta / "history").write_text("")
    for folder in sorted(prefix.rglob("__pycache__"), reverse=True):
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()
    return {"claims": claims, "lost": {name: sorted(paths) for name, paths in sorted(lost.items())}}


def _even_mode(path: Path) -> None:
    """Everybody may read an environment's files, only root may write them: whatever the archive says."""
    if not path.exists():
        return  # a link that leads nowhere; or gone, which whoever packs the environment says
    state = path.lstat()
    mode = 0o755 if state.st_mode & stat.S_IXUSR else 0o644
    if stat.S_ISREG(state.st_mode) and stat.S_IMODE(state.st_mode) != mode:
        path.chmod(mode)


def source_of(path: str) -> str:
    """The .py that a path of byte code belongs to, empty for other paths."""
    found = re.fullmatch(r"(.*/)__pycache__/([^/]+?)\.[^/.]+(?:\.opt-\d)?\.pyc", path)
    return f"{found[1]}{found[2]}.py" if found else ""


def _settle(
    prefix: Path, records: list[dict[str, Any]], items: dict[str, Wanted]
) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """Keeps one package's file of each path that several claim; the others' records lose it.

    py-rattler decides: a package wins against what it depends on, else the first by name. Packages of an
    earlier list keep what they have.
    """
    holders = {row["_path"]: (record, row) for record in records for row in record["paths_data"]["paths"]}
    losers: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for record in records:
        for row in record["paths_data"]["paths"]:
            if row.get("original_path"):
                losers.setdefault(row["original_path"], []).append((record, row))
    claims: list[dict[str, Any]] = []
    lost: dict[str, list[str]] = {}
    for path, others in sorted(losers.items()):
        # None where it is a folder of another package that the path gave way to.
        claimants = others + ([holders[path]] if path in holders else [])
        winner = holders.get(path, others[0])
        kept = winner[0]["name"]
        if path not in holders:
            inside = [each for each in holders if each.startswith(f"{path}/")]
            kept = holders[inside[0]][0]["name"] if inside else kept
        first = min(items[record["fn"]].group for record, _ in claimants)
        if path in holders and items[winner[0]["fn"]].group != first:
            below = [(r, row) for r, row in claimants if items[r["fn"]].group == first]
            winner, before = min(below, key=lambda pair: str(pair[0]["name"])), winner
            _swap(prefix, path, winner, before)
            kept = winner[0]["name"]
        for record, row in claimants:
            if record is winner[0] and path in holders:
                continue
            same = path in holders and _same(prefix / row["_path"], prefix / path)
            claims.append({"path": path, "kept": kept, "lost": record["name"], "same": same})
            record["paths_data"]["paths"].remove(row)
            lost.setdefault(record["name"], []).append(path)
    return claims, lost


def _swap(prefix: Path, path: str, winner: tuple[Any, Any], before: tuple[Any, Any]) -> None:
    (prefix / path).rename(prefix / "__clobbers__" / "swapped")
    (prefix / winner[1]["_path"]).rename(prefix / path)
    (prefix / "__clobbers__" / "swapped").rename(prefix / winner[1]["_path"])
    winner[1]["_path"], before[1]["_path"] = path, winner[1]["_path"]
    winner[1].pop("original_path")


def _same(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    if not one.is_file() or not other.is_file():
        return False
    return one.stat().st_size == other.stat().st_size and hash_file(one) == hash_file(other)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()


# --- post-link scripts ---------------------------------------------------------------------------


def script_command(prefix: str, name: str) -> list[str]:
    """What runs a package's post-link script: conda runs it by bash."""
    return ["/bin/bash", f"{prefix}/bin/.{name}-post-link.sh"]


def script_environment(prefix: str, package: list[Any]) -> dict[str, str]:
    """What a post-link script is told, as conda's documentation of link scripts has it."""
    name, version, number = package
    return {
        "PREFIX": prefix,
        "CONDA_PREFIX": prefix,
        "PKG_NAME": str(name),
        "PKG_VERSION": str(version),
        "PKG_BUILDNUM": str(number),
        "PATH": f"{prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp",  # noqa: S108
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run_scripts(prefix: Path, packages: list[list[Any]]) -> None:
    """Runs the post-link scripts of `packages`, what others depend on first."""
    for package in packages:
        done = subprocess.run(
            script_command(str(prefix), package[0]),
            env=script_environment(str(prefix), package),
            cwd=prefix,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode:
            told = done.stdout.decode(errors="replace")[-2000:]
            words = f"the post-link script of {package[0]} ended with {done.returncode}: {told}"
            raise Failure("script", words, [package[0]])
    _remove(prefix / ".messages.txt")


# --- the program ---------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="conda_install.py", description="Installs locked conda packages.")
    parser.add_argument("--explicit", type=Path, default=[], action="append")
    parser.add_argument("--prefix", type=Path, required=True)
    parser.add_argument("--as", dest="shown", default="")
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--channels", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--scripts", action="store_true")
    parser.add_argument("--scripts-later", action="store_true")
    parser.add_argument("--run-scripts", type=Path)
    parser.add_argument("--tell", action="store_true")
    options = parser.parse_args(arguments)
    os.umask(0o022)
    prefix = options.prefix = options.prefix.absolute()
    if options.run_scripts:
        run_scripts(prefix, json.loads(options.run_scripts.read_text("utf-8").splitlines()[-1])["scripts"])
        return
    if not options.explicit:
        parser.error("--explicit names what to install")
    if options.scripts and options.shown not in ("", str(prefix)):
        parser.error("--scripts works at the final prefix only, not with --as")
    if prefix.exists() and (not prefix.is_dir() or any(prefix.iterdir())):
        raise Failure("prefix", f"{prefix} is not empty")
    texts = [path.read_text("utf-8") for path in options.explicit]
    items = [item for number, text in enumerate(texts) for item in parse_explicit(text, number)]
    channels = Channels({})
    if options.channels and options.channels.exists():
        settings = json.loads(options.channels.read_text("utf-8"))
        os.environ.update(settings.get("proxies") or {})
        channels = Channels(settings)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".conda-", dir=prefix.parent) as scratch:
        downloads = Path(scratch) / "downloads"
        downloads.mkdir()
        with ThreadPoolExecutor(THREADS) as pool:
            find = pool.map(lambda item: find_archive(item, options.packages, downloads, channels), items)
            archives = list(find)
        order = Order(Path(scratch), options)
        result = install(items, archives, order)
        if prefix.exists():
            prefix.rmdir()
        order.prefix.chmod(0o755)
        order.prefix.rename(prefix)
    if options.scripts:
        try:
            run_scripts(prefix, result["scripts"])
        except Failure:
            shutil.rmtree(prefix)
            raise
    print(json.dumps(result, sort_keys=True))


def end(code: int) -> None:
    """Ends at once. Waiting for threads would hold up the news of a failure, and one of rattler's that still
    hands over a result kills the process with a signal when the interpreter goes first."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Failure as failure:
        print(failure, file=sys.stderr)
        end(1)
    except Exception:
        traceback.print_exc()
        end(1)
    end(0)
