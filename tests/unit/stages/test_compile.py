"""A wheel compiled in the image that it is for: what is shown to the compiler, what is kept, what stops."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from imagefactory.errors import BuildError, UsageError
from imagefactory.factory import Factory
from imagefactory.model import Completed, RunSpec, Target
from imagefactory.oci.model import Image
from imagefactory.progress import Quiet
from imagefactory.stages import compile as compiling
from imagefactory.stages.compile import CompileAsk, Compiled, compile_wheel
from tests.made.factory import put_image

FAILED = Completed(returncode=1, stdout="compiling", stderr="error: no such header", seconds=1.0)


@dataclass
class Compiler:
    """In place of a runner: remembers what it was to run, and leaves a wheel of what it saw."""

    specs: list[RunSpec] = field(default_factory=list)
    seen: list[Mapping[str, str]] = field(default_factory=list)
    code: int = 0

    def require(self) -> str:
        return "a compiler"

    def prepare(self, image: Image, *, checked: bool) -> Image:
        return image

    def run(self, image: Image, spec: RunSpec) -> Completed:
        self.specs.append(spec)
        source, tools, out = (mount.source for mount in spec.mounts)
        self.seen.append(
            {str(p.relative_to(source)): p.read_text("latin-1") for p in source.rglob("*") if p.is_file()}
        )
        assert (tools / "wheel_builder.py").is_file()
        if not self.code:
            (out / "ops-1.0-cp311-cp311-linux_x86_64.whl").write_text(json.dumps(self.seen[-1]))
        return Completed(
            returncode=self.code, stdout="compiling", stderr="error: no such header", seconds=1.0
        )


@pytest.fixture
def compiler(factory: Factory, target: Target, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    put_image(factory, target)
    monkeypatch.setattr(compiling, "make_runner", lambda *_: made)
    monkeypatch.setattr(compiling, "_tools", lambda *_: {})
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "ops"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("secret")
    (folder / "setup.py").write_text("setup()")
    (folder / "ops.cu").write_text("kernel")
    return folder


def compiled(factory: Factory, target: Target, source: Path | str, **more: tuple[str, ...]) -> Compiled:
    folder = factory.settings.root_path / "wheels"
    asked = CompileAsk(source=str(source), target=target, folder=folder, **more)
    return compile_wheel(factory, asked, Quiet())


def test_a_folder_is_compiled_once_for_its_source_and_capabilities(
    factory: Factory, target: Target, compiler: Compiler, source: Path
) -> None:
    first = compiled(factory, target, source)
    assert (first.made, first.wheel.parent) == (True, factory.settings.root_path / "wheels")
    assert compiler.seen == [{"setup.py": "setup()", "ops.cu": "kernel"}]
    (spec,) = compiler.specs
    variables = dict(spec.environment)
    assert variables["TORCH_CUDA_ARCH_LIST"] == ";".join(target.capabilities)
    assert variables["SOURCE_DATE_EPOCH"] == "315532800"
    assert spec.network is False
    record = json.loads(first.wheel.with_name(f"{first.wheel.name}.json").read_text())
    assert record["target"] == target.name
    assert record["source"].startswith("ops/ sha256:")
    assert compiled(factory, target, source) == Compiled(wheel=first.wheel, made=False)
    assert compiled(factory, target, source, capabilities=("8.0",)).made
    (source / "ops.cu").write_text("another kernel")
    assert compiled(factory, target, source, capabilities=("8.0",)).made
    first.wheel.write_text("damaged")
    assert compiled(factory, target, source, capabilities=("8.0",)).made
    assert len(compiler.specs) == 4
    assert list(factory.layout.tmp.glob("compile-*")) == []


def test_an_archive_is_shown_alone(
    factory: Factory, target: Target, compiler: Compiler, tmp_path: Path
) -> None:
    (tmp_path / "beside").write_text("secret")
    archive = tmp_path / "ops-1.0.zip"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("ops-1.0/setup.py", "setup()")
    compiled(factory, target, archive)
    (spec,) = compiler.specs
    assert spec.argv[2] == "/build/source/ops-1.0.zip"
    assert list(compiler.seen[0]) == ["ops-1.0.zip"]


def test_a_compiler_that_fails_says_its_last_words(
    factory: Factory, target: Target, compiler: Compiler, source: Path
) -> None:
    compiler.code = 1
    with pytest.raises(BuildError, match="error: no such header") as caught:
        compiled(factory, target, source)
    assert caught.value.hint == "PyPI has CUDA's compiler from CUDA 13 on, not of 12.1, if it is that"
    assert not (factory.settings.root_path / "wheels").exists()
    newer = CompileAsk(source="ops", target=replace(target, cuda="13.2"), folder=source)
    with pytest.raises(BuildError) as caught:
        compiling._refuse_failed(newer, FAILED)
    assert caught.value.hint.startswith("packages and Debian's libraries (system: in a recipe)")


def test_a_target_without_cuda_has_no_compiler_of_it(factory: Factory, target: Target, source: Path) -> None:
    known = {cuda: compiling._has_nvcc(replace(target, cuda=cuda)) for cuda in ("12.1", "13", "none")}
    assert known == {"12.1": False, "13": True, "none": False}
    amd = replace(target, cuda="rocm7", capabilities=("gfx90a",))
    with pytest.raises(UsageError, match="is for AMD's GPUs: nothing here compiles for them"):
        compiled(factory, amd, source)


def test_a_target_that_is_not_built(factory: Factory, target: Target, source: Path) -> None:
    with pytest.raises(BuildError, match=f"{target.name} is not built yet") as caught:
        compiled(factory, target, source)
    assert caught.value.hint == f"imagefactory build {target.name}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("./nothing", "nothing does not exist"),
        ("torch scatter", "is no package"),
        ("git+https://git.example.org/lab/ops", "names no commit"),
        ("git+https://git.example.org/lab/ops@main", "names no commit"),
        ("https://example.org/ops.tar.gz", "names no commit"),
    ],
)
def test_a_source_that_is_none(
    factory: Factory, target: Target, compiler: Compiler, text: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        compiled(factory, target, text)
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
