"""The modules of the packages that a recipe names: which they are, and what came of importing each."""

# ruff: noqa: E501 -- one case per line reads as a table
from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from imagefactory.suite.checks import imports
from imagefactory.suite.context import CheckFailure
from tests.made.environment import add_package, make_context

EXTENSION = f"cpython-{sys.version_info.major}{sys.version_info.minor}-x86_64-linux-gnu.so"
NUMPY_WARNING = """
A module that was compiled using NumPy 1.x cannot be run in
NumPy 2.1.0 as it may crash. To support both 1.x and 2.x
versions of NumPy, modules must be compiled with NumPy 2.0.

Traceback (most recent call last):  File "<string>", line 1, in <module>
  File "/opt/env/lib/python3.11/site-packages/datasets/__init__.py", line 17, in <module>
    import pyarrow
  File "/opt/env/lib/python3.11/site-packages/pyarrow/__init__.py", line 65, in <module>
    import pyarrow.lib as _lib
AttributeError: _ARRAY_API not found
"""


@pytest.mark.parametrize(
    ("files", "modules"),
    [
        (["tiny/__init__.py", "tiny/sub.py", "tests/__init__.py", "docs/conf.py"], ["tiny"]),
        ([f"_speed.{EXTENSION}", f"fast.{EXTENSION}", "single.py", "libcore.so"], ["fast", "single"]),
        ([f"fast/__init__.{EXTENSION}"], ["fast"]),
        (["space/part/__init__.py", "space/part/deep/__init__.py", "tiny-1.0.dist-info/METADATA"], ["space.part"]),
        (["google/cloud/storage/__init__.py", "google/cloud/_x/__init__.py"], ["google.cloud.storage"]),
        (["nvidia/cublas/lib/libcublas.so.12", "nvidia/cublas/include/cublas.h"], []),
        (["../../../bin/tool.py", "tiny.libs/libz.so.1", "data/notes.txt"], []),
        (["plain/one.py"], ["plain"]),
        ([], []),
    ],
)  # fmt: skip
def test_modules_of_files(files: list[str], modules: list[str]) -> None:
    assert imports.public_modules(files) == modules


def test_the_module_that_is_called_as_its_package_is_the_main_one() -> None:
    files = ["nibabel/__init__.py", "nisext/__init__.py"]
    assert imports.modules_of("nibabel", files) == [("nibabel", True), ("nisext", False)]
    assert imports.modules_of("pillow", ["PIL/__init__.py", "other.py"]) == [("PIL", True), ("other", True)]
    assert imports.modules_of("pygments", ["Pygments/__init__.py", "x.py"]) == [
        ("Pygments", True),
        ("x", False),
    ]


@pytest.mark.parametrize(
    ("errors", "gpu", "state"),
    [
        ([], True, imports.LOADS),
        (["ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"], True, imports.NEEDS_GPU),
        (["RuntimeError: Failed to import x", "ImportError: libcuda.so.1: cannot open shared object file"], True, imports.NEEDS_GPU),
        (["RuntimeError: 0 active drivers ([]). There should only be one."], True, imports.NEEDS_GPU),
        (["RuntimeError: Found no NVIDIA driver on your system."], True, imports.NEEDS_GPU),
        (["ImportError: libcuda.so.1: cannot open shared object file"], False, imports.FAILS),
        (["ImportError: libcudart.so.12: cannot open shared object file"], True, imports.FAILS),
        (["ImportError: libGL.so.1: cannot open shared object file"], True, imports.FAILS),
        (["ModuleNotFoundError: No module named 'pkg_resources'"], True, imports.FAILS),
        (["AssertionError: Torch not compiled with CUDA enabled"], True, imports.FAILS),
    ],
)  # fmt: skip
def test_what_lacks_a_gpu_alone_is_told_from_what_is_broken(
    errors: list[str], state: str, *, gpu: bool
) -> None:
    found, detail = imports.judge(json.dumps({"errors": errors}).encode(), "", 0, gpu=gpu)
    assert found == state
    assert not errors or errors[0] in detail


def test_the_cause_is_told_with_what_was_raised_from_it() -> None:
    errors = ["RuntimeError: Failed to import x", "ImportError: libGL.so.1: cannot open"]
    _, detail = imports.judge(json.dumps({"errors": errors}).encode(), "", 0, gpu=True)
    assert detail == "RuntimeError: Failed to import x, because of ImportError: libGL.so.1: cannot open"


def test_a_module_compiled_for_numpy_1_is_read_from_stderr() -> None:
    for answer in (b'{"errors": []}', b'{"errors": ["ImportError: numpy.core.multiarray failed to import"]}'):
        state, detail = imports.judge(answer, NUMPY_WARNING, 0, gpu=True)
        assert state == imports.FAILS
        assert detail == "pyarrow was compiled for NumPy 1 and cannot run with NumPy 2.1.0"


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b"\xff", b'{"errors": 1}'])
def test_a_process_without_an_answer_says_how_it_ended(answer: bytes) -> None:
    assert imports.judge(answer, "one\nlast words\n", -11, gpu=True) == (
        imports.FAILS,
        "ends the process by signal 11: last words",
    )
    assert imports.judge(answer, "", 3, gpu=True)[1] == "ends the process with exit code 3: no message"


