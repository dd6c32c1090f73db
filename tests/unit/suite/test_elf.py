"""The suite's ELF reader, on libraries that gcc makes here and on damaged ones."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from imagefactory.suite import elf


def compile_library(path: Path, *options: str) -> Path:
    source = path.with_suffix(".c")
    source.write_text(f"int {path.name.partition('.')[0]}_answer(void) {{ return 42; }}\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source, *options], check=True)
    return path


def test_soname_needs_and_runpath_are_read(tmp_path: Path) -> None:
    compile_library(tmp_path / "liba.so.1", "-Wl,-soname,liba.so.1")
    (tmp_path / "liba.so").symlink_to("liba.so.1")
    library = compile_library(
        tmp_path / "libb.so",
        "-Wl,--no-as-needed",
        f"-L{tmp_path}",
        "-la",
        "-Wl,--enable-new-dtags",
        "-Wl,-rpath,$ORIGIN/../x:/opt/y",
    )
    found = elf.read_dynamic(str(library))
    assert found is not None
    assert found.soname == ""
    assert found.needed == ("liba.so.1", "libc.so.6")
    assert found.runpath == ("$ORIGIN/../x", "/opt/y")
    assert found.rpath == ()
    assert found.machine in elf.MACHINES.values()


def test_old_rpath_is_told_from_runpath(tmp_path: Path) -> None:
    library = compile_library(
        tmp_path / "libc1.so", "-Wl,-soname,libc1.so.7", "-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN"
    )
    found = elf.read_dynamic(str(library))
    assert found is not None
    assert (found.soname, found.rpath, found.runpath) == ("libc1.so.7", ("$ORIGIN",), ())


def test_search_paths_of_many_thousand_bytes(tmp_path: Path) -> None:
    """bazel writes such into tensorflow."""
    long = ":".join(f"$ORIGIN/{index:04}/" + "d" * 60 for index in range(300))
    found = elf.read_dynamic(str(compile_library(tmp_path / "libl.so", f"-Wl,-rpath,{long}")))
    assert found is not None
    assert len(found.runpath or found.rpath) == 300


def test_the_interpreters_own_extensions_can_be_read() -> None:
    folder = Path(sysconfig.get_config_var("DESTSHARED"))
    read = [elf.read_dynamic(str(path)) for path in folder.glob("*.so")]
    assert read
    assert all(found is not None and found.machine in elf.MACHINES.values() for found in read)


def test_what_is_no_shared_library_gives_none(tmp_path: Path) -> None:
    script = tmp_path / "linker.so"
    script.write_text("INPUT(libother.so)" + " " * 80)
    empty = tmp_path / "empty.so"
    empty.write_bytes(b"")
    narrow = tmp_path / "narrow.so"
    narrow.write_bytes(b"\x7fELF\x01\x01" + b"\0" * 100)
    for path in (script, empty, narrow):
        assert elf.read_dynamic(str(path)) is None


def test_a_damaged_library_is_said_to_be_damaged(tmp_path: Path) -> None:
    """Cut anywhere: never another exception, and never the whole truth from half a file."""
    data = compile_library(tmp_path / "libd.so", "-Wl,-soname,libd.so.1").read_bytes()
    refused = 0
    for length in range(64, len(data), 97):
        try:
            elf.parse_dynamic(data[:length])
        except elf.CorruptElfError:
            refused += 1
    assert refused > 5
    with pytest.raises(elf.CorruptElfError):
        elf.parse_dynamic(data[:64])


def test_the_executable_of_python_names_its_loader() -> None:
    found = elf.read_dynamic(str(Path(sys.executable).resolve()))
    assert found is not None
    assert "libc.so.6" in found.needed
