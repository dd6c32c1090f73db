"""Locking conda targets by the command line: what is solved, kept, told, and written below lockfiles/.

py-rattler solves against a channel of records in a folder; no package is ever fetched.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from imagefactory.actions import lock as stages_lock
from imagefactory.actions.lock import LockOptions, LockResult, has_wheels, release_cutoff, solve_target
from imagefactory.errors import LockError, UnsolvableError
from imagefactory.lock import LockRequest, OutdatedPackage, PublisherReport, export
from imagefactory.lock.changes import content_hash
from imagefactory.lock.conda.channels import find_channels
from imagefactory.lock.conda.own_tool import CondaLockLocker, CondaTool
from imagefactory.lock.debian import archive
from imagefactory.lock.files import WHEELS, format_lock_files, read_lock, write_lock
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.question import PinnedVersions
from imagefactory.model import DebianPackage, FrozenSpec, Lock, LockedWheel, ReleaseCutoff
from imagefactory.progress import Progress, QuietProgress
from imagefactory.views.images import format_relock
from tests.made.command import Said
from tests.made.conda_lock import LOCK, TARGET
from tests.made.errors import fails
from tests.made.place import Place, make_place
from tests.made.values import hexed, make_conda

ROOT = Path(__file__).parents[3]
ON = """\
family: more
description: More on top
on: tiny-2.3-cu121
packages: [extra]
"""


@pytest.fixture
def place(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place(capsys, tmp_path, monkeypatch)


def test_a_lock_is_solved_once_and_then_kept(place: Place) -> None:
    assert place.call("lock", "tiny-*")[:2] == (0, "tiny-2.3-cu121: locked 4 packages, 4.0 kB\n")
    assert place.names() == ["tiny-2.3-cu121.conda-lock.yml"]
    place.offer(("numpy 1.27.0 py311h0_0", ("python >=3.11,<3.12.0a0",)))
    assert (*place.call("lock", "-q", "tiny-*"),) == (0, "tiny-2.3-cu121: unchanged (4 packages)\n", "")
    assert place.states() == {"tiny-2.3-cu121": "ok"}


def test_an_unchanged_lock_of_300_packages_loads_no_solver(place: Place) -> None:
    """The import of rattler or conda-lock alone would take longer than the whole answer may."""
    target = place.factory.targets[0]
    more = [make_conda(f"package{n} 1.{n} h{n}_0", "python", "numpy >=1,<3") for n in range(300)]
    channel = target.channels[0]
    here = (replace(one, url=f"{channel}/{one.subdir}/{one.filename}") for one in (*LOCK.conda, *more))
    packages = sorted(here, key=lambda one: one.name)
    lock = replace(
        LOCK,
        target=target.name,
        content_hash=content_hash(target, place.factory.base_of(target), None),
        conda=tuple(packages),
        channels=target.channels,
        virtual=target.virtual,
    )
    write_lock(place.root / "lockfiles", lock)
    code = (
        "import sys; from imagefactory import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "finally: print([m for m in ('rattler', 'conda_lock', 'requests', 'uv') if m in sys.modules])"
    )
    run = [sys.executable, "-c", code, "-C", str(place.root), "lock", target.name]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == f"tiny-2.3-cu121: unchanged ({len(packages)} packages)\n[]\n"


def test_what_moved_is_told(place: Place) -> None:
    place.call("lock", "tiny-*")
    place.offer(
        ("numpy 1.27.0 py311h0_0", ("python >=3.11,<3.12.0a0",)),
        ("pytorch 2.3.1 cuda121_py311_1", ("python >=3.11,<3.12.0a0", "numpy", "cuda-version 12.1.*")),
    )
    code, out, _ = place.call("lock", "--upgrade-package", "numpy")
    assert (code, out.splitlines()[1:]) == (0, ["  ~ numpy 1.26.4 -> 1.27.0"])
    code, out, _ = place.call("lock", "tiny-*", "--upgrade")
    assert out.splitlines()[1:] == ["  ~ pytorch 2.3.1, cuda121_py311_0 -> cuda121_py311_1"]
    place.ask('"extra"')
    code, out, _ = place.call("lock", "tiny-*")
    assert out.splitlines()[1:] == ["  + extra 1.0 (h0_0)"]


def test_show_tells_the_lock(place: Place) -> None:
    place.call("lock", "tiny-*", "--note", "tried nowhere")
    _, out, _ = place.call("show", "tiny-2.3-cu121")
    for line in (
        "lock           ok, 4 packages, 4.0 kB of conda's archives, by py-rattler",
        "cuda-version 12.1",
    ):
        assert line in out
    assert "tried nowhere" in out
    assert "__glibc 2.36" in out
    _, out, _ = place.call("show", "tiny-2.3-cu121", "--json")
    value = json.loads(out)
    assert (value["lock"], value["unsolvable"], value["lock_note"]) == ("ok", None, "tried nowhere")
    assert value["packages"][-1]["build"] == "cuda121_py311_0"
    assert value["packages"][-1]["url"].startswith("file:///")
    assert value["virtual"]["__cuda"] == "12.1"


def test_packages_that_come_from_elsewhere_are_told() -> None:
    """From conda before and from PyPI after is one that went and one that came."""
    wheel = LockedWheel(name="pip", version="25.0", filename="pip-25.0.whl", sha256=hexed("w"), size=5)
    after = replace(
        LOCK, conda=tuple(one for one in LOCK.conda if one.name != "pip"), wheels=(wheel,), note="tried"
    )
    lines = format_relock(LockResult(target=TARGET, before=LOCK, after=after)).splitlines()
    assert lines[1:] == ["  + pip 25.0", "  - pip 24.0 (pyhd8ed1ab_0)", "  note: tried"]


# --- conda-lock's word ---------------------------------------------------------------------------


def test_a_lock_is_rendered_for_conda_alone(place: Place) -> None:
    """The order is conda-lock's: what is needed stands first."""
    place.call("lock", "tiny-*")
    channel = (place.root / "channel").as_uri()
    code, out, err = place.call("lock", "tiny-*", "--render", "explicit")
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    assert (code, err, lines[0]) == (0, "", "@EXPLICIT")
    numpy = "numpy-1.26.4-py311h0_0.conda"
    assert f"{channel}/linux-64/{numpy}#{hexed(numpy, 'md5')}" in lines
    assert [line.rpartition("/")[2].split("-")[0] for line in lines[1:]][-2:] == ["numpy", "pytorch"]
    code, out, _ = place.call("lock", "tiny-*", "--render", "env")
    read = yaml.safe_load(out)
    assert (code, read["channels"]) == (0, [channel])
    assert "pytorch=2.3.1=cuda121_py311_0" in read["dependencies"]


