"""Images in containers of podman, by its command. Needs root, podman and runc.

GPUs are stood in for by a specification of CDI whose devices are /dev/null.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from imagefactory.jobs.slurm import write_slurm
from imagefactory.model import CommandResult, Mount, RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image
from imagefactory.progress import QUIET, QuietProgress
from imagefactory.runtime.devices import GpuDevices
from imagefactory.runtime.podman import PodmanRunner
from imagefactory.runtime.protocol import OUTPUT_LIMIT
from imagefactory.runtime.unshare import UnshareRunner
from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sites import find_site
from tests.made.errors import fails
from tests.made.layout import add_image
from tests.made.offers import job_spec
from tests.services.children import wait_for
from tests.services.gpu_host import THREADS, build_library, library_of_the_future
from tests.services.podman import PodmanService

PROGRAMS = ("sh", "cat", "cp", "env", "getconf", "grep", "head", "id", "ls", "sleep", "touch", "true", "yes")
SPEC = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [
        {"name": name, "containerEdits": {"deviceNodes": [{"path": f"/dev/gpu{n}", "hostPath": "/dev/null"}]}}
        for name, n in (("all", 0), ("1", 1), ("GPU-b", 2))
    ],
    "containerEdits": {"env": ["DRIVER=550"]},
}


def small_layer() -> bytes:
    """A tar of a shell and some programs of this machine, with the libraries that they need."""
    paths = {shutil.which(name) or "" for name in PROGRAMS}
    listed = subprocess.run(["ldd", *sorted(paths)], capture_output=True, text=True, check=True).stdout
    paths |= {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", dereference=True) as tar:
        for name in ("tmp", "etc"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        passwd = tarfile.TarInfo("etc/passwd")
        tar.addfile(passwd, io.BytesIO())
        for path in sorted(paths):
            tar.add(path, arcname=path.lstrip("/"))
    return data.getvalue()


@dataclass(frozen=True)
class Bench:
    layout: Layout
    service: PodmanService
    image: Image

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, **self.service.environ}

    @property
    def runner(self) -> PodmanRunner:
        return PodmanRunner(self.layout, self.environ, QUIET, self.service.command)

    def run(self, script: str, **fields: object) -> CommandResult:
        return self.runner.run(self.image, sh(script, **fields))

    @property
    def containers(self) -> list[str]:
        command = (*self.service.command, "ps", "--all", "--quiet")
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=True
        ).stdout.split()


def sh(script: str, **fields: object) -> RunSpec:
    return RunSpec(argv=("sh", "-c", script), **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, podman_session: PodmanService) -> Iterator[Bench]:
    layout = Layout(tmp_path_factory.mktemp("podman") / "store")
    with layout.in_use(QuietProgress()):
        add_image(layout, "small:1", [small_layer()])
        bench = Bench(layout=layout, service=podman_session, image=layout.image("small:1"))
        yield bench
        clear = (*podman_session.command, "rm", "--all", "--force")
        subprocess.run(clear, env=bench.environ, capture_output=True, check=True)


@pytest.fixture
def cdi() -> Iterator[Path]:
    """A specification for this machine's podman; one that is there stays."""
    folder = Path("/etc/cdi")
    missing = not folder.exists()
    folder.mkdir(exist_ok=True)
    path = folder / "imagefactory-tests.json"
    assert not [other for other in folder.iterdir() if other != path], "this machine has a specification"
    path.write_text(json.dumps(SPEC))
    yield path
    path.unlink(missing_ok=True)
    if missing:
        folder.rmdir()


def test_it_says_what_it_is(bench: Bench) -> None:
    assert bench.runner.require().startswith("podman ")
    absent = PodmanRunner(bench.layout, {"PATH": "/nowhere"}, QUIET, ("no-podman-here",))
    with fails("tool-missing"):
        absent.require()


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("sh", "-c", "exit 7"), 7),
        (("sh", "-c", "kill -9 $$"), 137),
        (("no-such-command",), 127),
        (("/etc/passwd",), 126),
    ],
)
def test_exit_codes(bench: Bench, argv: tuple[str, ...], code: int) -> None:
    assert bench.runner.run(bench.image, RunSpec(argv=argv)).returncode == code
    assert bench.containers == []


