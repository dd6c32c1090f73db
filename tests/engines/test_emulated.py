"""What is made for another processor, in the sandbox: qemu starts it, and the machine is as it was.

Needs Linux 6.7 or newer and Debian's qemu-user-static.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

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
    assert said["error"] == "ToolError"
    assert "runs by emulation here, and sees no GPU" in str(said["message"])
