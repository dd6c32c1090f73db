"""Link local conda packages for the assemble engine. A separate program:

    python -m imagefactory.build.conda.link --explicit FILE.. --prefix DIR --as /opt/env
        --packages FOLDER --cache FOLDER

It links as `build/conda_install.py` does, with protection. That program runs in a build stage of a
container. Here packages are linked on this machine, and a hostile package must not read or write its files.
A line "+" is printed for each unpacked and each linked package, and at the end the output of
conda_install.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imagefactory.build.conda_install import (
    Failure,
    Wanted,
    check_hash,
    end,
    install,
    parse_lists,
    run_program,
    unsound,
)
from imagefactory.trees import read_file, remove_tree


class CondaPackage:
    """The metadata of a package: `info` its files by name, `commands` its programs (entry points)."""

    def __init__(self, archive: Path, info: dict[str, bytes], paths: list[str]) -> None:
        self.archive, self.info, self.index = archive, info, info["info/index.json"]
        value = json.loads(self.index)
        self.name = str(value["name"])
        self.stem = "-".join((self.name, str(value["version"]), str(value["build"])))
        self.python = value.get("noarch") == "python"
        self.paths = paths
        self.commands: list[tuple[str, str]] = []


async def read_package(archive: Path, item: Wanted) -> CondaPackage:
    """Return the package of `archive`. Rejects paths outside the prefix.

    py-rattler joins the paths of info/paths.json to the prefix unchecked. Its own extraction and its rule
    for claimed paths protect against files below links to the outside; `check_unpacked` checks the result.
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
        package = CondaPackage(archive, info, paths)
        site_packages = str(json.loads(package.index).get("python_site_packages_path") or "lib")
        if package.python:
            info["info/link.json"] = await opened.read_file("info/link.json") or b""
            link = json.loads(info["info/link.json"] or b"{}").get("noarch") or {}
            points = [str(text).partition("=") for text in link.get("entry_points") or ()]
            package.commands = [(command.strip(), of.strip()) for command, _, of in points]
    except Exception as error:
        raise unsound(item, error) from None
    if re.sub(r"\.conda$|\.tar\.bz2$", "", item.filename) != package.stem:
        raise Failure("package", f"{item.filename} contains {package.stem}", [item.filename])
    for path in (*paths, site_packages):
        if _leads_out(path):
            words = f"{item.filename} has {path!r}, which is not a path inside the prefix"
            raise Failure("path", words, [item.filename])
    for command, _ in package.commands:
        if not re.fullmatch(r"[^/\x00-\x1f\x7f]+", command) or command in (".", ".."):
            words = f"{item.filename} has an entry point called {command!r}"
            raise Failure("path", words, [item.filename])
    return package


def _leads_out(path: str) -> bool:
    parts = path.split("/")
    # A name that begins with .wh. would remove another package's file: it is a whiteout in layers.
    odd = re.search(r"[\x00-\x1f\x7f]|(^|/)\.wh\.", path)
    return bool({"", ".", ".."} & set(parts)) or parts[0] in ("conda-meta", "__clobbers__") or odd is not None


def check_commands(packages: list[CondaPackage]) -> None:
    """Reject an entry point whose program is at a path of another package.

    py-rattler does not detect such a claim: it would write the program through a link there, even into a
    file of this machine or of the cache.
    """
    owners: dict[str, str] = {}
    for package in packages:
        for path in package.paths:
            if package.python and path.startswith("python-scripts/"):
                path = "bin" + path[len("python-scripts") :]
            owners["/".join(path.split("/")[:2])] = package.name
    programs: dict[str, tuple[str, str]] = {}
    for package in packages:
        for command, of in package.commands:
            path = f"bin/{command}"
            other = owners.get("bin") or owners.get(path)
            first = programs.setdefault(path, (package.name, of))
            if not other and first[1] != of:
                other = first[0]
            if other:
                words = f"{path} is an entry point of {package.name}, and {other} has something else there"
                raise Failure("path", words, [package.name, other])


