"""A kit's own program, with programs in docker's and apptainer's place and a made-up GPU."""

from __future__ import annotations

import ast
import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import UsageError
from imagefactory.gpu.forward import FIRST, FORWARD_DIRECTORY, LOOK
from imagefactory.verify import kits
from imagefactory.verify.kit import program, start
from imagefactory.verify.kit.program import LARGEST_REPORT, read_report
from imagefactory.verify.kits import make_kit
from tests.made.gpu_code import forward_note
from tests.made.kit import (
    CONFIG,
    INDEX,
    MANIFEST,
    NONCE,
    ORDER,
    REFERENCE,
    Bench,
    answer,
    apptainer,
    asked,
    docker,
    inspected,
    make_bench,
    open_files,
    pyxis,
    suite_report,
)
from tests.services.children import LIMIT, child
from tests.services.gpu_host import UUID, Told, library_of_the_future

GOOD = {"report": suite_report(), "says": ["driver: passed - 12.4"]}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# --- the folder ----------------------------------------------------------------------------------


def test_a_kit_holds_what_it_needs_and_nothing_of_imagefactory(bench: Bench) -> None:
    files = {name for name in files_below(bench.kit) if not name.startswith("suite/")}
    assert files == {"run.py", "kit.json", "expectations.json"} | {f"kit/{name}" for name in kits.CARRIED}
    for path in bench.kit.rglob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = {alias.name for node in named if isinstance(node, ast.Import) for alias in node.names}
        modules |= {
            node.module or "" for node in named if isinstance(node, ast.ImportFrom) and not node.level
        }
        assert not any(name.startswith("imagefactory") for name in modules), path
        if path.parent in (bench.kit, bench.kit / "kit"):
            assert {name.partition(".")[0] for name in modules} <= sys.stdlib_module_names, path


def test_a_kit_that_travelled_runs_by_itself(bench: Bench, tmp_path: Path) -> None:
    """Another folder, an interpreter without packages: this machine has no GPU, and the kit says so."""
    elsewhere = tmp_path / "a folder with blanks, and a comma"
    bench.kit.rename(elsewhere)
    argv = [sys.executable, "-I", "-S", "-B", str(elsewhere / "run.py"), "--runner", "docker"]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env={"PATH": str(bench.programs)}
    )
    assert (done.returncode, "no-gpu" in done.stderr) == (9, True), done.stderr
    assert files_below(elsewhere / "result") == {"run.json"}


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, bench: Bench) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(UsageError, check=lambda error: error.code == "kit-exists"):
        make_kit(tmp_path / "mine", asked(nonce="1" * 32), bench.nonces, bench.issued.issued)
    assert not list(bench.nonces.folder.glob(f"{'1' * 32}*"))
    (tmp_path / "empty").mkdir()
    make_kit(tmp_path / "empty", asked(nonce="2" * 32), bench.nonces, bench.issued.issued)
    assert (tmp_path / "empty" / "run.py").is_file()


# --- pyxis ---------------------------------------------------------------------------------------

JOB = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4", "CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": "/a"}


def test_pyxis_runs_the_image_by_digest_in_a_step_of_the_job(bench: Bench) -> None:
    pyxis(bench, GOOD)
    assert bench.run("--runner", "pyxis", **JOB) == 0
    calls = bench.calls()
    (imported,) = (call for call in calls if call[:2] == ["enroot", "import"])
    assert imported[-1] == f"docker://{REFERENCE.replace('/', '#', 1)}"
    (step,) = (call for call in calls if call[:2] == ["srun", "--ntasks=1"])
    assert f"--container-image={imported[3]}" in step
    assert "--cpus-per-task=4" in step
    (mounts,) = (word.partition("=")[2] for word in step if word.startswith("--container-mounts="))
    assert [mount.rpartition(":")[2] for mount in mounts.split(",")] == ["ro", "ro", "/imagefactory/report"]
    assert step[-len(ORDER.argv) :] == list(ORDER.argv)
    environ = bench.environs()[calls.index(step)]
    assert not {"SECRET", "LD_LIBRARY_PATH"} & environ.keys()
    assert environ["CUDA_VISIBLE_DEVICES"]
    facts = bench.result("run.json")
    assert (facts["outcome"], facts["runner"]) == ("", "pyxis")
    assert bench.result("report.json")["nonce"] == NONCE
    assert not list(bench.kit.glob(".work-*"))


