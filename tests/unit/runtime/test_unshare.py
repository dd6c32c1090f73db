"""What a sandbox shall be, decided without making one; and the GPU's files found in fake trees."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import struct
import subprocess
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar

import pytest

from imagefactory.errors import StoreError, ToolError, UsageError
from imagefactory.model import Mount, RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image
from imagefactory.runtime import protocol, unshare
from imagefactory.runtime.devices import (
    GpuDevices,
    count_gpus,
    find_device_nodes,
    find_gpus,
    parse_linker_cache,
)
from imagefactory.runtime.emulator import Emulator
from imagefactory.runtime.protocol import signals_to_command
from imagefactory.runtime.sandbox import keeper, syscalls
from imagefactory.runtime.unshare import (
    SandboxCaller,
    SandboxPaths,
    SandboxPlan,
    SandboxProcess,
    UnshareRunner,
    explain,
    identity_map,
    plan,
)
from tests.made.deep import MakeDeep
from tests.made.errors import fails
from tests.made.layer_store import LayerStore, file, make_tar

ALL = (1 << 41) - 1
FULL = "         0          0 4294967295\n"
ROOT = SandboxCaller(pid=9, uid=0, gid=0, capabilities=ALL, uid_map=FULL, gid_map=FULL, machine="x86_64")
USER = replace(ROOT, uid=1000, gid=1001, capabilities=0)
PLACE = SandboxPaths(
    lower=(Path("/s/a"), Path("/s/b")),
    scratch=Path("/s/run"),
    environment=(("PATH", "/opt/env/bin"), ("A", "1")),
)
GPUS = GpuDevices(
    devices=("/dev/nvidia0", "/dev/nvidiactl"), libraries=("/usr/lib/libcuda.so.550.90.07",),
    links=(("libcuda.so.1", "libcuda.so.550.90.07"),), programs=("/usr/bin/nvidia-smi",), driver="550.90.07",
)  # fmt: skip


def decided(
    spec: RunSpec, caller: SandboxCaller = ROOT, *, gpus: GpuDevices | None = None, tty: bool = False
) -> SandboxPlan:
    return plan(PLACE, spec, caller, gpus=gpus, tty=tty)


def test_as_root_ids_stay_themselves() -> None:
    made = decided(RunSpec(argv=("true",), uid=65534))
    assert (made.uid, made.gid, made.uid_map, made.deny_setgroups) == (
        65534,
        65534,
        "0 0 4294967295\n",
        False,
    )


def test_a_folder_that_another_sandbox_has_just_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each removes its own at its end, when others may be looking through them."""
    monkeypatch.setattr(keeper.os, "listdir", lambda _: ["gone"])
    folder, lock, left = keeper.make_scratch(str(tmp_path / "run"))
    os.close(lock)
    assert Path(folder).parent == tmp_path / "run"
    assert left == []


def test_what_an_image_left_is_removed_however_deep(tmp_path: Path, make_deep: MakeDeep) -> None:
    make_deep(tmp_path / "run/old")
    folder, lock, left = keeper.make_scratch(str(tmp_path / "run"))
    os.close(lock)
    assert list((tmp_path / "run").iterdir()) == [Path(folder)]
    assert left == []


def test_what_cannot_be_removed_is_told_and_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", f"{path}/.../stays")

    monkeypatch.setattr(keeper, "remove_tree", refuse)
    (tmp_path / "run/old").mkdir(parents=True)
    (tmp_path / "run/stray").touch()
    folder, lock, left = keeper.make_scratch(str(tmp_path / "run"))
    os.close(lock)
    assert Path(folder, "upper").is_dir()
    assert sorted(left) == [
        f"{tmp_path}/run/old/.../stays: Operation not permitted",
        f"{tmp_path}/run/stray: Not a directory",
    ]


def test_the_helper_tells_what_was_left_before_it_tells_how_it_went() -> None:
    sandbox = SandboxProcess.__new__(SandboxProcess)
    sandbox.undeletable = []
    sandbox.status = io.StringIO('{"event": "left", "text": "/a: busy"}\n{"event": "started"}\n')
    assert sandbox._event() == {"event": "started"}
    assert sandbox.undeletable == ["/a: busy"]


def test_as_root_of_a_namespace_its_own_ranges() -> None:
    assert identity_map("0 100000 65536\n65536 1 1\n") == "0 0 65536\n65536 65536 1\n"


