"""Conda targets by the embedded engine: linked, split by package, the same bytes every time.

Byte code comes from this Python and scripts run without a sandbox: those two need what unit tests have not
(tests/engines/test_conda_assemble.py has).
"""

from __future__ import annotations

import hashlib
import io
import json
import marshal
import os
import shlex
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.build import conda_install
from imagefactory.build.assemble import AssembleEngine
from imagefactory.build.assembly import describe_claims, settle_claims
from imagefactory.build.base.image import BuiltBase
from imagefactory.build.conda import prefix
from imagefactory.build.conda.prefix import (
    LinkedPrefix,
    LinkPlan,
    PathChange,
    PathClaim,
    lay_changes,
    lay_path,
    remove_extracted,
    run_scripts,
    staging_directory,
)
from imagefactory.build.layer_plan import OWN_LAYER_BYTES, LayerPackage, plan_layers
from imagefactory.build.wheel_layer import InstallPrefix
from imagefactory.errors import BuildError
from imagefactory.fs import Removal
from imagefactory.model import BuildSpec, Lock, LockedCondaPackage, LockedPackage, LockedWheel
from imagefactory.oci.layers import END_OF_ARCHIVE, TarSegment, codec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image, OciLayer
from imagefactory.progress import QuietProgress
from tests.made.compiled import compile_here
from tests.made.errors import fails
from tests.made.supplies import supplies
from tests.made.values import make_base, make_lock, make_target
from tests.made.wheels import locked as locked_wheel
from tests.made.wheels import make_wheel
from tests.services.channel_made import (
    ADDRESS,
    PYTHON,
    MadeChannel,
    framework_packages,
    hard_packages,
    pure_packages,
)
from tests.services.conda_package import PLACEHOLDER, CondaPackage, File, pack

BASE = make_base(python="")
TARGET = make_target(
    name="tinytorch-1.0-cu121", source="conda", framework="tinytorch", version="1.0", python=PYTHON,
    requirements=("tinytorch 1.0.*",), channels=(ADDRESS,),
)  # fmt: skip
FEW = ("python-3", "packaging", "tinytool-1.0", "tinyprefix", "oddpaths")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeChannel:
    """The made channel with a Python of a few modules, which cannot run: compiling all of it takes long."""
    channel = MadeChannel(folder=tmp_path_factory.mktemp("channel"))
    site = f"lib/python{PYTHON}"
    python = CondaPackage(
        name="python",
        version=f"{PYTHON}.9",
        build="h0_0_cpython",
        files={
            f"bin/python{PYTHON}": File(data=b"no program", executable=True),
            "bin/python": File(link=f"python{PYTHON}"),
            f"{site}/os.py": b"name = 'none'\n",
            f"{site}/json/decoder.py": b"def decode():\n    return (1, 'x', {'a': 2.5})\n",
            f"{site}/json/__pycache__/decoder.cpython-{PYTHON.replace('.', '')}.pyc": b"old",
            f"{site}/bad.py": b"this is no Python\n",
            f"{site}/json/tests/test_it.py": b"x = 1\n",
        },
    )
    for package in (python, *pure_packages(), *hard_packages(), *framework_packages(numpy=False)):
        pack(channel.folder, package)
    channel.index()
    return channel


@pytest.fixture(autouse=True)
def compile_with_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_here(monkeypatch, PYTHON)


def lock_of(*packages: LockedPackage, target: str = TARGET.name) -> Lock:
    return make_lock(
        target=target,
        python=PYTHON,
        solver="py-rattler",
        wheels=tuple(one for one in packages if isinstance(one, LockedWheel)),
        conda=tuple(one for one in packages if isinstance(one, LockedCondaPackage)),
        channels=(ADDRESS,),
    )


class Notes(QuietProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text.strip())


