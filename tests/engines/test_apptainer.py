"""The apptainer engine, its .sif files and its runner, with the real apptainer. Needs root."""

from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from imagefactory.actions.definition import define_target
from imagefactory.build.apptainer import ApptainerEngine, share_layout
from imagefactory.build.base.image import BuiltBase
from imagefactory.build.secrets import BuildSecrets, find_secrets
from imagefactory.build.sif import SifBuilder, write_sqsh
from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.model import BuildSpec, Lock, Mount, RunSpec
from imagefactory.oci.graph import StoreRepository, read_graph
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.maintenance import collect
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Image,
    SifArtifact,
    canonical_json,
    format_descriptor,
)
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.sif import find_sif, load_sif, read_partition, sifs_of
from imagefactory.oci.squash_layers import SQUASHED
from imagefactory.oci.transfer import TransferRequest, send
from imagefactory.progress import QuietProgress
from imagefactory.project import load_project
from imagefactory.runtime.apptainer import ApptainerRunner
from imagefactory.runtime.apptainer_command import CHILD, ApptainerCommand, SifRequest
from imagefactory.runtime.devices import GpuDevices
from imagefactory.scan.layers import unpacked_sif
from imagefactory.settings.load import load_settings
from tests.made.errors import fails
from tests.made.gpu_code import forward_libcuda
from tests.made.layer_store import TAR, file, make_tar
from tests.made.squashfs import count_packed
from tests.made.supplies import supplies
from tests.services.apptainer import ORDINARY_UID, as_ordinary_user
from tests.services.children import child
from tests.services.factory import Factory, lend
from tests.services.gpu_host import library_of_the_future

ROOT = Path(__file__).parents[2]
TARGET = "tiny-12.1-cu121"
CANARY = "canary-5d1f0c9e"


@dataclass(frozen=True, kw_only=True)
class Ground:
    """One small target, built by assemble into a store."""

    factory: Factory
    layout: Layout
    image: Image
    definition: BuildSpec
    base: BuiltBase
    command: ApptainerCommand

    def make(self, image: Image, compression: str = "fast") -> SifArtifact:
        return SifBuilder(self.layout, self.command, workers=2).make(
            image, TARGET, compression, QuietProgress()
        )

    @property
    def runner(self) -> ApptainerRunner:
        return ApptainerRunner(self.command, self.make)