@pytest.mark.parametrize(
    ("run", "changes", "environ", "code", "outcome"),
    [
        ({"code": 1, "complains": ["slurmstepd: error: pyxis: container start failed"]}, {}, JOB, 6,
         "infrastructure"),
        ({"code": 1, "complains": ["srun: error: Unable to create step"]}, {}, JOB, 6, "infrastructure"),
        ({"code": 3, "complains": ["srun: error: h1: task 0: Exited with exit code 3"]}, {}, JOB, 9, ""),
        (GOOD, {"config": "sha256:" + "0" * 64}, JOB, 2, None),
        (GOOD, {"version": "3.5.0"}, JOB, 6, None),
        (GOOD, {}, {}, 6, None),
    ],
)  # fmt: skip
def test_pyxis_that_cannot_run_it(
    bench: Bench,
    run: dict[str, Any],
    changes: dict[str, str],
    environ: dict[str, str],
    code: int,
    outcome: str | None,
) -> None:
    pyxis(bench, run, **changes)
    assert bench.run("--runner", "pyxis", **environ) == code
    assert (bench.kit / "result").exists() == (outcome is not None)
    if outcome is not None:
        assert bench.result("run.json")["outcome"] == outcome


def test_an_image_that_enroot_does_not_get(bench: Bench) -> None:
    pyxis(bench, GOOD)
    answer(bench, "enroot", {"enroot import .*": {"code": 1, "complains": ["[ERROR] URL not found"]}})
    assert bench.run("--runner", "pyxis", **JOB) == 8
    assert bench.result("run.json")["outcome"] == "pull-failed"


def test_only_a_request_by_name_chooses_pyxis(bench: Bench) -> None:
    pyxis(bench, GOOD)
    assert bench.run(**JOB) == 6
    assert bench.calls() == []


# --- docker --------------------------------------------------------------------------------------


def test_docker_runs_the_image_by_digest_without_network(bench: Bench) -> None:
    docker(bench, GOOD)
    assert bench.run() == 0
    run = next(call for call in bench.calls() if call[:2] == ["docker", "run"])
    text = " ".join(run)
    assert "--gpus all --network none" in text
    assert "--cap-drop ALL --security-opt no-new-privileges:true" in text
    assert run[run.index("--pull") + 1] == "never"
    assert run[-len(ORDER.argv) :] == [CONFIG, *ORDER.argv[1:]]
    assert run[run.index("--entrypoint") + 1] == ORDER.argv[0]
    mounts = [value for option, value in pairwise(run) if option == "--mount"]
    assert [mount.endswith(",readonly") for mount in mounts] == [True, True, False]
    assert bench.result("report.json")["nonce"] == NONCE
    assert bench.result("evidence.json")["gpus"][0]["uuid"] == UUID
    facts = bench.result("run.json")
    assert (facts["outcome"], facts["runner"], facts["returncode"]) == ("", "docker", 0)
    assert facts["said"] == ["driver: passed - 12.4"]
    assert not list(bench.kit.glob(".work-*"))
    assert bench.calls()[-1][:3] == ["docker", "rm", "--force"]


def test_an_image_that_is_not_here_is_pulled_by_its_digest(bench: Bench) -> None:
    docker(bench, GOOD)
    there = {"says": [json.dumps(inspected())]}
    answer(bench, "docker", {"docker image inspect .*": [{"code": 1}, there], "docker pull .*": {}})
    assert bench.run() == 0
    assert ["docker", "pull", "--quiet", REFERENCE] in bench.calls()


@pytest.mark.parametrize("code", [0, 9])
def test_what_was_pulled_is_taken_away_after_the_run(bench: Bench, code: int) -> None:
    docker(bench, GOOD if code == 0 else {"code": 1})
    there = {"says": [json.dumps(inspected())]}
    pulls = {"docker image inspect .*": [{"code": 1}, there], "docker pull .*": {}, "docker image rm .*": {}}
    answer(bench, "docker", pulls)
    assert bench.run() == code
    calls = bench.calls()
    assert calls[-1] == ["docker", "image", "rm", "--", REFERENCE]
    assert calls.index(["docker", "pull", "--quiet", REFERENCE]) < len(calls) - 1