@pytest.mark.parametrize(
    "caller", [USER, replace(ROOT, capabilities=0), replace(ROOT, capabilities=ALL & ~0x80)]
)
def test_without_powers_over_ids_the_uid_stands_for_the_caller(caller: SandboxCaller) -> None:
    made = decided(RunSpec(argv=("true",), uid=65534), caller)
    assert made.uid_map == f"65534 {caller.uid} 1\n"
    assert made.gid_map == f"65534 {caller.gid} 1\n"
    assert made.deny_setgroups


def test_environment_is_the_images_then_the_specs() -> None:
    made = decided(RunSpec(argv=("true",), environment=(("A", "2"), ("B", "3"))))
    assert dict(made.environment) == {"PATH": "/opt/env/bin", "A": "2", "B": "3"}
    assert dict(decided(RunSpec(argv=("sh",)), tty=True).environment)["TERM"] == "xterm"
    bare = plan(replace(PLACE, environment=()), RunSpec(argv=("true",)), ROOT, gpus=None, tty=False)
    assert list(dict(bare.environment)) == ["PATH"]


def test_plan_is_plain_json() -> None:
    spec = RunSpec(
        argv=("sh", "-c", "exit"), mounts=(Mount(source=Path("/h"), target="/m"),), gpus=True, timeout=2.5
    )
    read = json.loads(json.dumps(asdict(decided(spec, gpus=GPUS))))
    assert read["lower"] == ["/s/a", "/s/b"]
    assert read["mounts"] == [
        {"source": "/h", "target": "/m", "writable": False, "bind": False, "scratch": False}
    ]
    assert (read["timeout"], read["caller"], read["network"], read["read_only"]) == (2.5, 9, False, False)


def test_gpus_add_the_driver_behind_the_images_own_libraries() -> None:
    made = decided(RunSpec(argv=("true",), gpus=True, environment=(("LD_LIBRARY_PATH", "/own"),)), gpus=GPUS)
    environment = dict(made.environment)
    assert environment["LD_LIBRARY_PATH"] == "/own:/usr/local/nvidia-driver/libraries"
    assert environment["PATH"] == "/opt/env/bin:/usr/local/nvidia-driver/programs"
    assert made.driver is not None
    assert made.driver["devices"] == ("/dev/nvidia0", "/dev/nvidiactl")
    assert decided(RunSpec(argv=("true",)), gpus=GPUS).driver is None


def test_gpu_asked_for_and_none_there_is_no_silent_cpu_run() -> None:
    with pytest.raises(ToolError) as caught:
        decided(RunSpec(argv=("true",), gpus=True))
    assert caught.value.code == "gpu-device-missing"


@pytest.mark.parametrize(
    "target", ["relative", "/", "/a/../b", "/proc", "/sys/x", "/dev/shm", "//dev/x", "/x/../proc"]
)
def test_refused_mount_targets(target: str) -> None:
    with pytest.raises(UsageError):
        decided(RunSpec(argv=("true",), mounts=(Mount(source=Path("/h"), target=target),)))


def test_outer_mounts_come_first() -> None:
    mounts = tuple(Mount(source=Path("/h"), target=target) for target in ("/a/b/c", "/z", "/a/b"))
    assert [entry["target"] for entry in decided(RunSpec(argv=("true",), mounts=mounts)).mounts] == [
        "/z",
        "/a/b",
        "/a/b/c",
    ]


@pytest.mark.parametrize("spec", [
    RunSpec(argv=("a\0b",)), RunSpec(argv=("a",), workdir="x"),
    RunSpec(argv=("a",), environment=(("A=B", "x"),)),
    RunSpec(argv=("a",), environment=(("", "x"),)), RunSpec(argv=("a",), environment=(("A", "\0"),)),
    RunSpec(argv=("a",), uid=-1), RunSpec(argv=("a",), mounts=(Mount(source=Path("rel"), target="/x"),)),
])  # fmt: skip
def test_refused_specs(spec: RunSpec) -> None:
    with pytest.raises(UsageError):
        decided(spec)