class Factory:
    """A store and a cache in `folder`, and what packages lie where."""

    def __init__(self, folder: Path, files: Mapping[LockedPackage, Path]) -> None:
        self.layout, self.cache, self.files = Layout(folder / "store"), folder / "cache", dict(files)
        self.notes = Notes()

    def build(self, lock: Lock, *under: Lock, workers: int = 1) -> Image:
        definition = BuildSpec(
            target=replace(TARGET, name=lock.target, on=under[-1].target if under else ""),
            base=BASE,
            lock=lock,
            prefix="/opt/env",
            environment=(("PATH", "/opt/env/bin"),),
            labels=(("imagefactory.target", lock.target),),
            under=under,
        )
        blob = self.layout.add(bytes(1024), "application/vnd.oci.image.layer.v1.tar")
        layer = OciLayer(descriptor=blob, diff_id=blob.digest, title="debian-12")
        image = Image(
            name="base:debian-12", digest=blob.digest, manifest=blob.digest, config=blob.digest, size=1024,
            layers=(layer,), environment=(),
        )  # fmt: skip
        base = BuiltBase(image=image, folders=(self.layout.path,), identity="p", epoch=1, published=True)
        engine = AssembleEngine(self.layout, self.cache, codec="zstd", workers=workers)
        return engine.build(definition, supplies(base, lambda: self.files), self.notes)

    def entries(self, image: Image) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
        """All entries above the base, the upper ones last; no path twice in a layer."""
        found = {}
        for layer in image.layers[1:]:
            data = b"".join(codec("zstd").decompress(self.layout.blob_path(layer.descriptor.digest)))
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                names = tar.getnames()
                assert len(names) == len(set(names)), layer.title
                for entry in tar:
                    file = tar.extractfile(entry) if entry.isreg() else None
                    found[entry.name] = (entry, file.read() if file else b"")
        return found


def factory(folder: Path, made: MadeChannel, *names: str) -> tuple[Factory, Lock]:
    packages = made.locked(*names)
    files = {package: made.archive(package.filename) for package in packages}
    return Factory(folder, files), lock_of(*packages)


def digests(image: Image) -> list[str]:
    return [layer.descriptor.digest for layer in image.layers]


# --- what is in the image --------------------------------------------------------------------------


def test_the_image_holds_the_environment(tmp_path: Path, made: MadeChannel) -> None:
    factory_, lock = factory(tmp_path, made, *FEW)
    found = factory_.entries(factory_.build(lock))
    assert found["opt/env/share/tinyprefix.txt"][1] == b"home=/opt/env\n"
    library = found["opt/env/lib/libtinyprefix.so"][1]
    assert b"/opt/env/share/tinyprefix\0" in library
    assert PLACEHOLDER.encode() not in library
    tool = found["opt/env/bin/tinytool"]
    assert tool[0].mode == 0o755
    assert tool[1].startswith(f"#!/opt/env/bin/python{PYTHON}\n".encode())
    python = found["opt/env/bin/python"][0]
    assert (python.issym(), python.linkname) == (True, f"python{PYTHON}")
    assert found["opt/env/share/odd/up"][0].linkname == "../odd/program"
    assert found["opt/env/share/odd/größe-数.txt"][1] == b"letters\n"
    assert found["opt/env/share/odd/two words.txt"][0].mode == 0o644
    assert found["opt/env/conda-meta/history"][1] == b""
    record = json.loads(found["opt/env/conda-meta/tinytool-1.0-py_0.json"][1])
    assert record["url"] == f"{ADDRESS}/noarch/tinytool-1.0-py_0.conda"
    assert "opt/env/pyvenv.cfg" not in found
    assert {entry.mtime for entry, _ in found.values()} == {1}
    assert {entry.uid for entry, _ in found.values()} == {0}
    assert str(tmp_path).encode() not in b"".join(data for _, data in found.values())


def test_byte_code_is_made_for_every_source(tmp_path: Path, made: MadeChannel) -> None:
    """Unchecked hashes: no time of a source decides whether it holds. Shipped ones do not come along."""
    factory_, lock = factory(tmp_path, made, *FEW)
    found, tag = factory_.entries(factory_.build(lock)), f"cpython-{PYTHON.replace('.', '')}"
    top = f"opt/env/lib/python{PYTHON}"
    for name in ("json/{}decoder", "site-packages/tinytool/{}__init__", "{}os"):
        pyc = found[f"{top}/{name.format('__pycache__/')}.{tag}.pyc"][1]
        assert int.from_bytes(pyc[4:8], "little") == 0b01
        code = marshal.loads(pyc[16:])
        assert code.co_filename == f"/{top}/{name.format('')}.py"
    sources = {path for path in found if path.endswith(".py")}
    compiled = {path for path in found if path.endswith(".pyc")}
    left_out = {f"{top}/bad.py", f"{top}/json/tests/test_it.py"}
    assert len(compiled) == len(sources - left_out)
    assert b"old" not in {found[path][1] for path in compiled}