def test_what_a_rendered_file_lacks_is_told(place: Place) -> None:
    """The shape of pytorch-conda with a pip part, and of a channel whose records have no md5."""
    place.call("lock", "tiny-*")
    target = place.factory.targets[0]
    lock = read_lock(place.root / "lockfiles", target)
    assert lock is not None
    file = "idna-3.7-py3-none-any.whl"
    wheel = LockedWheel(name="idna", version="3.7", filename=file, sha256=hexed("w"), size=5)
    lock = replace(lock, wheels=(wheel,), solver=f"{lock.solver}, uv 0.9.0")
    write_lock(place.root / "lockfiles", lock)
    code, out, err = place.call("lock", target.name, "--render", "explicit")
    assert (code, "idna" in out) == (0, False)
    assert "1 packages from PyPI are not in it" in " ".join(err.split())
    bare = tuple(replace(one, md5="") if one.name == "numpy" else one for one in lock.conda)
    write_lock(place.root / "lockfiles", replace(lock, conda=bare))
    code, out, err = place.call("lock", target.name, "--render", "explicit")
    assert (code, out) == (5, "")
    assert f"micromamba create -n NAME -f lockfiles/{target.name}.conda-lock.yml" in " ".join(err.split())


def test_conda_lock_and_rattler_read_what_is_rendered(place: Place, tmp_path: Path) -> None:
    import rattler

    place.call("lock", "tiny-*")
    target = place.factory.targets[0]
    lock = read_lock(place.root / "lockfiles", target)
    assert lock is not None
    wheel = LockedWheel(
        name="idna", version="3.7", filename="idna-3.7-py3-none-any.whl", sha256=hexed("w"), size=5
    )
    urls = {wheel.filename: f"https://f.example.org/{wheel.filename}"}
    mixed = replace(lock, wheels=(wheel,))
    archives = {package.url: package.sha256 for package in lock.conda}
    content = export.read_back(lock, export.format_conda_lock_file(mixed, urls))
    pairs = {package.url: package.hash.sha256 for package in content.package}
    assert pairs == archives | {urls[wheel.filename]: wheel.sha256}
    path = tmp_path / "pixi.lock"
    path.write_text(export.format_pixi(mixed, urls, "https://index.example.org/simple"))
    environment = rattler.LockFile.from_path(path).default_environment()
    assert environment is not None
    packages = environment.packages(environment.platforms()[0])
    assert {Path(package.location.removeprefix("file://")).name for package in packages or ()} == {
        url.rpartition("/")[2] for url in (*archives, *urls.values())
    }
    code, out, _ = place.call("lock", target.name, "--render", "pixi")
    assert (code, out) == (0, export.format_pixi(lock, {}, ""))
    assert place.call("lock", target.name, "--render", "pylock").error_codes == ("target-without-wheels",)


def test_what_cannot_be_rendered_is_refused(place: Place) -> None:
    said = place.call("lock", "tiny-*", "--render", "env")
    assert (said.code, said.error_codes) == (5, ("lock-missing",))
    for arguments, value in {
        ("--render", "env"): "--render",
        ("tiny-*", "--render", "env", "--upgrade"): "--render",
        ("tiny-*", "--render", "env", "--json"): "JSON",
    }.items():
        code, out, err = place.call("lock", *arguments)
        assert (code, value in out + err) == (2, True)