@pytest.mark.parametrize("pair", [("A", "b\0"), ("A\0", "b"), ("", "b"), ("A", "\ud800"), ("A=", "b")])
def test_an_image_that_sets_what_cannot_be(pair: tuple[str, str]) -> None:
    place = replace(PLACE, environment=(("PATH", "/bin"), pair))
    with pytest.raises(StoreError) as told:
        plan(place, RunSpec(argv=("true",)), ROOT, gpus=None, tty=False)
    assert told.value.code == "image-variable-invalid"
    assert told.value.message.isprintable()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("/h", "/a\0b"),
        ("/h\0", "/a"),
        ("/h", "/" + "x" * 256),
        ("/h", "/x" * 2001),
        ("/h", "/" + "\xe9" * 128),
    ],
)
def test_mounts_whose_names_cannot_be(source: str, target: str) -> None:
    with pytest.raises(UsageError) as caught:
        decided(RunSpec(argv=("true",), mounts=(Mount(source=Path(source), target=target),)))
    assert caught.value.code == "mount-invalid"


def test_unknown_processor() -> None:
    with pytest.raises(ToolError, match="riscv64") as caught:
        decided(RunSpec(argv=("true",)), replace(ROOT, machine="riscv64"))
    assert caught.value.code == "processor-unsupported"


def test_what_is_emulated_sees_no_gpu() -> None:
    emulated = replace(PLACE, emulator=Emulator(machine="aarch64", program="/q", own=True, files="M::a:b"))
    with pytest.raises(ToolError, match="aarch64") as caught:
        plan(emulated, RunSpec(argv=("true",), gpus=True), ROOT, gpus=GPUS, tty=False)
    assert caught.value.code == "gpu-not-emulated"
    made = plan(emulated, RunSpec(argv=("true",)), ROOT, gpus=None, tty=False)
    assert made.emulator == {"machine": "aarch64", "program": "/q", "own": True, "files": "M::a:b"}


def test_errors_by_step() -> None:
    errors = {
        ("workdir", errno.ENOENT): (UsageError, "workdir-not-found"),
        ("mount", errno.EISDIR): (UsageError, "mount-failed"),
        ("mount-source", errno.ENOENT): (UsageError, "mount-failed"),
        ("shown", errno.EINVAL): (UsageError, "overlay-mount-failed"),
        ("image", errno.ENOTDIR): (StoreError, "image-path-unusable"),
        ("target", errno.EXDEV): (StoreError, "mount-target-reserved"),
        ("openat2", errno.ENOSYS): (ToolError, "kernel-too-old"),
        ("layers", errno.ENOENT): (StoreError, "layer-unreadable"),
        ("scratch", errno.ENOSPC): (StoreError, "scratch-not-writable"),
        ("user-namespace", errno.EPERM): (ToolError, "user-namespaces-denied"),
        ("overlay", errno.EINVAL): (ToolError, "mount-denied"),
        ("emulator", errno.ENODEV): (ToolError, "emulation-unavailable"),
        ("scratch", errno.EIO): (ToolError, "sandbox-failed"),
    }
    for (step, number), expected in errors.items():
        error = explain(step, number, "/x")
        assert (type(error), error.code) == expected
        assert "/x" in error.message
    assert "doctor" in explain("user-namespace", errno.EPERM, "no").hint
    assert "modprobe binfmt_misc" in explain("emulator", errno.ENODEV, "no").hint


# --- the system call filter, run as the kernel would ------------------------------------------------


def verdict(number: int, *arguments: int, audit: int = 0xC000003E) -> int:
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=iIQ6Q", number, audit, 0, *padded)
    program, place, word = syscalls.seccomp_program("x86_64"), 0, 0
    while True:
        code, if_true, if_false, value = program[place]
        place += 1
        if code == syscalls.RETURN:
            return value
        if code == syscalls.LOAD:
            word = struct.unpack_from("=I", data, value)[0]
        else:
            holds = {
                syscalls.JUMP_EQUAL: word == value,
                syscalls.JUMP_AT_LEAST: word >= value,
                syscalls.JUMP_ANY_BIT: bool(word & value),
            }[code]
            place += if_true if holds else if_false