# --- the same bytes --------------------------------------------------------------------------------


def test_one_lock_gives_one_digest(tmp_path: Path, made: MadeChannel) -> None:
    """Two stores, cold and warm caches, another umask, one process or two."""
    one, lock = factory(tmp_path / "one", made, *FEW, "claims-a", "claims-b")
    first = one.build(lock)
    before = os.umask(0o077)
    try:
        other, _ = factory(tmp_path / "other", made, *FEW, "claims-a", "claims-b")
        assert other.build(lock, workers=2).digest == first.digest
        third, _ = factory(tmp_path / "third", made, *FEW, "claims-a", "claims-b")
        third.cache = one.cache
        assert third.build(lock).digest == first.digest
    finally:
        os.umask(before)
    assert [list(factory_.layout.tmp.iterdir()) for factory_ in (one, other, third)] == [[], [], []]


def test_a_changed_package_writes_its_bucket_alone(tmp_path: Path, made: MadeChannel) -> None:
    factory_, lock = factory(tmp_path, made, *FEW)
    before = factory_.build(lock)
    changed, _ = factory(tmp_path, made, *FEW, "tinytool-1.1")
    packages = [one for one in changed.files if (one.name, one.version) != ("tinytool", "1.0")]
    blobs = set((tmp_path / "store/blobs/sha256").iterdir())
    after = changed.build(lock_of(*packages))
    assert sum(one != other for one, other in zip(digests(before), digests(after), strict=True)) == 1
    assert changed.notes.lines[-1].startswith("1 of ")
    # Beside the layer there are a config, a manifest and an index.
    assert len(set((tmp_path / "store/blobs/sha256").iterdir()) - blobs) == 4


def test_what_another_package_changes_of_one_is_in_its_key(tmp_path: Path, made: MadeChannel) -> None:
    """Byte code is left out where the source is there, whoever brings it. No earlier build decides it."""
    channel = MadeChannel(folder=tmp_path / "channel")
    top, tag = f"lib/python{PYTHON}/site-packages", f"cpython-{PYTHON.replace('.', '')}"
    pack(channel.folder, CondaPackage(name="bytes", files={f"{top}/__pycache__/m.{tag}.pyc": b"old"}))
    pack(channel.folder, CondaPackage(name="text", files={f"{top}/m.py": b"x = 1\n"}))
    channel.index()
    code, text = channel.locked("bytes", "text")
    one, lock = factory(tmp_path / "one", made, *FEW)
    other, _ = factory(tmp_path / "other", made, *FEW)
    for each in (one, other):
        each.files |= {code: channel.archive("bytes"), text: channel.archive("text")}
    whole = lock_of(*lock.conda, code, text)
    found = one.entries(one.build(lock_of(*lock.conda, code)))
    assert found[f"opt/env/{top}/__pycache__/m.{tag}.pyc"][1] == b"old"
    assert one.build(whole).digest == other.build(whole).digest


def test_what_is_built_on_a_target_shares_its_layers(tmp_path: Path, made: MadeChannel) -> None:
    """Also where it brings a path of that target, and a wheel on top."""
    (tmp_path / "w").mkdir()
    path = make_wheel(tmp_path / "w", "extra", {"extra.py": b"VALUE = 1\n"})
    wheel = locked_wheel(path)
    factory_, lock = factory(tmp_path, made, *FEW, "claims-b")
    below = factory_.build(lock)
    more, whole = factory(tmp_path, made, *FEW, "claims-b", "claims-a", "cuda-version-12.1")
    more.files[wheel] = path
    above = replace(whole, target="more-1.0-cu121", wheels=(wheel,))
    image = more.build(above, lock)
    assert digests(image)[: len(below.layers)] == digests(below)
    found = more.entries(image)
    assert found["opt/env/share/claims/different.txt"][1] == b"of b\n"
    assert f"opt/env/lib/python{PYTHON}/site-packages/extra.py" in found
    more.files |= {one: made.archive(one.filename) for one in made.locked("cuda-cudart")}
    top = lock_of(*more.files, target="top-1.0-cu121")
    assert digests(more.build(top, lock, above))[: len(image.layers)] == digests(image)
    alone, _ = factory(tmp_path / "alone", made, *FEW, "claims-b", "claims-a", "cuda-version-12.1")
    alone.files[wheel] = path
    assert alone.build(above, lock).digest == image.digest