def test_what_conda_lock_does_not_read_is_never_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were our writer to leave conda-lock's format, its models would say so before a file is there."""
    asked, read_back = [], export.read_back

    def broken(lock: Lock, text: str) -> object:
        asked.append(lock.target)
        return read_back(lock, text.replace("  optional: false", "  optional: perhaps", 1))

    monkeypatch.setattr(export, "read_back", broken)
    said = place.call("lock", "tiny-*")
    code, _, err = said
    assert said.error_codes == ("conda-lock-rejected",)
    assert (code, asked, (place.root / "lockfiles").exists()) == (5, ["tiny-2.3-cu121"], False)
    assert "package.0.optional" in err


# --- notes ---------------------------------------------------------------------------------------


def test_a_note_stays_with_the_packages_it_was_said_of(place: Place) -> None:
    def note() -> str:
        lock = read_lock(place.root / "lockfiles", place.factory.targets[0])
        return lock.note if lock else "no lock"

    place.call("lock", "tiny-*", "--note", "tried")
    place.offer(("numpy 1.27.0 py311h0_0", ("python >=3.11,<3.12.0a0",)))
    place.call("lock", "tiny-*")
    assert note() == "tried"
    code, out, _ = place.call("lock", "tiny-*", "--note", "tried twice")
    assert (code, note()) == (0, "tried twice")
    assert out.splitlines()[1:] == ["  the same packages", "  note: tried twice"]
    _, out, err = place.call("lock", "tiny-*", "--upgrade-package", "numpy")
    assert note() == ""
    assert "'tried twice'" in err
    place.call("lock", "tiny-*", "--note", "three")
    place.call("lock", "tiny-*", "--note", "")
    assert note() == ""


@pytest.mark.parametrize(
    ("arguments", "option", "error_codes"),
    [
        (("--note", "a"), "--note", None),
        (("--explain",), "--explain", None),
        (("--check", "--note", "a"), "--check", None),
        (("tiny-*", "--note", "a\nb"), "--note", ("option-invalid",)),
        (("tiny-*", "--note", "\x1b[31m"), "--note", ("option-invalid",)),
    ],
)
def test_notes_that_are_refused(
    place: Place, arguments: tuple[str, ...], option: str, error_codes: tuple[str, ...] | None
) -> None:
    said = place.call("lock", *arguments)
    assert (said.code, option in said.err) == (2, True)
    assert error_codes in (None, said.error_codes)


def test_a_lock_of_wheels_keeps_no_note(place: Place) -> None:
    shutil.copy(ROOT / "recipes" / "jax.yaml", place.root / "recipes")
    said = place.call("lock", "jax-0.4.30-cu12", "--note", "a")
    assert (said.code, said.error_codes) == (2, ("note-not-supported",))


@dataclass
class Debian:
    """Stands in for a Debian archive with snapshots."""

    gone: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    error: LockError | None = None

    def unavailable_packages(
        self, _: object, packages: tuple[DebianPackage, ...], *__: object
    ) -> tuple[tuple[DebianPackage, ...], ...]:
        if self.error:
            raise self.error
        return tuple(tuple(p for p in packages if p.name in names) for names in (self.gone, self.lost))


@pytest.fixture
def searched(place: Place, monkeypatch: pytest.MonkeyPatch) -> Debian:
    """A locked target, whose files are all available: `channel` has them with the locked size."""
    assert place.call("lock", "tiny-*").code == 0
    shutil.copytree(ROOT / "lockfiles" / "bases", place.root / "lockfiles" / "bases")
    for package in locked(place).conda:
        (place.root / "channel" / package.subdir / package.filename).write_bytes(bytes(package.size))
    debian = Debian()
    monkeypatch.setattr(archive, "unavailable_packages", debian.unavailable_packages)
    monkeypatch.setattr(stages_lock, "debian_mirror", lambda _: None)
    return debian


def locked(place: Place) -> Lock:
    lock = read_lock(place.root / "lockfiles", place.factory.targets[0])
    assert lock
    return lock


SEARCH = ("lock", "tiny-*", "--check", "--available", "--json")


def missing(said: Said) -> dict[str, list[str]]:
    return {row["file"]: row["locks"] for row in json.loads(said.out)["missing_files"]}


def test_all_locked_files_are_available(place: Place, searched: Debian) -> None:
    said = place.call(*SEARCH)
    assert (said.code, missing(said)) == (0, {})
    said = place.call(*SEARCH[:-1])
    assert (said.code, said.out.splitlines()) == (0, ["1 lock is current, and all files are available"])
    assert "missing_files" not in json.loads(place.call("lock", "--check", "--json", "tiny-*").out)