@pytest.mark.parametrize(("number", "arguments", "expected"), [
    (0, (), syscalls.ALLOW), (59, (), syscalls.ALLOW), (250, (), syscalls.NOT_PERMITTED),
    (425, (), syscalls.NO_CALL), *((number, (), syscalls.ALLOW) for number in (74, 75, 162, 277, 306)),
    (437, (), syscalls.NO_CALL), (90, (0, 0o755), syscalls.ALLOW), (90, (0, 0o4755), syscalls.NOT_PERMITTED),
    (91, (0, 0o2755), syscalls.NOT_PERMITTED), (452, (0, 0, 0o4000), syscalls.NOT_PERMITTED),
    (257, (0, 0, 0, 0o6777), syscalls.ALLOW), (257, (0, 0, 0o100, 0o6777), syscalls.NOT_PERMITTED),
    (2, (0, 0o101, 0o644), syscalls.ALLOW), (2, (0, 0o20000000, 0o4644), syscalls.NOT_PERMITTED),
    (41, (1,), syscalls.ALLOW), (41, (2,), syscalls.ALLOW), (41, (10,), syscalls.ALLOW),
    (41, (16,), syscalls.ALLOW), (41, (16, 3, 15), syscalls.ALLOW), (41, (16, 3, 20), syscalls.ALLOW),
    (41, (2, 1, 6), syscalls.ALLOW), (41, (1, 1, 0), syscalls.ALLOW), (41, (10, 2, 17), syscalls.ALLOW),
    *((41, (16, 3, protocol), syscalls.REFUSE | errno.EPROTONOSUPPORT) for protocol in (4, 6, 9, 12, 16, 21)),
    *((number, (), syscalls.NOT_PERMITTED) for number in (103, 300, 301)),
    (41, (40,), syscalls.REFUSE | errno.EAFNOSUPPORT), (41, (17,), syscalls.REFUSE | errno.EAFNOSUPPORT),
    (16, (0, 0x5401), syscalls.ALLOW), (16, (0, 0x5412), syscalls.NOT_PERMITTED),
    (16, (0, 0x541C), syscalls.NOT_PERMITTED),
    (16, (0, 0xFF00005412), syscalls.NOT_PERMITTED), (0x40000000, (), syscalls.NO_CALL),
])  # fmt: skip
def test_filter(number: int, arguments: tuple[int, ...], expected: int) -> None:
    assert verdict(number, *arguments) == expected
    assert verdict(number, *arguments, audit=0x40000003) == syscalls.NO_CALL  # 32-bit


def test_filter_exists_for_every_architecture() -> None:
    for machine in syscalls.ARCHITECTURES:
        program = syscalls.seccomp_program(machine)
        assert program[-1] == (syscalls.RETURN, 0, 0, syscalls.ALLOW)
        assert all(
            jump < len(program) - place for place, (_, *jumps, _) in enumerate(program) for jump in jumps
        )


# --- GPUs ----------------------------------------------------------------------------------------

CACHE = """\
812 libs found in cache `/etc/ld.so.cache'
\tlibnvidia-ml.so.1 (libc6,x86-64) => {root}/lib/libnvidia-ml.so.1
\tlibcudart.so.12 (libc6,x86-64) => {root}/lib/libcudart.so.12
\tlibcudadebugger.so.1 (libc6,x86-64) => {root}/lib/gone.so
\tlibcuda.so.1 (libc6,x86-64) => {root}/lib/libcuda.so.1
\tlibcuda.so.1 (libc6) => {root}/lib32/libcuda.so.1
\tlibcuda.so (libc6,x86-64, OS ABI: Linux 2.3.99) => {root}/lib/libcuda.so
Cache generated by: ldconfig (Debian GLIBC 2.36-9+deb12u10) stable release version 2.36
"""
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\nGCC: 12\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for name in ("dev", "lib", "bin", "proc/driver/nvidia"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(CLOSED)
    for name in ("libcuda.so.550.90.07", "libnvidia-ml.so.550.90.07", "libcudart.so.12"):
        (tmp_path / "lib" / name).write_text("")
    for name in ("libcuda.so", "libcuda.so.1"):
        (tmp_path / "lib" / name).symlink_to("libcuda.so.550.90.07")
    (tmp_path / "lib/libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.550.90.07")
    (tmp_path / "bin/nvidia-smi").write_text("")
    # Device nodes need root to make: a link to one of the kernel's own does.
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).symlink_to("/dev/null")
    (tmp_path / "dev/nvidia-caps").mkdir()
    (tmp_path / "dev/nvidia-note.txt").write_text("no device")
    return tmp_path


def find(root: Path, cache: str = CACHE) -> GpuDevices:
    return find_gpus(
        dev=root / "dev", proc=root / "proc", programs=(root / "bin",), linker_cache=cache.format(root=root)
    )