def test_what_was_there_before_stays_and_so_does_what_is_to_be_kept(bench: Bench) -> None:
    docker(bench, GOOD)
    assert bench.run() == 0
    there = {"says": [json.dumps(inspected())]}
    answer(bench, "docker", {"docker image inspect .*": [{"code": 1}, there], "docker pull .*": {}})
    (bench.programs / "calls.jsonl").unlink()
    assert bench.run("--keep") == 0
    assert ["docker", "pull", "--quiet", REFERENCE] in bench.calls()
    assert not any(call[:3] == ["docker", "image", "rm"] for call in bench.calls())


def test_an_image_that_docker_will_not_take_away_is_told(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    docker(bench, GOOD)
    refusal = {"code": 1, "complains": ["conflict: image is being used by running container"]}
    there = {"says": [json.dumps(inspected())]}
    pulls = {"docker image inspect .*": [{"code": 1}, there], "docker pull .*": {}}
    answer(bench, "docker", {**pulls, "docker image rm .*": refusal})
    assert bench.run() == 0
    assert f"left: {REFERENCE}: conflict: image is being used" in capsys.readouterr().err


def with_size(bench: Bench, size: int) -> None:
    kit = json.loads((bench.kit / "kit.json").read_bytes())
    (bench.kit / "kit.json").write_text(json.dumps({**kit, "size": size}))


def test_an_image_that_the_disk_cannot_hold_is_not_pulled(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_size(bench, 10**18)
    docker(bench, GOOD)
    root = {"docker image inspect .*": {"code": 1}, "docker info .*": {"says": [str(tmp_path)]}}
    answer(bench, "docker", root)
    assert bench.run() == 6
    said = bench.result("run.json")
    assert said["outcome"] == "infrastructure"
    assert f"{tmp_path} has " in said["reason"]
    assert (
        "and the image takes 1300000000.0 GB at least: free some, or move docker's data-root"
        in said["reason"]
    )
    assert not any(call[1] == "pull" for call in bench.calls())
    apptainer(bench, GOOD)
    assert bench.run("--runner", "apptainer") == 6
    assert "move the kit to another disk" in capsys.readouterr().err
    assert not any(call[1] == "build" for call in bench.calls())


def test_a_registry_that_gives_another_image_is_not_believed(bench: Bench) -> None:
    docker(bench, GOOD)
    other = {"says": [json.dumps(inspected(Id="other", RepoDigests=[], RootFS=None))]}
    answer(bench, "docker", {"docker image inspect .*": [{"code": 1}, other], "docker pull .*": {}})
    assert bench.run() == 2
    assert not any(call[1] == "run" for call in bench.calls())


def test_a_pull_that_fails_has_its_word(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    docker(bench, GOOD)
    pull = {"code": 1, "complains": ["Error response from daemon: \x1b[31mmanifest unknown"]}
    answer(bench, "docker", {"docker image inspect .*": {"code": 1}, "docker pull .*": pull})
    assert bench.run() == 8
    assert bench.result("run.json")["outcome"] == "pull-failed"
    assert files_below(bench.kit / "result") == {"run.json"}
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ({"Id": MANIFEST, "RepoDigests": [], "RootFS": {"Layers": ["other"]}}, 0),
        ({"Id": "other", "RepoDigests": [f"mirror/x@{MANIFEST}"], "RootFS": {"Layers": []}}, 0),
        ({"Id": "other", "RepoDigests": []}, 0),  # loaded from a file: all of its layers are the image's
        ({"Id": "other", "RepoDigests": [], "RootFS": {"Layers": []}}, 2),
        ({"Id": "other", "RepoDigests": None, "RootFS": None}, 2),
        ({"Id": "other", "RepoDigests": [], "RootFS": {"Layers": [CONFIG]}}, 2),
    ],
)
def test_an_image_that_is_named_must_be_the_kits(bench: Bench, found: dict[str, Any], code: int) -> None:
    docker(bench, GOOD, **found)
    assert bench.run("--image", "tiny:latest") == code
    assert any(call[1] == "run" for call in bench.calls()) == (code == 0)


def test_podman_in_dockers_clothes_is_refused(bench: Bench) -> None:
    docker(bench, GOOD)
    answer(bench, "docker", {"docker --version": {"says": ["podman version 4.3.1"]}})
    assert bench.run("--runner", "docker") == 6
    assert not (bench.kit / "result").exists()


def test_podman_gives_the_gpus_by_cdi(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"says": [json.dumps(inspected(Id=CONFIG.removeprefix("sha256:"), RepoDigests=[]))]}
    known = {"podman image inspect .*": there, "podman rm .*": {}, "podman run .*": GOOD}
    monkeypatch.setattr(start, "CDI_FOLDERS", (str(tmp_path / "cdi"),))
    answer(bench, "podman", {"podman --version": {"says": ["podman version 4.3.1"]}, **known})
    assert bench.run() == 6
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/nvidia.yaml").write_text(
        f'kind: nvidia.com/gpu\ndevices:\n- name: "{UUID}"\n- name: all\n'
    )
    answer(bench, "podman", {"podman --version": {"says": ["podman version 4.0.2"]}})
    assert bench.run("--runner", "podman") == 6
    answer(bench, "podman", {"podman --version": {"says": ["podman version 4.3.1"]}})
    assert bench.run() == 0
    run = " ".join(next(call for call in bench.calls() if call[:2] == ["podman", "run"]))
    assert "--device nvidia.com/gpu=all --network none" in run
    assert "--gpus" not in run
    assert bench.result("run.json")["runner"] == "podman"
    assert bench.run("--gpus", "0") == 0
    run = " ".join([call for call in bench.calls() if call[:2] == ["podman", "run"]][-1])
    assert f"--device nvidia.com/gpu={UUID} --network none" in run
    assert f"CUDA_VISIBLE_DEVICES={UUID}" in run


