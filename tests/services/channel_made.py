"""A small real channel: this machine's CPython, numpy, pure packages, a framework, and what goes wrong.

    made = make_channel(folder)     # a few seconds; `folder` is the channel, linux-64/ and noarch/ in it
    made.address                    # file:///...
    made.locked("python", "numpy")  # the records as a lock has them, under any channel address

| package | what it is for |
|---|---|
| `python`, `python-libs`, `python_abi` | CPython of this machine, able to lie anywhere, with its libraries |
| `numpy` 1.26.4 | a large binary package; from the index of this machine |
| `packaging`, `click` | noarch Python packages, as the tests' own environment has them |
| `tinytool` 1.0, 1.1 | noarch with an entry point; two versions to update |
| `tinytorch` 1.0, 2.0 | a framework on numpy, each with builds `cuda12.1` (wants __cuda) and `cpu` |
| `cuda-version`, `cuda-cudart` | what says which CUDA it is; the first as .tar.bz2 |
| `tinyprefix` | its prefix in a text file and in a compiled library |
| `scripted` | a post-link script that writes $PREFIX/etc/scripted.txt |
| `claims-a`, `claims-b` | one path with the same content, one with different content |
| `cuda-compat-impl` | a libcuda for older drivers, where conda-forge's package has it |
| `oddpaths` | links, programs, blanks and letters of other alphabets in names |
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rattler.index import index_fs

from imagefactory.model import LockedCondaPackage
from tests.made.gpu_code import forward_libcuda
from tests.services import uv
from tests.services.conda_package import PLACEHOLDER, CondaPackage, File, pack

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
PYTHON_FULL = f"{PYTHON}.{sys.version_info[2]}"
ABI = PYTHON.replace(".", "")
NUMPY = "1.26.4"
ADDRESS = "https://conda.anaconda.org/made"
"""A channel that nobody has, for locks that name the made packages as if they came from afar."""
# Of the machine's standard library: what other Debian packages own, what needs curses, databases or X.
_LEFT_OUT = re.compile(
    r"(config-|test$|idlelib|tkinter|turtledemo|lib2to3$|ensurepip|pydoc_data|EXTERNALLY-MANAGED|sitecustomize"
    r"|_distutils_system_mod|dist-packages$|site-packages$|__pycache__$|_(dbm|gdbm|curses|tkinter|crypt|xx|test)"
    r"|(nis|ossaudiodev|readline|xxlimited)\W)"
)
_GLIBC = re.compile(r"(libc|libm|libdl|libpthread|librt|libutil|libresolv|ld-linux\S*|linux-vdso)\.so")


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeChannel:
    """A channel in `folder`."""

    folder: Path

    @property
    def address(self) -> str:
        return self.folder.as_uri()

    def records(self) -> dict[str, dict[str, Any]]:
        """File name -> record, of both subdirs, as the index has them."""
        found = {}
        for subdir in ("linux-64", "noarch"):
            data = json.loads((self.folder / subdir / "repodata.json").read_text())
            for kind in ("packages", "packages.conda"):
                found |= {name: {**row, "subdir": subdir} for name, row in data[kind].items()}
        return found

    def archive(self, start: str) -> Path:
        """The one archive whose file name begins with `start` (`numpy-`, `tinytorch-2.0-cuda`)."""
        (name,) = [name for name in self.records() if name.startswith(start)]
        return self.folder / self.records()[name]["subdir"] / name

    def locked(self, *starts: str, address: str = ADDRESS) -> tuple[LockedCondaPackage, ...]:
        """Records whose file names begin with `starts`, sorted by name, of a channel called `address`."""
        rows = self.records()
        chosen = [self.archive(start).name for start in starts]
        return tuple(sorted((_locked(name, rows[name], address) for name in chosen), key=lambda p: p.name))

    def index(self) -> None:
        """Makes repodata.json (and .zst, shards) anew, for tests that add packages."""
        for subdir in ("linux-64", "noarch"):
            (self.folder / subdir).mkdir(parents=True, exist_ok=True)
        asyncio.run(index_fs(self.folder, force=True))


def _locked(filename: str, row: dict[str, Any], address: str) -> LockedCondaPackage:
    return LockedCondaPackage(
        name=row["name"],
        version=row["version"],
        build=row["build"],
        subdir=row["subdir"],
        url=f"{address}/{row['subdir']}/{filename}",
        filename=filename,
        sha256=row["sha256"],
        md5=row["md5"],
        size=row["size"],
        depends=tuple(row["depends"]),
    )


def make_channel(folder: Path, *, numpy: bool = True) -> MadeChannel:
    """The channel in `folder`. Without `numpy` nothing is fetched, and tinytorch does without it."""
    for package in (*python_packages(), *pure_packages(), *framework_packages(numpy=numpy), *hard_packages()):
        pack(folder, package)
    if numpy:
        pack(folder, numpy_package())
    made = MadeChannel(folder=folder)
    made.index()
    return made


# --- CPython -------------------------------------------------------------------------------------


def python_packages() -> Iterator[CondaPackage]:
    """This machine's CPython, able to lie anywhere, and the libraries it needs beside the C library's."""
    standard = Path(sysconfig.get_path("stdlib"))
    program = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        files, libraries = _python_files(standard, program, Path(scratch))
    glibc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    yield CondaPackage(
        name="python-libs",
        version="1.0",
        build="h1_0",
        depends=(f"__glibc >={glibc.removeprefix('glibc ')},<3.0.a0",),
        files=libraries,
    )
    yield CondaPackage(
        name="python",
        version=PYTHON_FULL,
        build="h1234567_0_cpython",
        depends=("python-libs >=1.0,<2.0a0",),
        constrains=(f"python_abi {PYTHON}.* *_cp{ABI}",),
        files=files,
        extra={"build_number": 0, "python_site_packages_path": f"lib/python{PYTHON}/site-packages"},
    )
    yield CondaPackage(
        name="python_abi",
        version=PYTHON,
        build=f"2_cp{ABI}",
        noarch="generic",
        constrains=(f"python {PYTHON}.* *_cpython",),
        extra={"build_number": 2},
    )


def _python_files(
    standard: Path, program: Path, scratch: Path
) -> tuple[dict[str, File | bytes], dict[str, File | bytes]]:
    files: dict[str, File | bytes] = {
        f"bin/python{PYTHON}": File(data=_moved(program, "$ORIGIN/../lib", scratch), executable=True),
        "bin/python3": File(link=f"python{PYTHON}"),
        "bin/python": File(link=f"python{PYTHON}"),
        f"lib/python{PYTHON}/site-packages/README.txt": b"Packages come here.\n",
    }
    needed = _libraries(program)
    for path in sorted(standard.rglob("*")):
        inside = path.relative_to(standard)
        if not path.is_file() or any(_LEFT_OUT.match(part) for part in inside.parts):
            continue
        if path.suffix == ".so":
            data = _moved(path, "$ORIGIN/../..", scratch)
            needed |= _libraries(path)
        else:
            data = path.read_bytes()
        prefix = ""
        if inside.name == "sysconfig.py":
            data = data.replace(b"prefix_scheme = 'posix_local'", b"prefix_scheme = 'posix_prefix'")
        elif inside.name.startswith("_sysconfigdata"):
            data = re.sub(rb"'%b(?=['/])" % sys.base_prefix.encode(), b"'" + PLACEHOLDER.encode(), data)
            prefix = "text" if PLACEHOLDER.encode() in data else ""
        files[f"lib/python{PYTHON}/{inside}"] = File(data=data, prefix=prefix)
    # Debian's Python looks into folders of Debian's, by a site.py that is frozen into the program.
    files[f"lib/python{PYTHON}/dist-packages/site-packages.pth"] = (
        f"import site, sys; site.addsitedir(sys.prefix + '/lib/python{PYTHON}/site-packages')\n".encode()
    )
    # Packages ship byte code that conda-build made; its times are those of another disk.
    for path in sorted((standard / "json" / "__pycache__").glob(f"*.cpython-{ABI}.pyc")):
        files[f"lib/python{PYTHON}/json/__pycache__/{path.name}"] = path.read_bytes()
    libraries: dict[str, File | bytes] = {
        f"lib/{name}": File(data=_moved(path, "$ORIGIN", scratch), executable=True)
        for name, path in sorted(needed.items())
    }
    return files, libraries


def _libraries(path: Path) -> dict[str, Path]:
    """Shared libraries that `path` loads, their own too, without those of the C library: name -> file."""
    told = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s*(\S+) => (/\S+)", told, re.MULTILINE)
    return {name: Path(file).resolve() for name, file in found if not _GLIBC.match(name)}


def _moved(path: Path, run_path: str, scratch: Path) -> bytes:
    """The bytes of a program or library that looks for its libraries at `run_path`."""
    copy = scratch / "moved"
    shutil.copyfile(path, copy)
    copy.chmod(0o755)
    subprocess.run(["patchelf", "--set-rpath", run_path, copy], check=True)
    return copy.read_bytes()


# --- packages of wheels --------------------------------------------------------------------------


def numpy_package() -> CondaPackage:
    """numpy from the index that this machine uses, unpacked by uv."""
    with tempfile.TemporaryDirectory() as scratch:
        uv.install("--target", scratch, "--no-deps", "--python", sys.executable, f"numpy=={NUMPY}")
        site, files = f"lib/python{PYTHON}/site-packages", {}
        for path in sorted(Path(scratch).rglob("*")):
            inside = path.relative_to(scratch)
            if path.is_file() and inside.parts[0] not in ("bin", ".lock") and "tests" not in inside.parts:
                files[f"{site}/{inside}"] = File(data=path.read_bytes())
    script = f"#!{PLACEHOLDER}/bin/python\nfrom numpy.f2py.f2py2e import main\nmain()\n".encode()
    return CondaPackage(
        name="numpy",
        version=NUMPY,
        build=f"py{ABI}h1_0",
        depends=(f"python >={PYTHON},<{sys.version_info[0]}.{sys.version_info[1] + 1}.0a0", _abi()),
        files={**files, "bin/f2py": File(data=script, executable=True, prefix="text")},
    )


def _abi() -> str:
    return f"python_abi {PYTHON}.* *_cp{ABI}"


def pure_packages() -> Iterator[CondaPackage]:
    """noarch packages: two that the tests' own environment holds, and one with an entry point."""
    for name in ("packaging", "click"):
        distribution = importlib.metadata.distribution(name)
        files: dict[str, File | bytes] = {}
        for file in distribution.files or ():
            left_out = file.suffix == ".pyc" or ".." in file.parts
            if not left_out and file.name not in ("RECORD", "direct_url.json"):
                files[f"site-packages/{file}"] = Path(str(file.locate())).read_bytes()
        yield CondaPackage(
            name=name,
            version=distribution.version,
            build="pyhd8ed1ab_0",
            noarch="python",
            depends=("python >=3.8",),
            files=files,
        )
    for version in ("1.0", "1.1"):
        module = f'__version__ = "{version}"\n\n\ndef main():\n    print("tinytool", __version__)\n'
        yield CondaPackage(
            name="tinytool",
            version=version,
            build="py_0",
            noarch="python",
            depends=("python >=3.8", "packaging"),
            files=_distribution(
                "tinytool", version, {"tinytool/__init__.py": module.encode()}, "site-packages"
            ),
            entry_points=("tinytool = tinytool:main",),
        )