def test_inside_there_is_no_power_no_network_and_nothing_of_the_host(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOST_SECRET", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://secret.example.org")
    done = bench.run("env; cat /proc/self/status; ls /sys/class/net; id -u; echo é '\"' $0")
    assert "secret" not in done.stdout
    for line in ("CapBnd:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
        assert line in done.stdout
    assert done.stdout.endswith('lo\n0\né " sh\n')
    assert len(bench.run("ls /sys/class/net", network=True).stdout.split()) > 1


def test_user_folder_environment_and_mounts(bench: Bench, tmp_path: Path) -> None:
    odd = tmp_path / 'in, "here"'
    odd.mkdir()
    (odd / "word").write_text("read me")
    (odd / "out").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    for path in (tmp_path, *tmp_path.parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o755)
    script = 'id -u; id -g; pwd; echo "$A"; cat /w/word; echo written > /w/out/file; touch /w/no || echo no'
    spec = sh(
        script,
        uid=65534,
        workdir="/usr",
        environment=(("A", "b=c d"),),
        mounts=(
            Mount(source=tmp_path / "out", target="/w/out", writable=True),
            Mount(source=odd, target="/w"),
        ),
    )
    done = bench.runner.run(bench.image, spec)
    assert done.stdout == "65534\n65534\n/usr\nb=c d\nread meno\n", done
    assert (tmp_path / "out/file").read_text() == "written\n"
    with fails("mount-failed"):
        missing = replace(spec, mounts=(Mount(source=tmp_path / "nothing", target="/w"),))
        bench.runner.run(bench.image, missing)


def test_read_only_leaves_scratch_alone(bench: Bench) -> None:
    script = "touch /x || echo no; for d in /tmp /dev/shm; do cp /usr/bin/true $d/t && $d/t && echo $d; done"
    assert bench.run(script, read_only=True, uid=65534).stdout.splitlines() == ["no", "/tmp", "/dev/shm"]
    assert bench.run("touch /etc/new && echo yes").stdout == "yes\n"
    assert bench.run("ls /etc/new || echo none").stdout == "none\n"


def test_limits_hold(bench: Bench) -> None:
    limits = (("processes", 40), ("memory", 1 << 28), ("files", 99))
    pids, memory = "/sys/fs/cgroup/pids/pids.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    script = f"ulimit -n; cat {pids} /sys/fs/cgroup/pids.max; cat {memory} /sys/fs/cgroup/memory.max"
    done = bench.run(script, limits=limits)
    assert done.stdout.split() == ["99", "40", str(1 << 28)], done
    own = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert bench.run("ulimit -n").stdout == f"{min(own, int(Path('/proc/sys/fs/nr_open').read_text()))}\n"


def test_time_out_ends_the_command(bench: Bench) -> None:
    for limit in (6.0, 60.0):  # on a busy machine the container begins late
        done = bench.run("echo begun; trap '' TERM INT; sleep 1000", timeout=limit)
        assert (done.returncode, done.timed_out) == (137, True)
        if done.stdout:
            break
    assert done.stdout == "begun\n"
    assert bench.containers == []


def test_endless_output_is_cut(bench: Bench) -> None:
    done = bench.run("yes | head -c 40000000; echo end >&2")
    assert (done.returncode, done.stderr) == (0, "end\n")
    assert done.stdout.endswith(f"[cut after {OUTPUT_LIMIT} bytes]\n")


def test_gpus_come_by_cdi(bench: Bench, cdi: Path) -> None:
    script = "test -c /dev/gpu0 && echo $DRIVER"
    assert bench.run(script, gpus=True).stdout == "550\n"
    assert bench.run(script).returncode == 1
    for gpus, nodes in (
        (((1, "GPU-a", ""),), ["gpu1"]),
        (((7, "GPU-b", ""), (1, "GPU-a", "")), ["gpu1", "gpu2"]),
    ):
        assert bench.run("cd /dev && ls -d gpu*", gpus=True, selected_gpus=gpus).stdout.split() == nodes
    with fails("podman-cdi-unavailable", "gpu=7"):
        bench.run("true", gpus=True, selected_gpus=((7, "GPU-c", ""),))
    # After an update of the driver its libraries have other names.
    old = {"hostPath": "/usr/lib/libcuda.so.525.60", "containerPath": "/usr/lib/libcuda.so.525.60"}
    cdi.write_text(json.dumps({**SPEC, "containerEdits": {"mounts": [old]}}))
    with fails("podman-cdi-unavailable", "libcuda"):
        bench.run(script, gpus=True)
    cdi.unlink()
    with fails("podman-cdi-unavailable", "nvidia.com/gpu=all"):
        bench.run(script, gpus=True)
    assert bench.containers == []


GPUS = ("GPU-0a", "GPU-1b", "GPU-2c")
SMI = f"""\
#!/bin/sh
case $1 in
-L) {"; ".join(f"echo 'GPU {at}: A100 (UUID: {uuid})'" for at, uuid in enumerate(GPUS))} ;;
--query-gpu=*) {"; ".join(f"echo '{uuid}, 8.0'" for uuid in GPUS)} ;;
*) echo "| Driver: 550.54.15  CUDA Version: 12.4 |" ;;
esac
"""
PROGRAM = """\
#!/usr/bin/sh
cd "$(cat where)" && ls /dev | grep gpu
echo "$CUDA_VISIBLE_DEVICES $SLURM_JOB_ID $HOME $1"
id -u >written
exit 7
"""


@pytest.mark.parametrize("named", ["uuid", "number"])
def test_a_slurm_job_gets_its_own_gpus_alone(
    bench: Bench, registry: str, cdi: Path, tmp_path: Path, named: str
) -> None:
    names = GPUS if named == "uuid" else ("0", "1", "2")
    devices = [
        {
            "name": name,
            "containerEdits": {"deviceNodes": [{"path": f"/dev/gpu{at}", "hostPath": "/dev/null"}]},
        }
        for at, name in enumerate(names)
    ]
    cdi.write_text(json.dumps({**SPEC, "devices": devices}))
    podman, environ = [*bench.service.command], bench.environ

    def call(*words: str) -> str:
        done = subprocess.run([*podman, *words], env=environ, capture_output=True, text=True, check=True)
        return done.stdout

    bench.run("true")  # loads the image
    address = f"{registry}/jobs/{named}"
    (loaded,) = {row["Id"] for row in json.loads(call("image", "ls", "--format", "json")) if row.get("Names")}
    call("push", "--digestfile", str(tmp_path / "digest"), loaded, f"docker://{address}:1")
    job = replace(
        job_spec(
            "8.0", site="slurm", kind=ImageKind.DOCKER, executable="train.sh", arguments=("a b",), gpus=2
        ),
        site=replace(find_site("slurm"), container="podman", kinds=(ImageKind.DOCKER,)),
    )
    address = f"docker://{address}@{(tmp_path / 'digest').read_text()}"
    job = replace(job, image=replace(job.image, address=address))
    folder, programs = tmp_path / "work", tmp_path / "bin"
    for path in (folder, programs):
        path.mkdir()
    for path, text in {
        programs / "nvidia-smi": SMI,
        programs / "podman": f'#!/bin/sh\nexec {shlex.join(podman)} "$@"\n',
        folder / "train.sh": PROGRAM,
    }.items():
        path.write_text(text)
        path.chmod(0o755)
    (folder / "where").write_text(str(folder))
    proc = tmp_path / "proc"
    for at, uuid in enumerate(GPUS):
        (proc / f"0000:0{at}:00.0").mkdir(parents=True)
        (proc / f"0000:0{at}:00.0/information").write_text(f"Model: A100\nGPU UUID: \t {uuid}\n")
    (text,) = write_slurm(job).values()
    text = text.replace("/proc/driver/nvidia/gpus", str(proc))
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={
            **environ,
            "PATH": f"{programs}:{environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "2,1",
            "SLURM_JOB_ID": "77",
            "SLURM_SUBMIT_DIR": str(folder),
        },
        capture_output=True,
        text=True,
    )
    assert done.stdout == "gpu1\ngpu2\nGPU-2c,GPU-1b 77 /tmp a b\n", done
    assert done.returncode == 7
    assert (folder / "written").read_text() == f"{os.getuid()}\n"
    assert bench.containers == []