@pytest.mark.parametrize("where", ["complains", "says"])
def test_a_docker_without_its_daemon_is_not_used(
    bench: Bench, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    docker(bench, GOOD)
    refusal = {"code": 1, where: ["\x1b[31mCannot connect to the daemon"]}
    answer(bench, "docker", {"docker version .*": refusal})
    assert bench.run("--runner", "docker") == 6
    said = capsys.readouterr().err
    assert "`docker version --format {{.Server.Version}}` says: [31mCannot connect to the daemon" in said
    assert not (bench.kit / "result").exists()
    apptainer(bench, GOOD)
    assert bench.run() == 0
    assert bench.result("run.json")["runner"] == "apptainer"


def test_a_container_that_docker_does_not_start_is_no_result_of_the_image(bench: Bench) -> None:
    refusal = "docker: Error response from daemon: could not select device driver with capabilities: [[gpu]]."
    docker(bench, {"code": 125, "complains": [refusal]})
    assert bench.run() == 6
    facts = bench.result("run.json")
    assert (facts["outcome"], refusal in facts["reason"]) == ("infrastructure", True)
    assert files_below(bench.kit / "result") == {"run.json"}


def test_a_run_that_takes_too_long_is_ended_and_told(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, replace(ORDER, timeout=0.5))
    docker(bench, {"sleeps": 600})
    assert bench.run() == 9
    facts = bench.result("run.json")
    assert (facts["timed_out"], facts["outcome"]) == (True, "")
    assert files_below(bench.kit / "result") == {"run.json", "evidence.json"}


def test_one_that_is_told_to_end_leaves_nothing_behind(bench: Bench) -> None:
    docker(bench, {"says": ["started"], "sleeps": 600})
    program = (
        "import json, sys; from pathlib import Path; from imagefactory.runtime.hardware import Places; "
        "from imagefactory.verify.kit.program import main; "
        "sys.exit(main([], json.loads(sys.argv[1]), Path(sys.argv[2]), Places(*json.loads(sys.argv[3]))))"
    )
    argv = [
        sys.executable,
        "-c",
        program,
        json.dumps(bench.environ()),
        str(bench.kit),
        json.dumps(bench.places),
    ]
    with child(argv, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "started\n" in process.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT) == 128 + signal.SIGTERM
    assert bench.calls()[-1][:3] == ["docker", "rm", "--force"]
    assert not list(bench.kit.glob(".work-*"))
    assert not (bench.kit / "result").exists()


def test_a_kit_runs_once_at_a_time_and_clears_what_a_kill_left(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    docker(bench, GOOD)
    (bench.kit / ".work-killed").mkdir()
    with (bench.kit / "kit.json").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert bench.run() == 2
    assert "running already" in capsys.readouterr().err
    assert (bench.kit / ".work-killed").exists()
    assert bench.run() == 0
    assert not list(bench.kit.glob(".work-*"))


@pytest.mark.parametrize("kind", ["link", "pipe", "large", "folder"])
def test_what_the_image_leaves_for_a_report_is_taken_only_as_a_plain_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "report.json"
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b" " * (LARGEST_REPORT + 1))
    opened = open_files()
    assert read_report(tmp_path, path.name) is None
    assert open_files() <= opened


# --- apptainer -----------------------------------------------------------------------------------


def test_apptainer_runs_it_where_there_is_no_docker(bench: Bench) -> None:
    apptainer(bench, GOOD)
    assert bench.run(APPTAINER_BIND="/home", APPTAINER_CACHEDIR="/cache") == 0
    made = next(call for call in bench.calls() if call[1] == "build")
    assert made[-4:] == ["--no-https", "--disable-cache", made[-2], f"docker://{REFERENCE}"]
    run = next(call for call in bench.calls() if "--nv" in call)
    assert {"--nv", "--containall", "--cleanenv", "--no-home"} <= set(run)
    assert " ".join(run).count("--network none") == 1
    assert run[-len(ORDER.argv) :] == list(ORDER.argv)
    mounts = [value for option, value in pairwise(run) if option == "--mount"]
    assert [mount.endswith(",ro") for mount in mounts] == [True, True, False]
    last = bench.environs()[-1]
    assert "SECRET" not in last
    assert "APPTAINER_BIND" not in last
    assert last["APPTAINER_CACHEDIR"] == "/cache"
    assert not any("image.sif" in str(path) for path in bench.kit.rglob("*"))
    assert bench.run("--keep") == 0
    kept = [call for call in bench.calls() if call[1] == "build"][-1]
    assert "--disable-cache" not in kept
    assert bench.result("run.json")["runner"] == "apptainer"


@pytest.mark.parametrize(
    ("driver", "name", "chosen"),
    [
        ("535.54.03", "NVIDIA A100-PCIE-40GB", True),
        ("535.54.03", "NVIDIA GeForce RTX 3090", False),
        ("580.65.06", "NVIDIA A100-PCIE-40GB", False),
    ],
)
def test_apptainer_takes_the_libcuda_that_nvidias_hook_would(
    tmp_path: Path, driver: str, name: str, chosen: bool
) -> None:
    bench = make_bench(tmp_path, told=Told(driver=driver, name=name))
    note = forward_note("12.9", (535, 575)).decode()
    apptainer(bench, GOOD, ("libcuda.so.575.57.08", "", note))
    assert bench.run() == 0
    look, run = [call for call in bench.calls() if "exec" in call]
    assert look[-3:] == ["/bin/sh", "-c", LOOK]
    assert not {"--nv", "--mount"} & set(look)
    (image,) = (word for word in look if word.endswith("image.sif"))
    wrapper = ["/bin/sh", "-c", FIRST, FORWARD_DIRECTORY] if chosen else []
    assert run[run.index(image) + 1 :] == [*wrapper, *ORDER.argv]


def test_a_sif_is_run_by_its_sha256_alone(tmp_path: Path) -> None:
    file = tmp_path / "image.sif"
    file.write_bytes(b"a .sif")
    sha256 = f"sha256:{hashlib.sha256(b'a .sif').hexdigest()}"
    bench = make_bench(tmp_path, ORDER)
    kit = json.loads((bench.kit / "kit.json").read_bytes())
    kit.update(sif=True, subject={**kit["subject"], "config": sha256})
    (bench.kit / "kit.json").write_text(json.dumps(kit))
    docker(bench, GOOD)
    apptainer(bench, GOOD)
    assert bench.run("--image", str(file)) == 0
    assert str(file) in bench.calls()[-1]
    assert bench.run() == 0  # pulled, and looked at the same way
    assert any(call[-1] == f"oras://{REFERENCE}" for call in bench.calls())
    file.write_bytes(b"another .sif")
    assert bench.run("--image", str(file)) == 2
    assert bench.run("--runner", "docker") == 6


def test_a_sif_stands_for_an_image_where_its_maker_knows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a network: a .sif tells nobody what it was made of, so the kit names those that are right."""
    file = tmp_path / "image.sif"
    file.write_bytes(b"a .sif")
    sha256 = f"sha256:{hashlib.sha256(b'a .sif').hexdigest()}"
    bench = make_bench(tmp_path, replace(ORDER, sifs=(sha256,)))
    apptainer(bench, GOOD)
    assert bench.run("--image", str(file)) == 0
    assert not any(call[1] in ("pull", "build") for call in bench.calls())
    other = make_bench(tmp_path / "other")
    apptainer(other, GOOD)
    assert other.run("--image", str(file)) == 2
    assert "imagefactory image export TARGET --format sif" in capsys.readouterr().err
    assert not any("exec" in call for call in other.calls())


def test_an_older_apptainer_pulls(bench: Bench) -> None:
    apptainer(bench, GOOD)
    answer(bench, "apptainer", {"apptainer --version": {"says": ["apptainer version 1.1.9-1.el8"]}})
    assert bench.run() == 0
    assert any(call[1] == "pull" for call in bench.calls())


@pytest.mark.parametrize("named", [f"other.site/x@sha256:{'0' * 64}", "other.site/x:latest"])
def test_another_reference_must_name_the_same_digest(bench: Bench, named: str) -> None:
    apptainer(bench, GOOD)
    assert bench.run("--image", named) == 2
    assert not any(call[1] in ("pull", "build") for call in bench.calls())
    assert bench.run("--image", f"other.site/x@{MANIFEST}") == 0
    assert bench.run("--image", f"other.site/x@{INDEX}") == 0


# --- GPUs ----------------------------------------------------------------------------------------


def test_without_a_gpu_nothing_is_started_and_nothing_looks_like_a_result(bench: Bench) -> None:
    docker(bench, GOOD)
    assert bench.run() == 0
    gone = bench.places._replace(dev="/nowhere")
    before = len(bench.calls())
    assert bench.run(places=gone) == 9
    assert len(bench.calls()) == before
    assert files_below(bench.kit / "result") == {"run.json"}  # the earlier result made room
    facts = bench.result("run.json")
    assert (facts["outcome"], facts["runner"]) == ("no-gpu", "")


def test_another_gpu_than_asked_for_is_told_before_anything_is_started(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, asked(capability="9.0"))
    docker(bench, GOOD)
    assert bench.run() == 9
    facts = bench.result("run.json")
    assert facts["outcome"] == "wrong-gpu"
    assert "Test GPU (8.0)" in facts["reason"]
    assert not bench.calls()


def test_a_batch_systems_choice_of_gpus_holds_inside(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, told=Told(count=2))
    docker(bench, GOOD)
    apptainer(bench, GOOD)
    assert bench.run(CUDA_VISIBLE_DEVICES="1") == 0
    assert "CUDA_VISIBLE_DEVICES=1" in next(call for call in bench.calls() if call[1] == "run")
    assert bench.run("--runner", "apptainer", CUDA_VISIBLE_DEVICES="1") == 0
    assert bench.environs()[-1]["APPTAINERENV_CUDA_VISIBLE_DEVICES"] == "1"
    before = len(bench.calls())
    assert bench.run(CUDA_VISIBLE_DEVICES="") == 9
    assert (bench.result("run.json")["outcome"], len(bench.calls())) == ("no-gpu", before)


def test_two_gpus_make_the_first_that_fits_visible(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, told=Told(count=2))
    docker(bench, GOOD)
    assert bench.run() == 0
    assert f"CUDA_VISIBLE_DEVICES={UUID}" in next(call for call in bench.calls() if call[1] == "run")


def test_selected_gpus_come_by_dockers_runtime_or_cdi(bench: Bench, tmp_path: Path) -> None:
    docker(bench, GOOD)

    def started(*argv: str) -> list[str]:
        assert bench.run("--runner", "docker", *argv, CUDA_VISIBLE_DEVICES="7") == 0
        return [call for call in bench.calls() if call[1] == "run"][-1]

    call = started("--gpus", UUID)
    assert call[call.index("--gpus") + 1] == f'"device={UUID}"'
    assert f"CUDA_VISIBLE_DEVICES={UUID}" in call
    everything = started("--gpus", "all")  # whatever the batch system says
    assert everything[everything.index("--gpus") + 1] == "all"
    assert "CUDA_VISIBLE_DEVICES" not in " ".join(everything)
    (tmp_path / "gpus.json").write_text(json.dumps({"kind": "nvidia.com/gpu", "devices": [{"name": "0"}]}))
    answer(
        bench, "docker", {"docker info .*json .*": {"says": [json.dumps({"CDISpecDirs": [str(tmp_path)]})]}}
    )
    call = started("--gpus", "0")
    assert call[call.index("--device") + 1] == "nvidia.com/gpu=0"
    assert "--gpus" not in call


def test_a_gpu_that_is_not_there_stops_a_kit_before_anything_is_started(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    docker(bench, GOOD)
    for text in ("1", "GPU-0", "0,0", "MIG-1"):
        assert bench.run("--gpus", text) == 2
        assert f"0 ({UUID})" in capsys.readouterr().err
    assert not bench.calls()
    assert not (bench.kit / "result").exists()


@pytest.mark.parametrize(("glibc", "code"), [("glibc 2.31", 6), ("glibc 2.99", 0), ("no such tool", 0)])
def test_a_driver_that_needs_a_newer_glibc_than_the_image(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, glibc: str, code: int
) -> None:
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(library_of_the_future())
    monkeypatch.setattr(start, "driver_libraries", lambda: [str(library)])
    for name, runs in (("docker", docker), ("apptainer", apptainer)):
        answer(bench, name, {f"{name} .*getconf.*": {"says": [glibc]}})
        runs(bench, GOOD)
        assert bench.run("--runner", name) == code
        facts = bench.result("run.json")
        assert facts["outcome"] == ("infrastructure" if code else "")
        assert ("2.99" in facts["reason"]) == bool(code)
        assert (bench.kit / "result/report.json").exists() == (code == 0)


def test_apptainer_gets_the_selected_gpus(bench: Bench) -> None:
    apptainer(bench, GOOD)
    assert bench.run("--gpus", "0") == 0
    environ = bench.environs()[-1]
    assert (environ["NVIDIA_VISIBLE_DEVICES"], environ["APPTAINERENV_CUDA_VISIBLE_DEVICES"]) == (UUID, UUID)


# --- refusals ------------------------------------------------------------------------------------


def test_a_kit_that_was_changed_or_is_old_is_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    docker(bench, GOOD)
    kit = json.loads((bench.kit / "kit.json").read_bytes())
    (bench.kit / "kit.json").write_text(json.dumps({**kit, "expires": "2026-01-01T00:00:00Z"}))
    assert bench.run() == 2
    assert "good until 2026-01-01" in capsys.readouterr().err
    (bench.kit / "kit.json").write_text(json.dumps({**kit, "machine": "riscv64"}))
    assert bench.run() == 2
    assert "this kit is for riscv64, and this machine is" in capsys.readouterr().err
    (bench.kit / "kit.json").write_text(json.dumps(kit))
    suite = bench.kit / "suite" / "table.py"
    suite.write_text(suite.read_text() + "\n")
    assert bench.run() == 2
    assert "suite of this kit was changed" in capsys.readouterr().err
    (bench.kit / "kit.json").write_text("{}")
    assert bench.run() == 2
    assert not bench.calls()
    assert not (bench.kit / "result").exists()


def test_a_kit_that_cannot_be_written_to_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: Any) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(bench.kit))

    docker(bench, GOOD)
    monkeypatch.setattr(program.tempfile, "mkdtemp", refuse)
    assert bench.run() == 6
    assert f"error: {bench.kit}: Read-only file system" in capsys.readouterr().err
    assert not bench.calls()


def test_a_job_of_github_says_which(bench: Bench) -> None:
    docker(bench, GOOD)
    assert bench.run(GITHUB_ACTIONS="true", GITHUB_REPOSITORY="lab/images", GITHUB_RUN_ID="7") == 0
    assert bench.result("run.json")["actions"]["GITHUB_REPOSITORY"] == "lab/images"


def test_no_runner_at_all(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run() == 6
    said = capsys.readouterr().err
    for name in ("docker", "podman", "apptainer"):
        assert f"{name}: not installed" in said
    assert not (bench.kit / "result").exists()
