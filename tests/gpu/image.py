"""A verdict on a machine with a GPU, without network, that runs commands over a copy of this tree. Steps:

    .venv/bin/python -m tests.gpu.image pack               here: an image, and pieces to carry
    python3 -B -m tests.gpu.image run --output FOLDER      there, when all pieces are there
    .venv/bin/python -m tests.gpu.image read FOLDER        here: what FOLDER brought, as far as a job file

`pack` prints the calls. `run` and `read` write report.json and report.md, a row for each step; a step is a
process with a limit of its own. Exit code 0 when nothing failed, 1 when something did.

With `run --stand-in FOLDER` it is a rehearsal: the tests' stand-in is the GPU. Its report says `rehearsed`,
and neither its key nor its verdict is kept. docs/dev/gpu-day.md has the order of the calls.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.measure import FAILED, NOT_RUN, PASSED, Report, Row  # noqa: E402

FOLDER = ROOT / "build/gpu-day"
TARGET = "numba-0.68-cu12"
PIECE = 49_500_000
"""Bytes of a piece: a call carries 64 MiB, the 16 MB of the tree among them."""
REHEARSED = "rehearsed"
LIST, STORE, PROJECT, SITE, NEW, KEY = "pieces.json", "store", "project", "site", "verdict.tar", "day.pub"
LOCAL = ("unpacked", "run", "tmp", "locks")
"""Directories of a store that belong to one machine."""

# The base without compilers, which Numba does not need: 47 MB in place of 133 MB.
BASES = """\
bases:
  - name: debian-12
    suite: bookworm
    python: "3.11"
    glibc: "2.36"
    packages: [ca-certificates, libgomp1, python3, python3-venv, tini]
    public: docker.io/library/debian:12-slim
"""
# What the command line needs on a machine without .venv, from requirements/build.txt.
PACKAGES = (
    *("certifi", "cffi", "charset-normalizer", "click", "cryptography", "idna", "packaging", "pycparser"),
    *("pyyaml", "requests", "securesystemslib", "tenacity", "tomlkit", "urllib3", "zstandard"),
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- pieces --------------------------------------------------------------------------------------


class Pieces(io.RawIOBase):
    """A stream into files of `size` bytes: piece-00, piece-01, ... `rows` have name, size and sha256."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size, self.part = folder, size, bytearray()
        self.rows: list[dict[str, object]] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self.part += data
        while len(self.part) >= self.size:
            self._put(self.size)
        return len(data)

    def close(self) -> None:
        if self.part:
            self._put(len(self.part))
        super().close()

    def _put(self, size: int) -> None:
        name, data = f"piece-{len(self.rows):02}", bytes(self.part[:size])
        (self.folder / name).write_bytes(data)
        self.rows.append({"name": name, "size": size, "sha256": hashlib.sha256(data).hexdigest()})
        del self.part[:size]