def test_what_is_built_on_a_target_of_wheels_shares_its_layers(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    wheels: dict[LockedPackage, Path] = {}
    for number in range(6):
        text = f"VALUE = {number}\n".encode()
        path = make_wheel(tmp_path / "w", f"pkg{number}", {f"pkg{number}.py": text, "shared.py": b""})
        wheels[locked_wheel(path)] = path
    factory_ = Factory(tmp_path, wheels)
    few, many = [*wheels][:4], [*wheels]
    lock, above = lock_of(*few), lock_of(*many, target="more-1.0-cu121")
    below, image = factory_.build(lock), factory_.build(above, lock)
    assert digests(image)[: len(below.layers)] == digests(below)
    assert len(image.layers) > len(below.layers)


def test_a_long_chain_of_targets_stays_below_dockers_limit(made: MadeChannel) -> None:
    (some,) = made.locked("packaging")
    groups = []
    for number in range(8):
        packages = [
            replace(some, name=f"p{number}-{n}", size=OWN_LAYER_BYTES if n < 60 else 1) for n in range(120)
        ]
        groups.append(
            {one: LayerPackage(key=one.name, path=Path(one.name), size=one.size) for one in packages}
        )
    plans = plan_layers(groups)
    assert len(plans) < 120
    assert sum(len(plan.parts) for plan in plans) == 8 * 120
    for number in range(1, 8):
        below = plan_layers(groups[:number])
        assert plans[: len(below)] == below


# --- what goes wrong -------------------------------------------------------------------------------


def test_a_wheel_does_not_replace_a_condas_file(tmp_path: Path, made: MadeChannel) -> None:
    (tmp_path / "w").mkdir()
    path = make_wheel(tmp_path / "w", "evil", {"tinytool/__init__.py": b"evil = 1\n"})
    wheel = locked_wheel(path)
    factory_, lock = factory(tmp_path, made, *FEW)
    factory_.files[wheel] = path
    with fails("file-conflict", r"tinytool/__init__\.py .*tinytool-1\.0-py_0 .*evil-1\.0"):
        factory_.build(replace(lock, wheels=(wheel,)))
    assert factory_.layout.tags() == {}


@pytest.mark.parametrize("harm", ["truncated", "tampered"])
def test_a_damaged_archive_is_named_and_leaves_nothing(tmp_path: Path, made: MadeChannel, harm: str) -> None:
    factory_, lock = factory(tmp_path, made, *FEW)
    package = next(one for one in lock.conda if one.name == "tinytool")
    data = factory_.files[package].read_bytes()
    bad = tmp_path / package.filename
    bad.write_bytes(data[:-200] if harm == "truncated" else data[:300] + b"?" + data[301:])
    factory_.files[package] = bad
    with fails("conda-link-failed", r"tinytool-1\.0-py_0\.conda", hint=f"rm {bad}"):
        factory_.build(lock)
    assert factory_.layout.tags() == {}
    assert list(factory_.layout.tmp.iterdir()) == []


def test_what_was_unpacked_and_changed_is_not_believed(tmp_path: Path, made: MadeChannel) -> None:
    factory_, lock = factory(tmp_path, made, *FEW)
    first = factory_.build(lock)
    (kept,) = (factory_.cache / "conda-pkgs").glob("tinytool-1.0-*/site-packages/tinytool/__init__.py")
    kept.unlink()  # the first store's staging is gone, so that this name is the last one
    kept.write_text("evil = 1\n")
    again, _ = factory(tmp_path / "again", made, *FEW)
    again.cache = factory_.cache
    for segment in [path for path in (again.cache / "segments").rglob("*") if path.is_file()]:
        segment.unlink()
    assert again.build(lock).digest == first.digest
    assert any("unpacked again" in line for line in again.notes.lines)


def test_a_package_whose_own_list_is_wrong_is_refused(tmp_path: Path, made: MadeChannel) -> None:
    channel = MadeChannel(folder=tmp_path / "channel")
    path = pack(channel.folder, CondaPackage(name="liar", files={"x.txt": File(data=b"x", told="0" * 64)}))
    channel.index()
    (package,) = channel.locked("liar")
    factory_, _ = factory(tmp_path, made, "python-3")
    factory_.files[package] = path
    with fails("package-altered", r"liar-1\.0-0: /opt/env/x\.txt .*0000"):
        factory_.build(lock_of(*factory_.files))


def test_an_environment_without_python_is_refused(tmp_path: Path, made: MadeChannel) -> None:
    factory_, lock = factory(tmp_path, made, "oddpaths")
    with fails("lock-without-python"):
        factory_.build(lock)


def test_without_py_rattler_the_extra_is_named(
    tmp_path: Path, made: MadeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory_, lock = factory(tmp_path, made, *FEW)
    monkeypatch.setattr(prefix.importlib.util, "find_spec", lambda _: None)
    with fails("extra-not-installed", "py-rattler", hint="gpu-imagefactory[conda]"):
        factory_.build(lock)


def test_claims_are_told_once_for_two_packages() -> None:
    claims = [PathClaim(path=f"p{n}", kept="a", lost="b", same=n == 2) for n in (3, 1, 2)]
    lines = list(describe_claims(claims))
    assert lines == ["a and b both bring p1 and 1 more, not the same: that of a is kept"]


# --- post-link scripts -----------------------------------------------------------------------------


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., tuple[LinkedPrefix, tuple[PathChange, ...]]]]:
    """Links one package with a script and runs it, without a sandbox, where it lies."""
    channel = MadeChannel(folder=tmp_path / "channel")

    def run(
        text: str, more: Mapping[str, File | bytes] | None = None
    ) -> tuple[LinkedPrefix, tuple[PathChange, ...]]:
        script = File(data=f"#!/bin/bash\nset -e\n{text}\n".encode(), executable=True)
        files: dict[str, File | bytes] = {
            "bin/.s-post-link.sh": script,
            "data/a.txt": b"a\n",
            "data/b.txt": b"b\n",
            **(more or {}),
        }
        pack(channel.folder, CondaPackage(name="s", files=files))
        channel.index()
        (package,) = channel.locked("s-1.0")
        staging = LinkPlan(
            archives={package: channel.archive("s-1.0")}, groups=[[package]], shown="/opt/env",
            scratch=tmp_path / "scratch", cache=tmp_path / "cache/conda-pkgs",
        )  # fmt: skip
        with staging_directory(staging, QuietProgress()) as prefix:
            here = replace(prefix, shown=str(prefix.folder))

            def start(argv: tuple[str, ...], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
                return subprocess.Popen(argv, env=dict(environment), stdout=-1, stderr=subprocess.STDOUT)

            return here, run_scripts(here, start)

    yield run
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_scripts_change_is_found(
    scripted: Callable[[str], tuple[LinkedPrefix, tuple[PathChange, ...]]], tmp_path: Path
) -> None:
    _, changes = scripted(
        'cd "$PREFIX"\necho new > new.txt\nmkdir -p deep/er\nln -s new.txt link\n'
        "echo changed > data/a.txt\nrm data/b.txt\necho hi > .messages.txt"
    )
    assert changes == (
        PathChange(path="data/a.txt"),
        PathChange(path="data/b.txt", removed=True),
        PathChange(path="deep"),
        PathChange(path="deep/er"),
        PathChange(path="link"),
        PathChange(path="new.txt"),
    )
    assert [path.read_text() for path in (tmp_path / "cache").rglob("data/a.txt")] == ["a\n"]


def test_a_folder_that_a_script_removes_is_told_once(
    scripted: Callable[[str], tuple[LinkedPrefix, tuple[PathChange, ...]]],
) -> None:
    _, changes = scripted('rm -r "$PREFIX/data"')
    assert changes == (PathChange(path="data", removed=True),)


def test_a_folder_that_a_script_makes_a_file_is_told_once(
    scripted: Callable[[str], tuple[LinkedPrefix, tuple[PathChange, ...]]],
) -> None:
    _, changes = scripted('rm -r "$PREFIX/data"; echo x > "$PREFIX/data"')
    assert changes == (PathChange(path="data"),)


def test_a_file_of_this_machine_is_not_written_through_a_link_of_a_package(
    scripted: Callable[..., tuple[LinkedPrefix, tuple[PathChange, ...]]], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine\n")
    _, changes = scripted("true", {"data/a.txt.own": File(link=str(mine)), "data/b.txt.own": b"of its own\n"})
    assert changes == ()
    assert mine.read_text() == "mine\n"
    assert [path.read_text() for path in (tmp_path / "cache").rglob("data/b.txt.own")] == ["of its own\n"]


@pytest.mark.parametrize("name", [".wh.b.txt", "two\nlines", "tab\tthere"])
def test_a_name_that_no_image_can_hold_is_refused(
    scripted: Callable[[str], tuple[LinkedPrefix, tuple[PathChange, ...]]], name: str
) -> None:
    with fails("post-link-files-invalid", "data/"):
        scripted(f'touch "$PREFIX/data/"{shlex.quote(name)}')


def test_byte_code_follows_what_scripts_change(tmp_path: Path) -> None:
    """Of a source's old byte code nobody would see that it is old."""
    site, changes = tmp_path / f"lib/python{PYTHON}", []
    (site / "__pycache__").mkdir(parents=True)
    tag = f"cpython-{PYTHON.replace('.', '')}"
    files = {"m.py": b"x = 1\n", f"__pycache__/m.{tag}.pyc": b"of the script", "n.txt": b"n"}
    for name, data in files.items():
        (site / name).write_bytes(data)
        changes.append(PathChange(path=f"lib/python{PYTHON}/{name}"))
    changes.append(PathChange(path=f"lib/python{PYTHON}/gone.py", removed=True))

    class Compiler:
        def compile(self, path: str, source: bytes) -> bytes:
            return path.encode() + b"|" + source

    out = io.BytesIO()
    segment = TarSegment(codec("gzip"), out, hashlib.sha256(), epoch=1)
    laid = lay_changes(
        tmp_path, changes, InstallPrefix(prefix="/opt/env", python=PYTHON), segment, Compiler()
    )
    segment.raw(END_OF_ARCHIVE)
    segment.close()
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
        found = {entry.name: (tar.extractfile(entry) or out).read() for entry in tar if entry.isreg()}
    top = f"opt/env/lib/python{PYTHON}"
    assert found == {
        f"{top}/m.py": b"x = 1\n",
        f"{top}/n.txt": b"n",
        f"{top}/.wh.gone.py": b"",
        f"{top}/__pycache__/m.{tag}.pyc": f"/{top}/m.py|x = 1\n".encode(),
    }
    assert [file.path for file in laid] == [f"{top}/m.py", f"{top}/n.txt", f"{top}/gone.py"]
    with fails("file-conflict", r"/gone\.py .*w\.whl .*post-link scripts"):
        settle_claims(
            [("w.whl", "sha256=x", laid[-1].path), *(("post-link scripts", f.content, f.path) for f in laid)],
            {},
        )


def test_a_script_that_fails_is_named(
    scripted: Callable[[str], tuple[LinkedPrefix, tuple[PathChange, ...]]],
) -> None:
    with fails("post-link-failed", r"s 1\.0 .*1: .*no-such-file"):
        scripted("cat /no-such-file")


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "sleep 30",
        "sleep 30 &",  # and keeps the pipe open
        'cd "$PREFIX/data"; for n in {1..101}; do mkdir d; cd d; done',
        'cd "$PREFIX/data"; touch {1..30}',
        'truncate -s 20G "$PREFIX/data/hole"',
    ],
)
def test_a_script_takes_no_more_than_it_may(
    scripted: Callable[[str], tuple[LinkedPrefix, tuple[PathChange, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
) -> None:
    monkeypatch.setattr(conda_install, "SCRIPT_SECONDS", 0.3 if "sleep" in text else 600.0)
    monkeypatch.setattr(prefix, "NEW_ENTRIES", 20)
    with pytest.raises(BuildError, match=r" s ") as caught:
        scripted(text)
    assert caught.value.code in ("post-link-failed", "post-link-files-invalid")


def test_what_a_script_leaves_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with fails("file-type-unsupported", "/opt/env/fifo"):
        lay_path(tmp_path / "fifo", "opt/env/fifo", None)  # type: ignore[arg-type]


# --- the cache -----------------------------------------------------------------------------------


def test_what_lies_unpacked_can_be_collected(tmp_path: Path, made: MadeChannel) -> None:
    factory_, lock = factory(tmp_path, made, *FEW)
    first = factory_.build(lock)
    for dry_run in (True, False):
        assert list((factory_.cache / "conda-pkgs").iterdir())
        removal = Removal(factory_.cache, dry_run=dry_run)
        remove_extracted(factory_.cache, removal)
        assert removal.bytes > 100_000
    assert not list((factory_.cache / "conda-pkgs").iterdir())
    again, _ = factory(tmp_path / "again", made, *FEW)
    again.cache = factory_.cache
    assert again.build(lock).digest == first.digest
