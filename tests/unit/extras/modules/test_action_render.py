"""A site's module as text: what a shell and Tcl make of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from imagefactory.errors import UsageError
from imagefactory.extras.modules.action import (
    EnvironmentModule,
    format_modulefile,
    format_wrapper,
    is_program,
)
from tests.made.values import make_target

SIF = "pytorch-2.3-cu121-0123456789ab.sif"


def module(folder: Path = Path("/software/gpu"), **target: object) -> EnvironmentModule:
    return EnvironmentModule(
        target=make_target(**target), folder=folder, image=SIF, programs=("python", "torchrun")
    )


def test_the_modulefile_is_tcl_that_names_what_is_there() -> None:
    text = format_modulefile(module())
    assert text.startswith("#%Module1.0\n")
    assert str(module().modulefile) == "modulefiles/pytorch/2.3-cu121"
    assert "\nset root /software/gpu\n" in text
    assert f"\nprepend-path PATH $root/wrappers/{SIF.removesuffix('.sif')}/bin\n" in text
    assert f"\nsetenv IMAGEFACTORY_IMAGE $root/images/{SIF}\n" in text
    assert f"\nmodule-whatis {{pytorch 2.3, CUDA 12.1, Python 3.11: the image {SIF}}}\n" in text
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize(
    "folder", ["/soft ware", "/a[exec id]", "/a$b", "/a;b", "/a{b", '/a"b', "/a\\b", "/ä"]
)
def test_a_folder_that_tcl_would_read_otherwise_is_refused(folder: str) -> None:
    with pytest.raises(UsageError) as caught:
        format_modulefile(module(Path(folder)))
    assert caught.value.code == "option-invalid"


def started(tmp_path: Path, made: EnvironmentModule, *words: str) -> list[str]:
    """What a wrapper gives to apptainer."""
    place = tmp_path / "soft ware" / made.wrappers
    (place / "bin").mkdir(parents=True)
    (place / "run").write_text(format_wrapper(made))
    (place / "run").chmod(0o755)
    (place / "bin/torchrun").symlink_to("../run")
    (tmp_path / "apptainer").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 7\n')
    (tmp_path / "apptainer").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [place / "bin/torchrun", *words], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7, done.stderr
    return done.stdout.splitlines()


def test_a_wrapper_starts_the_program_of_its_name_wherever_the_folder_lies(tmp_path: Path) -> None:
    said = started(tmp_path, module(), "--nnodes=1", "a b", "", "$x")
    image = said.index("PYTHONNOUSERSITE=1") + 1
    assert Path(said[image]).resolve() == tmp_path / "soft ware/images" / SIF
    assert said[image + 1 :] == ["/opt/env/bin/torchrun", "--nnodes=1", "a b", "", "$x"]
    assert said[0] == "exec"
    assert set(said[1 : image - 2]) <= {"--nv", "--env"}


@pytest.mark.parametrize(
    ("target", "shown"),
    [({}, "--nv"), ({"cuda": "rocm7"}, "--rocm"), ({"cuda": "none", "capabilities": ()}, "")],
)
def test_gpus_are_shown_where_the_image_is_for_some(target: dict[str, object], shown: str) -> None:
    text = format_wrapper(module(**target))
    for option in ("--nv", "--rocm"):
        assert (option in text) == (option == shown)


@pytest.mark.parametrize(
    ("name", "head", "scripts", "wanted"),
    [
        ("python", b"", True, True),
        ("python3.11", b"\x7fELF", True, True),
        ("torchrun", b"#!/opt/env/bin/python3.11", True, True),
        ("ninja", b"\x7fELF", False, True),
        ("clear", b"\x7fELF", True, False),
        ("c_rehash", b"#!/usr/bin/perl", True, False),
        ("activate", b"# This file must be used", False, False),
        ("a b", b"\x7fELF", False, False),
        (".hidden", b"\x7fELF", False, False),
        ("-x", b"\x7fELF", False, False),
    ],
)
def test_what_gets_a_wrapper(name: str, head: bytes, scripts: bool, wanted: bool) -> None:
    assert is_program(name, head, scripts=scripts) == wanted
