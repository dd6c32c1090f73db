"""The suite's checks in a conda environment: what conda-meta says is there, whole, and nothing else."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory.errors import UsageError
from imagefactory.suite import conda, table
from imagefactory.suite.checks import imports, libraries, packages
from imagefactory.suite.context import CheckFailure, Context, same_release
from imagefactory.suite.frameworks import jax as jax_file
from imagefactory.suite.frameworks import other, ptxas
from imagefactory.suite.frameworks import torch as torch_file
from imagefactory.verify import suite_files
from tests.made.environment import add_package, fake_program, library, make_context
from tests.made.trial import make_definition
from tests.made.values import make_conda

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
SITE = f"lib/python{PYTHON}/site-packages"


class Environment:
    """A conda environment in `prefix`, as a linker leaves it."""

    def __init__(self, prefix: Path) -> None:
        self.prefix, self.site = prefix, prefix / SITE
        self.locked: dict[str, str] = {}
        self.site.mkdir(parents=True)
        (prefix / "conda-meta").mkdir()
        (prefix / "conda-meta/history").write_text("")

    def add(self, name: str, files: dict[str, bytes], *, links: dict[str, str] | None = None) -> None:
        rows = []
        for path, data in files.items():
            (self.prefix / path).parent.mkdir(parents=True, exist_ok=True)
            (self.prefix / path).write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            rows.append(
                {"_path": path, "path_type": "hardlink", "sha256": digest, "size_in_bytes": len(data)}
            )
        for path, target in (links or {}).items():
            (self.prefix / path).symlink_to(target)
            rows.append({"_path": path, "path_type": "softlink"})
        self.record(name, rows)

    def record(self, name: str, rows: list[dict[str, Any]], **changes: Any) -> None:
        data = {"name": name, "version": "1.0", "build": "h1_0", **changes}
        data["paths_data"] = {"paths": rows, "paths_version": 1}
        (self.prefix / f"conda-meta/{name}-1.0-h1_0.json").write_text(json.dumps(data))
        self.locked[name] = "1.0 h1_0"

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self.prefix / f"conda-meta/{name}-1.0-h1_0.json"
        return list(json.loads(file.read_text())["paths_data"]["paths"])

    def context(self, module: Any = other, **changes: Any) -> Context:
        values = {"conda": dict(self.locked), "framework": table.OTHER, "distribution": "tiny", **changes}
        made = make_context(self.site, module, **values)
        return Context(expected=made.expected, framework=module, site=str(self.site), prefix=str(self.prefix))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    made = Environment(tmp_path / "env")
    made.add("libtiny", {"lib/libtiny.so.1": b"\x7fno library", "share/tiny/data": b"12345"})
    info = f"{SITE}/tiny-1.0.dist-info"
    made.add(
        "tiny",
        {
            f"{SITE}/tiny/__init__.py": b"__version__ = 'none'\n",
            f"{SITE}/tiny/__pycache__/__init__.cpython-311.pyc": b"theirs",
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
            "bin/tiny": b"#!/opt/env/bin/python\n",
        },
        links={"bin/tiny-link": "tiny", "share/nowhere": "not-there"},
    )
    return made


# --- packages --------------------------------------------------------------------------------------


def test_packages_as_locked(environment: Environment) -> None:
    code = environment.site / "tiny/__pycache__/__init__.cpython-311.pyc"
    for change in (lambda: code.write_bytes(b"compiled here"), code.unlink):
        change()
        finding = packages.check(environment.context())
        assert finding.numbers["files"] == 5
    assert finding.numbers["hashed-files"] == 5


def test_wheels_on_top_are_told_from_condas_packages(environment: Environment) -> None:
    add_package(environment.site, "wheel-on-top", "2.0", {"top.py": b"", "../../../bin/top": b"#!"})
    context = environment.context(packages={"wheel-on-top": "2.0"})
    assert packages.check(context).numbers["packages"] == 3
    with pytest.raises(CheckFailure, match=r"wheel-on-top 2\.0"):
        packages.check(environment.context())
    (environment.site / "top.py").write_bytes(b"changed")
    with pytest.raises(CheckFailure, match=r"top\.py .*7.*0"):
        packages.check(context)


def rewritten(environment: Environment, data: bytes, recorded: bytes) -> None:
    """A file that the prefix was written into: the package's own hash and size are those of before."""
    path = environment.prefix / "share/tiny/data"
    path.write_bytes(data)
    before = b"home=/placeholder/placeholder\n"
    row = {
        "_path": "share/tiny/data",
        "path_type": "hardlink",
        "file_mode": "text",
        "prefix_placeholder": "/placeholder/placeholder",
        "size_in_bytes": len(before),
        "sha256": hashlib.sha256(before).hexdigest(),
        "sha256_in_prefix": hashlib.sha256(recorded).hexdigest(),
    }
    rows = [each for each in environment.rows("libtiny") if each["_path"] != row["_path"]]
    environment.record("libtiny", [*rows, row])


