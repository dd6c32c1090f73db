"""Batch scripts for Slurm as text: what they ask for, what a shell makes of them, and what is refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.errors import CheckFailedError, UsageError
from imagefactory.jobs.htcondor import JobImageSpec, SubmitCommand
from imagefactory.jobs.offer import choose_form, forms_of
from imagefactory.jobs.slurm import NO_GPU, SlurmRequest, format_reach, format_sbatch, request_gpus
from imagefactory.schedulers.pool import ImageKind, Inventory
from imagefactory.schedulers.sites import find_site
from imagefactory.schedulers.sizes import GB
from imagefactory.schedulers.slurm.nodes import parse_nodes
from tests.made.offers import IMAGE, NOW, gpu_class, offer

RUNS = SubmitCommand(name="train", executable="train.sh")
SLURM = find_site("slurm")
UUID, MIG = "GPU-11111111-2222-3333-4444-555555555555", "MIG-89c850dc-38e3-57df-85c7-690c186b68e9"
ANY = SlurmRequest(lines=("--gres=gpu:1",), gpus=(), total=0, known=False)


def taken(*capabilities: str, kind: ImageKind = ImageKind.DOCKER, cuda: str = "12.4") -> JobImageSpec:
    form = choose_form(forms_of(offer(of_sif=()), ""), SLURM, kind)
    classes = tuple(gpu_class(one, cuda) for one in capabilities or ("8.0",))
    return JobImageSpec(target=IMAGE.target, platform=IMAGE.platform, form=form, classes=classes, judged=NOW)


def cluster(*nodes: str) -> Inventory:
    """Nodes as `name gres features`."""
    lines = []
    for text in nodes:
        name, gres, features = (*text.split(), "")[:3]
        lines.append(f"NodeName={name} Arch=x86_64 ActiveFeatures={features} Gres={gres} State=IDLE")
    return parse_nodes("\n".join(lines), datetime.now(UTC))


A, H, V, OLD = "a1 gpu:a100:4 a100,new", "h1 gpu:h100:2 h100,new", "v1 gpu:v100:1 v100", "o1 gpu:2"


@pytest.mark.parametrize(
    ("nodes", "capabilities", "gpus", "lines", "reached"),
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
    nodes: Sequence[str], capabilities: Sequence[str], gpus: int, lines: list[str], reached: int
) -> None:
    request = request_gpus(taken(*capabilities), replace(RUNS, gpus=gpus), cluster(*nodes))
    assert (list(request.lines), len(request.gpus)) == (lines, reached)
    assert {gpu.capability for gpu in request.gpus} <= set(capabilities)
    script = format_sbatch(taken(*capabilities), replace(RUNS, gpus=gpus), request, ())
    for line in lines:
        assert f"\n#SBATCH {line}\n" in script
    total = sum(len(one.gpus) for one in cluster(*nodes).machines)
    assert format_reach(request).startswith(f"reaches {reached} of {total} GPU")


def test_what_a_cluster_cannot_give_is_refused_with_what_it_has() -> None:
    with pytest.raises(CheckFailedError) as lacking:
        request_gpus(taken("9.0"), RUNS, cluster(A, V, OLD))
    assert lacking.value.code == "no-matching-gpu"
    for words in (" 9.0,", "a100 (8.0)", "of no type (?)", "v100 (7.0)"):
        assert words in lacking.value.message
    with pytest.raises(CheckFailedError) as caught:  # a slice is no GPU that was verified
        request_gpus(taken("8.0"), RUNS, cluster("a1 gpu:a100_1g.5gb:7"))
    assert caught.value.code == "no-matching-gpu"
    assert request_gpus(taken("8.0"), replace(RUNS, mig=True), cluster("a1 gpu:a100_1g.5gb:7")).gpus
    with pytest.raises(UsageError) as caught:
        request_gpus(taken("7.0", "8.0"), RUNS, cluster("m1 gpu:a100:2,gpu:v100:2,gpu:ours:1"))
    assert caught.value.code == "gpu-type-ambiguous"


def test_where_no_cluster_is_at_hand_the_script_says_so() -> None:
    request = request_gpus(taken(), RUNS, None)
    assert request == ANY
    assert "--gres=gpu:TYPE:1" in format_sbatch(taken(), RUNS, request, ())
    assert format_reach(request) == ""


# --- what a shell makes of it --------------------------------------------------------------------------


def run_script(
    folder: Path,
    script: str,
    task: str = "",
    capability: str = "8.0",
    cuda: str = "12.4",
    *,
    visible: str | None = "0",
) -> tuple[int, str]:
    """Runs a script as a node would, with programs that tell how they were called."""
    programs = {
        "apptainer": 'printf "%s\\n" "$@"',
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
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    environ |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_ARRAY_TASK_ID": task}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_program_runs_in_the_image_with_its_arguments(tmp_path: Path) -> None:
    words = ("--name", "it's $HOME", 'a "b"', "", "*", "\\")
    script = format_sbatch(taken(), replace(RUNS, arguments=words), ANY, ())
    code, said = run_script(tmp_path, script)
    assert code == 0, said
    start = ["exec", "--nv", "--env", "PYTHONNOUSERSITE=1", "--bind", str(tmp_path), "--pwd", str(tmp_path)]
    address = taken().form.image.address
    assert said.splitlines() == [*start, address, "./train.sh", *words]
    assert "@sha256:" in address


def test_each_run_of_a_sweep_has_its_values_and_its_folder(tmp_path: Path) -> None:
    run = replace(RUNS, columns=("run", "lr", "name"), arguments=("$(run)", "x$(LR)y", "$(name)"))
    rows = tuple((f"0.{number}", f"b c{number}") for number in range(40))
    script = format_sbatch(taken(kind=ImageKind.SIF), run, ANY, rows)
    assert "\n#SBATCH --array=1-40\n" in script
    for number in (1, 40):
        code, said = run_script(tmp_path, script, str(number))
        assert code == 0, said
        image, program, *words = said.splitlines()[-5:]
        assert (program, words) == ("../train.sh", [str(number), f"x0.{number - 1}y", f"b c{number - 1}"])
        assert image == f"../{taken(kind=ImageKind.SIF).form.image.address}"
        assert (tmp_path / f"run-{number}").is_dir()


@pytest.mark.parametrize(
    ("capability", "cuda", "code", "said"),
    [
        ("8.0", "12.4", 0, ""),
        ("8.0", "13.0", 0, ""),
        ("9.0", "12.4", 9, "this GPU has compute capability 9.0; the image is proven on 8.0"),
        ("8.0", "12.2", 9, "this driver takes CUDA 12.2; it must take 12.4"),
        ("8.0", "", 9, "this driver takes CUDA of no version; it must take 12.4"),
    ],
)
def test_a_gpu_that_is_not_proven_stops_the_job(
    tmp_path: Path, capability: str, cuda: str, code: int, said: str
) -> None:
    ended, told = run_script(tmp_path, format_sbatch(taken(), RUNS, ANY, ()), "", capability, cuda)
    assert ended == code
    assert said in told
    assert ("./train.sh" in told) == (code == 0)


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
    ended, told = run_script(tmp_path, format_sbatch(taken(), RUNS, ANY, ()), visible=visible)
    assert ended == code, told
    assert ("./train.sh" in told) == (code == 0)
    assert told  # never ends without a word


def test_a_job_on_cpus_asks_for_no_gpu(tmp_path: Path) -> None:
    script = format_sbatch(taken(), replace(RUNS, gpus=0), NO_GPU, ())
    assert "gres" not in script
    assert "nvidia-smi" not in script
    assert "--nv" not in run_script(tmp_path, script)[1]


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
    script = format_sbatch(taken(), replace(RUNS, gpus=0, checkpoint="last.pt"), NO_GPU, ())
    for line in ("--requeue", "--open-mode=append", "--signal=B:TERM@120"):
        assert f"\n#SBATCH {line}\n" in script
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7"}
    command = ["bash", "-c", script]
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
    run = replace(RUNS, cpus=8, memory=20 * GB + 1, time=timedelta(days=1, hours=2, seconds=3.2))
    script = format_sbatch(taken(), run, ANY, ())
    for line in ("--cpus-per-task=8", f"--mem={20 * 1024 + 1}M", "--time=1-02:00:04", "--job-name=train"):
        assert f"\n#SBATCH {line}\n" in script


@pytest.mark.parametrize(
    ("changes", "rows", "code", "said"),
    [
        ({"inputs": ("data.csv",)}, (), "option-conflict", "--input"),
        ({"outputs": ("model.pt",)}, (), "option-conflict", "--output-file"),
        ({"disk": GB}, (), "option-conflict", "--disk"),
        ({"name": "a b"}, (), "submit-value-invalid", "'a b'"),
        ({"executable": "a;b"}, (), "submit-value-invalid", "'a;b'"),
        ({"arguments": ("$(lr)",)}, (), "macro-unknown", "'$(lr)'"),
        ({"arguments": ("a\nb",)}, (), "argument-not-ascii", r"'a\nb'"),
        ({"columns": ("run", "a-b")}, (("1",),), "column-name-invalid", "'a-b'"),
        ({"columns": ("run", "lr")}, (("1", "2"),), "sweep-values-invalid", "run 1 has 2 values, not 1"),
        ({"columns": ("run", "lr")}, (("`id`",),), "sweep-values-invalid", "'`id`'"),
    ],
)
def test_what_cannot_stand_in_a_script_is_refused(
    changes: dict[str, object], rows: tuple[tuple[str, ...], ...], code: str, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        format_sbatch(taken(), replace(RUNS, **changes), ANY, rows)  # type: ignore[arg-type]
    assert caught.value.code == code
    assert said in caught.value.message


def test_the_memory_of_a_gpu_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError) as caught:
        request_gpus(taken(), replace(RUNS, gpu_memory=GB), cluster(A))
    assert caught.value.code == "option-conflict"
    assert "--gpu-memory" in caught.value.message
