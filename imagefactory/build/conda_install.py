"""Installs explicit lists of conda packages, each with its sha256, by py-rattler. A program by itself.

    python conda_install.py --explicit FILE.. --prefix DIR [--channels FILE]
    python conda_install.py --run-scripts TOLD --prefix DIR

Definitions carry it for docker and apptainer; the assemble engine calls its `install`, so that all link
alike. It needs the standard library and py-rattler, nothing of imagefactory.

- An explicit list is conda's `@EXPLICIT`: a URL a line, `#sha256:<hex>` behind it. The packages of an
  earlier list keep every path that a later one claims too.
- `--prefix` must not exist or be empty. It is made beside and renamed.
- `--channels` is JSON, and may be missing: {"mirrors": {address or beginning of one: where to ask instead},
  "auth": {host: credentials}, "proxies": {variable: value}}, the credentials as rattler and pixi write them
  (BearerToken, CondaToken, BasicHTTP), the variables as environments have them.
- Post-link scripts are told only; `--run-scripts` runs those that such a call told on its standard output.
- Every record in conda-meta is written anew: the package's own address, nothing of this machine or time,
  so the same list gives the same files. Shipped byte code whose source is there too is left out: its times
  fit no image.

On standard output comes JSON: {"claims": [...], "lost": {name: [paths]}, "scripts": [[name, version, build
number]]}. A failure is one JSON line on standard error, {"error": kind, "message": ..., "packages": [...]},
and exit code 1 (2 for wrong arguments).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LINKER = 1
"""The rules of this file. Another number where the same packages give other files."""
CHUNK = 1 << 20
ATTEMPTS = 6
AT_ONCE = 6
SCRIPT_SECONDS, SCRIPT_OUTPUT, SCRIPT_TAIL = 3600, 16 << 20, 2000  # of a post-link script


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


def parse_lists(paths: Sequence[Path]) -> list[Wanted]:
    """The packages of all lists, each with the number of its list."""
    texts = [path.read_text("utf-8") for path in paths]
    return [item for number, text in enumerate(texts) for item in parse_explicit(text, number)]


# --- fetching ------------------------------------------------------------------------------------


def fetch(items: Sequence[Wanted], folder: Path, settings: dict[str, Any]) -> list[Path]:
    """The archives of `items` in `folder`, each with the right sha256."""
    from rattler.networking import AuthenticationMiddleware, Client, MirrorMiddleware, RetryMiddleware

    os.environ.update(settings.get("proxies") or {})
    auth, mirrors = dict(settings.get("auth") or {}), dict(settings.get("mirrors") or {})
    for address, mirror in mirrors.items():  # rattler sends no password that stands in an address
        parts = urllib.parse.urlsplit(mirror)
        if parts.username:
            user, password = (urllib.parse.unquote(text or "") for text in (parts.username, parts.password))
            auth[parts.hostname or ""] = {"BasicHTTP": {"username": user, "password": password}}
            mirrors[address] = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    file = folder / ".auth.json"
    file.touch(0o600)
    file.write_text(json.dumps(auth))
    os.environ["RATTLER_AUTH_FILE"] = str(file)
    mirrored = MirrorMiddleware({address: [mirror] for address, mirror in mirrors.items()})
    retried = RetryMiddleware(ATTEMPTS - 1)
    client = Client([mirrored, retried, AuthenticationMiddleware()], user_agent="imagefactory")

    async def run() -> list[Path]:
        free = asyncio.Semaphore(AT_ONCE)
        return list(await asyncio.gather(*(_fetch(item, folder, client, free) for item in items)))

    return asyncio.run(run())


async def _fetch(item: Wanted, folder: Path, client: Any, free: asyncio.Semaphore) -> Path:
    """The address told is the channel's: a mirror's may hold a password."""
    from rattler.package_streaming import download_to_path

    path = folder / item.filename
    async with free:
        for attempt in range(ATTEMPTS):
            try:
                await download_to_path(client, item.url, path)
                break
            except Exception as error:
                told = re.sub(r" for url \(.*?\)", "", str(error))
                if re.search(r"\([45]\d\d ", told) or attempt == ATTEMPTS - 1:  # rattler itself asks again
                    raise Failure("fetch", f"{item.url}: {told}", [item.filename]) from None
            await asyncio.sleep(min(2.0**attempt, 30.0))
        check_hash(item, path)
    return path


def check_hash(item: Wanted, path: Path) -> None:
    got = hash_file(path)
    if got != item.sha256:
        words = f"{item.filename} has the wrong hash: expected sha256 {item.sha256}, got {got}"
        raise Failure("hash", words, [item.filename])


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# --- linking -------------------------------------------------------------------------------------


def install(
    items: Sequence[Wanted],
    archives: Sequence[Path],
    prefix: Path,
    scratch: Path,
    *,
    shown: str = "",
    cache: Path | None = None,
    reporter: Any = None,
) -> dict[str, Any]:
    """Links all packages into `prefix`; gives what a caller wants to know of it.

    `shown` is the path written into files where the environment will lie somewhere else. `cache` keeps
    unpacked packages for the next time; files of the prefix may be links to them. `reporter` is rattler's.
    """
    from rattler.exceptions import InstallerError  # type: ignore[attr-defined,unused-ignore]
    from rattler.install import install as link
    from rattler.repo_data import PackageRecord

    async def run() -> list[Any]:
        records = [await _record(item, path, scratch) for item, path in zip(items, archives, strict=True)]
        try:
            await link(
                records,
                target_prefix=prefix,
                cache_dir=cache or scratch / "cache",
                installed_packages=[],
                execute_link_scripts=False,
                show_progress=False,
                reporter=reporter,
                alternative_target_prefix=shown or str(prefix),
            )
        except InstallerError as error:
            raise Failure("link", str(error)) from None
        return records

    records = PackageRecord.sort_topologically(asyncio.run(run()))
    result = normalise(prefix, {item.filename: item for item in items})
    result["scripts"] = [
        [record.name.normalized, str(record.version), record.build_number]
        for record in records
        if Path(_script(prefix, record.name.normalized)).exists()
    ]
    prefix.chmod(0o755)
    return result


async def _record(item: Wanted, archive: Path, scratch: Path) -> Any:
    """The record that py-rattler installs: of the archive at hand, checked against the sha256 of the list."""
    from rattler.package_streaming import PackageArchive
    from rattler.repo_data import PackageRecord, RepoDataRecord

    index = scratch / "index.json"
    try:
        opened = await PackageArchive.from_path(archive)
        index.write_bytes(await opened.read_file("info/index.json") or b"")
        size = archive.stat().st_size
        described = PackageRecord.from_index_json(index, size=size, sha256=item.sha256)
    except Exception as error:
        raise unsound(item, error) from None
    return RepoDataRecord(described, item.filename, archive.as_uri(), item.channel)


def unsound(item: Wanted, error: Exception) -> Failure:
    words = f"{item.filename} is no sound package: {str(error) or type(error).__name__}"
    return Failure("package", words, [item.filename])


def normalise(prefix: Path, items: dict[str, Wanted]) -> dict[str, Any]:
    """Settles claimed paths and writes conda-meta anew, the same whatever machine and day it is."""
    meta = prefix / "conda-meta"
    records = {path: json.loads(path.read_text("utf-8")) for path in sorted(meta.glob("*.json"))}
    claims, lost = _settle(prefix, list(records.values()), items)
    remove(prefix / "__clobbers__")
    # Of each path the list that brought it: what a later one brings changes nothing of an earlier one.
    groups = {
        row["_path"]: items[record["fn"]].group
        for record in records.values()
        for row in record["paths_data"]["paths"]
    }
    if "CACHEDIR.TAG" not in groups:
        remove(prefix / "CACHEDIR.TAG")
    for path, record in records.items():
        item = items[record["fn"]]
        kept = []
        for row in sorted(record["paths_data"]["paths"], key=lambda row: str(row["_path"])):
            source = source_of(row["_path"])
            if source and groups.get(source, item.group + 1) <= item.group:
                remove(prefix / row["_path"])
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
    remove(meta / "history")
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


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()


# --- post-link scripts ---------------------------------------------------------------------------


def script_command(prefix: str, name: str) -> list[str]:
    """What runs a package's post-link script: conda runs it by bash."""
    return ["/bin/bash", _script(prefix, name)]