# --- in processes --------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that the processes see, though they start without this one's paths."""
    text = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    script = Path(imports.__file__).parents[1] / "import_module.py"
    (tmp_path / "import_module.py").write_text(
        script.read_text().replace("import sys\n", f"import sys\n{text}", 1)
    )
    folder = tmp_path / "suite/checks"
    folder.mkdir(parents=True)
    monkeypatch.setattr(imports, "__file__", str(folder / "imports.py"))
    (tmp_path / "import_module.py").rename(tmp_path / "suite/import_module.py")
    return tmp_path


def test_each_module_is_one_answer_whatever_the_others_do(site: Path) -> None:
    texts = {
        "good": "print('x'); import sys; print('y', file=sys.stderr)",
        "gone": "import nothing_of_this_name",
        "leaves": "import sys; sys.exit(3)",
        "dies": "import os; os.kill(os.getpid(), 9)",
        "driver": "raise ImportError('libcuda.so.1: cannot open shared object file')",
        "wrapped": "try:\n    raise OSError('libX11.so.6: cannot open')\nexcept OSError as e:\n    raise ImportError('no\\nscreen') from e",
        "old": f"import sys; sys.stderr.write({NUMPY_WARNING!r})",
    }
    for name, text in texts.items():
        add_package(site, name, "1.0", {f"{name}.py": f"{text}\n".encode()})
    add_package(
        site, "tools", "1.0", {"tools/__init__.py": b"", "toolsext.py": b"import nothing_of_this_name\n"}
    )
    context = make_context(
        site, packages=dict.fromkeys([*texts, "tools"], "1.0"), named=(*texts, "tools", "not-locked")
    )
    answers = imports.import_named(context)
    found = {answer.module: answer for answer in answers}
    assert {name: answer.state for name, answer in found.items()} == {
        **dict.fromkeys(found, imports.FAILS),
        "good": imports.LOADS,
        "driver": imports.NEEDS_GPU,
        "tools": imports.LOADS,
    }
    assert found["gone"].detail == "ModuleNotFoundError: No module named 'nothing_of_this_name'"
    assert found["leaves"].detail == "SystemExit: 3"
    assert "signal 9" in found["dies"].detail
    assert (
        found["wrapped"].detail == "ImportError: no ... screen, because of OSError: libX11.so.6: cannot open"
    )
    faults = imports.faults_of(answers)
    assert {fault.partition(" of ")[0] for fault in faults} == {
        "gone",
        "leaves",
        "dies",
        "wrapped",
        "old",
    }


def test_the_run_as_an_ordinary_user_imports_main_modules_alone(site: Path) -> None:
    add_package(site, "tools", "1.0", {"tools/__init__.py": b"", "toolsext.py": b""})
    for uid, modules in ((None, ["tools", "toolsext"]), (65534, ["tools"])):
        context = make_context(site, packages={"tools": "1.0"}, named=("tools",), uid=uid)
        assert [answer.module for answer in imports.import_named(context)] == modules


def test_a_module_that_hangs_is_ended(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "SECONDS", 0.5)
    (site / "hangs.py").write_text("import time; time.sleep(1000)")
    assert imports.run_import("hangs", gpu=True) == (imports.FAILS, "takes more than 0 s")


def test_the_check_tells_what_needs_a_gpu_and_names_each_fault(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework's own package may need a GPU too: then it is not imported in this process."""
    monkeypatch.syspath_prepend(site)
    texts = {"fgood": "", "fdriver": "raise ImportError('libcuda.so.1: cannot open shared object file')"}
    for name, text in texts.items():
        add_package(site, name, "1.0", {f"{name}.py": f"{text}\n".encode()})
    module = SimpleNamespace(MODULES=(), prepare=lambda: None)
    context = make_context(
        site,
        module,
        framework="other",
        distribution="fdriver",
        packages=dict.fromkeys(texts, "1.0"),
        named=(*texts,),
    )
    finding = imports.check(context)
    assert (finding.numbers["named-modules"], finding.numbers["gpu-modules"]) == (1, 1)
    assert "fdriver of fdriver 1.0, which needs a GPU" in finding.detail
    add_package(site, "fbad", "1.0", {"fbad.py": b"import nothing_of_this_name\n"})
    packages = dict.fromkeys([*texts, "fbad"], "1.0")
    expected = replace(context.expected, packages=packages, named=(*packages,))
    with pytest.raises(CheckFailure) as caught:
        imports.check(replace(context, expected=expected))
    assert caught.value.detail == "fbad of fbad: ModuleNotFoundError: No module named 'nothing_of_this_name'"