def _distribution(name: str, version: str, files: dict[str, bytes], site: str) -> dict[str, File | bytes]:
    """The files of a Python package below `site`, and what makes it a distribution to pip and importlib."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    info = {"METADATA": metadata, "INSTALLER": b"conda\n"}
    return {
        **{f"{site}/{path}": data for path, data in files.items()},
        **{f"{site}/{name}-{version}.dist-info/{path}": data for path, data in info.items()},
    }


# --- a framework ---------------------------------------------------------------------------------

_CONFIG = '''\
__version__ = "{version}"
cuda = {cuda!r}


def library():
    """What the compiled part says of itself."""
    import ctypes
    import pathlib

    found = ctypes.CDLL(str(pathlib.Path(__file__).parents[4] / "lib" / "libtinytorch.so"))
    found.tinytorch_build.restype = ctypes.c_char_p
    return found.tinytorch_build().decode()
'''
_WITH_NUMPY = """

def matmul(left, right):
    import numpy

    return (numpy.array(left) @ numpy.array(right)).tolist()
"""


def framework_packages(*, numpy: bool = True) -> Iterator[CondaPackage]:
    """tinytorch with and without CUDA, and the packages that say which CUDA it is."""
    for minor in ("1", "4"):
        yield CondaPackage(
            name="cuda-version",
            version=f"12.{minor}",
            build="h1_3",
            noarch="generic",
            constrains=(f"cudatoolkit 12.{minor}|12.{minor}.*", "__cuda >=12"),
            files={"share/cuda-version.txt": f"12.{minor}\n".encode()},
            suffix=".tar.bz2",
        )
    runtime = _compiled("int cudaRuntimeGetVersion(int *v) { *v = 12010; return 0; }", "libcudart.so.12")
    yield CondaPackage(
        name="cuda-cudart",
        version="12.1.105",
        build="0",
        depends=("cuda-version >=12.1,<12.2.0a0",),
        files={
            "lib/libcudart.so.12.1.105": File(data=runtime, executable=True),
            "lib/libcudart.so.12": File(link="libcudart.so.12.1.105"),
        },
    )
    python = (f"python >={PYTHON},<{sys.version_info[0]}.{sys.version_info[1] + 1}.0a0", _abi())
    for version in ("1.0", "2.0"):
        for cuda in ("12.1", ""):
            kind = f"cuda{cuda}" if cuda else "cpu"
            text = _CONFIG.format(version=version, cuda=cuda or None) + (_WITH_NUMPY if numpy else "")
            code = f'const char *tinytorch_build(void) {{ return "{version} {kind}"; }}'
            library = File(data=_compiled(code, "libtinytorch.so"), executable=True)
            wants = ("__cuda >=12.1", "cuda-version 12.1.*", "cuda-cudart >=12.1,<12.2") if cuda else ()
            yield CondaPackage(
                name="tinytorch",
                version=version,
                build=f"py{ABI}_{kind}_{1 if cuda else 0}",
                depends=(*python, *(("numpy >=1.26,<2",) if numpy else ()), *wants),
                files={
                    **_distribution(
                        "tinytorch",
                        version,
                        {"tinytorch/__init__.py": text.encode()},
                        f"lib/python{PYTHON}/site-packages",
                    ),
                    "lib/libtinytorch.so": library,
                },
            )


def _compiled(code: str, name: str) -> bytes:
    """A shared library of some C."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "made.so"
        command = ["gcc", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{name}", "-Wl,--build-id=none"]
        subprocess.run([*command, "-x", "c", "-", "-o", made], input=code.encode(), check=True)
        return made.read_bytes()


# --- what is hard about linking ------------------------------------------------------------------


def hard_packages() -> Iterator[CondaPackage]:
    code = f'const char *tinyprefix(void) {{ return "{PLACEHOLDER}/share/tinyprefix"; }}'
    yield CondaPackage(
        name="tinyprefix",
        build="h1_0",
        files={
            "lib/libtinyprefix.so": File(
                data=_compiled(code, "libtinyprefix.so"), executable=True, prefix="binary"
            ),
            "bin/tinyprefix": File(
                data=f"#!/bin/sh\necho {PLACEHOLDER}/share\n".encode(), executable=True, prefix="text"
            ),
            "share/tinyprefix.txt": File(data=f"home={PLACEHOLDER}\n".encode(), prefix="text"),
        },
    )
    script = (
        '#!/bin/sh\nmkdir -p "$PREFIX/etc"\n'
        '"$PREFIX/bin/python" -c "print(6 * 7)" > "$PREFIX/etc/scripted.txt"\n'
    )
    yield CondaPackage(
        name="scripted",
        build="h1_0",
        depends=("python",),
        files={"bin/.scripted-post-link.sh": File(data=script.encode(), executable=True)},
    )
    for letter in "ab":
        yield CondaPackage(
            name=f"claims-{letter}",
            build="h1_0",
            files={
                "share/claims/same.txt": b"the same\n",
                "share/claims/different.txt": f"of {letter}\n".encode(),
                f"share/claims/{letter}.txt": b"own\n",
            },
        )
    yield CondaPackage(
        name="cuda-compat-impl",
        version="575.57.08",
        build="h1_0",
        files={
            "cuda-compat/libcuda.so.575.57.08": forward_libcuda("12.9", (535, 575)),
            "cuda-compat/libcuda.so.1": File(link="libcuda.so.575.57.08"),
        },
    )
    yield CondaPackage(
        name="oddpaths",
        build="h1_0",
        files={
            "share/odd/two words.txt": b"blank\n",
            "share/odd/größe-数.txt": b"letters\n",
            "share/odd/$HOME;'\".txt": b"shell\n",
            "share/odd/program": File(data=b"#!/bin/sh\necho odd\n", executable=True),
            "share/odd/link": File(link="two words.txt"),
            "share/odd/up": File(link="../odd/program"),
            "share/odd/nowhere": File(link="not-there"),
            "share/odd/empty": b"",
        },
    )