def test_locked_files_that_no_place_has_are_listed(place: Place, searched: Debian) -> None:
    numpy, python = (
        next(one for one in locked(place).conda if one.name == name) for name in ("numpy", "python")
    )
    (place.root / "channel" / numpy.subdir / numpy.filename).unlink()
    (place.root / "channel" / python.subdir / python.filename).write_bytes(b"of another size")
    searched.gone, searched.lost = ("apt", "bash"), ("apt",)
    said = place.call(*SEARCH)
    assert (said.code, said.error_codes) == (9, ("locked-files-unavailable",))
    rows = missing(said)
    deb = next(file for file in rows if file.endswith(".deb"))
    assert deb.startswith("apt_")
    assert rows == {deb: ["base:debian-12"], numpy.url: ["tiny-2.3-cu121"], python.url: ["tiny-2.3-cu121"]}
    assert [line for line in said.err.splitlines() if line.startswith("base:debian-12: 1 ")]


def test_a_place_that_cannot_be_read_leaves_the_answer_unknown(place: Place, searched: Debian) -> None:
    searched.error = LockError("archive-read-failed", "cannot read the package lists")
    said = place.call(*SEARCH)
    assert (said.code, said.error_codes, missing(said)) == (11, ("availability-unknown",), {})
    assert place.call("lock", "tiny-*", "--available").code == 2


# --- what cannot be solved -----------------------------------------------------------------------


def test_a_target_that_cannot_be_solved_is_told_in_every_table(place: Place) -> None:
    place.ask('"numpy >=2"')
    code, out, err = place.call("lock", "tiny-*")
    assert (code, out) == (5, "")
    assert err.startswith("error: tiny-2.3-cu121: ")
    assert place.names() == ["tiny-2.3-cu121.unsolvable.txt"]
    assert place.states() == {"tiny-2.3-cu121": "unsolvable"}
    reason = err.splitlines()[0].removeprefix("error: tiny-2.3-cu121: ")
    _, out, _ = place.call("show", "tiny-2.3-cu121")
    assert f"unsolvable\n                {reason}" in out
    why = json.loads(place.call("show", "tiny-2.3-cu121", "--json")[1])["unsolvable"]
    assert why["reason"].startswith(reason)
    code, out, _ = place.call("lock", "tiny-*", "--check")
    assert (code, "known to have no solution: tiny-2.3-cu121" in out) == (0, True)
    said = place.call("render", "tiny-*")
    assert (said.code, said.error_codes, reason in said.err) == (5, ("target-unsolvable",), True)
    code, _, err = place.call("render")
    assert (code, "skipped, because they have no solution: tiny-2.3-cu121" in err) == (0, True)


def test_the_whole_account_is_given_on_request_without_solving_again(place: Place) -> None:
    place.ask('"numpy >=2"')
    _, _, err = place.call("lock", "tiny-*")
    tree = json.loads(place.call("show", "tiny-2.3-cu121", "--json")[1])["unsolvable"]["tree"].strip()
    shutil.rmtree(place.root / "channel")
    code, out, again = place.call("lock", "tiny-*", "--explain")
    assert (code, out.strip(), again) == (5, tree, err)
    assert "numpy >=2" in tree
    (place.root / "lockfiles" / "tiny-2.3-cu121.unsolvable.txt").unlink()
    place.offer()
    code, out, _ = place.call("lock", "tiny-*", "--explain")
    assert (code, out.strip()) == (5, tree)
    code, out, _ = place.call("lock", "tiny-*", "--json")
    assert (code, json.loads(out)["errors"][0]["tree"].strip()) == (5, tree)


def test_the_reason_is_told_also_where_its_record_cannot_be_written(place: Place) -> None:
    place.ask('"numpy >=99"')
    (place.root / "lockfiles" / "tiny-2.3-cu121.unsolvable.txt" / "taken").mkdir(parents=True)
    code, _, err = place.call("lock", "tiny-*")
    assert code == 5
    assert "has no `numpy >=99`" in err
    assert "unsolvable.txt" in err


def test_unsolvable_holds_as_long_as_what_was_asked(place: Place) -> None:
    place.ask('"numpy >=2"')
    place.call("lock", "tiny-*")
    place.ask('"numpy >=3"')
    assert place.states() == {"tiny-2.3-cu121": "none"}
    place.ask('"numpy >=2"')
    assert place.states() == {"tiny-2.3-cu121": "unsolvable"}
    place.offer(("numpy 2.0.0 py311h0_0", ("python >=3.11,<3.12.0a0",)))
    assert place.call("lock", "tiny-*")[0] == 0
    assert place.names() == ["tiny-2.3-cu121.conda-lock.yml"]


def test_an_update_that_cannot_be_leaves_the_lock(place: Place) -> None:
    place.call("lock", "tiny-*")
    before = (place.root / "lockfiles" / "tiny-2.3-cu121.conda-lock.yml").read_bytes()
    shutil.rmtree(place.root / "channel")
    assert place.call("lock", "tiny-*", "--upgrade-package", "numpy")[0] == 5
    assert place.names() == ["tiny-2.3-cu121.conda-lock.yml"]
    assert (place.root / "lockfiles" / "tiny-2.3-cu121.conda-lock.yml").read_bytes() == before