class Joined(io.RawIOBase):
    """The pieces of a list as one stream. Raises SystemExit for one that is missing or changed."""

    def __init__(self, folder: Path) -> None:
        rows = json.loads((folder / LIST).read_text())["pieces"]
        wrong = [row["name"] for row in rows if not is_whole(folder / row["name"], row["sha256"])]
        if wrong:
            raise SystemExit(f"carry {' '.join(wrong)} first: missing or changed in {folder}")
        self.paths, self.file = [folder / row["name"] for row in rows], io.BytesIO()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        data = self.file.read(len(buffer))
        while not data and self.paths:
            self.file = io.BytesIO(self.paths.pop(0).read_bytes())
            data = self.file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def is_whole(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def split(folder: Path, target: str, size: int) -> list[dict[str, object]]:
    """Write project, store and packages of `folder` as pieces beside them, and their list."""
    for path in folder.glob("piece-*"):
        path.unlink()
    with (
        Pieces(folder, size) as pieces,
        gzip.GzipFile("", "wb", 1, pieces, 0) as packed,  # type: ignore[arg-type]
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for name in (PROJECT, STORE, SITE):
            archive.add(folder / name, name, filter=lambda member: None if is_local(member.name) else member)
    document = {"target": target, "pieces": pieces.rows}
    (folder / LIST).write_text(json.dumps(document, indent=1) + "\n")
    return pieces.rows


def is_local(name: str) -> bool:
    return name.split("/")[:1] == [STORE] and name.split("/")[1:2] != [] and name.split("/")[1] in LOCAL


def pack(folder: Path, python: str, size: int) -> int:
    """Lock, build and test the image, fetch the packages for `python`, and split all of it."""
    project, site = folder / PROJECT, folder / SITE
    (project / "recipes").mkdir(parents=True, exist_ok=True)
    (project / "imagefactory.toml").write_text("")
    (project / "recipes/bases.yaml").write_text(BASES)
    shutil.copy(ROOT / "recipes/numba.yaml", project / "recipes")
    environ = {**os.environ, "IMAGEFACTORY_STORE": str(folder / STORE)}
    for words in (("lock", "base:debian-12", TARGET), ("build", TARGET), ("image", "prune")):
        command = [sys.executable, "-m", "imagefactory", "-C", str(project), *words]
        subprocess.run(command, env=environ, check=True)
    shutil.rmtree(site, ignore_errors=True)
    wanted = folder / "packages.txt"
    wanted.write_text("".join(requirements(ROOT / "requirements/build.txt")))
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--target", str(site), "--python-version", python, "-r", str(wanted)]
    subprocess.run([*command, "--python-platform", "x86_64-manylinux_2_28"], check=True)
    rows = split(folder, TARGET, size)
    where = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    calls = ["bash tests/run gpu --output $OUT", *["true"] * (len(rows) - 1)]
    for row, command_there in zip(rows, calls, strict=True):
        say(f"call: carry {where}/{row['name']} ({row['size']:,} bytes), run: {command_there}")
    say(f"last call: carry {where}/{LIST}, run: python3 -B -m tests.gpu.image run --output $OUT")
    return 0


def requirements(path: Path) -> Iterator[str]:
    """The lines of PACKAGES in a file of requirements, with their hashes."""
    inside = False
    for line in path.read_text().splitlines(keepends=True):
        if not line.startswith((" ", "#")):
            inside = line.partition("==")[0].partition("[")[0] in PACKAGES
        if inside:
            yield line


# --- steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """The command line of `program` on a store, a project and settings in `folder` alone."""

    folder: Path
    program: tuple[str, ...]
    extra: Mapping[str, str] = field(default_factory=dict)

    def environ(self) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("IMAGEFACTORY_")}
        mine = {
            "HOME": str(self.folder),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "IMAGEFACTORY_STORE": str(self.folder / STORE),
            "IMAGEFACTORY_CACHE": str(self.folder / "cache"),
            "PYTHONPATH": f"{ROOT}:{self.folder / SITE}",
        }
        return {**kept, **mine, **self.extra}

    def command(self, *words: str) -> list[str]:
        project = self.folder / PROJECT
        return [*self.program, *(("-C", str(project)) if project.exists() else ()), *words]

    def step(self, report: Report, part: str, *words: str, limit: float = 60.0) -> bool:
        """Run a command as a row of the report. Returns whether it passed."""
        began = time.monotonic()
        try:
            done = subprocess.run(
                self.command(*words),
                cwd=self.folder,
                env=self.environ(),
                capture_output=True,
                text=True,
                timeout=limit,
            )
            text = done.stdout if done.returncode == 0 else f"{done.stdout} {done.stderr}"
            state = PASSED if done.returncode == 0 else FAILED
            detail = f"exit code {done.returncode}: {' '.join(text.split())[-600:]}"
        except subprocess.TimeoutExpired:
            state, detail = NOT_RUN, f"its {limit:.0f} seconds were over before its end"
        seconds = round(time.monotonic() - began, 1)
        report.add(Row(part, " ".join(words[:2]), state, detail, seconds))
        return state == PASSED


def finish(report: Report, *, rehearsal: bool) -> int:
    failed = any(row.state != PASSED for row in report.rows)
    report.outcome = FAILED if failed else REHEARSED if rehearsal else PASSED
    report.write()
    print(f"{report.outcome}: {report.folder}/report.md and report.json")
    if rehearsal:
        print("a rehearsal on a stand-in: nothing is verified, and nothing of it is kept")
    return int(failed)


def run(folder: Path, output: Path, stand_in: Path | None) -> int:
    """Verify the image of the pieces on the GPU of this machine, by a key of this run alone."""
    target = json.loads((folder / LIST).read_text())["target"]
    report = Report(output, time.monotonic())
    report.machine.update(target=target, rehearsal=stand_in is not None)
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as name:
        work = Path(name)
        began = time.monotonic()
        with tarfile.open(fileobj=io.BufferedReader(Joined(folder)), mode="r|gz") as archive:
            archive.extractall(work)  # `pack` wrote it: its sha256 were compared
        before = names_of(work / STORE)
        took = round(time.monotonic() - began, 1)
        report.add(Row("image", "unpack", PASSED, f"{len(before)} files of the store", took))
        program = ("-m", "imagefactory")
        if stand_in:
            from tests.services.libcuda import build_libcuda

            library = stand_in / "libcuda.so.1"
            if not library.exists():
                build_libcuda(stand_in)
            program = (str(Path(__file__).with_name("stand_in.py")), str(library))
        else:
            report.add(link_driver())
        machine = Machine(work, (sys.executable, "-B", *program))
        machine.step(report, "image", "key", "create", "day")
        machine.step(report, "image", "key", "trust", "day")
        machine.step(report, "image", "verify", target, "--suite", "quick", "--json", limit=300.0)
        machine.step(report, "image", "verdict", "list", target)
        machine.step(report, "image", "image", "promote", target)
        with tarfile.open(output / NEW, "w") as archive:
            for path in sorted(names_of(work / STORE) - before | {"index.json"}):
                archive.add(work / STORE / path, path)
        for key in (work / "config").rglob("day.pub"):
            shutil.copy(key, output / KEY)
    return finish(report, rehearsal=stand_in is not None)


def names_of(store: Path) -> set[str]:
    paths = (path for path in store.rglob("*") if path.is_file() and not path.is_symlink())
    names = (path.relative_to(store).as_posix() for path in paths)
    return {name for name in names if name.split("/")[0] not in LOCAL}


def link_driver() -> Row:
    """Let the linker's cache name the driver's library, by which the sandbox finds it."""
    program = next((path for path in ("/sbin/ldconfig", "/usr/sbin/ldconfig") if Path(path).is_file()), "")
    if not program:
        return Row("image", "driver", FAILED, "there is no ldconfig")

    def cached() -> bool:
        done = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=30)
        return "libcuda.so.1" in done.stdout

    if cached():
        return Row("image", "driver", PASSED, "the linker's cache has libcuda.so.1")
    loaded = "import ctypes; ctypes.CDLL('libcuda.so.1'); print(open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=30)
    paths = {line.split()[-1] for line in done.stdout.splitlines() if "/libcuda.so" in line}
    folders = sorted(str(Path(path).parent) for path in paths)
    subprocess.run([program, *folders], capture_output=True, timeout=60)
    state = PASSED if cached() else FAILED
    where = " ".join(folders) or "no folder: libcuda is not found"
    return Row("image", "driver", state, f"ldconfig ran for {where}")


