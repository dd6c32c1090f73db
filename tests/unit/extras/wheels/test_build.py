"""A wheel compiled in the image that it is for: what is shown to the compiler, what is kept, what stops."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory.errors import EXIT_LIMIT, BuildError, ImagefactoryError, LimitError, UsageError
from imagefactory.extras.wheels import build as compiling
from imagefactory.extras.wheels.build import CompileRequest, CompileResult, compile_wheel
from imagefactory.lock.pypi.sources import DEFAULT_REQUIRES
from imagefactory.lock.pypi.unbuilt import has_nvcc
from imagefactory.model import CommandResult, RunSpec, Target
from imagefactory.oci.manifests import Image
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.settings.load import load_settings
from tests.made.factory import put_image
from tests.made.git_tree import GitTree
from tests.made.values import make_lock, make_target
from tests.made.wheels import add_nested, locked, make_wheel

FAILED = CommandResult(returncode=1, stdout="compiling", stderr="error: no such header", seconds=1.0)
WHEEL = "ops-1.0-py3-none-any.whl"


def leave_wheel(out: Path) -> Path:
    return make_wheel(out, "ops", {"ops.py": b"ops"})


@dataclass
class Compiler:
    """In place of a runner: remembers what it was to run, and leaves a wheel of what it saw.

    `asked` are the runs that ask a build backend, which `requires` answers.
    """

    specs: list[RunSpec] = field(default_factory=list)
    seen: list[Mapping[str, str]] = field(default_factory=list)
    code: int = 0
    asked: list[RunSpec] = field(default_factory=list)
    requires: str = "[]"
    leave: Callable[[Path], object] = leave_wheel
    completed: Mapping[str, Any] = field(default_factory=dict)

    def require(self) -> str:
        return "a compiler"

    def prepare(self, image: Image, *, checked: bool) -> Image:
        return image

    def run(self, image: Image, spec: RunSpec) -> CommandResult:
        source, tools, out = (mount.source for mount in spec.mounts)
        if spec.argv[2].startswith("requires"):
            self.asked.append(spec)
            (out / "requires.json").write_text(self.requires)
            return replace(FAILED, returncode=0)
        self.specs.append(spec)
        self.seen.append(
            {str(p.relative_to(source)): p.read_text("latin-1") for p in source.rglob("*") if p.is_file()}
        )
        assert (tools / "wheel_builder.py").is_file()
        if not self.code:
            self.leave(out)
        return replace(FAILED, returncode=self.code, **self.completed)


@pytest.fixture
def compiler(factory: Project, target: Target, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    put_image(factory, target)
    monkeypatch.setattr(compiling, "make_runner", lambda *_: made)
    monkeypatch.setattr(compiling, "_tools", lambda *_, **__: {})
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "ops"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("secret")
    (folder / "setup.py").write_text("setup()")
    (folder / "ops.cu").write_text("kernel")
    return folder


def compiled(factory: Project, target: Target, source: Path | str, **more: Any) -> CompileResult:
    folder = factory.settings.root_path / "wheels"
    asked = CompileRequest(source=str(source), target=target, folder=folder, **more)
    return compile_wheel(factory, asked, QuietProgress())


def test_a_folder_is_compiled_once_for_its_source_and_capabilities(
    factory: Project, target: Target, compiler: Compiler, source: Path
) -> None:
    first = compiled(factory, target, source)
    assert (first.compiled, first.wheel.parent) == (True, factory.settings.root_path / "wheels")
    assert compiler.seen == [{"setup.py": "setup()", "ops.cu": "kernel"}]
    (spec,) = compiler.specs
    variables = dict(spec.environment)
    assert variables["TORCH_CUDA_ARCH_LIST"] == ";".join(target.capabilities)
    assert variables["SOURCE_DATE_EPOCH"] == "315532800"
    assert spec.network is False
    assert (spec.limits, spec.timeout) == ((), compiling.TIMEOUT)
    assert [mount.target for mount in spec.mounts if mount.writable] == [
        mount.target for mount in spec.mounts if mount.scratch
    ]
    record = json.loads(first.wheel.with_name(f"{first.wheel.name}.json").read_text())
    assert record["target"] == target.name
    assert record["source"].startswith("ops/ sha256:")
    assert compiled(factory, target, source) == CompileResult(wheel=first.wheel, compiled=False)
    assert compiled(factory, target, source, capabilities=("8.0",)).compiled
    (source / "ops.cu").write_text("another kernel")
    assert compiled(factory, target, source, capabilities=("8.0",)).compiled
    first.wheel.write_text("damaged")
    assert compiled(factory, target, source, capabilities=("8.0",)).compiled
    assert len(compiler.specs) == 4
    assert list(factory.layout.scratch.glob("compile-*")) == []


def test_an_archive_is_shown_alone(
    factory: Project, target: Target, compiler: Compiler, tmp_path: Path
) -> None:
    (tmp_path / "beside").write_text("secret")
    archive = tmp_path / "ops-1.0.zip"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("ops-1.0/setup.py", "setup()")
    compiled(factory, target, archive)
    (spec,) = compiler.specs
    assert spec.argv[2:4] == ("wheel-isolated", "/build/source/ops-1.0.zip")
    assert list(compiler.seen[0]) == ["ops-1.0.zip"]


# --- what a stranger's package may leave ---------------------------------------------------------------


def leave(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda out: change(leave_wheel(out))


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return leave(lambda wheel: (wheel.unlink(), make(wheel)))


def edited(wheel: Path, old: bytes, new: bytes) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name).replace(old, new) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def linked_member(wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        info = zipfile.ZipInfo("ops/key")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")


@pytest.mark.parametrize(
    "left",
    [
        lambda out: None,
        lambda out: (leave_wheel(out), make_wheel(out, "more", {})),
        replaced_by(lambda wheel: wheel.symlink_to("/etc/hostname")),
        replaced_by(lambda wheel: wheel.symlink_to("/dev/zero")),
        replaced_by(os.mkfifo),
        replaced_by(Path.mkdir),
        replaced_by(lambda wheel: wheel.write_bytes(b"PK")),
        leave(lambda wheel: os.truncate(wheel, 1 << 43)),
        leave(lambda wheel: wheel.rename(wheel.with_name("ops-1.0.whl"))),
        leave(
            lambda wheel: wheel.rename(wheel.with_name("../ops-1.0-py3-none-any.whl".replace("/", "\x1b")))
        ),
        leave(lambda wheel: wheel.rename(wheel.with_name("other-1.0-py3-none-any.whl"))),
        leave(lambda wheel: wheel.rename(wheel.with_name("ops-1.0-cp27-cp27m-win32.whl"))),
        leave(add_nested),
        leave(linked_member),
        leave(lambda wheel: edited(wheel, b"Version: 1.0", b"Version: 2.0")),
        leave(lambda wheel: edited(wheel, b"ops.py,sha256=", b"ops.py,sha256=x")),
        leave(lambda wheel: edited(wheel, b"ops.py,sha256=", b"other.py,sha256=")),
        lambda out: [(out / f"{number}").touch() for number in range(11)],
    ],
)
def test_only_a_sound_wheel_is_taken(
    factory: Project,
    target: Target,
    compiler: Compiler,
    source: Path,
    left: Callable[[Path], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "MOST_NAMES", 10)
    compiler.leave = left
    with pytest.raises(BuildError):
        compiled(factory, target, source, limits=(("scratch", 1 << 42),))
    assert not (factory.settings.root_path / "wheels").exists()
    assert list(factory.layout.scratch.iterdir()) == []


def test_a_wheel_of_another_package_is_not_taken(
    factory: Project, target: Target, compiler: Compiler, source: Path
) -> None:
    (source / "pyproject.toml").write_text('[project]\nname = "other"\n')
    with pytest.raises(BuildError, match=f"other, .* {WHEEL}") as caught:
        compiled(factory, target, source)
    assert caught.value.code == "wheel-mismatch"


@pytest.mark.parametrize(
    "completed",
    [{"over": ("it reached the limit memory=1G", "more")}, {"timed_out": True}],
)
def test_a_limit_that_is_reached_is_told(
    factory: Project, target: Target, compiler: Compiler, source: Path, completed: dict[str, Any]
) -> None:
    compiler.completed, compiler.code = completed, 137
    with pytest.raises(LimitError) as caught:
        compiled(factory, target, source, limits=(("memory", 1 << 30),), timeout=5.0)
    assert (caught.value.code, caught.value.exit_code) == ("limit-reached", EXIT_LIMIT)
    assert (compiler.specs[0].limits, compiler.specs[0].timeout) == ((("memory", 1 << 30),), 5.0)


def test_a_source_is_held_to_the_scratch_limit(
    factory: Project, target: Target, compiler: Compiler, source: Path
) -> None:
    archive = source.with_name("ops.zip")
    shutil.make_archive(str(archive.with_suffix("")), "zip", source)
    for text in (source, archive):
        with pytest.raises(UsageError, match=str(text)):
            compiled(factory, target, text, limits=(("scratch", 10),))
    assert compiler.specs == []


def test_links_into_the_wheels_folder_are_not_followed(
    factory: Project, target: Target, compiler: Compiler, source: Path, tmp_path: Path
) -> None:
    """A project may come with them: in place of the wheel, its record, and other records."""
    wheels = factory.settings.root_path / "wheels"
    wheels.mkdir()
    secret = tmp_path / "secret"
    secret.write_text("as it was")
    for name in (WHEEL, f"{WHEEL}.json"):
        (wheels / name).symlink_to(secret)
    (wheels / "a.whl.json").symlink_to("/dev/zero")
    os.mkfifo(wheels / "b.whl.json")
    (wheels / "c.whl.json").write_text("[" * 100_000)
    made = compiled(factory, target, source)
    assert (made.compiled, made.wheel) == (True, wheels / WHEEL)
    assert secret.read_text() == "as it was"
    assert compiled(factory, target, source) == CompileResult(wheel=made.wheel, compiled=False)


def test_tools_are_unpacked_as_they_were_locked(tmp_path: Path) -> None:
    files = {"tool/a.py": b"a", "tool-1.0.data/scripts/run": b"run", "tool-1.0.data/data/x": b"x"}
    wheel = make_wheel(tmp_path, "tool", files)
    row = locked(wheel)
    compiling._unpack_tools({row: wheel}, tmp_path / "tools", 1 << 20)
    found = {path.relative_to(tmp_path / "tools").as_posix() for path in tmp_path.glob("tools/*/*")}
    assert found == {"site/tool", "site/tool-1.0.dist-info", "bin/run"}
    assert os.access(tmp_path / "tools/bin/run", os.X_OK)
    with pytest.raises(BuildError, match="10 bytes"):
        compiling._unpack_tools({row: wheel}, tmp_path / "small", 10)
    add_nested(wheel)
    with pytest.raises(BuildError, match="locked is"):
        compiling._unpack_tools({row: wheel}, tmp_path / "changed", 1 << 20)
    with pytest.raises(BuildError, match=wheel.name) as caught:
        compiling._unpack_tools({locked(wheel): wheel}, tmp_path / "damaged", 1 << 20)
    assert caught.value.code == "wheel-invalid"
    assert not list(tmp_path.glob("changed/site")) + list(tmp_path.glob("damaged/site"))


def test_a_repository_takes_no_more_of_the_disk_than_is_free_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "git").write_text("#!/bin/sh\ncase $3 in init) ;; *) exec sleep 60 ;; esac\n")
    (programs / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    free = iter((100, 100, 100, 60, 40, 40))
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(compiling.shutil, "disk_usage", lambda _: usage(0, 0, next(free, 40)))
    with pytest.raises(UsageError, match=r"file:///a at 000000000000 .* 50 bytes") as caught:
        compiling._clone("file:///a", "0" * 40, tmp_path / "clone", 50)
    assert caught.value.code == "source-too-large"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not here")
def test_what_a_repository_links_to_outside_stops_it(
    factory: Project, target: Target, compiler: Compiler, source: Path, tmp_path: Path
) -> None:
    shutil.rmtree(source / ".git")
    git = GitTree(source)
    for change, expected in (
        (lambda: None, None),
        (lambda: (source / "k").symlink_to("/etc/passwd"), "is a link to outside"),
    ):
        change()
        git.commit()
        text = f"git+file://{source}@{git('rev-parse', 'HEAD')}"
        if expected is None:
            assert compiled(factory, target, text).compiled
            assert sorted(compiler.seen[0]) == ["ops.cu", "setup.py"]
        else:
            with pytest.raises(ImagefactoryError, match=expected):
                compiled(factory, target, text)


def test_a_compiler_that_fails_says_its_last_words(
    factory: Project, target: Target, compiler: Compiler, source: Path
) -> None:
    compiler.code = 1
    with pytest.raises(BuildError, match="error: no such header") as caught:
        compiled(factory, target, source)
    assert caught.value.code == "compile-failed"
    assert ("nvcc" in caught.value.hint, "12.1" in caught.value.hint) == (True, True)
    assert not (factory.settings.root_path / "wheels").exists()
    newer = CompileRequest(source="ops", target=replace(target, cuda="13.2"), folder=source)
    with pytest.raises(BuildError) as caught:
        compiling._check_compilers(newer, FAILED)
    assert "system:" in caught.value.hint


def test_a_target_without_cuda_has_no_compiler_of_it(factory: Project, target: Target, source: Path) -> None:
    known = {cuda: has_nvcc(replace(target, cuda=cuda)) for cuda in ("12.1", "13", "none")}
    assert known == {"12.1": False, "13": True, "none": False}
    amd = replace(target, cuda="rocm7", capabilities=("gfx90a",))
    with pytest.raises(UsageError) as caught:
        compiled(factory, amd, source)
    assert caught.value.code == "amd-not-supported"


def test_a_target_that_is_not_built(factory: Project, target: Target, source: Path) -> None:
    with pytest.raises(BuildError) as caught:
        compiled(factory, target, source)
    assert caught.value.code == "image-not-built"
    assert caught.value.hint == f"run imagefactory build {target.name}"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("./nothing", "path-not-found"),
        ("torch scatter", "requirement-invalid"),
        ("git+https://git.example.org/lab/ops", "commit-missing"),
        ("git+https://git.example.org/lab/ops@main", "commit-missing"),
        ("https://example.org/ops.tar.gz", "commit-missing"),
    ],
)
def test_a_source_that_is_none(
    factory: Project, target: Target, compiler: Compiler, text: str, code: str
) -> None:
    with pytest.raises(UsageError) as caught:
        compiled(factory, target, text)
    assert caught.value.code == code
    assert text.removeprefix("./") in caught.value.message
    assert compiler.specs == []


@pytest.mark.parametrize(
    "error",
    [
        "/build/source/a.cpp:12:3: error: 'x' was not declared",
        "/build/source/a.cpp:1:10: fatal error: cub/cub.cuh: No such file or directory",
        '/build/source/a.cu(7): error: identifier "y" is undefined',
        "nvcc fatal   : Unsupported gpu architecture 'compute_70'",
        "/usr/bin/ld: cannot find -lcudart",
    ],
)
def test_a_compilers_first_error_is_shown_though_much_follows(error: str) -> None:
    noise = [f"a.cpp:{number}: warning: unused" for number in range(200)]
    lines = [
        *noise,
        error,
        "  12 | x",
        *noise,
        "a.cpp:9:1: error: the second",
        "RuntimeError: Error compiling",
    ]
    told = compiling.what_failed("\n".join(lines)).splitlines()
    assert told[0] == error
    assert told[1] == "  12 | x"
    assert told[-2:] == lines[-2:]
    assert len(told) <= 41


def test_without_a_compilers_error_the_end_is_shown() -> None:
    lines = [f"line {number}" for number in range(100)]
    assert compiling.what_failed("\n".join(lines)).splitlines() == lines[-30:]
    assert compiling.what_failed("short\na.c:1: error: here").splitlines() == ["short", "a.c:1: error: here"]


# --- what a build sees -------------------------------------------------------------------------------


def test_what_its_backend_asks_for_is_there_and_recorded(
    factory: Project, target: Target, compiler: Compiler, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """setup_requires of seqeval: without setuptools-scm it would say to be 0.0.0."""
    wanted: list[tuple[str, ...]] = []
    monkeypatch.setattr(compiling, "_tools", lambda *given, **_: wanted.append(tuple(given[3])) or {})
    compiler.requires = '["setuptools_scm>=8"]'
    made = compiled(factory, target, source)
    assert wanted == [DEFAULT_REQUIRES, (*DEFAULT_REQUIRES, "setuptools_scm>=8")]
    record = json.loads(made.wheel.with_name(f"{made.wheel.name}.json").read_text())
    assert (record["requires"], record["isolated"]) == (["setuptools_scm>=8"], True)
    assert not compiled(factory, target, source).compiled
    assert (len(compiler.asked), len(compiler.specs)) == (1, 1)  # the record says what it asked for


@pytest.mark.parametrize(
    "requires", ["", "{}", '["a b"]', '["a @ file:///etc"]', str(["a"] * 1000), "[" * 9999]
)
def test_what_an_untrusted_backend_asks_for_is_read_strictly(
    factory: Project, target: Target, compiler: Compiler, source: Path, requires: str
) -> None:
    compiler.requires = requires.replace("'", '"')
    with pytest.raises(BuildError):
        compiled(factory, target, source)
    assert compiler.specs == []


@pytest.mark.parametrize(
    ("setup", "pyproject", "isolated"),
    [
        ("setup()", "", True),
        ("import numpy\nsetup()", "", False),
        ("try:\n    from numpy import get_include\nexcept ImportError: pass\n", "", False),
        ("import other\nsetup()", "", True),
        ("setup()", '[build-system]\nrequires = ["setuptools", "NumPy>=1"]\n', False),
        ("setup()", '[build-system]\nrequires = ["setuptools", "numpy>=99"]\n', True),
    ],
)
def test_the_targets_packages_are_shown_to_what_names_or_imports_one(
    factory: Project,
    target: Target,
    compiler: Compiler,
    source: Path,
    setup: str,
    pyproject: str,
    isolated: bool,
) -> None:
    (source / "setup.py").write_text(setup)
    (source / "pyproject.toml").write_text(pyproject)
    made = compiled(factory, target, source)
    record = json.loads(made.wheel.with_name(f"{made.wheel.name}.json").read_text())
    assert record["isolated"] is isolated
    assert (compiler.specs[0].argv[2] == "wheel-isolated") is isolated


def test_they_are_shown_where_a_module_is_missed(
    factory: Project, target: Target, compiler: Compiler, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Compiler.run

    def missing(self: Compiler, image: Image, spec: RunSpec) -> CommandResult:
        if spec.argv[2] == "requires-isolated":
            return replace(FAILED, stderr="ModuleNotFoundError: No module named 'torch'")
        return run(self, image, spec)

    monkeypatch.setattr(Compiler, "run", missing)
    made = compiled(factory, target, source)
    record = json.loads(made.wheel.with_name(f"{made.wheel.name}.json").read_text())
    assert (record["isolated"], [spec.argv[2] for spec in compiler.specs]) == (False, ["wheel"])


def test_pkg_resources_comes_with_the_last_setuptools_that_has_it(
    factory: Project, target: Target, compiler: Compiler, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[tuple[str, ...]] = []
    monkeypatch.setattr(compiling, "_tools", lambda *given, **_: wanted.append(tuple(given[3])) or {})
    (source / "setup.py").write_text("import pkg_resources\nsetup()")
    compiled(factory, target, source)
    assert wanted == [(*DEFAULT_REQUIRES, "setuptools<81")]


@pytest.mark.parametrize(("version", "taken"), [("1.0", True), ("1.0.0", True), ("1.2.2", False)])
def test_a_wheel_of_another_version_is_not_taken(
    factory: Project, target: Target, compiler: Compiler, source: Path, version: str, taken: bool
) -> None:
    (source / "pyproject.toml").write_text(f'[project]\nname = "ops"\nversion = "{version}"\n')
    if taken:
        assert compiled(factory, target, source).compiled
        return
    with pytest.raises(BuildError, match=rf"ops 1\.2\.2, .* {WHEEL}") as caught:
        compiled(factory, target, source)
    assert caught.value.code == "wheel-mismatch"
    assert not (factory.settings.root_path / "wheels").exists()


SCM = '[build-system]\nrequires = ["setuptools>=64", "setuptools_scm>=8"]\n[project]\nname = "ops"\n'


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not here")
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize(
    ("pyproject", "variable"),
    [
        (f'{SCM}dynamic = ["version"]', "SETUPTOOLS_SCM_PRETEND_VERSION"),
        (SCM.replace("setuptools_scm>=8", "pdm-backend"), "PDM_BUILD_SCM_VERSION"),
        (f'{SCM}version = "1.0"', ""),
    ],
)
def test_a_build_that_would_ask_git_is_given_the_version(
    factory: Project,
    target: Target,
    compiler: Compiler,
    source: Path,
    tmp_path: Path,
    pyproject: str,
    variable: str,
    away: bool,
) -> None:
    """A commit that is fetched comes with the tags and commits before it."""
    shutil.rmtree(source / ".git")
    (source / "pyproject.toml").write_text(pyproject)
    git = GitTree(source)
    git.commit()
    git("tag", "v1.2.3")
    git.commit()
    text = f"git+file://{source}@{git('rev-parse', 'HEAD')}" if away else source
    compiler.leave = lambda out: make_wheel(out, "ops", {}, version="1.0")
    made = compiled(factory, target, text)
    version = f"1.2.4.dev1+g{git('rev-parse', 'HEAD')[:9]}"
    assert dict(compiler.specs[0].environment).get(variable, "") == (version if variable else "")
    assert dict(compiler.asked[0].environment).get(variable, "") == (version if variable else "")
    record = json.loads(made.wheel.with_name(f"{made.wheel.name}.json").read_text())
    assert (version in record["source"]) is bool(variable)


@pytest.mark.parametrize(("pyproject", "told"), [(f'{SCM}dynamic = ["version"]', True), ("", False)])
def test_a_build_without_a_version_in_git_says_what_to_write(
    factory: Project, target: Target, compiler: Compiler, source: Path, pyproject: str, told: bool
) -> None:
    (source / "pyproject.toml").write_text(pyproject)
    compiler.code = 1
    with pytest.raises(BuildError) as caught:
        compiled(factory, target, source)
    assert ("git tag" in caught.value.hint and "[project]" in caught.value.hint) is told


def test_a_known_package_is_compiled_and_does_not_look_for_a_wheel(
    factory: Project, target: Target, compiler: Compiler, source: Path
) -> None:
    (source / "pyproject.toml").write_text('[project]\nname = "flash-attn"\nversion = "1.0"\n')
    compiler.leave = lambda out: make_wheel(out, "flash_attn", {})
    compiled(factory, target, source)
    assert dict(compiler.specs[0].environment)["FLASH_ATTENTION_FORCE_BUILD"] == "TRUE"


def test_a_projects_root_is_built_without_what_imagefactory_has_there(
    factory: Project, target: Target, compiler: Compiler
) -> None:
    root = factory.settings.root_path
    (root / "setup.py").write_text("setup()")
    (root / "wheels").mkdir()
    (root / "wheels" / "a.whl").write_text("another")
    first = compiled(factory, target, root)
    assert set(compiler.seen[0]) == {"setup.py"}
    assert compiled(factory, target, root) == CompileResult(wheel=first.wheel, compiled=False)


def test_another_targets_wheel_of_the_same_name_stays(
    factory: Project, target: Target, compiler: Compiler, source: Path
) -> None:
    """An extension is built for one torch: the same name has other bytes for another target."""
    wheels = factory.settings.root_path / "wheels"
    wheels.mkdir()
    (wheels / WHEEL).write_bytes(b"another target's")
    made = compiled(factory, target, source, reserved=frozenset({WHEEL}))
    assert (made.wheel, (wheels / WHEEL).read_bytes()) == (wheels / target.name / WHEEL, b"another target's")
    assert compiled(factory, target, source, reserved=frozenset({WHEEL})) == CompileResult(
        wheel=made.wheel, compiled=False
    )
    shutil.rmtree(wheels / target.name)
    (wheels / target.name).symlink_to("/tmp")
    with pytest.raises(BuildError) as caught:
        compiled(factory, target, source, reserved=frozenset({WHEEL}))
    assert caught.value.code == "wheel-folder-outside"


def test_build_tools_wait_for_the_cooldown_and_locked_packages_do_not(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "IMAGEFACTORY_COOLDOWN": "2 days"}
    access: Any = SimpleNamespace(settings=load_settings(directory=None, start=tmp_path, environ=environ))
    target = make_target(cooldown="1 week except setuptools")
    cutoff = compiling.tools_cutoff(access, target, make_lock().wheels)
    assert cutoff
    assert cutoff.allowed == ("idna", "setuptools", "torch")
    assert datetime.now(UTC) - cutoff.time >= timedelta(days=7)