def test_a_damaged_record_is_made_anew(place: Place) -> None:
    place.ask('"numpy >=2"')
    place.call("lock", "tiny-*")
    record = place.root / "lockfiles" / "tiny-2.3-cu121.unsolvable.txt"
    text = record.read_text()
    record.write_text("nonsense")
    assert place.states() == {"tiny-2.3-cu121": "none"}
    place.call("lock", "tiny-*")
    assert record.read_text() == text


# --- locks that are not as they should be --------------------------------------------------------


def test_a_damaged_lock_is_told_and_made_anew(place: Place) -> None:
    place.call("lock", "tiny-*")
    path = place.root / "lockfiles" / "tiny-2.3-cu121.conda-lock.yml"
    text = path.read_text()
    path.write_text(text.replace("version: 1.26.4", "version: 1.26.5").replace("'1.26.4'", "'1.26.5'"))
    assert place.states() == {"tiny-2.3-cu121": "malformed"}
    code, _, err = place.call("show", "tiny-2.3-cu121")
    assert (code, f"{path}:" in err) == (5, True)
    code, _, err = place.call("lock", "tiny-*")
    assert (code, "locking tiny-2.3-cu121 again" in err) == (0, True)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"/channel": "/strange"}, "the channel file:///"),  # and all packages from there
        ({"__cuda=12.1": "__cuda=12.9"}, "channels or virtual packages"),
        ({"cuda121_py311_0": "cpu_py311_1"}, "is a build for the CPU"),
    ],
)
def test_a_lock_that_was_changed_by_hand_is_not_believed(
    place: Place, changes: dict[str, str], what: str
) -> None:
    place.call("lock", "tiny-*")
    path = place.root / "lockfiles" / "tiny-2.3-cu121.conda-lock.yml"
    text = changed = path.read_text()
    for old, new in changes.items():
        changed = changed.replace(old, new)
    path.write_text(changed)
    assert place.states() == {"tiny-2.3-cu121": "malformed"}
    code, _, err = place.call("render", "tiny-*")
    assert (code, what in err) == (5, True)
    code, _, err = place.call("lock", "tiny-*")
    assert (code, what in err, "locking tiny-2.3-cu121 again" in err) == (0, True, True)
    assert path.read_text() == text


def test_a_lock_that_was_stopped_between_its_two_files_keeps_what_it_holds(place: Place) -> None:
    """The file of the wheels is there and conda's is still the one before: an update goes on from these."""
    place.call("lock", "tiny-*")
    folder = place.root / "lockfiles"
    target = place.factory.targets[0]
    lock = read_lock(folder, target)
    assert lock is not None
    wheel = LockedWheel(
        name="einops", version="1", filename="einops-1-py3-none-any.whl", sha256=hexed("w"), size=5
    )
    wheels = format_lock_files(replace(lock, wheels=(wheel,), solver=f"{lock.solver}, uv 0.9"))[WHEELS]
    (folder / "tiny-2.3-cu121.requirements.txt").write_text(wheels)
    assert place.states() == {"tiny-2.3-cu121": "malformed"}
    newer = ("pytorch 2.3.1 cuda121_py311_1", ("python >=3.11,<3.12.0a0", "numpy", "cuda-version 12.1.*"))
    place.offer(("numpy 1.27.0 py311h0_0", ("python >=3.11,<3.12.0a0",)), newer)
    code, out, err = place.call("lock", "tiny-*", "--upgrade-package", "numpy")
    assert (code, "locking tiny-2.3-cu121 again" in err) == (0, True)
    assert out.splitlines()[1:] == ["  - einops 1", "  ~ numpy 1.26.4 -> 1.27.0"]
    assert place.names() == ["tiny-2.3-cu121.conda-lock.yml"]


def test_a_record_beside_a_lock_that_holds_is_not_believed(place: Place) -> None:
    """Two branches: on one there was no solution, on the other there was."""
    place.ask('"numpy >=2"')
    place.call("lock", "tiny-*")
    record = place.root / "lockfiles" / "tiny-2.3-cu121.unsolvable.txt"
    text = record.read_text()
    place.offer(("numpy 2.0.0 py311h0_0", ("python >=3.11,<3.12.0a0",)))
    place.call("lock", "tiny-*")
    record.write_text(text)
    assert place.call("lock", "tiny-*", "--explain")[0] == 0
    assert not record.exists()


@dataclass(frozen=True)
class OldLocker:
    """Solves to one lock, of which `behind` is far behind."""

    lock_made: Lock
    found: OutdatedPackage

    def lock(self, request: LockRequest, progress: Progress) -> Lock:
        return self.lock_made

    def behind(self, request: LockRequest, lock: Lock, progress: Progress) -> tuple[OutdatedPackage, ...]:
        return (self.found,)

    def publishers(self, wheels: object, lock: Lock, progress: Progress) -> PublisherReport:
        return PublisherReport(known={}, attests=False)