def files_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """The plain files of an archive of another machine. Raises SystemExit for a name that leaves it."""
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is None or member.name.startswith("/") or ".." in member.name.split("/"):
                raise SystemExit(f"{path} has {member.name!r}, which is no file of a store")
            yield member.name, file.read()


def send_verdicts(site: Machine, target: str) -> Row:
    """Send the image with its verdicts to the registry of the site: `push` sends the image alone."""
    from imagefactory.actions.verdicts import local_place, registry_of
    from imagefactory.oci.graph import read_graph
    from imagefactory.oci.transfer import TransferRequest, send
    from imagefactory.progress import QUIET
    from imagefactory.project import load_project
    from imagefactory.settings.load import load_settings

    environ, root = site.environ(), site.folder / PROJECT
    project = load_project(load_settings(directory=root, start=root, environ=environ), environ)
    family, _, version = target.partition("-")
    source, place = local_place(project, family), registry_of(project, family)
    graph = read_graph(source, version, referrers=True)
    sending = TransferRequest(graph=graph, repository=place.repository, tags=("brought",))
    send(source, place.store, sending, QUIET)
    return Row("site", "verdicts", PASSED, f"{len(graph.manifests)} manifests to {place}")


def read(brought: Path, folder: Path, output: Path) -> int:
    """Take the verdict that `run` brought through a registry to a job file, in a copy of the store."""
    from tests.services.registry import registry_server

    there = json.loads((brought / "report.json").read_text())
    target, rehearsal = there["target"], there["rehearsal"]
    report = Report(output, time.monotonic())
    report.machine.update(target=target, rehearsal=rehearsal)
    family = target.partition("-")[0]
    with (
        tempfile.TemporaryDirectory(prefix="gpu-day-", dir=folder) as name,
        tempfile.TemporaryDirectory(prefix="gpu-day-") as home,  # a user is outside of every project
    ):
        work = Path(name)
        shutil.copytree(folder / PROJECT, work / PROJECT)
        for path in names_of(folder / STORE):  # by links: nothing of a rehearsal comes into the store itself
            (work / STORE / path).parent.mkdir(parents=True, exist_ok=True)
            (work / STORE / path).hardlink_to(folder / STORE / path)
        for path, data in files_of(brought / NEW):
            (work / STORE / path).parent.mkdir(parents=True, exist_ok=True)
            (work / STORE / path).unlink(missing_ok=True)
            (work / STORE / path).write_bytes(data)
        with registry_server(work / "registry") as server:
            place = {"IMAGEFACTORY_REGISTRY": f"{server.host}/day"}
            site = Machine(work, (sys.executable, "-m", "imagefactory"), place)
            site.step(report, "site", "key", "trust", str(brought / KEY))
            site.step(report, "site", "verdict", "list", target)
            site.step(report, "site", "push", target)
            report.add(send_verdicts(site, target))
            site.step(report, "site", "image", "promote", target)
            site.step(report, "site", "key", "create", "site")
            site.step(report, "site", "key", "trust", "site")
            site.step(report, "site", "site", "publish")
            site.step(report, "site", "site", "invite", "--push", "-o", str(work / "invitation.toml"))
            user, job = Machine(Path(home), site.program), Path(home, "job.sub")
            user.step(report, "user", "site", "join", "--yes", f"{server.host}/day")
            user.step(report, "user", "job", "write", target, "-o", str(job))
            if job.exists():
                shutil.copy(job, output / f"{family}.sub")
    if rehearsal:
        for name in (NEW, KEY):
            (brought / name).unlink()
    return finish(report, rehearsal=rehearsal)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu.image", description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing, running, reading = (verbs.add_parser(verb) for verb in ("pack", "run", "read"))
    for verb in (packing, running, reading):
        verb.add_argument("--folder", type=Path, default=FOLDER, help="of the image and its pieces")
    packing.add_argument("--python", default="3.12", help="the version of Python there")
    packing.add_argument("--size", type=int, default=PIECE, help="bytes of a piece")
    running.add_argument("--output", type=Path, required=True, help="what comes back")
    running.add_argument("--stand-in", type=Path, help="rehearse with the tests' libcuda, built there")
    reading.add_argument("brought", type=Path, help="the output of run")
    reading.add_argument("--output", type=Path, default=FOLDER / "read")
    given = parser.parse_args(arguments)
    given.folder = given.folder.absolute()
    if given.verb == "pack":
        return pack(given.folder, given.python, given.size)
    given.output = given.output.absolute()
    given.output.mkdir(parents=True, exist_ok=True)
    if given.verb == "run":
        return run(given.folder, given.output, given.stand_in and given.stand_in.absolute())
    return read(given.brought.absolute(), given.folder, given.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