def _script(prefix: str | Path, name: str) -> str:
    return f"{prefix}/bin/.{name}-post-link.sh"


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


def follow_script(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Return the end of what a post-link script prints, and how it failed, empty where it did not.

    One that prints without end, or does not end, is killed.
    """
    assert process.stdout is not None
    fd, tail, printed, why = process.stdout.fileno(), b"", 0, ""
    deadline = time.monotonic() + SCRIPT_SECONDS
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    with process.stdout:
        while not why:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                why = f"was stopped after {SCRIPT_SECONDS} s"
                break
            data = os.read(fd, 1 << 16)
            if not data:
                break
            printed, tail = printed + len(data), (tail + data)[-SCRIPT_TAIL:]
            if printed > SCRIPT_OUTPUT:
                why = f"was stopped: it printed more than {SCRIPT_OUTPUT >> 20} MiB"
    if why:
        process.kill()
    code = process.wait()
    return tail.decode(errors="replace").strip(), why or (f"ended with {code}" if code else "")


def run_scripts(prefix: Path, packages: list[list[Any]]) -> None:
    """Runs the post-link scripts of `packages`, what others depend on first."""
    for package in packages:
        process = subprocess.Popen(
            script_command(str(prefix), package[0]),
            env=script_environment(str(prefix), package),
            cwd=prefix,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        told, why = follow_script(process)
        if why:
            raise Failure("script", f"the post-link script of {package[0]} {why}: {told}", [package[0]])
    remove(prefix / ".messages.txt")


# --- the program ---------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="conda_install.py", description="Installs locked conda packages.")
    parser.add_argument("--explicit", type=Path, nargs="+")
    parser.add_argument("--prefix", type=Path, required=True)
    parser.add_argument("--channels", type=Path)
    parser.add_argument("--run-scripts", type=Path)
    options = parser.parse_args(arguments)
    os.umask(0o022)
    prefix = options.prefix.absolute()
    if options.run_scripts:
        run_scripts(prefix, json.loads(options.run_scripts.read_text("utf-8"))["scripts"])
        return
    if not options.explicit:
        parser.error("--explicit names what to install")
    if prefix.exists() and (not prefix.is_dir() or any(prefix.iterdir())):
        raise Failure("prefix", f"{prefix} is not empty")
    items = parse_lists(options.explicit)
    told = options.channels and options.channels.exists()
    settings = json.loads(options.channels.read_text("utf-8")) if told else {}
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".conda-", dir=prefix.parent) as folder:
        scratch = Path(folder)
        downloads = scratch / "downloads"
        downloads.mkdir()
        archives = fetch(items, downloads, settings)
        result = install(items, archives, scratch / "prefix", scratch, shown=str(prefix))
        if prefix.exists():
            prefix.rmdir()
        (scratch / "prefix").rename(prefix)
    print(json.dumps(result, sort_keys=True))


def end(code: int) -> None:
    """Ends at once. Waiting for threads would hold up the news of a failure, and one of rattler's that still
    hands over a result kills the process with a signal when the interpreter goes first."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_program(program: Any) -> None:
    """Runs `program` on this process's arguments, and ends the process."""
    try:
        program(sys.argv[1:])
    except Failure as failure:
        print(failure, file=sys.stderr)
        end(1)
    except Exception:
        traceback.print_exc()
        end(1)
    end(0)


if __name__ == "__main__":
    run_program(main)
