"""What starts programs of another processor, decided of facts alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.errors import ToolError
from imagefactory.runtime import emulator
from imagefactory.runtime.emulator import EmulationFacts, choose_emulator, files_of, parse_registered

QEMU = "/usr/bin/qemu-aarch64-static"
FACTS = EmulationFacts(machine="x86_64", kernel="6.12.3-amd64", programs=(("aarch64", QEMU),), registered=())
OLD = replace(FACTS, kernel="6.1.0-49-amd64")
# As Linux shows the entry of Debian's qemu-user-static, and as that package's own file writes it.
ENTRY = """\
enabled
interpreter /usr/libexec/qemu-binfmt/aarch64-binfmt-P
flags: POF
offset 0
magic 7f454c460201010000000000000000000200b700
mask ffffffffffffff00fffffffffffffffffeffffff
"""
DEBIANS = (
    r"M::\x7f\x45\x4c\x46\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:"
    r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
)


def test_a_sandbox_brings_qemu_where_the_kernel_lets_it() -> None:
    found = choose_emulator("aarch64", FACTS)
    assert found is not None
    assert (found.program, found.own, found.machine) == (QEMU, True, "aarch64")
    assert choose_emulator("x86_64", FACTS) is None
    assert choose_emulator("", FACTS) is None


def test_what_the_machine_has_registered_serves_old_kernels_and_containers_of_others() -> None:
    there = (("aarch64", "/q"),)
    for facts, own in ((replace(OLD, registered=there), True), (replace(FACTS, registered=there), False)):
        found = choose_emulator("aarch64", facts, include_own=own)
        assert found is not None
        assert (found.program, found.own) == ("/q", False)


@pytest.mark.parametrize(("facts", "own", "named", "hint"), [
    (replace(FACTS, programs=()), True, r"aarch64, .* x86_64",
     "apt-get install qemu-user-static"),
    (OLD, True, "6.1.0-49-amd64", "binfmt-support, or boot Linux 6.7"),
    (replace(FACTS, kernel="strange"), True, "strange", "binfmt-support"),
    (FACTS, False, "docker and apptainer", "assemble"),
])  # fmt: skip
def test_where_nothing_starts_them_it_is_said_what_to_install(
    facts: EmulationFacts, own: bool, named: str, hint: str
) -> None:
    with pytest.raises(ToolError, match=named) as caught:
        choose_emulator("aarch64", facts, include_own=own)
    assert caught.value.code == "emulation-unavailable"
    assert hint in caught.value.hint


def test_the_kernels_entries_are_read() -> None:
    assert parse_registered(ENTRY, "aarch64") == "/usr/libexec/qemu-binfmt/aarch64-binfmt-P"
    assert parse_registered(ENTRY, "x86_64") == ""
    assert parse_registered(ENTRY.replace("enabled", "disabled"), "aarch64") == ""
    assert parse_registered(ENTRY.replace("POF", "PO"), "aarch64") == ""
    assert parse_registered("enabled\n", "aarch64") == ""


def test_entries_of_programs_that_are_gone_do_not_count(tmp_path: Path) -> None:
    program = tmp_path / "qemu"
    (tmp_path / "table").mkdir()
    (tmp_path / "table/qemu-aarch64").write_text(
        ENTRY.replace("/usr/libexec/qemu-binfmt/aarch64-binfmt-P", str(program))
    )
    assert emulator.read_facts(tmp_path / "table").registered == ()
    program.touch()
    assert emulator.read_facts(tmp_path / "table").registered == (("aarch64", str(program)),)


def test_files_are_told_as_debians_package_tells_them() -> None:
    assert files_of("aarch64") == DEBIANS


def test_what_proves_something_of_a_gpu_is_not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator.platform, "machine", lambda: "x86_64")
    for processor in ("amd64", ""):
        emulator.check_not_emulated("demo", processor)
    with pytest.raises(ToolError, match=r"demo .* aarch64, .* x86_64") as caught:
        emulator.check_not_emulated("demo", "arm64")
    assert caught.value.code == "emulation-not-verified"


def test_a_processor_that_nobody_knows_is_named() -> None:
    with pytest.raises(ToolError, match="riscv64") as caught:
        emulator.find_emulator("riscv64")
    assert caught.value.code == "processor-unsupported"
    assert emulator.emulation("") == ""