class NoSolution:
    """Says of `numpy >=1.5` that it contradicts, as the solver of wheels does."""

    def lock(self, request: LockRequest, progress: Progress) -> Lock:
        texts = tuple(text for text in request.target.requirements if text.startswith("numpy"))
        told = f"tiny: {texts[0]} contradicts {texts[0]}.1"
        raise UnsolvableError("no-solution", told, hint="x", tree="all", conflict=texts)


def test_what_contradicts_is_said_with_its_place_in_the_recipe(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.ask('"numpy >=1.5"')
    (line,) = (
        n
        for n, text in enumerate((place.root / "recipes/tiny.yaml").read_text().split("\n"), 1)
        if "numpy >=1.5" in text
    )
    monkeypatch.setattr(stages_lock, "target_locker", lambda *_: NoSolution())
    code, _, err = place.call("lock", "tiny-*")
    assert code == 5
    assert f"numpy >=1.5 (recipes/tiny.yaml:{line}:" in err
    assert "contradicts numpy >=1.5.1" in err  # which is another text
    record = (place.root / "lockfiles/tiny-2.3-cu121.unsolvable.txt").read_text()
    assert "tiny.yaml:" not in record  # lines move


def test_an_old_release_of_what_the_recipe_names_stops_its_lock(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.call("lock", "tiny-*")
    made = read_lock(place.factory.lock_folder, place.factory.targets[0])
    assert made
    for path in place.factory.lock_folder.glob("tiny-*"):
        path.unlink()
    old = OutdatedPackage(
        name="demo", locked="0.9", newest="1.3", reason="no wheel of demo", accept="demo<1", named=True
    )
    said = "demo 0.9, where 1.3 is the newest: no wheel of demo"
    monkeypatch.setattr(stages_lock, "target_locker", lambda *_: OldLocker(made, old))
    code, out, _ = place.call("lock", "tiny-*", "--json")
    (error,) = json.loads(out)["errors"]
    assert (code, error["outdated"]) == (5, [asdict(old)])
    assert (error["code"], said in error["message"]) == ("release-outdated", True)
    assert """ "demo<1" under 'constraints' at recipes/tiny.yaml""" in error["hint"]
    source = replace(old, locked="0.3.1.dev5", accept="demo==0.3.1.dev5", build="demo==1.3")
    monkeypatch.setattr(stages_lock, "target_locker", lambda *_: OldLocker(made, source))
    _, _, unlike = place.call("lock", "tiny-*")
    assert ("--build" in unlike, "demo==0.3.1.dev5" in unlike) == (True, False)
    monkeypatch.setattr(stages_lock, "target_locker", lambda *_: OldLocker(made, old))
    place.call("lock", "tiny-*")
    assert place.names() == ["tiny-2.3-cu121.unsolvable.txt"]
    assert said in place.call("show", "tiny-2.3-cu121")[1]
    below = replace(old, named=False)
    monkeypatch.setattr(stages_lock, "target_locker", lambda *_: OldLocker(made, below))
    code, out, _ = place.call("lock", "tiny-*", "--json")
    assert (code, json.loads(out)["results"][0]["outdated"]) == (0, [asdict(below)])
    assert format_relock(
        LockResult(target=place.factory.targets[0], before=None, after=made, behind=(below,))
    ) == (f"tiny-2.3-cu121: locked 4 packages, 4.0 kB\n  ! {said}")


def test_files_that_no_recipe_makes_are_orphans(place: Place) -> None:
    place.call("lock", "tiny-*")
    for name in ("old-1-cu12.conda-lock.yml", "old-2-cu12.unsolvable.txt", "old-3-cu12.requirements.txt"):
        (place.root / "lockfiles" / name).touch()
    code, _, err = place.call("lock", "--check")
    assert code == 4
    assert "old-1-cu12.conda-lock.yml, lockfiles/old-2-cu12.unsolvable.txt, lockfiles/old-3-cu12" in err


# --- built on another ----------------------------------------------------------------------------


@pytest.fixture
def stack(place: Place) -> Place:
    (place.root / "recipes" / "more.yaml").write_text(ON)
    return place


def test_a_target_below_is_locked_first(stack: Place) -> None:
    failed = stack.call("lock", "more-*")
    assert (failed.code, failed.error_codes, "tiny-2.3-cu121" in failed.err) == (5, ("lock-missing",), True)
    code, out, _ = stack.call("lock", "more-*", "tiny-*")
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == ["tiny-2.3-cu121", "more-2.3-cu121"]
    assert stack.states() == {"more-2.3-cu121": "ok", "tiny-2.3-cu121": "ok"}


def test_a_lock_that_lacks_what_is_below_is_made_anew(stack: Place) -> None:
    """A merge took another file of one package."""
    stack.call("lock", "more-*", "tiny-*")
    path = stack.root / "lockfiles" / "more-2.3-cu121.conda-lock.yml"
    text = path.read_text()
    path.write_text(text.replace(hexed("numpy-1.26.4-py311h0_0.conda"), hexed("another")))
    assert stack.states() == {"more-2.3-cu121": "malformed", "tiny-2.3-cu121": "ok"}
    code, _, err = stack.call("render", "more-*")
    assert (code, "imagefactory lock more-2.3-cu121" in err) == (5, True)
    code, _, err = stack.call("lock", "more-*")
    assert (code, "numpy-1.26.4-py311h0_0.conda" in err) == (0, True)
    assert path.read_text() == text


def test_what_moves_below_makes_what_is_above_stale(stack: Place) -> None:
    stack.call("lock", "more-*", "tiny-*")
    stack.offer(("numpy 1.27.0 py311h0_0", ("python >=3.11,<3.12.0a0",)))
    _, out, _ = stack.call("lock", "--upgrade-package", "numpy")
    assert out.splitlines()[-1] == "also lock what extends these: imagefactory lock more-2.3-cu121"
    assert stack.states() == {"more-2.3-cu121": "stale", "tiny-2.3-cu121": "ok"}
    said = stack.call("render", "more-*")
    assert (said.code, said.error_codes, "tiny-2.3-cu121" in said.err) == (4, ("lock-outdated",), True)
    stack.call("lock", "more-*")
    assert stack.states() == {"more-2.3-cu121": "ok", "tiny-2.3-cu121": "ok"}
    folder, targets = stack.root / "lockfiles", {one.name: one for one in stack.factory.targets}
    below, above = (read_lock(folder, targets[f"{name}-2.3-cu121"]) for name in ("tiny", "more"))
    assert below is not None
    assert above is not None
    assert set(below.conda) < set(above.conda)


def test_a_note_below_makes_nothing_stale(stack: Place) -> None:
    stack.call("lock", "more-*", "tiny-*")
    stack.call("lock", "tiny-*", "--note", "tried")
    assert stack.states() == {"more-2.3-cu121": "ok", "tiny-2.3-cu121": "ok"}


def test_a_solve_writes_nothing_and_names_extras_that_are_not_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Solver:
        def versions(self, *_: object, declared: bool) -> PinnedVersions:
            return PinnedVersions(
                lines=("einops==0.8.0",), lacking=() if declared else (("einops", "nothing"),)
            )

    class Notes(QuietProgress):
        def note(self, text: str) -> None:
            noted.append(text)

    noted: list[str] = []
    monkeypatch.setattr(stages_lock, "uv_locker", lambda _: Solver())
    target = replace(place.factory.targets[0], source="pypi", channels=())
    base = place.factory.base_of(target)
    for declared in (True, False):
        solved = solve_target(place.factory, target, base, Notes(), declared=declared)
        assert solved == {"einops": "0.8.0"}
    assert ["nothing" in text for text in noted] == [True]
    assert not place.factory.lock_folder.exists()


def test_whether_some_python_has_a_wheel_of_a_release(place: Place) -> None:
    class Index:
        def platform(self, *_: object) -> str:
            return "manylinux_2_36_x86_64"

        def project(self, name: str, _: Lock) -> tuple[IndexFile, ...]:
            files = (
                "1.0-py2-none-any.whl",
                "1.1-py2.py3-none-any.whl",
                "1.2-2-cp38-cp38-any.whl",
                "1.3.tar.gz",
            )
            return tuple(IndexFile(filename=f"{name}-{one}", url="", sha256="") for one in files)

    target = place.factory.targets[0]
    base = place.factory.base_of(target)
    found = [has_wheels(Index(), target, base, pin) for pin in ("x", "x==1.0", "x==1.1", "x==1.2", "x==1.3")]  # type: ignore[arg-type]
    assert found == [True, False, True, True, False]


NEWER = ("numpy 1.27.0 py311h0_0", ("python >=3.11,<3.12.0a0",))


def test_a_young_release_is_excluded_with_its_age_until_it_is_let_through(place: Place) -> None:
    place.offer(NEWER, young=NEWER[0])
    code, out, _ = place.call("lock", "tiny-*", "--exclude-newer", "7 days", "--json")
    row = json.loads(out)["results"][0]
    (outdated,) = row["outdated"]
    assert (code, outdated["name"], outdated["locked"], outdated["newest"]) == (
        0,
        "numpy",
        "1.26.4",
        "1.27.0",
    )
    assert datetime.now(UTC) - datetime.fromisoformat(outdated["uploaded"]) > timedelta(days=2)
    (target,) = place.factory.targets
    before = read_lock(place.root / "lockfiles", target)
    assert before
    assert before.cutoff
    assert str(before.cutoff) == row["exclude_newer"]
    assert place.call("lock", "tiny-*", "--exclude-newer", row["exclude_newer"])[0] == 0  # the same date
    assert read_lock(place.root / "lockfiles", target) == before
    assert place.call("lock", "tiny-*", "-P", "numpy", "--exclude-newer", "7 days except numpy")[0] == 0
    after = read_lock(place.root / "lockfiles", target)
    assert after
    assert after.cutoff
    assert after.cutoff.allowed == ("numpy",)
    assert next(package.version for package in after.conda if package.name == "numpy") == "1.27.0"
    assert place.states() == {"tiny-2.3-cu121": "ok"}


def test_a_long_list_of_young_releases_is_cut() -> None:
    rows = tuple(
        OutdatedPackage(
            name=f"p{n}", locked="1", newest="2", reason="why", accept="", named=False, uploaded="2026"
        )
        for n in range(13)
    )
    lines = format_relock(LockResult(target=TARGET, before=LOCK, after=LOCK, behind=rows)).splitlines()
    assert (len(lines), lines[-1].split()[:3]) == (12, ["!", "and", "3"])


def test_a_recipe_that_needs_a_young_release_is_told_which(place: Place) -> None:
    place.offer(NEWER, young=NEWER[0])
    place.ask('"numpy 1.27.*"')
    code, _, err = place.call("lock", "tiny-*", "--exclude-newer", "7 days")
    assert code == 5
    assert "numpy 1.27.0 (2 days old)" in " ".join(err.split())


def test_the_cooldown_of_a_recipe_and_the_setting(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.offer(NEWER, young=NEWER[0])
    monkeypatch.setenv("IMAGEFACTORY_COOLDOWN", "1 day")
    recipe = place.root / "recipes" / "tiny.yaml"
    recipe.write_text(f"{recipe.read_text()}    cooldown: 1 week\n")
    assert place.call("lock", "tiny-*")[0] == 0
    (target,) = place.factory.targets
    lock = read_lock(place.root / "lockfiles", target)
    assert lock
    assert lock.cutoff
    assert timedelta(days=7) <= datetime.now(UTC) - lock.cutoff.time < timedelta(days=8)
    recipe.write_text(recipe.read_text().replace("    cooldown: 1 week\n", ""))
    assert place.states() == {"tiny-2.3-cu121": "stale"}


def test_without_an_upgrade_the_date_never_goes_back(place: Place) -> None:
    (target,) = place.factory.targets
    late = ReleaseCutoff(time=datetime(2030, 1, 1, tzinfo=UTC), allowed=("numpy", "torch"))
    before = replace(LOCK, cutoff=late)
    kept = release_cutoff(place.factory, target, before, LockOptions(update=("numpy",)))
    assert kept == replace(late, allowed=("torch",))
    assert release_cutoff(place.factory, target, before, LockOptions(update_all=True)) is None
    assert release_cutoff(place.factory, target, before, LockOptions(exclude_newer="0 days")) is None
    cooled = replace(target, cooldown="1 day except scipy")
    both = release_cutoff(place.factory, cooled, before, LockOptions())
    assert both == replace(late, allowed=("numpy", "scipy", "torch"))


def test_what_an_import_solves_is_limited_by_the_cooldown_too(place: Place) -> None:
    place.offer(NEWER, young=NEWER[0])
    (target,) = place.factory.targets
    base = place.factory.base_of(target)
    for cooldown, version in (("", "1.27.0"), ("7 days", "1.26.4")):
        asked = replace(target, cooldown=cooldown)
        assert solve_target(place.factory, asked, base, QuietProgress())["numpy"] == version


def test_a_cutoff_does_not_apply_to_the_files_of_another_tool(place: Place) -> None:
    (target,) = place.factory.targets
    frozen = FrozenSpec(file="pixi.lock", where=target.where)
    cooled = replace(target, frozen=frozen, cooldown="7 days")
    assert release_cutoff(place.factory, cooled, None, LockOptions()) is None
    with fails("option-conflict"):
        release_cutoff(place.factory, cooled, None, LockOptions(exclude_newer="7 days"))


@pytest.mark.parametrize("option", ["--check", "--render=env"])
def test_exclude_newer_needs_a_solve(place: Place, option: str) -> None:
    assert place.call("lock", "tiny-2.3-cu121", option, "--exclude-newer", "7 days").code == 2


def test_the_solver_of_the_user_cannot_exclude_releases(place: Place) -> None:
    (target,) = place.factory.targets
    tool = CondaTool(path=Path("/bin/false"), environ={})
    locker = CondaLockLocker(tool, find_channels("", {}, ""), place.root, lambda: pytest.fail("asked"))
    cutoff = ReleaseCutoff(time=datetime(2026, 1, 1, tzinfo=UTC))
    request = LockRequest(target=target, base=place.factory.base_of(target), cutoff=cutoff)
    with fails("cutoff-not-supported"):
        locker.lock(request, QuietProgress())