def test_a_driver_that_needs_a_newer_glibc_than_the_image(bench: Bench, cdi: Path, tmp_path: Path) -> None:
    """Both runners say so before the command starts."""
    library = tmp_path / "libcuda.so.550.90.07"
    mount = {"hostPath": str(library), "containerPath": "/usr/lib/libcuda.so.1", "options": ["rbind", "ro"]}
    cdi.write_text(json.dumps({**SPEC, "containerEdits": {"mounts": [mount]}}))
    devices = GpuDevices(devices=(), libraries=(str(library),), links=(), programs=(), driver="")
    runners = (bench.runner, UnshareRunner(bench.layout, find=lambda: devices))
    library.write_bytes(library_of_the_future())
    for runner in runners:
        with fails("image-glibc-too-old", r"libcuda.so.550.90.07.* 2\.99 "):
            runner.run(bench.image, sh("true", gpus=True))
    library.write_bytes(build_library(THREADS))
    for runner in runners:
        assert runner.run(bench.image, sh("echo runs", gpus=True)).stdout == "runs\n"


CHILD = """
import os, sys
from pathlib import Path
from imagefactory.model import RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.progress import QUIET
from imagefactory.runtime.podman import PodmanRunner
layout = Layout(Path(sys.argv[1]))
runner = PodmanRunner(layout, os.environ, QUIET, sys.argv[3:])
spec = RunSpec(argv=("sh", "-c", sys.argv[2]), capture=False)
sys.exit(runner.run(layout.image("small:1"), spec).returncode)
"""


def test_a_command_has_our_streams_and_what_a_killed_runner_left_goes(bench: Bench) -> None:
    def command(script: str) -> list[str]:
        return [sys.executable, "-c", CHILD, str(bench.layout.path), script, *bench.service.command]

    done = subprocess.run(
        command("cat; echo err >&2; exit 5"), input="in", env=bench.environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (5, "in"), done
    assert "err\n" in done.stderr
    left = subprocess.Popen(command("sleep 1000"), env=bench.environ, stdin=subprocess.DEVNULL)
    wait_for(lambda: len(bench.containers) == 1, "the container")
    left.send_signal(signal.SIGKILL)
    left.wait()
    assert bench.run("true").returncode == 0
    assert bench.containers == []