@pytest.fixture(scope="module")
def ground(apptainer: str, tiny_root: Path, small_store: Path) -> Iterator[Ground]:
    folder = Path(tempfile.mkdtemp(prefix="apptainer-"))
    folder.chmod(0o755)  # an ordinary user looks in
    root = shutil.copytree(tiny_root, folder / "tiny")
    made = replace(lend(small_store, folder), root=root)
    made.run("build", "--engine", "assemble", "--no-test", TARGET)
    factory = load_project(load_settings(directory=root, start=root, environ=made.environ), made.environ)
    layout = factory.layout
    image, base = layout.image("tiny:12.1-cu121"), layout.image("base:debian-12")
    assert image
    assert base
    yield Ground(
        factory=made,
        layout=layout,
        image=image,
        definition=define_target(factory, factory.targets[0]),
        base=BuiltBase(image=base, folders=(), identity="sha256:" + "0" * 64, epoch=0, published=True),
        command=ApptainerCommand(os.environ),
    )
    shutil.rmtree(folder, ignore_errors=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


# --- the adapter catches what spython reports as success -------------------------------------------


@pytest.fixture
def bench(ground: Ground, tmp_path: Path) -> Path:
    share_layout(ground.layout, ground.base.image.manifest, tmp_path / "base")
    return tmp_path


def definition_of(bench: Path, post: str) -> str:
    (bench / "x.def").write_text(f"Bootstrap: oci\nFrom: base\n%post\n{textwrap.indent(post, '    ')}\n")
    return "x.def"


@pytest.mark.parametrize("earlier", [b"", b"a file of an earlier time"])
def test_a_failing_build_is_caught(ground: Ground, bench: Path, earlier: bytes) -> None:
    output = bench / "out" / "x.sif"
    output.parent.mkdir()
    if earlier:
        output.write_bytes(earlier)
    lines: list[str] = []
    order = SifRequest(
        folder=bench, spec=definition_of(bench, "echo before\necho went wrong >&2\nexit 3"), output=output
    )
    with fails("apptainer-build-failed", r"x\.sif: .*255", message="went wrong"):
        ground.command.build(order, lines.append)
    assert "before" in lines
    assert [path.name for path in output.parent.iterdir()] == (["x.sif"] if earlier else [])
    assert not earlier or output.read_bytes() == earlier


def test_spython_calls_a_failure_success(ground: Ground, bench: Path) -> None:
    """Why nothing here believes it: remove the adapter's checks when this fails."""
    code = """
        from spython.main import Client
        Client.quiet = True
        built = Client.build(recipe="x.def", image="there.sif", sudo=False, quiet=True, options=["--force"])
        print([built])
    """
    definition_of(bench, "exit 3")
    (bench / "there.sif").write_text("of an earlier time")
    (bench / "bin").mkdir()
    (bench / "bin/singularity").symlink_to(ground.command.find())
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=bench, env={**os.environ, "PATH": f"{bench}/bin:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["['there.sif']"], done.stdout + done.stderr


def test_an_interrupted_build_leaves_nothing(ground: Ground, bench: Path) -> None:
    output, asleep = bench / "out" / "x.sif", marked_sleep()

    def stop(line: str) -> None:
        if line == "ready":
            raise KeyboardInterrupt

    order = SifRequest(folder=bench, spec=definition_of(bench, f"echo ready\n{asleep}"), output=output)
    with pytest.raises(KeyboardInterrupt):
        ground.command.build(order, stop)
    assert list(output.parent.iterdir()) == []
    assert not running(asleep)


def test_a_killed_factory_takes_its_build_along(ground: Ground, bench: Path) -> None:
    asleep = marked_sleep()
    definition_of(bench, f"echo ready\n{asleep}")
    code = f"""
        import os
        from pathlib import Path
        from imagefactory.runtime.apptainer_command import ApptainerCommand, SifRequest
        order = SifRequest(folder=Path({str(bench)!r}), spec="x.def", output=Path({str(bench / "x.sif")!r}))
        ApptainerCommand(os.environ).build(order, lambda line: print(line, flush=True))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout
        assert "ready\n" in iter(process.stdout.readline, "")
        process.kill()
        # Read to its end: whoever still held the pipe would be alive.
        assert "FATAL" not in process.stdout.read()
    assert not running(asleep)


def test_a_build_ends_when_nobody_hears_it(tmp_path: Path) -> None:
    """A dead parent may be noticed by what is said first, while its other pipe is still there."""
    asleep = marked_sleep()
    program = tmp_path / "singularity"
    program.write_text(f"#!/bin/sh\n{asleep} &\necho ready\nwhile echo more; do :; done\n")
    program.chmod(0o755)
    with child(
        [sys.executable, "-P", str(CHILD), "build"], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert b"ready\n" in iter(process.stdout.readline, b"")
        process.stdout.close()
        assert process.wait(timeout=60) == -signal.SIGKILL
        assert not running(asleep)


def marked_sleep() -> str:
    """A command that is found in all of /proc, and that no other run of the tests has."""
    return f"sleep 4711.{secrets.randbelow(10**12):012}"


def running(words: str) -> bool:
    """Whether a process with this command line comes to live on for a minute."""
    wanted = words.replace(" ", "\0").encode()
    for _ in range(600):
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes())
            except OSError:
                continue
        if not any(line.strip(b"\0") == wanted for line in lines):
            return False
        time.sleep(0.1)
    return True


def test_the_callers_environment_stays_out(ground: Ground, bench: Path) -> None:
    environ = {
        **os.environ,
        "APPTAINERENV_LEAK": "1",
        "SINGULARITYENV_LEAK": "1",
        "APPTAINER_BIND": "/root:/srv",
    }
    lines: list[str] = []
    order = SifRequest(
        folder=bench, spec=definition_of(bench, "echo leak=${LEAK:-none}; ls /srv"), output=bench / "x.sif"
    )
    ApptainerCommand({**environ, "LEAK": "1"}).build(order, lines.append)
    assert "leak=none" in lines
    sif = replace_path(ground.make(ground.image), bench / "x.sif")
    done = ApptainerRunner(ApptainerCommand({**environ, "LEAK": "1"}), ground.make).run(
        sif, RunSpec(argv=("sh", "-c", "echo ${LEAK:-none}; ls /srv"))
    )
    assert done.stdout == "none\n"


def replace_path(sif: SifArtifact, path: Path) -> SifArtifact:
    return replace(sif, path=path)


# --- the engine ------------------------------------------------------------------------------------


class Locked(http.server.SimpleHTTPRequestHandler):
    """A package index behind a password."""

    def do_GET(self) -> None:
        wanted = "Basic " + base64.b64encode(f"ada:{CANARY}".encode()).decode()
        if self.headers.get("Authorization") == wanted:
            return super().do_GET()
        self.send_response(401)
        self.send_header("WWW-Authenticate", "Basic realm=index")
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def locked_index(ground: Ground) -> Iterator[PackageIndex]:
    """The target's wheels behind a password that is the canary."""
    folder = ground.factory.cache.parent / "index"
    for wheel in ground.definition.lock.wheels:
        (source,) = ground.factory.cache.glob(f"wheels/**/{wheel.filename}")
        place = folder / "simple" / wheel.name
        place.mkdir(parents=True)
        shutil.copy(source, place)
        (place / "index.html").write_text(f'<a href="{wheel.filename}">{wheel.filename}</a>')
    handler = functools.partial(Locked, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://ada:{CANARY}@127.0.0.1:{server.server_port}/simple"
        yield PackageIndex(url=url, origin="a test", certificates="", proxy="", environment=())
        server.shutdown()


class Remembering(QuietProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def built(ground: Ground, locked_index: PackageIndex) -> tuple[SifArtifact, list[str]]:
    """What the engine made through that index, and all it said."""

    def secrets(lock: Lock | None) -> BuildSecrets:
        assert lock == ground.definition.lock
        found = find_secrets(locked_index, {})
        return replace(found, certificates=f"# {CANARY}\n".encode() + (found.certificates or b""))

    engine, progress = ApptainerEngine(ground.layout, ground.command, secrets), Remembering()
    assert engine.require() == ground.command.version()
    assert engine.find(ground.definition, ground.base) is None
    sif = engine.build(ground.definition, supplies(ground.base), progress)
    assert engine.find(ground.definition, ground.base) == sif
    return sif, progress.lines


def test_engine_keeps_what_it_built(ground: Ground, built: tuple[SifArtifact, list[str]]) -> None:
    sif, lines = built
    assert sif.name == f"{TARGET}-{sif.file.digest[7:19]}.sif"
    assert (sif.made_from, sif.compression, sif.config) == ("", "fast", sif.file.digest)
    assert sha256_of(sif.path) == sif.file.digest
    assert find_sif(ground.layout, "tiny:12.1-cu121.sif") == sif
    assert any("Successfully installed" in line for line in lines)
    assert list(ground.layout.tmp.glob("sif-*")) == []
    ground.layout.untag("tiny:12.1-cu121.sif")
    ApptainerEngine(ground.layout, ground.command, pytest.fail).tag(ground.definition, sif)
    assert find_sif(ground.layout, "tiny:12.1-cu121.sif") == sif


def test_no_secret_of_the_machine_is_in_it(built: tuple[SifArtifact, list[str]], tmp_path: Path) -> None:
    sif, lines = built
    word = CANARY.encode()
    assert any("Collecting idna" in line for line in lines)  # it came through the locked index
    assert not any(CANARY in line for line in lines)
    program = ApptainerCommand(os.environ).find()
    listed = subprocess.run(
        [program, "sif", "list", str(sif.path)], capture_output=True, text=True, check=True
    )
    rows = [line.split("|") for line in listed.stdout.splitlines() if line[:1].isdigit()]
    assert len(rows) >= 4
    for number, *_, kind in rows:
        dumped = tmp_path / number.strip()
        with dumped.open("wb") as file:
            subprocess.run([program, "sif", "dump", number.strip(), str(sif.path)], stdout=file, check=True)
        if kind.startswith("FS"):
            tree = tmp_path / "tree"
            subprocess.run(
                ["unsquashfs", "-q", "-n", "-d", str(tree), str(dumped)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
        else:
            assert word not in dumped.read_bytes()
    files = [path for path in tree.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 4000
    assert [path for path in files if word in path.read_bytes()] == []
    assert list((tree / "mnt").iterdir()) == []
    definition = (tree / ".singularity.d/Singularity").read_text()
    assert "From: image" in definition
    assert "pip.conf" in definition  # the step that reads it, not what it says


def test_built_and_converted_hold_the_locks_packages(
    ground: Ground, built: tuple[SifArtifact, list[str]]
) -> None:
    listed = "sorted((d.name.lower(), d.version) for d in m.distributions())"
    show = f"import importlib.metadata as m; print({listed})"
    wanted = sorted((wheel.name, wheel.version) for wheel in ground.definition.lock.wheels)
    for made in (built[0], ground.image):
        done = ground.runner.run(made, RunSpec(argv=("python", "-c", show)))
        assert done.stdout == f"{wanted}\n", done.stderr


# --- .sif files of images --------------------------------------------------------------------------


def test_export_makes_it_once_and_keeps_it(ground: Ground, tmp_path: Path) -> None:
    first = json.loads(
        ground.factory.run(
            "image", "export", "--format", "sif", "--json", "-o", f"{tmp_path}/a.sif", TARGET
        ).stdout
    )
    (kept,) = sifs_of(ground.layout, ground.image.manifest)
    made = kept.path.stat().st_mtime_ns
    second = json.loads(
        ground.factory.run(
            "image", "export", "--format", "sif", "--json", "-o", f"{tmp_path}/b.sif", TARGET
        ).stdout
    )
    assert (
        first["sha256"] == second["sha256"] == sha256_of(tmp_path / "a.sif") == sha256_of(tmp_path / "b.sif")
    )
    assert kept.path.stat().st_mtime_ns == made
    assert first["source_manifest"] == ground.image.manifest == kept.made_from
    assert first["name"] == f"{TARGET}-{first['sha256'][7:19]}.sif"
    manifest = json.loads(ground.layout.blob_path(kept.digest).read_bytes())
    assert manifest["subject"]["digest"] == ground.image.manifest
    assert manifest["artifactType"] == "application/vnd.sylabs.sif.layer.v1.sif"
    listed = json.loads(ground.factory.run("image", "list", "--json").stdout)
    assert first["name"] in [sif["name"] for sif in listed["sifs"]]
    assert [check.name for check in tmp_path.iterdir() if check.suffix != ".sif"] == []


def test_it_has_the_images_environment_and_labels(ground: Ground) -> None:
    sif = ground.make(ground.image)
    command = [ground.command.find(), "inspect", "--json", str(sif.path)]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    labels = said["data"]["attributes"]["labels"]
    assert dict(ground.definition.labels).items() <= labels.items()
    assert str(ground.layout.path) not in json.dumps(labels)
    done = ground.runner.run(sif, RunSpec(argv=("env", "-0")))
    found = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)
    wanted = dict(ground.image.environment)
    assert wanted.pop("HOME") != found["HOME"]  # the home that apptainer gives goes before the image's
    assert found.pop("LD_LIBRARY_PATH").startswith(wanted.pop("LD_LIBRARY_PATH"))  # apptainer adds its own
    assert wanted.items() <= found.items()


def listed(file: Path, offset: int | None = None) -> dict[str, str]:
    """What unsquashfs says of each path of a .sif: kind and modes, owners, and size or target; no times."""
    offset = read_partition(file).offset if offset is None else offset
    command = ["unsquashfs", "-offset", str(offset), "-lln", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for line in said.splitlines():
        modes, owners, size, _, _, place = line.split(maxsplit=5)
        path, _, target = place.partition(" -> ")
        # A folder's size is that of its list, which depends on where its inodes stand; labels have a date.
        told = "" if modes[0] == "d" or path.endswith("/labels.json") else size
        found[path] = f"{modes} {owners} {told} {target}"
    return found


def test_a_sqsh_is_the_image_as_enroot_starts_it(ground: Ground, tmp_path: Path) -> None:
    """Its files are those of the .sif without apptainer's. /etc/rc is run as enroot does, in a new root."""
    sqsh, again = tmp_path / "x.sqsh", tmp_path / "y.sqsh"
    for path in (sqsh, again):
        write_sqsh(ground.layout, ground.image, path, compression="fast", workers=2, progress=QuietProgress())
    assert sha256_of(sqsh) == sha256_of(again)
    own = {
        f"squashfs-root/etc/{name}"
        for name in ("environment", "fstab", "rc", "rc.local", "profile.d/zz-image-path.sh")
    }
    own |= {"squashfs-root/etc/hosts"}  # apptainer empties it
    files, of_sif = listed(sqsh, 0), listed(ground.make(ground.image).path)
    assert own <= files.keys()
    theirs = {path for path in of_sif if path not in files}
    assert all(
        re.search(r"/(\.singularity\.d|\.(exec|run|shell|test)|environment|singularity)\b", path)
        for path in theirs
    )
    assert {path: files[path] for path in files.keys() - own} == {
        path: of_sif[path] for path in of_sif.keys() - theirs - own
    }
    tree = tmp_path / "tree"
    subprocess.run(["unsquashfs", "-q", "-n", "-d", tree, sqsh], check=True, stdout=subprocess.DEVNULL)
    environment = (tree / "etc/environment").read_text().splitlines()
    assert dict(row.split("=", 1) for row in environment) == dict(ground.image.environment)
    program = "import os, sys; print(os.getcwd(), sys.prefix, sys.argv[1:])"
    command = ["chroot", tree, "/usr/bin/env", "-i", *environment, "/bin/sh", "-l", "/etc/rc"]
    done = subprocess.run(
        [*command, "python", "-c", program, "a b"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "/ /opt/env ['a b']\n"), done


def parts_of(sif: Path) -> tuple[list[str], list[bytes]]:
    """What apptainer says of the parts of a .sif, without where they lie, and those beside the partition."""
    program = ApptainerCommand(os.environ).find()
    command = [program, "sif", "list", str(sif)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [[word.strip() for word in line.split("|")] for line in told.splitlines() if line[:1].isdigit()]
    dumped = [
        subprocess.run([program, "sif", "dump", row[0], str(sif)], capture_output=True, check=True).stdout
        for row in rows[:-1]
    ]
    return ["|".join([*row[:3], row[4]]) for row in rows], dumped


def without_date(data: bytes) -> bytes:
    date = rb'("org.label-schema.build-date": ?")\w+_\d+_\w+_\d{4}_\d+:\d+:\d+_UTC"'
    plain, count = re.subn(date, rb"\1", data)
    return plain if count == 1 else data


def test_it_is_what_apptainer_makes_of_the_image(ground: Ground, tmp_path: Path) -> None:
    """The whole tree, modes, owners, contents and container: apptainer's own build of the same image."""
    share_layout(ground.layout, ground.image.manifest, tmp_path / "image")
    theirs = tmp_path / "theirs.sif"
    ground.command.build(SifRequest(folder=tmp_path, spec="oci:image", output=theirs), lambda _: None)
    ours = ground.make(ground.image).path
    ours_listed = listed(ours)
    assert len(ours_listed) > 4000
    assert ours_listed == listed(theirs)
    (our_parts, our_texts), (their_parts, their_texts) = parts_of(ours), parts_of(theirs)
    assert our_parts == their_parts
    assert list(map(without_date, our_texts)) == list(map(without_date, their_texts))
    with (
        unpacked_sif(ours, tmp_path, QuietProgress()) as our_root,
        unpacked_sif(theirs, tmp_path, QuietProgress()) as their_root,
    ):
        labels = ".singularity.d/labels.json"
        told = [without_date((root / labels).read_bytes()) for root in (our_root, their_root)]
        assert told[0] == told[1]
        (our_root / labels).write_bytes(b"")
        (their_root / labels).write_bytes(b"")
        subprocess.run(["diff", "--recursive", "--no-dereference", our_root, their_root], check=True)


def test_the_same_file_wherever_it_is_made(ground: Ground, tmp_path: Path) -> None:
    first = ground.make(ground.image)
    layout = Layout(tmp_path / "store")
    for name in ("blobs", "oci-layout", "index.json"):
        child = ground.layout.path / name
        (shutil.copytree if child.is_dir() else shutil.copy)(child, layout.path / name)
    layout.blob_path(first.file.digest).unlink()
    image = layout.image(ground.image.name)
    assert image
    second = SifBuilder(layout, ground.command, workers=5).make(image, TARGET, "fast", QuietProgress())
    assert (second.file, second.digest) == (first.file, first.digest)


def on_top(ground: Ground, content: bytes, name: str = "opt/more") -> Image:
    """The image with one more layer, which holds one file."""
    layout = ground.layout
    layer = layout.add(make_tar(file(name, content)), TAR)
    found = layout.manifest(ground.image.manifest)
    assert found
    manifest = json.loads(found[1])
    config = json.loads(layout.blob_path(ground.image.config).read_bytes())
    config["rootfs"]["diff_ids"].append(layer.digest)
    manifest["config"] = format_descriptor(layout.add(canonical_json(config), CONFIG_TYPE))
    manifest["layers"].append(format_descriptor(layer))
    return layout.load("more", layout.add(canonical_json(manifest), MANIFEST_TYPE))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_packed(monkeypatch)


def test_one_layer_more_packs_that_layer_alone(ground: Ground, packed: list[int]) -> None:
    ground.make(ground.image)
    packed.clear()
    sif = ground.make(on_top(ground, b"one more"))
    assert sorted(packed)[0] == len(b"one more")
    assert len(packed) == 2
    assert max(packed) < 50_000  # what apptainer adds
    assert ground.runner.run(sif, RunSpec(argv=("cat", "/opt/more"))).stdout == "one more"


def test_a_kept_file_that_changed_is_in_no_other(ground: Ground, packed: list[int], tmp_path: Path) -> None:
    image = on_top(ground, b"to be changed")
    sif = ground.make(image)  # where the layers' blocks are taken from next
    whole = sif.path.read_bytes()
    sif.path.write_bytes(whole[: len(whole) // 2] + b"!" + whole[len(whole) // 2 + 1 :])
    more = ground.make(on_top(ground, b"another"))
    assert sum(packed) > 10_000_000
    assert not sif.path.exists()
    assert ground.make(image).file == sif.file
    assert sif.path.read_bytes() == whole
    subprocess.run([ground.command.find(), "sif", "list", more.path], check=True)
    with unpacked_sif(more.path, tmp_path, QuietProgress()) as root:
        assert (root / "opt/more").read_bytes() == b"another"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_maker_leaves_nothing(ground: Ground, number: int) -> None:
    image = on_top(ground, f"interrupted by {number}".encode())
    before = {path.name for path in (ground.layout.path / "blobs/sha256").iterdir()}
    code = """
        import os, signal, sys
        from pathlib import Path
        from imagefactory.build.sif import SifBuilder
        from imagefactory.oci import squash_layers
        from imagefactory.oci.layout import Layout
        from imagefactory.progress import QuietProgress
        from imagefactory.runtime.apptainer_command import ApptainerCommand
        copy = squash_layers._copy
        def interrupt(*args):
            os.kill(os.getpid(), int(sys.argv[3]))
            return copy(*args)
        squash_layers._copy = interrupt
        layout = Layout(Path(sys.argv[1]))
        found, _ = layout.manifest(sys.argv[2])
        SifBuilder(layout, ApptainerCommand(os.environ), workers=2).make(
            layout.load("more", found), "tiny", "fast", QuietProgress())
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), ground.layout.path, image.manifest, str(number)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -number, done.stderr
    assert {path.name for path in (ground.layout.path / "blobs/sha256").iterdir()} == before
    assert (list(ground.layout.tmp.glob("sif-*")) == []) == (number == signal.SIGINT)
    shutil.rmtree(ground.layout.tmp)
    assert ground.make(image).file.size > 10_000_000


def test_collection_keeps_it_as_long_as_its_image(ground: Ground) -> None:
    sif = ground.make(ground.image)
    ground.factory.run("image", "prune")
    assert load_sif(ground.layout, sif.digest) == sif
    index = ground.layout.tags()["tiny:12.1-cu121"]
    other = ground.factory.store.parent / "other"
    shutil.copytree(ground.factory.store, other, symlinks=True)
    layout = Layout(other)
    layout.untag("tiny:12.1-cu121")
    collect(layout, QuietProgress())
    assert not layout.has(sif.file)
    assert list((layout.path / SQUASHED).iterdir()) == []
    assert not layout.has(index)
    shutil.rmtree(other, ignore_errors=True)


def test_small_is_smaller(ground: Ground) -> None:
    small = ground.make(ground.image, "small")
    fast = ground.make(ground.image)
    assert small.compression == "small"
    assert small.file.size < 0.9 * fast.file.size
    assert ground.runner.run(small, RunSpec(argv=("python", "-c", "print(6 * 7)"))).stdout == "42\n"


def test_apptainer_pulls_what_was_pushed(ground: Ground, registry: str, tmp_path: Path) -> None:
    sif = ground.make(ground.image)
    source, destination = LayoutStore(ground.layout), RegistryClient(registry)
    origin = StoreRepository(store=source, repository="tiny")
    graph = read_graph(origin, sif.digest)
    tag = f"12.1-cu121-{sif.file.digest[7:19]}.sif"
    send(origin, destination, TransferRequest(graph=graph, repository="tiny", tags=(tag,)), QuietProgress())
    path = tmp_path / "pulled.sif"
    environ = {**os.environ, "APPTAINER_NOHTTPS": "1"}
    pull = [ground.command.find(), "pull", "--disable-cache", str(path), f"oras://{registry}/tiny:{tag}"]
    subprocess.run(pull, capture_output=True, env=environ, check=True)
    assert sha256_of(path) == sif.file.digest
    command = [
        ground.command.find(),
        "exec",
        f"oras://{registry}/tiny@{sif.digest}",
        "python",
        "-c",
        "print(6 * 7)",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.stdout == "42\n", done.stderr


# --- the runner ------------------------------------------------------------------------------------


def run(ground: Ground, *argv: str, **spec: object) -> tuple[int, str, str]:
    done = ground.runner.run(ground.image, RunSpec(argv=argv, **spec))  # type: ignore[arg-type]
    assert not done.timed_out
    return done.returncode, done.stdout, done.stderr


def test_require(ground: Ground) -> None:
    assert ground.runner.require() == f"apptainer {ground.command.version()}"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("true",), 0),
        (("sh", "-c", "exit 7"), 7),
        (("sh", "-c", "exit 255"), 255),  # what apptainer itself ends with when it cannot start one
        (("no-such-program",), 127),
        (("/etc/passwd",), 126),
        (("sh", "-c", "kill -9 $$"), 137),
        (("sh", "-c", "kill -TERM $$"), 143),
    ],
)
def test_exit_codes(ground: Ground, argv: tuple[str, ...], code: int) -> None:
    assert run(ground, *argv)[0] == code


def test_the_streams_stay_apart(ground: Ground) -> None:
    assert run(ground, "sh", "-c", "echo out; echo err >&2") == (0, "out\n", "err\n")


def test_a_script_on_stdin_is_the_callers(ground: Ground, tmp_path: Path) -> None:
    """`... | bash` with a run inside: what the image writes to its stdin is no line of that script."""
    sif = ground.make(ground.image)
    driver = f"{sys.executable} {tmp_path / 'driver.py'} {sif.path}"
    (tmp_path / "driver.py").write_text(DRIVER.replace("print(", "0 and print("))
    write = "echo 'echo PWNED' > /proc/self/fd/0"
    script = ""
    for number, argv in enumerate((["true"], ["sh", "-c", write], ["head", "-c", "3"])):
        spec = json.dumps({"argv": argv, "capture": False})
        script += f"{driver} {shlex.quote(spec)}\n{'abc' * (number == 2)}echo outer {number}\n"
    done = subprocess.run(
        ["bash"], input=script.encode(), capture_output=True, cwd=ROOT, timeout=300, check=False
    )
    assert done.stdout == b"outer 0\nouter 1\nabcouter 2\n", done.stderr


def test_values_arrive_as_they_are(ground: Ground) -> None:
    value = "$(id) `id` $HOME a,B=b \"q\" 'q' \\ \n end"
    code, out, _ = run(ground, "sh", "-c", 'printf %s "$A"', environment=(("A", value),))
    assert (code, out) == (0, value)


def test_no_network_unless_asked_for(ground: Ground) -> None:
    count = "import socket; print(len(socket.if_nameindex()))"
    assert run(ground, "python", "-c", count)[1] == "1\n"
    assert int(run(ground, "python", "-c", count, network=True)[1]) > 1


def test_root_may_write_and_the_image_stays(ground: Ground) -> None:
    sif = ground.make(ground.image)
    assert run(ground, "sh", "-c", "touch /x /opt/env/x /usr/bin/x && echo written")[1] == "written\n"
    assert run(ground, "sh", "-c", "ls /x /opt/env/x 2>/dev/null")[1] == ""
    assert sha256_of(sif.path) == sif.file.digest


def test_uid_65534_with_read_only_root(ground: Ground) -> None:
    code = """
        import os
        assert os.getuid() == os.getgid() == 65534, os.getuid()
        assert not any(os.access(p, os.W_OK) for p in ("/", "/usr", "/opt/env"))
        status = dict(l.split(":", 1) for l in open("/proc/self/status") if ":" in l)
        print(status["CapEff"].strip(), status["CapBnd"].strip(), status["NoNewPrivs"].strip())
        open("/tmp/x", "w").write("scratch")
        open("/etc/x", "w")
    """
    ended, out, err = run(ground, "python", "-c", textwrap.dedent(code), uid=65534, read_only=True)
    assert out.split() == ["0" * 16, "0" * 16, "1"]
    assert (ended, "Read-only file system" in err) == (1, True)


def test_root_inside_has_no_capability(ground: Ground) -> None:
    assert run(ground, "sh", "-c", "id -u; grep CapBnd /proc/self/status")[1].split() == [
        "0",
        "CapBnd:",
        "0" * 16,
    ]


def test_mounts(ground: Ground, tmp_path: Path) -> None:
    odd = tmp_path / "a, folder: with=signs"
    odd.mkdir()
    (odd / "file").write_text("host")
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    mounts = (
        Mount(source=odd, target="/in/side"),
        Mount(source=open_folder, target="/in/side/out", writable=True),
    )
    (odd / "out").mkdir()
    script = "cat /in/side/file; touch /in/side/new; touch /in/side/out/new; ls /root"
    for spec in ({"uid": 0}, {"uid": 65534, "read_only": True}):
        (open_folder / "new").unlink(missing_ok=True)
        _, out, err = run(ground, "sh", "-c", script, mounts=mounts, **spec)
        assert out.startswith("host")
        assert "/in/side/new" in err
        assert (open_folder / "new").exists()
        assert not (odd / "new").exists()


@pytest.mark.parametrize("read_only", [True, False])
def test_a_time_limit_ends_everything(ground: Ground, read_only: bool) -> None:
    asleep = marked_sleep()
    argv = ("sh", "-c", f"echo begun; {asleep} & wait")
    for seconds in (6.0, 120.0):  # apptainer itself may need the shorter one to start
        done = ground.runner.run(ground.image, RunSpec(argv=argv, timeout=seconds, read_only=read_only))
        if done.stdout:
            break
    assert (done.timed_out, done.returncode, done.stdout) == (True, 137, "begun\n")
    assert not running(asleep)


def test_what_cannot_be_is_said(ground: Ground, tmp_path: Path) -> None:
    with fails("workdir-not-found", "/nowhere"):
        run(ground, "true", workdir="/nowhere")
    with fails("mount-failed"):
        run(ground, "true", mounts=(Mount(source=tmp_path / "gone", target="/a"),))
    with fails("command-missing"):
        run(ground, "")
    (tmp_path / "broken.sif").write_bytes(b"no .sif")
    with fails("command-not-started"):
        ground.runner.run(
            replace_path(ground.make(ground.image), tmp_path / "broken.sif"), RunSpec(argv=("true",))
        )


def test_gpus_are_demanded_first(ground: Ground) -> None:
    """`apptainer exec --nv` without a GPU exits 0."""
    if Path("/dev/nvidia0").exists():
        assert run(ground, "sh", "-c", "ls /dev/nvidia0", gpus=True)[0] == 0
        return
    with fails("gpu-device-missing"):
        run(ground, "true", gpus=True)


@pytest.mark.parametrize(
    ("driver", "model", "chosen"),
    [
        ("535.54.03", "NVIDIA A100-PCIE-40GB", True),
        ("535.54.03", "NVIDIA GeForce RTX 3090", False),
        ("580.65.06", "NVIDIA A100-PCIE-40GB", False),
    ],
)
def test_a_libcuda_for_older_drivers_comes_first_where_nvidias_hook_would_put_it(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, driver: str, model: str, chosen: bool
) -> None:
    data = forward_libcuda("12.9", (535, 575))
    name = "usr/local/cuda/compat/libcuda.so.575.57.08"
    image = on_top(ground, data, name)
    devices = GpuDevices(
        devices=(), libraries=("/lib/libcuda.so.1",), links=(), programs=(), driver=driver, models=(model,)
    )
    monkeypatch.setattr("imagefactory.runtime.apptainer.find_gpus", lambda: devices)
    spec = RunSpec(argv=("sh", "-c", "echo $LD_LIBRARY_PATH"), gpus=True)
    first, _, rest = ground.runner.run(image, spec).stdout.strip().partition(":")
    assert (first == "/usr/local/cuda/compat") == chosen
    assert "/.singularity.d/libs" in f"{first}:{rest}"


def test_a_driver_that_needs_a_newer_glibc_than_the_image(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(library_of_the_future())
    devices = GpuDevices(devices=(), libraries=(str(library),), links=(), programs=(), driver="")
    monkeypatch.setattr("imagefactory.runtime.apptainer.find_gpus", lambda: devices)
    with fails("image-glibc-too-old", r"libcuda.so.1 .* 2\.99 "):
        run(ground, "true", gpus=True)


DRIVER = """
import json, os, sys
from pathlib import Path
from imagefactory.runtime.apptainer_command import ApptainerCommand
from imagefactory.model import RunSpec
from imagefactory.oci.manifests import Descriptor, SifArtifact
from imagefactory.runtime.apptainer import ApptainerRunner
sif = SifArtifact(name="x", digest="", file=Descriptor(media_type="", digest="", size=0),
path=Path(sys.argv[1]),
          made_from="", compression="")
runner = ApptainerRunner(ApptainerCommand(os.environ), None)
runner.require()
spec = json.loads(sys.argv[2])
done = runner.run(sif, RunSpec(argv=tuple(spec.pop("argv")), **spec))
print(json.dumps([done.returncode, done.stdout, done.stderr, done.timed_out]))
"""


@pytest.mark.parametrize("uid", [0, 33, ORDINARY_UID])
def test_an_ordinary_user_is_whom_he_asks_for(ground: Ground, tmp_path: Path, uid: int) -> None:
    """He: 65534, who is himself, root or another inside, without a network, and writes where he may."""
    sif = ground.make(ground.image)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        shutil.copytree(
            ROOT / "imagefactory",
            folder / "python/imagefactory",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        shutil.copy(sif.path, folder / "x.sif")
        (folder / "driver.py").write_text(DRIVER)
        for path in folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)

        def ask(**spec: object) -> list[object]:
            driver = ["/usr/bin/python3", folder / "driver.py", folder / "x.sif"]
            environ = {"PATH": os.environ["PATH"], "HOME": name, "PYTHONPATH": f"{name}/python"}
            done = subprocess.run(
                as_ordinary_user(tmp_path, [*driver, json.dumps({"uid": uid, **spec})]),
                capture_output=True, text=True, env=environ, cwd="/", timeout=300, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            return list(json.loads(done.stdout))

        code, out, err, _ = ask(
            argv=["sh", "-c", "id -u; cat /proc/net/dev | wc -l; touch /x"], read_only=True
        )
        assert (code, out) == (1, f"{uid}\n3\n"), err
        assert "Read-only" in str(err)
        assert ask(argv=["no-such-program"])[0] == 127
        if uid == 0:
            assert ask(argv=["sh", "-c", "touch /x && echo written"])[1] == "written\n"
        asleep = marked_sleep()
        assert ask(argv=asleep.split(), timeout=2.0)[3] is True
        assert not running(asleep)