def check_unpacked(package: CondaPackage, directory: Path) -> None:
    """Reject an unpacked package that differs from `read_package`, or has misleading links.

    An archive may have a name twice, and a list may call a link a file. py-rattler then reads the link's
    target, a file of this machine.
    """
    filename = package.archive.name
    for name, data in package.info.items():
        try:
            content = read_file(directory, name, len(data))
        except FileNotFoundError:
            content = b""
        except OSError:
            content = None
        if content != data:
            words = f"{filename} holds {name} twice, or what was unpacked of it has changed since"
            raise Failure("path", words, [filename])
    rows = json.loads(package.info.get("info/paths.json") or b"{}").get("paths") or ()
    links = {str(row["_path"]) for row in rows if row.get("path_type") == "softlink"}
    changed = {str(row["_path"]) for row in rows if "prefix_placeholder" in row}
    # The older form of info/paths.json: paths after their placeholder and mode, perhaps in quotes.
    rows_of = package.info.get("info/has_prefix", b"").decode(errors="replace").splitlines()
    top = directory.resolve()
    sound = {""}
    for path in package.paths:
        above = path.rpartition("/")[0]
        if above not in sound:
            if (directory / above).resolve() != top / above:
                raise Failure("path", f"{filename} holds {path!r} below a link", [filename])
            sound.add(above)
        if not (directory / path).is_symlink():
            continue
        old = "info/has_prefix" in package.info
        written = path in changed or any(row.strip(" \"'").endswith(path) for row in rows_of)
        if written or not (old or path in links):
            raise Failure("path", f"{filename} lists the link {path!r} as a file", [filename])


def link(items: Sequence[Wanted], options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Check and link all packages; return the result of `install`."""
    from rattler.install import InstallerReporter

    archives = [(options.packages / item.filename).resolve() for item in items]
    for item, archive in zip(items, archives, strict=True):
        check_hash(item, archive)

    async def read() -> list[CondaPackage]:
        return [await read_package(archive, item) for archive, item in zip(archives, items, strict=True)]

    packages = asyncio.run(read())
    check_commands(packages)
    by_name = {package.name.lower(): package for package in packages}

    class Watcher(InstallerReporter):
        def on_populate_cache_complete(self, cache_entry: int) -> None:  # noqa: ARG002
            print("+", flush=True)

        def on_link_start(self, operation: int, package_name: str) -> int:
            # The package is unpacked and not linked yet. Errors of this method would be lost.
            try:
                package = by_name[package_name]
                check_unpacked(package, options.cache / package.stem)
            except Failure as failure:
                # Correct next time if the disk or another process changed it.
                remove_tree(options.cache / package.stem)
                exit_now(failure, scratch)
            except Exception as error:
                exit_now(Failure("link", f"{package_name}: {error!r}", [package_name]), scratch)
            return operation

        def on_link_complete(self, index: int) -> None:  # noqa: ARG002
            print("+", flush=True)

    reporter = Watcher()  # type: ignore[abstract]
    prefix = scratch / "prefix"
    return install(
        items, archives, prefix, scratch, shown=options.shown, cache=options.cache, reporter=reporter
    )


def exit_now(failure: Failure, scratch: Path) -> None:
    """End the process at once, so that nothing more is linked."""
    with contextlib.suppress(OSError):
        remove_tree(scratch)
    print(failure, file=sys.stderr)
    end(1)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="link", description="Links conda packages that are at hand.")
    parser.add_argument("--explicit", type=Path, nargs="+", required=True)
    parser.add_argument("--prefix", type=Path, required=True)
    parser.add_argument("--as", dest="shown", required=True)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args(arguments)
    os.umask(0o022)
    items = parse_lists(options.explicit)
    with tempfile.TemporaryDirectory(prefix=".conda-", dir=options.prefix.parent) as directory:
        result = link(items, options, Path(directory))
        Path(directory, "prefix").rename(options.prefix)
    print(json.dumps(result, sort_keys=True))


if __name__ == "__main__":
    run_program(main)
