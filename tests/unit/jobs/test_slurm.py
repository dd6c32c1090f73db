"""Batch scripts for Slurm as text: what they ask for, what a shell makes of them, and what is refused."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import ImagefactoryError
from imagefactory.jobs.slurm import format_reach, request_gpus, write_slurm
from imagefactory.jobs.spec import JobSpec
from imagefactory.runtime.hardware import MAKE_CDI
from imagefactory.schedulers.pool import ImageKind, Inventory
from imagefactory.schedulers.sites import Site, find_site
from imagefactory.schedulers.sizes import GB
from imagefactory.schedulers.slurm.nodes import parse_nodes
from imagefactory.settings.choices import CONTAINERS, EDF, PODMAN, PYXIS
from tests.made.offers import job_spec

UUID, MIG = "GPU-11111111-2222-3333-4444-555555555555", "MIG-89c850dc-38e3-57df-85c7-690c186b68e9"


def script(*capabilities: str, **changes: Any) -> str:
    (text,) = write_slurm(job_spec(*capabilities, site="slurm", **changes)).values()
    return text


def cluster(*nodes: str) -> Inventory:
    """Return nodes from `name gres features`."""
    lines = []
    for text in nodes:
        name, gres, features = (*text.split(), "")[:3]
        lines.append(f"NodeName={name} Arch=x86_64 ActiveFeatures={features} Gres={gres} State=IDLE")
    return parse_nodes("\n".join(lines), datetime.now(UTC))


A, H, V, OLD = "a1 gpu:a100:4 a100,new", "h1 gpu:h100:2 h100,new", "v1 gpu:v100:1 v100", "o1 gpu:2"


@pytest.mark.parametrize(
    ("nodes", "capabilities", "gpus", "lines", "count"),
    [
        ((A, H, V), ("8.0",), 1, ["--gres=gpu:a100:1"], 4),
        ((A, V), ("7.0", "8.0"), 1, ["--gres=gpu:1"], 5),
        ((A, H, V), ("8.0", "9.0"), 2, ["--gres=gpu:2", "--constraint=new"], 6),
        ((A, H, V, OLD), ("7.0", "9.0"), 1, ["--gres=gpu:1", "--constraint=h100|v100"], 3),
        (("a1 gpu:a100:4 x", "h1 gpu:h100:2 x", "v1 gpu:v100:1 x"), ("8.0", "9.0"), 1,
         ["--gres=gpu:1", "--exclude=v1"], 6),
        ((A, "h2 gpu:h100:1 h100,new", OLD), ("8.0", "9.0"), 2, ["--gres=gpu:a100:2"], 4),
        (("m1 gpu:a100:2,gpu:v100:2 m",), ("8.0",), 1, ["--gres=gpu:a100:1"], 2),
    ],
)  # fmt: skip
def test_what_is_asked_for_reaches_the_proven_gpus_alone(
    nodes: Sequence[str], capabilities: Sequence[str], gpus: int, lines: list[str], count: int
) -> None:
    job = job_spec(*capabilities, site="slurm", gpus=gpus, inventory=cluster(*nodes))
    options, reached = request_gpus(job)
    assert (list(options), len(reached)) == (lines, count)
    assert {gpu.capability for gpu in reached} <= set(capabilities)
    (text,) = write_slurm(job).values()
    assert all(f"\n#SBATCH {line}\n" in text for line in lines)
    total = sum(len(machine.gpus) for machine in cluster(*nodes).machines)
    assert format_reach(job).startswith(f"GPUs that match: {count} of {total},")


SLICES = "a1 gpu:a100_1g.5gb:7"


@pytest.mark.parametrize(
    ("capabilities", "nodes", "code", "words"),
    [
        (("9.0",), (A, V, OLD), "gpu-match-unknown", (" 9.0,", "a100 (8.0)", "of no type (?)", "v100 (7.0)")),
        (("8.0",), (SLICES,), "no-matching-gpu", ()),
        (("7.0", "8.0"), ("m1 gpu:a100:2,gpu:v100:2,gpu:ours:1",), "gpu-type-ambiguous", ()),
    ],
)
def test_a_gpu_that_the_cluster_cannot_give(
    capabilities: Sequence[str], nodes: Sequence[str], code: str, words: Sequence[str]
) -> None:
    with pytest.raises(ImagefactoryError) as caught:
        script(*capabilities, inventory=cluster(*nodes))
    assert caught.value.code == code
    assert all(word in caught.value.message for word in words)


def test_slices_are_requested_by_an_option() -> None:
    assert request_gpus(job_spec(site="slurm", mig=True, inventory=cluster(SLICES)))[1]


def test_without_a_cluster_any_gpu_is_requested() -> None:
    job = job_spec(site="slurm")
    assert request_gpus(job) == (("--gres=gpu:1",), ())
    assert "--gres=gpu:TYPE:1" in script()
    assert format_reach(job) == ""


# --- what a shell makes of it --------------------------------------------------------------------------


def run_script(
    folder: Path,
    text: str,
    task: str = "",
    capability: str = "8.0",
    cuda: str = "12.4",
    *,
    visible: str | None = "0",
) -> tuple[int, str]:
    """Runs a script as a node would, with programs that tell how they were called."""
    programs = {
        "apptainer": 'printf "%s\\n" "$@"',
        "srun": 'env | grep -E "^(PYTHONNOUSERSITE|PWD)="; printf "%s\\n" "$@"',
        "nvidia-smi": f"""case $1 in
