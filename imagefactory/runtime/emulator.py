"""Run programs for another processor with qemu's user emulation.

From Linux 6.7 on, each user namespace has its own table of interpreters (binfmt_misc). So a sandbox can use
qemu without a change of the machine. On older kernels qemu must be registered on the machine.
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import ToolError
from imagefactory.gpu.capability import MACHINES, machine_of
from imagefactory.suite import elf

REGISTERED = Path("/proc/sys/fs/binfmt_misc")
OWN_SINCE = (6, 7)
_PACKAGE = "qemu-user-static"


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulator:
    """qemu for a `machine`. With `own` a sandbox registers it only for itself.

    `files` is binfmt_misc's pattern of its files.
    """

    machine: str
    program: str
    own: bool
    files: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationFacts:
    """This machine's processor and kernel (`6.18.2-amd64`), and its installed and registered qemu."""

    machine: str
    kernel: str
    programs: tuple[tuple[str, str], ...]
    registered: tuple[tuple[str, str], ...]


def read_facts(registered: Path = REGISTERED) -> EmulationFacts:
    machine = platform.machine()
    programs = {name: shutil.which(f"qemu-{name}-static") for name in MACHINES.values() if name != machine}
    return EmulationFacts(
        machine=machine,
        kernel=platform.release(),
        programs=tuple((name, program) for name, program in programs.items() if program),
        registered=tuple(_read_registered(registered)),
    )


def _read_registered(directory: Path) -> Iterable[tuple[str, str]]:
    for name in MACHINES.values():
        for entry in sorted(directory.glob("*")):
            try:
                program = parse_registered(entry.read_text(errors="replace"), name)
            except OSError:  # `register` can only be written
                continue
            if program and Path(program).exists():
                yield name, program


def parse_registered(text: str, machine: str) -> str:
    """Return the program of an entry of binfmt_misc for files of `machine`, empty for another entry.

    Also empty for a disabled entry, and for one without F, whose program would have to be in the image.
    """
    lines = dict(line.partition(" ")[::2] for line in text.splitlines())
    fits = lines.get("magic", "").lower() == magic(machine).hex()
    usable = "enabled" in lines and "F" in lines.get("flags:", "")
    return lines.get("interpreter", "") if fits and usable else ""


def magic(machine: str) -> bytes:
    """Return the first bytes of executables for `machine`: ELF files of 64 bits."""
    return b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0" + elf.MACHINES[machine].to_bytes(2, "little")


def files_of(machine: str) -> str:
    """Return the pattern for files with these first bytes, libraries and other ABIs included."""
    mask = b"\xff" * 7 + b"\0" + b"\xff" * 8 + b"\xfe\xff\xff\xff"
    begin, counts = ("".join(f"\\x{byte:02x}" for byte in part) for part in (magic(machine), mask))
    return f"M::{begin}:{counts}"


def choose_emulator(machine: str, facts: EmulationFacts, *, include_own: bool = True) -> Emulator | None:
    """Return the emulator for programs of `machine`, None for this machine's own or an unknown one.

    Docker and apptainer use only the machine's (not `include_own`). Raises ToolError, with the package to
    install.
    """
    if machine in ("", facts.machine):
        return None
    numbers = re.match(r"(\d+)\.(\d+)", facts.kernel)
    new = numbers is not None and (int(numbers[1]), int(numbers[2])) >= OWN_SINCE
    program, registered = dict(facts.programs).get(machine, ""), dict(facts.registered).get(machine, "")
    if program and new and include_own:
        return Emulator(machine=machine, program=program, own=True, files=files_of(machine))
    if registered:
        return Emulator(machine=machine, program=registered, own=False, files=files_of(machine))
    if not include_own:
        raise ToolError(
            "emulation-unavailable",
            f"this machine cannot run programs for {machine} in containers of docker and apptainer",
            hint=f"sudo apt-get install {_PACKAGE} binfmt-support, or build with --engine assemble",
        )
    if new:
        raise ToolError(
            "emulation-unavailable",
            f"this machine cannot run programs for {machine}, only for {facts.machine}",
            hint=f"install a (slow) emulator: sudo apt-get install {_PACKAGE}",
        )
    raise ToolError(
        "emulation-unavailable",
        f"this machine cannot run programs for {machine}, and on Linux "
        f"{facts.kernel} only root can change that",
        hint=f"sudo apt-get install {_PACKAGE} binfmt-support, or boot Linux 6.7 or newer",
    )


def find_emulator(processor: str, *, include_own: bool = True) -> Emulator | None:
    """Return this machine's emulator for an image's architecture (`arm64`, empty if it has none)."""
    machine = machine_of(processor)
    if processor and not machine:
        raise ToolError(
            "processor-unsupported",
            f"images for {processor} are not supported",
            hint=f"supported processors: {', '.join(MACHINES)}",
        )
    return choose_emulator(machine, read_facts(), include_own=include_own)


def check_not_emulated(name: str, processor: str) -> None:
    """Raise ToolError for an image of another processor, whose run would verify nothing."""
    here, machine = platform.machine(), machine_of(processor)
    if machine not in ("", here):
        raise ToolError(
            "emulation-not-verified",
            f"{name} is for {machine}, and this machine is {here}: an emulated run gives no verdict",
            hint=f"verify it on a machine with {machine} and a GPU, directly, with a kit or in a sweep",
        )


def emulation(processor: str, *, include_own: bool = True) -> str:
    """Return a note on an image's emulation, empty without one. Raises ToolError like `choose_emulator`."""
    emulator = find_emulator(processor, include_own=include_own)
    return f"emulated for {emulator.machine} by qemu, slowly" if emulator else ""
