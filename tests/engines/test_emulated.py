"""What is made for another processor, in the sandbox: qemu starts it, and the machine is as it was.

Needs Linux 6.7 or newer and Debian's qemu-user-static.
"""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest

from imagefactory.build.base.make import builder_facts, choose_ids
from imagefactory.build.layer_plan import LayerInputs
from imagefactory.build.layers import BaseCompiler, new_compiler
from imagefactory.build.wheel_layer import InstallPrefix
from imagefactory.lock.debian.archive import find_mirror, open_archive
from imagefactory.lock.debian.lock import downloaded_filename
from imagefactory.progress import QuietProgress
from imagefactory.runtime.build_sandbox import SYSTEM_PATH, TREE, BuildProcess, prepare_directory
from imagefactory.runtime.emulator import find_emulator
from imagefactory.versions import natural
from tests.services.sandbox import Caller, add_layer, entry

TABLE = Path("/proc/sys/fs/binfmt_misc")
ADDRESS, HEAD = 0x400000, 120


def arm_program(code: int) -> bytes:
    """An executable for aarch64 without a library: it ends with `code`."""
    instructions = struct.pack(
        "<3I", 0xD2800000 | code << 5, 0xD2800BA8, 0xD4000001
    )  # exit, by its number 93
    size = HEAD + len(instructions)
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 2, 183, 1, ADDRESS + HEAD, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, ADDRESS, ADDRESS, size, size, 0x10000)
    return head + segment + instructions


@pytest.fixture
def arm(caller: Caller) -> Caller:
    blobs = caller.ground / "blobs"
    caller.layers = [*caller.layers, add_layer(blobs, "arm", [(entry("arm", mode=0o755), arm_program(42))])]
    caller.architecture = "arm64"
    return caller


def test_a_program_of_another_processor_runs_and_the_machine_is_as_it_was(arm: Caller) -> None:
    before = sorted(TABLE.glob("*"))
    assert arm.run("/arm")["returncode"] == 42
    assert arm.run("bash", "-c", "/arm; exit $(($? + 1))", uid=65534, read_only=True)["returncode"] == 43
    assert sorted(TABLE.glob("*")) == before
    arm.architecture = "amd64"
    assert arm.run("/arm")["returncode"] == 126


def test_no_file_of_the_machine_is_to_be_written_through_it(arm: Caller) -> None:
    """The emulator is the machine's file, and root inside is its owner."""
    text = arm.python(
        """
        import os, subprocess, time
        tried, child = [], os.fork()
        if child == 0:
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.execv("/arm", ["/arm"])
        seen = set()
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            try:
                seen.add(os.readlink(f"/proc/{child}/exe"))
                os.close(os.open(f"/proc/{child}/exe", os.O_WRONLY))
                tried.append("written")
            except OSError:
                pass
        print(tried, [one for one in seen if "qemu" in one])
        """
    )
    assert text == "[] []"


def test_what_is_emulated_sees_no_gpu(arm: Caller) -> None:
    arm.gpus = {"devices": [], "libraries": [], "links": [], "programs": [], "driver": "1"}
    said = arm.run("/arm", gpus=True)
    assert said["code"] == "gpu-not-emulated"


def test_scripts_of_a_base_for_another_processor_run_in_its_chroot(tmp_path: Path) -> None:
    prepare_directory(tmp_path)
    program = tmp_path / TREE / "root/arm"
    program.parent.mkdir()
    program.write_bytes(arm_program(42))
    program.chmod(0o755)
    build = BuildProcess(
        tmp_path,
        ("chroot", "/tmp/root", "/arm"),
        environment={"PATH": SYSTEM_PATH},
        ids=choose_ids(builder_facts()),
        emulator=find_emulator("arm64"),
    )
    with build.process as process:
        _, stderr = process.communicate()
        assert build.wait() == 42, stderr


# All that Debian 12's Python needs to start, 5 MB: a whole base takes qemu minutes.
PYTHON = ("python3.11-minimal", "libpython3.11-minimal", "libc6", "libexpat1", "zlib1g")


@pytest.fixture(scope="module")
def arm_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with Debian's Python for arm64, from the machine's own mirror."""
    folder = tmp_path_factory.mktemp("arm-python")
    mirror = find_mirror("", folder / "debs", os.environ, etc_apt=Path("/etc/apt"))
    with open_archive(mirror, "bookworm", "arm64", QuietProgress()) as archive:
        offers = archive.offered(PYTHON).values()
        newest = [max((o for o in offers if o.name == n), key=lambda o: natural(o.version)) for n in PYTHON]
        assert {one.architecture for one in newest} == {"arm64"}
        archive.download(newest, folder, QuietProgress())
    for package in newest:
        subprocess.run(["dpkg-deb", "-x", folder / downloaded_filename(package), folder / "root"], check=True)
    return folder / "root"


def test_byte_code_is_made_by_the_images_own_python(arm_python: Path, tmp_path: Path) -> None:
    """Its bytes are those of the same Python on this processor."""
    source = b"def f(x, y=1.5):\n    return [x ** 40 for _ in ('a', y)]\n"
    bench = LayerInputs(
        store=tmp_path / "store",
        segments=tmp_path / "segments",
        codec="zstd",
        place=InstallPrefix(prefix="/opt/env", python="3.11"),
        epoch=1,
        compiler="arm",
        processor="arm64",
    )

    def start_here(argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(argv, env={"PYTHONHASHSEED": "0"}, **pipes)

    made = []
    for compiler in (new_compiler(bench, (arm_python,)), BaseCompiler(start_here, "3.11")):
        try:
            with compiler.wheel():
                made.append(compiler.compile("/opt/env/demo.py", source))
        finally:
            compiler.close()
    assert made[0]
    assert made[0] == made[1]