def test_found_devices_and_libraries(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found = find(machine)
    assert [Path(path).name for path in found.devices] == [
        "nvidia-caps",
        "nvidia-uvm",
        "nvidia0",
        "nvidia1",
        "nvidiactl",
    ]
    assert [Path(path).name for path in found.libraries] == [
        "libcuda.so.550.90.07",
        "libnvidia-ml.so.550.90.07",
    ]
    assert found.links == (
        ("libcuda.so", "libcuda.so.550.90.07"),
        ("libcuda.so.1", "libcuda.so.550.90.07"),
        ("libnvidia-ml.so.1", "libnvidia-ml.so.550.90.07"),
    )
    assert found.programs == (str(machine / "bin/nvidia-smi"),)
    assert found.models == ()
    for bus, model in (("0000:07:00.0", "NVIDIA A40"), ("0000:08:00.0", "NVIDIA A100-PCIE-40GB")):
        (machine / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
        text = f"Model: \t\t {model}\nIRQ:   \t\t 90\n"
        (machine / "proc/driver/nvidia/gpus" / bus / "information").write_text(text)
    assert find(machine).models == ("NVIDIA A100-PCIE-40GB", "NVIDIA A40")
    assert found.driver == "550.90.07"
    assert count_gpus(find_device_nodes(machine / "dev")) == 2


def test_no_device_no_module_no_library(machine: Path) -> None:
    with pytest.raises(ToolError, match=r"libcuda\.so") as caught:
        find(machine, "0 libs\n")
    assert caught.value.code == "gpu-driver-incomplete"
    (machine / "dev/nvidia-uvm").unlink()
    with pytest.raises(ToolError, match="nvidia-uvm") as told:
        find(machine)
    assert told.value.code == "gpu-driver-incomplete"
    assert "nvidia-modprobe" in told.value.hint
    for node in (machine / "dev").glob("nvidia?"):
        node.unlink()
    with pytest.raises(ToolError) as caught:
        find(machine)
    assert caught.value.code == "gpu-device-missing"


def test_linker_cache_of_the_architecture_alone() -> None:
    names = [name for name, _ in parse_linker_cache(CACHE.format(root=""), machine="x86_64")]
    assert names == ["libcuda.so", "libcuda.so.1", "libcudadebugger.so.1", "libnvidia-ml.so.1"]
    assert (
        dict(parse_linker_cache(CACHE.format(root=""), machine="x86_64"))["libcuda.so.1"]
        == "/lib/libcuda.so.1"
    )
    assert parse_linker_cache(CACHE.format(root=""), machine="aarch64") == ()


def test_only_selected_gpus_are_bound() -> None:
    devices = ("/dev/nvidia-caps", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia10", "/dev/nvidiactl")
    gpus = replace(GPUS, devices=devices)
    spec = RunSpec(argv=("true",), gpus=True, selected_gpus=((0, "GPU-a", "/dev/nvidia1"),))
    driver = decided(spec, gpus=gpus).driver
    assert driver is not None
    assert driver["devices"] == ("/dev/nvidia-caps", "/dev/nvidia1", "/dev/nvidiactl")
    for node in ("/dev/nvidia7", ""):
        with fails("gpu-device-missing"):
            decided(replace(spec, selected_gpus=((0, "GPU-a", node),)), gpus=gpus)
    amd = replace(GPUS, devices=("/dev/kfd", "/dev/dri"), libraries=())
    driver = decided(replace(spec, selected_gpus=((0, "GPU-a", ""),)), gpus=amd).driver
    assert driver is not None
    assert driver["devices"] == amd.devices  # ROCR_VISIBLE_DEVICES selects


def printing(script: str) -> SandboxProcess:
    """A sandbox whose helper, a shell here, is the command."""
    sandbox = SandboxProcess.__new__(SandboxProcess)
    pipe = subprocess.PIPE
    sandbox.process = subprocess.Popen(["sh", "-c", script], stdout=pipe, stderr=pipe)
    return sandbox


@pytest.mark.parametrize(("printed", "kept"), [("1234", "1234"), ("12345", "1234\n[cut after 4 bytes]\n")])
def test_what_a_command_prints_is_kept_up_to_a_limit(
    printed: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly the limit is whole. More is read to its end, lest the command waits for ever, and said."""
    monkeypatch.setattr(protocol, "OUTPUT_LIMIT", 4)
    sandbox = printing(f"printf {printed}; printf err >&2")
    with sandbox.process as process:
        assert sandbox.collect() == (kept, "err")
        assert process.wait() == 0


def test_output_that_nobody_asked_for_is_empty() -> None:
    sandbox = SandboxProcess.__new__(SandboxProcess)
    sandbox.process = subprocess.Popen(["true"])
    with sandbox.process:
        assert sandbox.collect() == ("", "")


def test_an_interactive_command_has_the_interrupt_to_itself() -> None:
    before = signal.getsignal(signal.SIGINT)
    with signals_to_command(interactive=True):
        signal.raise_signal(signal.SIGINT)  # nothing happens here
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt), signals_to_command(interactive=False):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_where_no_signal_arrives_a_command_runs_all_the_same() -> None:
    ran = []

    def run() -> None:
        with signals_to_command(interactive=True):
            ran.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ran == [True]


class Helper:
    """Stands where the sandbox's helper would; `fails` while the command is read."""

    fails: BaseException | None = None
    over: str | None = None
    made: ClassVar[list[Helper]] = []
    undeletable: ClassVar[list[str]] = []

    def __init__(self, decided: SandboxPlan, **pipes: int | None) -> None:
        self.decided, self.pipes, self.ended = decided, pipes, False
        self.made.append(self)

    def collect(self) -> tuple[str, str]:
        if self.fails:
            raise self.fails
        return "out", "err"

    def wait(self) -> dict[str, object]:
        return {"returncode": 3, "seconds": 1.5, "timed_out": True, "over": self.over, "lost": ""}

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> list[Helper]:
    monkeypatch.setattr(Helper, "made", [])
    monkeypatch.setattr(unshare, "SandboxProcess", Helper)
    return Helper.made


EMPTY = Image(
    name="a:1", digest="", manifest="", config="", size=0, layers=(), environment=(("A", "image"), ("B", "b"))
)


def test_a_run_is_what_the_helper_tells(helpers: list[Helper], tmp_path: Path) -> None:
    spec = RunSpec(argv=("true",), environment=(("A", "spec"),), timeout=9.0)
    done = UnshareRunner(Layout(tmp_path)).run(EMPTY, spec)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out", "err")
    assert (done.seconds, done.timed_out) == (1.5, True)
    (helper,) = helpers
    assert dict(helper.decided.environment) | {"A": "spec", "B": "b"} == dict(helper.decided.environment)
    assert helper.pipes == {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    assert not helper.ended


def test_a_limit_that_ended_a_run_is_its_last_word(
    helpers: list[Helper], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Helper, "over", "memory")
    done = UnshareRunner(Layout(tmp_path)).run(EMPTY, RunSpec(argv=("true",), limits=(("memory", 1 << 20),)))
    assert done.over[0].endswith("memory=1M")
    assert done.stderr.startswith(f"err\n{done.over[0]} ({done.over[1]}")
    assert helpers[0].decided.limits.memory == 1 << 20


def test_what_changed_of_a_layer_is_unpacked_anew_before_a_verdict(tmp_path: Path) -> None:
    store = LayerStore(tmp_path)
    image = replace(EMPTY, layers=(store.add(make_tar(file("a", b"locked"))),))
    runner = UnshareRunner(store)
    runner.prepare(image, checked=True)
    place = store.unpacked.path(image.layers[0].diff_id) / "a"
    place.write_bytes(b"changed")
    runner.prepare(image, checked=False)
    assert place.read_bytes() == b"changed"
    runner.prepare(image, checked=True)
    assert place.read_bytes() == b"locked"


def test_an_interrupted_run_ends_its_helper(
    helpers: list[Helper], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Helper, "fails", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        UnshareRunner(Layout(tmp_path)).run(EMPTY, RunSpec(argv=("true",)))
    assert [helper.ended for helper in helpers] == [True]


@pytest.mark.parametrize(("helps", "code", "starts"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_systemd_starts_a_run_where_that_gives_it_a_group_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helps: bool, code: int, starts: bool
) -> None:
    program = tmp_path / "systemd-run"
    program.write_text(f"#!/bin/sh\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(unshare, "scope_helps", lambda *_: helps)
    command = unshare.find_scope.__wrapped__()
    assert command[:3] == ((str(program), "--user", "--scope") if starts else ())