-L) cat <<'END'
GPU 0: NVIDIA A100-SXM4-40GB (UUID: {UUID})
  MIG 1g.5gb     Device  0: (UUID: {MIG})
Unable to determine the device handle for gpu 0000:02:00.0: GPU is lost.
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-2222{UUID[8:]})
END
;;
--query-gpu=uuid,compute_cap) printf '%s\n' '{UUID}, {capability}' 'GPU-2222{UUID[8:]}, [Unknown Error]' ;;
*) echo "| Driver Version: 550.54.15   CUDA Version: {cuda}   |" ;;
esac""",
    }
    for name, program in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{program}\n")
        (folder / name).chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    environ |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_ARRAY_TASK_ID": task}
    ended = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_the_program_runs_in_the_image_with_its_arguments(tmp_path: Path) -> None:
    words = ("--name", "it's $HOME", 'a "b"', "", "*", "\\")
    code, output = run_script(tmp_path, script(arguments=words))
    assert code == 0, output
    start = ["exec", "--nv", "--env", "PYTHONNOUSERSITE=1", "--bind", str(tmp_path), "--pwd", str(tmp_path)]
    address = job_spec(site="slurm").image.address
    assert output.splitlines() == [*start, address, "./train.sh", *words]
    assert "@sha256:" in address


def site_with(container: str) -> Site:
    return replace(find_site("slurm"), container=container, kinds=(ImageKind.DOCKER,))


def job_for(container: str, **changes: Any) -> JobSpec:
    return replace(job_spec(site="slurm", kind=ImageKind.DOCKER, **changes), site=site_with(container))


def test_pyxis_starts_the_program_in_the_image_by_digest(tmp_path: Path) -> None:
    words = ("--name", "it's $HOME", "")
    job = job_for(PYXIS, arguments=words, cpus=8)
    (text,) = write_slurm(job).values()
    code, output = run_script(tmp_path, text)
    assert code == 0, output
    host, _, path = job.image.address.removeprefix("docker://").partition("/")
    assert "PYTHONNOUSERSITE=1" in output.splitlines()
    assert output.splitlines()[2:] == [
        "--ntasks=1",
        "--cpus-per-task=8",
        f"--container-image=docker://{host}#{path}",
        f"--container-mounts={tmp_path}:{tmp_path}",
        f"--container-workdir={tmp_path}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
        *("sh", "-c", 'export PATH="/opt/env/bin:$PATH"; exec "$@"', "sh"),
        "./train.sh",
        *words,
    ]
    assert "@sha256:" in path
    assert "apptainer" not in text


@pytest.mark.parametrize("directory", ["", "jobs", "{here}/a b"])
def test_an_edf_stands_beside_its_script_and_names_the_digest(tmp_path: Path, directory: str) -> None:
    columns = {"columns": ("run",), "rows": ((), ()), "arguments": ("$(run)",), "gather": "sum.sh"}
    directory = directory.format(here=tmp_path)
    job = job_for(EDF, cpus=8, name="it", directory=directory, **columns)
    texts = write_slurm(job)
    assert list(texts) == ["it.sbatch", "it-gather.sbatch", "it.toml"]
    edf = tomllib.loads(texts["it.toml"])
    host, _, path = job.image.address.removeprefix("docker://").partition("/")
    assert edf == {
        "image": f"{host}#{path}",
        "mounts": ["${SLURM_SUBMIT_DIR}:${SLURM_SUBMIT_DIR}"],
        "workdir": "${PWD}",
        "entrypoint": False,
        "env": {"PYTHONNOUSERSITE": "1"},
    }
    assert path.endswith(f"@{job.image.subject.index}")
    beside = tmp_path / directory / "it.toml"
    beside.parent.mkdir(exist_ok=True)
    beside.write_text(texts["it.toml"])
    for name, program in (("it.sbatch", ["../train.sh", "2"]), ("it-gather.sbatch", ["./sum.sh"])):
        code, output = run_script(tmp_path, texts[name], "2")
        assert code == 0, output
        assert f"--environment={beside}" in output.splitlines()
        assert output.splitlines()[-len(program) :] == program
    assert "PWD=" + str(tmp_path / "run-2") in run_script(tmp_path, texts["it.sbatch"], "2")[1]


@pytest.mark.parametrize("container", [PYXIS, EDF])
@pytest.mark.parametrize(("version", "code"), [("3.5.0", 9), ("4.0.0", 0), ("4.10.1", 0), ("", 0)])
def test_an_enroot_that_takes_no_digest_stops_the_job(
    tmp_path: Path, container: str, version: str, code: int
) -> None:
    enroot = tmp_path / "enroot"
    enroot.write_text(f"#!/bin/sh\necho {version}\n[ -n '{version}' ]\n")
    enroot.chmod(0o755)
    script, *edf = write_slurm(job_for(container)).values()
    for text in edf:
        (tmp_path / "train.toml").write_text(text)
    ended, output = run_script(tmp_path, script)
    assert (ended, "./train.sh" in output) == (code, code == 0), output


@pytest.mark.parametrize("container", [PYXIS, EDF])
@pytest.mark.parametrize(
    ("sha256", "code"), [("", 9), ("0" * 64, 9), (hashlib.sha256(b"squashed").hexdigest(), 0)]
)
def test_an_exported_file_is_started_if_it_is_the_one_of_the_script(
    tmp_path: Path, container: str, sha256: str, code: int
) -> None:
    enroot, image = tmp_path / "enroot", tmp_path / "a.sqsh"
    enroot.write_text("#!/bin/sh\necho 3.5.0\n")
    enroot.chmod(0o755)
    image.write_bytes(b"squashed")
    script, *edf = write_slurm(job_for(container)).values()
    for text in edf:
        (tmp_path / "train.toml").write_text(re.sub("(?m)^image = .*$", f'image = "{image}"', text))
    script = re.sub("(?m)^image='.*$", f"image={image}", script)
    ended, output = run_script(tmp_path, script.replace("\nsha256=", f"\nsha256={sha256}"))
    assert (ended, "./train.sh" in output) == (code, code == 0), output
    if container == PYXIS and not code:
        assert f"--container-image={image}" in output.splitlines()


def run_podman(
    folder: Path, cdi: str | None, visible: str, runtime: str = "crun", **changes: Any
) -> tuple[int, list[str]]:
    """Run a job for podman on a node with this text in a CDI specification and two GPUs."""
    (text,) = write_slurm(job_for(PODMAN, **changes)).values()
    for number, uuid in enumerate((UUID, f"GPU-2222{UUID[8:]}")):
        gpu = folder / f"proc/0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"GPU UUID: \t {uuid}\n")
    if cdi is not None:
        (folder / "cdi").mkdir()
        (folder / "cdi/nvidia.yaml").write_text(cdi)
    podman = folder / "podman"
    podman.write_text(f"#!/bin/sh\n[ $1 = info ] && echo {runtime} || printf '%s\\n' \"$@\"\n")
    podman.chmod(0o755)
    text = text.replace("/etc/cdi", str(folder / "cdi")).replace("/var/run/cdi", str(folder / "none"))
    code, output = run_script(
        folder, text.replace("/proc/driver/nvidia/gpus", str(folder / "proc")), visible=visible
    )
    return code, output.splitlines()


@pytest.mark.parametrize(
    ("spec", "visible", "names", "uuids"),
    [
        (f"kind: nvidia.com/gpu\nname: {UUID}\n", "0", [UUID], UUID),
        ("kind: nvidia.com/gpu\nname: '0'\n", "GPU-1111", ["0"], UUID),
        (f"kind: nvidia.com/gpu\nname: {MIG}\n", MIG, [MIG], MIG),
    ],
)
def test_podman_gets_the_gpus_of_the_job_by_cdi(
    tmp_path: Path, spec: str, visible: str, names: list[str], uuids: str
) -> None:
    code, words = run_podman(tmp_path, spec, visible, arguments=("a b", ""))
    assert code == 0, words
    assert [words[at + 1] for at, word in enumerate(words) if word == "--device"] == [
        f"nvidia.com/gpu={name}" for name in names
    ]
    assert f"CUDA_VISIBLE_DEVICES={uuids}" in words
    address = job_for(PODMAN).image.address.removeprefix("docker://")
    assert words[-5:] == ["--entrypoint", "./train.sh", address, "a b", ""]
    assert f"{tmp_path}:{tmp_path}" in words
    assert "--cgroups=disabled" in words


@pytest.mark.parametrize(
    ("spec", "visible"), [(None, "0"), ("", "0"), ("kind: nvidia.com/gpu\nname: '0'\n", MIG)]
)
def test_podman_without_a_specification_of_the_gpu_stops_the_job(
    tmp_path: Path, spec: str | None, visible: str
) -> None:
    code, words = run_podman(tmp_path, spec, visible)
    assert code == 9
    assert MAKE_CDI.partition("=")[0] in words[-1]


def test_podman_starts_a_job_on_cpus_without_devices(tmp_path: Path) -> None:
    code, words = run_podman(tmp_path, None, "", "runc", gpus=0)
    assert code == 0, words
    assert "--device" not in words
    assert "--cgroups=disabled" not in words


def test_each_run_of_a_sweep_has_its_values_and_its_folder(tmp_path: Path) -> None:
    rows = tuple((f"0.{number}", f"b c{number}") for number in range(40))
    arguments = ("$(run)", "x$(LR)y", "$(name)")
    text = script(kind=ImageKind.SIF, columns=("run", "lr", "name"), rows=rows, arguments=arguments)
    assert "\n#SBATCH --array=1-40\n" in text
    for number in (1, 40):
        code, output = run_script(tmp_path, text, str(number))
        assert code == 0, output
        image, program, *words = output.splitlines()[-5:]
        assert (program, words) == ("../train.sh", [str(number), f"x0.{number - 1}y", f"b c{number - 1}"])
        assert image == f"../{job_spec(kind=ImageKind.SIF).image.address}"
        assert (tmp_path / f"run-{number}").is_dir()


@pytest.mark.parametrize(
    ("capability", "cuda", "code", "message"),
    [
        ("8.0", "12.4", 0, ""),
        ("8.0", "13.0", 0, ""),
        ("9.0", "12.4", 9, "this GPU has compute capability 9.0, but the image is verified on 8.0"),
        ("8.0", "12.2", 9, "this driver supports CUDA 12.2, but the image requires 12.4"),
        ("8.0", "", 9, "this driver supports CUDA (unknown), but the image requires 12.4"),
    ],
)
def test_a_gpu_that_is_not_proven_stops_the_job(
    tmp_path: Path, capability: str, cuda: str, code: int, message: str
) -> None:
    ended, output = run_script(tmp_path, script(), "", capability, cuda)
    assert ended == code
    assert message in output
    assert ("./train.sh" in output) == (code == 0)


@pytest.mark.parametrize(
    ("visible", "code"),
    [
        ("0", 0),
        ("GPU-1111", 0),
        (UUID, 0),
        (f"{MIG},MIG-cccc", 0),
        (f"MIG-{UUID}/1/2", 0),
        ("0,-1,2", 0),
        ("2", 9),  # whose capability is not told
        ("0,2", 9),
        ("", 9),
        (None, 9),
        ("NoDevFiles", 9),
        ("1", 9),
        ("-1,0", 9),
        ("GPU-", 9),
        ("0,0", 9),  # which leaves nothing
        (f"{MIG},{MIG}", 9),
        ("MIG-0000", 9),
    ],
)
def test_the_job_looks_at_the_gpus_that_cuda_shows_it(tmp_path: Path, visible: str | None, code: int) -> None:
    ended, output = run_script(tmp_path, script(), visible=visible)
    assert ended == code, output
    assert ("./train.sh" in output) == (code == 0)
    assert output  # never ends silently


def test_a_job_on_cpus_asks_for_no_gpu(tmp_path: Path) -> None:
    text = script(gpus=0)
    assert "gres" not in text
    assert "nvidia-smi" not in text
    assert "--nv" not in run_script(tmp_path, text)[1]


# --- checkpoints -------------------------------------------------------------------------------------


SAVES = """\
trap 'echo saved; exit 85' TERM
echo started >started
[ -e once ] || { touch once; while :; do sleep 0.02; done; }
exit 3"""


def resuming(folder: Path, **programs: str) -> tuple[subprocess.Popen[str], Path]:
    """A script that resumes, as it runs on a node; and what tells that its program has begun."""
    for name, text in {"scontrol": 'echo "scontrol $*"', "sleep": "/bin/sleep 0.02", **programs}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    script_text = script(gpus=0, checkpoint="last.pt")
    for line in ("--requeue", "--open-mode=append", "--signal=B:TERM@120"):
        assert f"\n#SBATCH {line}\n" in script_text
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7"}
    command = ["bash", "-c", script_text]
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=-1, text=True), folder / "started"


def test_a_program_that_is_told_to_end_saves_and_is_queued_again(tmp_path: Path) -> None:
    job, started = resuming(tmp_path, apptainer=SAVES)
    while not started.exists():
        assert job.poll() is None
    job.terminate()
    assert job.communicate(timeout=60)[0].splitlines() == ["saved", "scontrol requeue 7"]
    assert job.returncode == 85
    job, _ = resuming(tmp_path, apptainer=SAVES)
    assert (job.communicate(timeout=60)[0], job.returncode) == ("", 3)  # of its own accord: that is the end


# --- values ------------------------------------------------------------------------------------------


def test_amounts_are_as_sbatch_takes_them() -> None:
    text = script(cpus=8, memory=20 * GB + 1, time=timedelta(days=1, hours=2, seconds=3.2))
    for line in ("--cpus-per-task=8", f"--mem={20 * 1024 + 1}M", "--time=1-02:00:04", "--job-name=train"):
        assert f"\n#SBATCH {line}\n" in text


@pytest.mark.parametrize("container", [CONTAINERS[0], PODMAN, PYXIS, EDF])
def test_paths_of_the_site_are_bound_into_the_image(container: str) -> None:
    mounts = ("/opt/plugin:/opt/plugin", "/usr/lib64/ofi:/opt/ofi")
    job = job_spec(site="slurm", kind=ImageKind.DOCKER)
    texts = write_slurm(replace(job, site=replace(site_with(container), mounts=mounts)))
    (text,) = (text for name, text in texts.items() if name.endswith(".toml") or len(texts) == 1)
    for mount in mounts:
        bound = {
            CONTAINERS[0]: f"--bind {mount}:ro ",
            PODMAN: f"--volume {mount}:ro ",
            PYXIS: f",{mount}:ro",
            EDF: f'"{mount}:ro"',
        }
        assert bound[container] in text