def test_a_file_with_the_prefix_written_into_it(environment: Environment) -> None:
    rewritten(environment, b"home=/opt/env\n", b"home=/opt/env\n")
    packages.check(environment.context())
    rewritten(environment, b"home=/opt/elsewhere\n", b"home=/opt/env\n")
    with pytest.raises(CheckFailure, match="libtiny: share/tiny/data"):
        packages.check(environment.context())


DAMAGES: list[tuple[Callable[[Environment], Any], str]] = [
    (lambda e: (e.prefix / "share/tiny/data").unlink(), "libtiny: share/tiny/data"),
    (lambda e: (e.prefix / "share/tiny/data").write_bytes(b"1234"), "share/tiny/data has 4"),
    (lambda e: (e.prefix / "share/tiny/data").write_bytes(b"54321"), "libtiny: share/tiny/data"),
    (lambda e: (e.prefix / "bin/tiny-link").unlink(), "tiny: bin/tiny-link"),
    (lambda e: (e.prefix / "lib/stray.so").write_bytes(b""), "lib/stray.so"),
    (lambda e: (e.site / "evil.pyc").write_bytes(b""), f"{SITE}/evil.pyc"),
    (lambda e: (e.site / "evil").symlink_to("/tmp"), f"{SITE}/evil"),
    (lambda e: (e.prefix / "conda-meta/pinned").write_text("x"), "conda-meta/pinned"),
    (lambda e: (e.prefix / "conda-meta/tiny-1.0-h1_0.json").unlink(), "tiny 1.0 h1_0"),
    (lambda e: (e.prefix / "conda-meta/tiny-1.0-h1_0.json").write_text("{"), "json cannot be read"),
    (lambda e: e.record("tiny", e.rows("tiny"), build="h2_0"), "1.0 h2_0"),
    (lambda e: e.record("tiny", [{"_path": 1}]), "json cannot be read: TypeError"),
    (lambda e: e.locked.pop("libtiny"), "libtiny 1.0 h1_0"),
    (
        lambda e: shutil.copy(e.prefix / "conda-meta/tiny-1.0-h1_0.json", e.prefix / "conda-meta/a.json"),
        "tiny has two records",
    ),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_damaged_environments(
    environment: Environment, damage: Callable[[Environment], Any], words: str
) -> None:
    packages.check(environment.context())
    damage(environment)
    with pytest.raises(CheckFailure) as caught:
        packages.check(environment.context())
    assert words in caught.value.detail


def test_an_environment_of_wheels_may_hold_no_conda_packages(environment: Environment) -> None:
    with pytest.raises(CheckFailure, match=r"tiny 1\.0"):
        packages.check(environment.context(conda={}))


def test_a_path_of_two_packages_is_as_one_of_them_says(environment: Environment) -> None:
    environment.add("other", {"share/tiny/data": b"theirs"})
    assert packages.check(environment.context()).numbers["files"] == 5
    (environment.prefix / "share/tiny/data").write_bytes(b"nobody's")
    with pytest.raises(CheckFailure, match="share/tiny/data has 8"):
        packages.check(environment.context())


def test_what_scripts_made_is_told_and_no_fault(environment: Environment) -> None:
    environment.add("scripted", {"bin/.scripted-post-link.sh": b"#!/bin/sh\n"})
    (environment.prefix / "etc").mkdir()
    (environment.prefix / "etc/made").write_bytes(b"")
    detail = packages.check(environment.context()).detail
    assert "1 more" in detail
    assert "scripted" in detail


# --- import ----------------------------------------------------------------------------------------


def find(environment: Environment, name: str, **changes: Any) -> tuple[str, ...]:
    return imports.find_modules(environment.context(distribution=name, **changes))


def test_a_package_is_imported_by_its_name_else_as_what_it_brings(environment: Environment) -> None:
    assert find(environment, "tiny") == ("tiny",)
    environment.add("scikit-tiny", {f"{SITE}/sktiny/__init__.py": b"", f"{SITE}/_sk.py": b""})
    assert find(environment, "scikit-tiny") == ("sktiny",)
    with pytest.raises(CheckFailure, match="libtiny"):
        find(environment, "libtiny")
    add_package(environment.site, "Wheel-Two", "1.0", {"one.py": b"", "two/__init__.py": b""})
    assert find(environment, "wheel-two", packages={"wheel-two": "1.0"}) == ("one", "two")
    with pytest.raises(CheckFailure, match="gone"):
        find(environment, "gone", packages={"gone": "1.0"})


def test_any_package_is_imported(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "imagefactory_tiny_framework"
    environment.add(name, {f"{SITE}/{name}.py": b"VALUE = 1\n"})
    monkeypatch.syspath_prepend(environment.site)
    importlib.invalidate_caches()
    assert imports.check(environment.context(distribution=name)).detail == f"{name} of {name} 1.0"
    with pytest.raises(CheckFailure, match="tiny2"):
        imports.check(environment.context(distribution="tiny2"))
    (environment.site / f"{name}2.py").write_bytes(b"import nothing_of_this_name\n")
    environment.record(f"{name}2", [{"_path": f"{SITE}/{name}2.py"}])
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        imports.check(environment.context(distribution=f"{name}2"))


def test_condas_builds_may_call_themselves_something_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imagefactory_conda_torch.py").write_text("__version__ = '2.4.0.post302'\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    framework = SimpleNamespace(
        MODULES=(("torch", "imagefactory_conda_torch"), ("pytorch", "imagefactory_conda_torch")),
        prepare=lambda: None,
    )

    def check(**changes: Any) -> str:
        return imports.check(make_context(tmp_path, framework, **changes)).detail

    conda_lock = {"pytorch": "2.4.0 cuda120_py311h1_302"}
    assert check(distribution="pytorch", conda=conda_lock) == "imagefactory_conda_torch 2.4.0.post302"
    with pytest.raises(CheckFailure, match=r"2\.4\.0\.post302.*2\.4\.1"):
        check(distribution="pytorch", conda={"pytorch": "2.4.1 cuda120_py311h1_302"})
    with pytest.raises(CheckFailure, match=r"2\.4\.0$"):
        check(distribution="torch", packages={"torch": "2.4.0"})


def test_releases_are_compared_by_their_numbers() -> None:
    assert same_release("0.20.0a0+1f2e", "0.20.0")
    assert same_release("2.4.0.post302", "2.4.0")
    assert not same_release("2.4.1", "2.4.0")


# --- libraries -------------------------------------------------------------------------------------


def test_libraries_anywhere_in_the_environment_find_each_other(environment: Environment) -> None:
    (environment.prefix / "lib/libtiny.so.1").unlink()
    needed = library(environment.prefix / "lib/libcudart.so.12")
    library(environment.site / "tiny/_C.so", needed, runpath="$ORIGIN/../../..")
    library(environment.prefix / "lib/stubs/libcuda.so", needed)
    (environment.prefix / "lib/libdangling.so").symlink_to("nothing")
    numbers = libraries.check(environment.context()).numbers
    assert (numbers["libraries"], numbers["preloaded"]) == (2, 0)
    needed.unlink()
    with pytest.raises(CheckFailure, match=rf"libcudart\.so\.12 .*{SITE}/tiny/_C\.so"):
        libraries.check(environment.context())


def test_condas_jaxlib_opens_gpu_libraries_itself(environment: Environment) -> None:
    (environment.prefix / "lib/libtiny.so.1").unlink()
    library(environment.site / "jaxlib/xla_extension.so", runpath="$ORIGIN/../../..")
    _, names = libraries.OPENED_BY_NAME["jax"]
    for name in names:
        library(environment.prefix / f"lib/{name}.so.1")
    context = environment.context(framework="jax")
    assert libraries.check(context).numbers["opened-by-name"] == len(names)
    (environment.prefix / "lib/libcudnn.so.1").unlink()
    with pytest.raises(CheckFailure, match=rf"libcudnn .*{SITE}/jaxlib/xla_ext"):
        libraries.check(context)
    with pytest.raises(CheckFailure, match="so no GPU library would be opened"):
        libraries.check(environment.context(framework="jax", conda={}))


def test_the_programs_run_path_leads_libraries_without_one_of_their_own(environment: Environment) -> None:
    (environment.prefix / "lib/libtiny.so.1").unlink()
    needed = library(environment.prefix / "lib/libx.so.1", soname="libimagefactoryx.so.1")
    path = library(environment.site / "tiny/_C.so", needed)
    (environment.prefix / "lib/libx.so.1").rename(environment.prefix / "lib/libimagefactoryx.so.1")
    scan = libraries.scan_libraries(str(environment.prefix), "x86_64")
    scan.names.clear()
    program = libraries.System(folders=(), cached=frozenset(), program=(str(environment.prefix / "lib"),))
    asked = ("libimagefactoryx.so.1", str(path), str(environment.site), scan)
    assert libraries.resolve(*asked, program) == "resolved"
    assert libraries.resolve(*asked, libraries.System(folders=(), cached=frozenset())) == "unresolved"


def test_the_graphics_drivers_libraries_may_be_absent_of_condas_packages_alone(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    (environment.prefix / "lib/libtiny.so.1").unlink()
    needed = library(environment.prefix / "libgl.so", soname="libGL.so.1")
    library(environment.site / "tiny/_C.so", needed)
    needed.unlink()
    small = libraries.System(folders=(), cached=frozenset({"libc.so.6"}))  # this machine may have one
    monkeypatch.setattr(libraries, "read_system", lambda *_: small)
    assert libraries.check(environment.context()).numbers["driver"] == 1
    with pytest.raises(CheckFailure, match=r"libGL\.so\.1"):
        libraries.check(environment.context(conda={}))


# --- compilers -------------------------------------------------------------------------------------


def test_condas_assembler_is_found(environment: Environment) -> None:
    assert ptxas.find_programs(environment.context(), "ptxas") == []
    fake_program(environment.prefix / "bin/ptxas", "exit 1")
    assert ptxas.find_programs(environment.context(), "ptxas") == [str(environment.prefix / "bin/ptxas")]
    assert not table.check_not_applicable("jax", "compiler", {"jaxlib": "0.5.0", "cuda-nvcc-tools": "12.6"})
    assert table.check_not_applicable("jax", "compiler", {"jaxlib": "0.5.0", "cuda-version": "12.6"})


def test_condas_jaxlib_says_its_cuda(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """jax itself is not here: what it says of its GPU code is made up, and read as from the real one."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [])
    versions: Any = SimpleNamespace(cuda_runtime_build_version=lambda: 12060)
    library_of_jax = SimpleNamespace(cuda_versions=versions)
    for name in ("jax", "jax._src"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax._src.lib", library_of_jax)
    locked = {
        "jaxlib": "0.5.0 cuda126py311h1_200",
        "cuda-cudart": "12.6.77 h5888daf_0",
        "cuda-cudart-dev": "12.6.77 0",
    }

    def ask(**changes: str) -> tuple[str, str]:
        return jax_file.cuda_version(environment.context(jax_file, cuda="12.6", conda={**locked, **changes}))

    assert ask() == ("12.6", "CUDA code of jaxlib, cuda-cudart 12.6.77")
    with pytest.raises(CheckFailure, match=r"CUDA 12.*cuda-cudart 11\.8"):
        ask(**{"cuda-cudart": "11.8.89 0"})
    library_of_jax.cuda_versions = None
    with pytest.raises(CheckFailure, match=r"12\.6 .*\*cuda\*"):
        ask()


def test_condas_triton_counts(environment: Environment) -> None:
    assert table.check_not_applicable("torch", "compiler", {"pytorch": "1.13.1"})
    assert not table.check_not_applicable("torch", "compiler", {"pytorch": "2.3.1"})
    assert not table.check_not_applicable("torch", "compiler", {"pytorch": "1.13.1", "torchtriton": "2.0"})
    context = environment.context(torch_file, conda={"pytorch": "2.3.1 x", "torchtriton": "2.3.1 py311"})
    with pytest.raises(CheckFailure, match="ptxas"):
        torch_file.compilers(context, str(environment.prefix))


# --- the host's side -------------------------------------------------------------------------------


def test_expectations_name_builds_and_refuse_checks_that_are_not_for_all() -> None:
    package = make_conda("tiny 1.0 h1_0")
    made = make_definition(framework="tiny", checks=("packages", "import"))
    definition = replace(made, lock=replace(made.lock, conda=(package,)))
    asked = suite_files.expectations(definition)
    assert (asked["conda"], asked["version"]) == ({"tiny": "1.0 h1_0"}, "1.0")
    with pytest.raises(UsageError) as caught:
        suite_files.expectations(make_definition(framework="tiny", checks=("packages", "compute")))
    assert caught.value.code == "check-not-applicable"
    assert "'compute'" in caught.value.message
    assert caught.value.hint == "write checks: [packages, libraries, import, unprivileged]"


def test_what_is_tried_as_an_ordinary_user() -> None:
    assert table.unprivileged_checks("torch", ("unprivileged",)) == table.UNPRIVILEGED_CHECKS
    assert table.unprivileged_checks(table.OTHER, ("packages", "unprivileged")) == ("unprivileged",)
    assert table.unprivileged_checks(table.OTHER, ("import", "unprivileged")) == ("unprivileged", "import")


def test_records_know_their_scripts(environment: Environment) -> None:
    records, faults = conda.read_records(str(environment.prefix))
    assert [record.name for record in records] == ["libtiny", "tiny"]
    assert faults == []
    assert conda.scripted(records) == []
