"""From a catalog to files in a folder: what is chosen, what is refused, what is written."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.cli.job import gpu_rows
from imagefactory.errors import CheckFailedError, NothingSelectedError, UsageError
from imagefactory.jobs.make import check_files, resolve_job, save_files, write_job
from imagefactory.jobs.spec import JobParameters, JobSpec
from imagefactory.model import Outcome
from imagefactory.oci.manifests import digest_of
from imagefactory.progress import QuietProgress
from imagefactory.schedulers.inventory import write_inventory
from imagefactory.schedulers.pool import ImageKind, Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sites import find_site
from imagefactory.trust.catalog import CENTER_HINT, LIFE, Catalog, sign_catalog
from imagefactory.trust.envelope import parse_envelope
from imagefactory.trust.offers import find_offer
from imagefactory.trust.policy import AcceptancePolicy, TrustRules
from imagefactory.trust.verdict import sign
from imagefactory.verify.report import Hardware
from tests.made.catalog import SIF_SUBJECT, make_catalog, make_image, signed
from tests.made.command import Call, Said, say
from tests.made.errors import fails
from tests.made.offers import offer, verdict
from tests.made.verdicts import (
    HOST,
    LAB,
    MADE_UP,
    NOW,
    STRANGER,
    SUITE,
    TRUST,
    digest,
    together_report,
    whole_report,
)

NAME = "pytorch-2.3-cu121"


def resolve(
    catalog: Catalog | None = None, trust: TrustRules = TRUST, now: datetime = NOW, **changes: Any
) -> JobSpec:
    fields = {"target": NAME, "site": find_site("generic"), "name": "train", "executable": "train.sh"}
    request = JobParameters(**{**fields, **changes})
    offer = find_offer(catalog or make_catalog(), request.target, trust, now)
    return resolve_job(offer, request, trust, now)


def text_of(job: JobSpec) -> str:
    return next(iter(write_job(job).values()))


def lines(job: JobSpec) -> list[str]:
    return text_of(job).splitlines()


def test_the_image_that_is_proven_by_its_digest() -> None:
    job = resolve()
    assert f"container_image = docker://registry.example.org/gpu/pytorch@{digest('a')}" in lines(job)
    assert "gpus_minimum_capability = 8.0" in lines(job)
    assert "gpus_maximum_capability = 8.0" in lines(job)
    assert "gpus_minimum_runtime = 12.4" in lines(job)
    assert "WARNING" not in text_of(job)
    ((_, envelope),) = make_catalog().images[0].envelopes
    verdict = digest_of(parse_envelope(envelope, "").payload)
    assert gpu_rows(job) == [
        {
            "capability": "8.0",
            "cuda": "12.4",
            "basis": "verified",
            "reason": "passed the quick suite on A GPU of the tests, driver 550.54.15, 2026-11-22",
            "source": f"verdict {verdict} of key {LAB.keyid[:12]}",
        }
    ]


@pytest.mark.parametrize(("gpus", "together"), [(2, ("8.0",)), (3, ())])
def test_whether_several_gpus_work_together_is_a_verdicts_own_word(
    gpus: int, together: tuple[str, ...]
) -> None:
    two = signed(together_report(nonce="7" * 32), "7")
    image = make_image()
    catalog = make_catalog(replace(image, envelopes=(*image.envelopes, two)))
    assert resolve(catalog, gpus=gpus).multi_gpu == together
    assert resolve(gpus=gpus).multi_gpu == ()


def test_predictions_are_taken_only_where_somebody_accepts_them() -> None:
    job = resolve(predicted=True)
    assert (
        "require_gpus = ((Capability == 7.0 && DriverVersion >= 12.0)"
        ' || (Capability == 8.0 && DriverVersion >= 12.4)) && regexp(" mig ", DeviceName, "i") =!= true'
    ) in lines(job)
    assert "# WARNING: no verdict says that it runs on 7.0; only its code predicts it." in lines(job)


def for_cpus(**changes: object) -> Catalog:
    image = make_image(
        **{
            "cuda": "none",
            "required": (),
            "predicted": (),
            "runtime": "",
            "driver": "",
            "envelopes": (),
            **changes,
        }
    )
    return make_catalog(replace(image, sifs=()))


@pytest.mark.parametrize("site", ["generic", "chtc", "ospool"])
def test_an_image_for_cpus_needs_no_verdict_and_asks_for_no_gpu(site: str) -> None:
    job = resolve(for_cpus(), site=find_site(site))
    assert 'requirements = (Arch == "X86_64")' in lines(job)
    assert "request_cpus = 1" in lines(job)
    gpu_lines = [
        line for line in lines(job) if "gpu" in line.lower() and not line.startswith(("#", "container_image"))
    ]
    assert gpu_lines == []
    assert "# there is no verdict about it, only its smoke test." in lines(job)
    assert gpu_rows(job) == []


def test_no_script_is_written_for_gpus_that_it_cannot_check() -> None:
    with fails("amd-not-supported"):
        resolve(for_cpus(cuda="rocm7", required=("gfx90a",)), site=find_site("slurm"))
    with fails("not-verified"):
        resolve(for_cpus(cuda="rocm7", required=("gfx90a",)))


def test_kubernetes_gives_gpus_of_amd_and_the_job_looks_at_them() -> None:
    rocm = for_cpus(cuda="rocm7", required=("gfx90a",))
    with fails("not-verified"):
        resolve(rocm, site=find_site("kubernetes"), files={"train.sh": b"#!/bin/sh\n"})


def test_a_first_trial_on_cpus_asks_for_no_gpu_either() -> None:
    job = resolve(for_cpus(framework="tensorflow-cpu"), name="", executable="")
    assert "import tensorflow; print(tensorflow.__name__, tensorflow.__version__)" in text_of(job)


@pytest.mark.parametrize(
    ("changes", "option"),
    [({"gpus": 2}, "--gpus"), ({"gpu_memory": 1}, "--gpu-memory"), ({"mig": True}, "--allow-mig")],
)
def test_what_asks_for_gpus_is_refused_on_cpus(changes: dict[str, object], option: str) -> None:
    with fails("option-conflict", message=option):
        resolve(for_cpus(), **changes)


def without_verdicts(**changes: object) -> Catalog:
    image = make_image(envelopes=(), **changes)
    return make_catalog(replace(image, sifs=()))


def test_without_a_verdict_nothing_is_made_and_the_prediction_is_named() -> None:
    with pytest.raises(CheckFailedError) as caught:
        resolve(without_verdicts())
    assert caught.value.exit_code == 9
    assert caught.value.code == "not-verified"
    for words in ("pytorch-2.3-cu121 (docker)", "predicted to run on 7.0;", "not predicted to run on 3.5"):
        assert words in caught.value.message
    assert "imagefactory job write pytorch-2.3-cu121 --allow-unverified" in caught.value.hint
    assert "your center" in caught.value.hint
    with pytest.raises(CheckFailedError) as caught:
        resolve(without_verdicts(), own=True)
    assert "imagefactory sweep start pytorch-2.3-cu121" in caught.value.hint
    job = resolve(without_verdicts(), predicted=True)
    assert "gpus_maximum_capability = 7.0" in lines(job)


def in_the_store_alone(sif: bool) -> Catalog:
    image = make_image(envelopes=(), reference="")
    sifs = tuple(replace(one, reference="", envelopes=()) for one in image.sifs) if sif else ()
    return make_catalog(replace(image, sifs=sifs))


@pytest.mark.parametrize("predicted", [True, False])
def test_without_a_registry_an_own_image_is_advised_as_a_file(predicted: bool) -> None:
    """The command that the hint names makes what the next try takes."""
    with fails("image-not-exported", hint=f"imagefactory image export {NAME} --format sif"):
        resolve(in_the_store_alone(sif=False), own=True, predicted=predicted)
    job = resolve(in_the_store_alone(sif=True), own=True, predicted=True)
    assert job.image.kind is ImageKind.SIF
    assert job.fetch == f"imagefactory image export {NAME} --format sif"


def test_a_file_is_advised_where_jobs_can_take_it_and_who_has_the_image() -> None:
    for changes, code in (
        ({"own": True, "kind": ImageKind.DOCKER}, "image-not-published"),
        ({"own": True, "site": find_site("kubernetes")}, "image-not-published"),
        ({"own": False}, "image-not-published"),
    ):
        with pytest.raises(NothingSelectedError) as caught:
            resolve(in_the_store_alone(sif=False), **changes)
        assert caught.value.code == code
        assert "export" not in caught.value.hint


def test_nothing_is_accepted_where_nothing_is_predicted() -> None:
    with pytest.raises(CheckFailedError) as caught:
        resolve(without_verdicts(predicted=()), predicted=True)
    assert caught.value.code == "not-verified"
    assert "no GPU is predicted to run it" in caught.value.message
    assert "--allow-unverified" not in caught.value.hint


def test_verdicts_of_strangers_count_for_nothing() -> None:
    with fails(
        "not-verified", message=("you trust no key", "a verdict is wrong-key"), hint="imagefactory site join"
    ):
        resolve(trust=TrustRules(keys=(), policy=AcceptancePolicy()))
    with pytest.raises(CheckFailedError) as caught:
        resolve(trust=TrustRules(keys=(), policy=AcceptancePolicy()), own=True)
    assert "imagefactory key trust FILE.pub" in caught.value.hint
    another = replace(TRUST.keys[0], name="another", keyid=STRANGER.keyid, public=STRANGER.public)
    with pytest.raises(CheckFailedError) as caught:  # he believes whoever signed the catalog, and no more
        resolve(trust=TrustRules(keys=(another,)))
    assert "a verdict is wrong-key" in caught.value.message
    assert CENTER_HINT in caught.value.hint


def test_an_expired_verdict_is_said_to_be_one() -> None:
    with fails("not-verified", message="a verdict is expired: "):
        resolve(now=NOW + timedelta(days=40))


def test_a_verdict_that_says_no_is_named() -> None:
    report = whole_report(outcome=Outcome.WRONG_NUMBERS, reason="conv2d is 0.3 off")
    image = make_image(envelopes=(signed(report, "1"),))
    with fails("not-verified", message=("not 8.0: wrong-numbers: ", "conv2d is 0.3 off")):
        resolve(make_catalog(replace(image, sifs=())))


def test_a_verdict_on_the_sif_is_none_on_the_image() -> None:
    image = make_image(envelopes=())
    name = f"{NAME}-{'7' * 12}.sif"
    job = resolve(make_catalog(image))
    assert f"container_image = {name}" in lines(job)
    with fails("not-verified", message="(docker)"):
        resolve(make_catalog(image), kind=ImageKind.DOCKER)
    assert SIF_SUBJECT.manifest in text_of(job)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(NothingSelectedError) as caught:
        resolve(target="pytorch-2.3-cu122")
    assert NAME in caught.value.hint


@pytest.mark.parametrize(
    ("framework", "program"), [("torch", "torch.cuda.get_device_name()"), ("other", "sys.version")]
)
def test_without_a_program_of_ones_own_the_framework_is_tried(framework: str, program: str) -> None:
    job = resolve(make_catalog(make_image(framework=framework)), executable="")
    assert "executable = /opt/env/bin/python" in lines(job)
    assert "transfer_executable = false" in lines(job)
    assert any(line.startswith("arguments = ") and program in line for line in lines(job))


# --- files -----------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "train.sh").write_text("#!/bin/sh\n")
    monkeypatch.chdir(folder)
    return folder


def save(force: bool = False, **changes: Any) -> list[str]:
    """Write the files of a job and return their names."""
    job = resolve(**changes)
    return list(save_files(job, write_job(job), force=force))


def test_files_are_written_once(here: Path) -> None:
    assert save() == ["train.sub"]
    assert (here / "train.sub").read_text() == text_of(resolve())
    with fails("file-exists", message="train.sub"):
        save()
    assert save(force=True, predicted=True) == ["train.sub"]
    assert "WARNING" in (here / "train.sub").read_text()
    assert sorted(path.name for path in here.iterdir()) == ["train.sh", "train.sub"]


def test_a_sweep_is_a_dag_and_a_folder_for_each_run(here: Path) -> None:
    sweep = {"columns": ("run", "lr"), "arguments": ("--lr", "$(lr)"), "rows": (("0.1",), ("0.2",))}
    assert save(**sweep) == ["train.sub", "train.dag"]
    names = ["run-1", "run-2", "train.dag", "train.sh", "train.sub"]
    assert sorted(path.name for path in here.iterdir()) == names
    assert (here / "train.dag").read_text().count("JOB run-") == 2
    for path in ("train.sub", "train.dag"):
        (here / path).unlink()
    (here / "run-2" / "model.pt").write_text("precious")
    with fails("file-exists", message="run-2", hint="another directory"):
        save(**sweep)


def test_an_earlier_sweep_is_not_continued(here: Path) -> None:
    """condor_submit_dag takes the newest rescue DAG of a name by itself, and runs only what that leaves."""
    (here / "train.dag.rescue001").write_text("DONE run-1\n")
    with fails("sweep-rescue-exists", message="train.dag.rescue001"):
        save(force=True, columns=("run",), rows=((), ()))
    assert not (here / "train.dag").exists()
    assert save() == ["train.sub"]


def test_a_link_is_not_written_through(here: Path) -> None:
    (here / "train.sub").symlink_to(here / "elsewhere")
    with fails("file-exists", message="train.sub"):
        save()
    save(force=True)
    assert not (here / "elsewhere").exists()


@pytest.mark.parametrize(
    ("program", "code", "hint"),
    [
        (b"#!/bin/sh\r\necho\r\n", "program-line-endings", "sed -i"),
        (b"print(1)\n", "program-no-interpreter", "#!/bin/sh"),
        (b"", "program-no-interpreter", "#!/bin/sh"),
        (None, "cannot-read-file", "--executable"),
    ],
)
def test_programs_that_no_machine_starts(here: Path, program: bytes | None, code: str, hint: str) -> None:
    if program is None:
        (here / "train.sh").unlink()
    else:
        (here / "train.sh").write_bytes(program)
    with fails(code, message="train.sh", hint=hint):
        check_files(resolve(), QuietProgress())


def test_inputs_must_be_here(here: Path) -> None:
    job = resolve(inputs=("data.csv", "osdf:///site/x"))
    with fails("input-not-found", message="data.csv"):
        check_files(job, QuietProgress())
    (here / "data.csv").touch()
    check_files(job, QuietProgress())


def sif_image(data: bytes) -> Catalog:
    """A catalog whose .sif is a file of these bytes."""
    sha256 = f"sha256:{hashlib.sha256(data).hexdigest()}"
    subject = replace(SIF_SUBJECT, config=sha256)
    image = make_image(envelopes=())
    report = whole_report(subject=subject, nonce="b" * 32)
    sif = replace(image.sifs[0], sha256=sha256, subject=subject, envelopes=(signed(report, "2"),))
    return make_catalog(replace(image, sifs=(sif,)))


def test_a_sif_is_the_one_that_was_verified(here: Path) -> None:
    catalog = sif_image(b"the file")
    job = resolve(catalog)
    name = job.image.address
    with pytest.raises(UsageError) as caught:
        check_files(job, QuietProgress())
    assert caught.value.code == "sif-missing"
    assert name in caught.value.message
    assert name in caught.value.hint
    assert resolve(catalog, own=True).fetch == f"imagefactory image export {NAME} --format sif"
    (here / name).write_bytes(b"another")
    with fails("sif-mismatch", message=name):
        check_files(job, QuietProgress())
    (here / name).write_bytes(b"the file")
    check_files(job, QuietProgress())
    elsewhere = resolve(catalog, sif_folder="/nowhere/on/this/machine")
    check_files(elsewhere, QuietProgress())  # machines of the pool may have it


# --- the command -----------------------------------------------------------------------------------


@pytest.fixture
def call(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """The command as a researcher has it: no factory, a signed catalog, one key that he trusts."""
    now = datetime.now(UTC).replace(microsecond=0)
    hour = timedelta(hours=1)

    def envelope(capability: str, driver: str, cuda: str, nonce: str) -> tuple[str, bytes]:
        device = replace(MADE_UP, capability=capability)
        hardware: Hardware = replace(HOST, driver=driver, gpus=(device,))
        report = whole_report(
            hardware=hardware,
            device=device,
            cuda=cuda,
            nonce=nonce * 32,
            started=now - 2 * hour,
            ended=now - hour,
        )
        return digest(nonce), sign(report, LAB, now=now - hour, days=30).envelope

    image = make_image(
        envelopes=(envelope("8.0", "550.54.15", "12.4", "1"), envelope("7.0", "535.54.03", "12.2", "2")),
        sifs=(),
    )
    catalog = make_catalog(
        image, replace(image, target="pytorch-2.4-cu124", envelopes=(), predicted=image.predicted[:1]),
        created=now - hour, expires=now - hour + LIFE, suites=(SUITE,),
    )  # fmt: skip
    path = tmp_path / "catalog"
    path.write_bytes(sign_catalog(catalog, LAB))
    config = tmp_path / "config" / "imagefactory"
    config.mkdir(parents=True)
    (config / "imagefactory.toml").write_text(
        f'catalog = "{path}"\nsite = "chtc"\n\n[[trust]]\nname = "lab"\nkeyid = "{LAB.keyid}"\n'
        f'public = "{base64.b64encode(LAB.public).decode()}"\n'
        f"from = {now - timedelta(days=9):%Y-%m-%d}\nuntil = {now + timedelta(days=99):%Y-%m-%d}\n"
    )
    for name, value in (("XDG_CONFIG_HOME", tmp_path / "config"), ("IMAGEFACTORY_CACHE", tmp_path / "cache")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "nothing"))
    monkeypatch.setenv("IMAGEFACTORY_STORE", str(tmp_path / "store"))

    def run(*arguments: str, code: int = 0, command: str = "write") -> Said:
        said = say(capsys, "job", command, *arguments)
        assert said.code == code, said
        return said

    return run


def test_a_researcher_in_an_empty_folder(call: Call, here: Path) -> None:
    said = call(NAME, "--executable", "train.sh", "--arguments", "--lr 0.1 'a b'")
    assert said.out.splitlines()[0] == f"wrote {NAME}.sub"
    assert said.err.splitlines()[-1] == f"next: condor_submit {NAME}.sub"
    text = (here / f"{NAME}.sub").read_text()
    assert (
        "require_gpus = ((Capability == 7.0 && DriverVersion >= 12.2)"
        ' || (Capability == 8.0 && DriverVersion >= 12.4)) && regexp(" mig ", DeviceName, "i") =!= true\n'
    ) in text
    assert "+WantGPULab = true\n" in text
    assert "arguments = \"--lr 0.1 'a b'\"\n" in text
    assert sorted(path.name for path in here.iterdir()) == [f"{NAME}.sub", "train.sh"]
    assert call(NAME, "--executable", "train.sh", code=2).error_codes == ("file-exists",)
    call(NAME, "--force", "-o", "other.sub", "--site", "ospool")
    assert '+JobDurationCategory = "Medium"' in (here / "other.sub").read_text()


def test_it_ends_with_how_many_gpus_it_reaches(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an inventory; without a pool it claims nothing, and a pool that does not answer is told."""
    assert "reaches" not in call("pytorch-2.3", "-o", "plain.sub").out
    pool = here.parent / "inventory.json"
    gpu = {"name": "V100", "capability": "7.0", "memory": 1 << 34, "cuda": "12.2"}
    attributes = {"Arch": "X86_64", "HasDockerURL": True}
    pool.write_text(
        json.dumps(
            {
                "format": "imagefactory.inventory/1",
                "taken": "2026-11-22T06:00:00Z",
                "machines": [
                    {"name": "a", "attributes": attributes, "gpus": [gpu, {**gpu, "free": False}]},
                    {"name": "b", "attributes": attributes, "gpus": [{**gpu, "cuda": "12.0"}]},
                ],
            }
        )
    )
    said = call("pytorch-2.3", "--inventory", str(pool))
    assert said.out.splitlines()[0] == f"wrote {NAME}.sub"
    assert said.out.splitlines()[-1] == "  GPUs that match: 2 of 3, 1 free at 2026-11-22 06:00 UTC"
    assert "reaches" not in (here / f"{NAME}.sub").read_text()
    reach = call(NAME, "--force", "--inventory", str(pool), "--json").json()["pool"]
    assert reach == {"matching": 2, "free": 1, "uncertain": 0, "total": 3, "taken": "2026-11-22T06:00:00Z"}
    said = call(NAME, "--force", "--inventory", str(here / "none.json"))
    assert "note: the number of GPUs for this job is unknown: " in said.err
    assert "reaches" not in said.out
    assert call(NAME, "--force", "--json").json()["pool"] is None


def test_programs_of_the_image_and_one_that_gathers(call: Call, here: Path) -> None:
    asked = (
        NAME,
        "-o",
        "a.sub",
        "--runs",
        "2",
        "--executable",
        "/app/train.py",
        "--finalize",
        "/app/gather.py",
    )
    said = call(*asked, "--in-image", "--checkpoint", "last.pt", "--json").json()
    assert said["files"] == ["a.sub", "a-gather.sub", "a.dag"]
    for name, program in (("a.sub", "/app/train.py"), ("a-gather.sub", "/app/gather.py")):
        lines = f"executable = {program}\ntransfer_executable = false\n"
        assert lines in (here / name).read_text()
    assert "transfer_checkpoint_files = last.pt\n" in (here / "a.sub").read_text()
    assert "checkpoint" not in (here / "a-gather.sub").read_text()
    assert "JOB gather a-gather.sub\n" in (here / "a.dag").read_text()
    assert call(*asked, "--in-image", code=2).error_codes == ("file-exists",)
    said = call(*asked, code=2)
    assert said.error_codes == ("cannot-read-file",)
    assert "/app/train.py" in said.err
    said = call(*asked[:1], "-o", "a.sbatch", *asked[3:], "--in-image", "--site", "slurm")
    assert "sbatch --dependency=afterok:JOB a-gather.sbatch" in " ".join(said.out.split())
    assert said.err.splitlines()[-1] == "next: sbatch a.sbatch"
    assert "\n#SBATCH --array" not in (here / "a-gather.sbatch").read_text()


def test_a_sweep_from_the_command_line(call: Call, here: Path) -> None:
    (here / "values.csv").write_text("lr,seed\n0.1,1\n0.2,2\n")
    said = call(
        NAME, "--executable", "train.sh", "--params", "values.csv", "-o", "train.sub", "--json"
    ).json()
    assert said["files"] == ["train.sub", "train.dag"]
    assert said["format"] == "imagefactory.job/1"
    assert 'VARS run-2 run="2" value_lr="0.2" value_seed="2"' in (here / "train.dag").read_text()
    assert "arguments = \"--lr '$(value_lr)' --seed '$(value_seed)'\"" in (here / "train.sub").read_text()
    call(NAME, "--executable", "train.sh", "--runs", "2", "-o", "many.sub")
    assert "arguments = \"'$(run)'\"" in (here / "many.sub").read_text()


@pytest.mark.parametrize("directory", ["jobs", "jobs/new", "../elsewhere", "{here}/absolute"])
def test_files_in_another_directory_are_submitted_from_this_one(
    call: Call, here: Path, directory: str
) -> None:
    """Paths in the files are relative to the directory in which condor_submit and condor_submit_dag run."""
    directory = directory.format(here=here)
    call(NAME, "--executable", "train.sh", "-o", "one.sub")
    said = call(NAME, "--executable", "train.sh", "-o", f"{directory}/one.sub")
    assert said.err.splitlines()[-1] == f"next: condor_submit {directory}/one.sub"
    assert Path(directory, "one.sub").read_text() == (here / "one.sub").read_text()
    sweep = ("--executable", "train.sh", "--runs", "2", "--finalize", "train.sh")
    said = call(NAME, *sweep, "-o", f"{directory}/many.sub")
    assert said.err.splitlines()[-1] == f"next: condor_submit_dag {directory}/many.dag"
    jobs = [line.split() for line in Path(directory, "many.dag").read_text().splitlines()]
    files = {row[1]: row[2] for row in jobs if row[0] == "JOB"}
    assert files == {
        "gather": f"{directory}/many-gather.sub",
        **dict.fromkeys(("run-1", "run-2"), f"{directory}/many.sub"),
    }
    assert all(Path(file).is_file() for file in files.values())
    assert (here / "run-2").is_dir()
    Path(directory, "many.dag.rescue001").touch()
    assert call(NAME, *sweep, "-o", f"{directory}/many.sub", "--force", code=2).error_codes == (
        "sweep-rescue-exists",
    )


@pytest.mark.parametrize(("site", "suffix"), [("slurm", "sbatch"), ("kubernetes", "yaml")])
def test_files_of_other_schedulers_in_another_directory(
    call: Call, here: Path, site: str, suffix: str
) -> None:
    (here / "train.sh").chmod(0o755)
    words = (NAME, "--executable", "train.sh", "--runs", "2", "--site", site)
    names = [f"one.{suffix}", f"jobs/one.{suffix}"]
    first, second = (call(*words, "-o", name, "--json").json()["files"] for name in names)
    assert second == [f"jobs/{name}" for name in first]
    assert [(here / name).read_text() for name in first] == [(here / name).read_text() for name in second]


def test_no_verdict_is_exit_9_and_writes_nothing(call: Call, here: Path) -> None:
    said = call("pytorch-2.4-cu124", code=9)
    assert said.error_codes == ("not-verified",)
    assert "predicted to run on 7.0" in " ".join(said.err.split())
    assert "--allow-unverified" in said.err
    assert [path.name for path in here.iterdir()] == ["train.sh"]
    call("pytorch-2.4-cu124", "--allow-unverified", "--site", "ospool")
    assert "# WARNING" in (here / "pytorch-2.4-cu124.sub").read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "TARGET"),
        ((NAME, "--executable", "train.sh", "--runs", "2", "-o", "a b/x.sub"), "submit-value-invalid"),
        ((NAME, "-o", "train.sh/x.sub"), "cannot-create-file"),
        ((NAME, "--executable", "train.sh", "--runs", "2", "--params", "a.csv"), "--params"),
        ((NAME, "-o", "x"), "-o train.sub"),
        ((NAME, "--arguments", "'"), "--arguments"),
        ((NAME, "--arguments", "x"), "--executable train.sh"),
        ((NAME, "--executable", "train.sh", "--arguments", "$HOME"), "macro-unknown"),
        ((NAME, "--executable", "no.sh"), "cannot-read-file"),
        ((NAME, "--executable", "train.sh", "--input", "a b"), "submit-value-invalid"),
        ((NAME, "--memory", "lots"), "size-invalid"),
        ((NAME, "--disk", "1GB"), "disk-too-small"),
        ((NAME, "--time", "8d"), "job-too-long"),
        ((NAME, "--image-format", "osdf"), "image-type-not-offered"),
        ((NAME, "--params", "no.csv"), "cannot-read-file"),
        ((NAME, "--checkpoint", "last.pt"), "--executable train.sh"),
        ((NAME, "--executable", "train.sh", "--finalize", "train.sh"), "--runs N"),
        ((NAME, "--executable", "train.sh", "--in-image"), "--executable /app/train.py"),
        ((NAME, "--executable", "train.sh", "--runs", "2", "--finalize", "no.sh"), "cannot-read-file"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_written(
    call: Call, here: Path, arguments: tuple[str, ...], problem: str
) -> None:
    code = 3 if "osdf" in arguments else 2
    said = call(*arguments, code=code)
    assert any(problem in text for text in (*said.error_codes, said.err))
    assert [path.name for path in here.iterdir()] == ["train.sh"]


def test_a_catalog_that_somebody_changed(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "catalog"
    data = path.read_bytes()
    for place in (20, data.index(b"\x1f\x8b\x08", 9) + 99):  # the envelope, and its image
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        call(NAME, code=9)


# --- looking at a file -----------------------------------------------------------------------------


def pool_of(*gpus: tuple[str, str]) -> Inventory:
    """Machines with one GPU each, of a (capability, CUDA of the driver); all of them can run containers."""
    attributes: dict[str, str | int | float | bool] = {
        "Arch": "X86_64", "OpSys": "LINUX", "Cpus": 64, "Memory": 256_000, "Disk": 2_000_000_000,
        "TotalSlotCpus": 64, "TotalSlotMemory": 256_000, "TotalSlotDisk": 2_000_000_000, "HasContainer": True,
        "HasDockerURL": True, "HasSIF": True, "HasSandboxImage": True, "HasFileTransfer": True,
        "HasFileTransferPluginMethods": "https,osdf,file", "HasCHTCStaging": True,
    }  # fmt: skip
    machines = [
        PoolMachine(
            name=f"gpu{number}.example.org",
            attributes=attributes,
            start="",
            gpus=(
                PoolGpu(
                    id=f"GPU-0000000{number}",
                    uuid=f"GPU-0000000{number}-0000-0000-0000-000000000000",
                    name="a GPU of the tests",
                    capability=capability,
                    memory=40 << 30,
                    driver="",
                    cuda=cuda,
                    mig=False,
                    free=True,
                ),
            ),
        )
        for number, (capability, cuda) in enumerate(gpus)
    ]
    return Inventory(pool="tests", taken=NOW, machines=tuple(machines))


@pytest.fixture
def inventory(tmp_path: Path) -> str:
    path = tmp_path / "inventory.json"
    write_inventory(path, pool_of(("7.0", "12.2"), ("8.0", "12.4"), ("8.0", "12.1"), ("9.0", "12.4")))
    return str(path)


def test_what_is_written_stands_its_own_check(call: Call, inventory: str) -> None:
    for site in ("chtc", "ospool", "generic"):
        call(NAME, "--executable", "train.sh", "--site", site, "--force")
        found = call(
            f"{NAME}.sub", "--inventory", inventory, "--site", site, "--json", command="check"
        ).json()
        assert found["format"] == "imagefactory.job-check/1"
        assert found["findings"] == []
        assert found["failed"] is False
        (queue,) = found["queues"]  # type: ignore[misc]
        assert (queue["target"], queue["matching"], queue["total"]) == (NAME, 2, 4)  # type: ignore[has-type]


def test_a_file_that_is_wrong_is_exit_9(call: Call, here: Path, inventory: str) -> None:
    call(NAME, "--executable", "train.sh")
    text = (here / f"{NAME}.sub").read_text()
    wide = "\n".join(line for line in text.splitlines() if not line.startswith("require_gpus"))
    (here / "wide.sub").write_text(wide + "\n")
    said = call("wide.sub", "--inventory", inventory, code=9, command="check")
    assert "wide.sub:" in said.out
    assert "4 of 4 GPUs" in said.out
    assert said.err == ""


def test_without_a_pool_the_rest_is_checked(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call(NAME, "--executable", "train.sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = call(f"{NAME}.sub", command="check")
    assert "condor_status" in said.err
    assert "no errors" in said.out


@pytest.mark.parametrize(
    ("site", "capabilities", "matches"),
    [("chtc", ("7.0", "7.5"), True), ("generic", ("7.0",), True), ("chtc", ("7.0",), False)],
)
def test_gpus_that_are_older_than_those_of_the_site(
    site: str, capabilities: tuple[str, ...], matches: bool
) -> None:
    offered = offer(*map(verdict, capabilities))
    request = JobParameters(target=offered.image.target, site=find_site(site), executable="train.sh")
    if matches:
        job = resolve_job(offered, request, TrustRules(), NOW)
        assert [str(row.capability) for row in job.classes] == list(capabilities)
    else:
        with fails("no-matching-gpu"):
            resolve_job(offered, request, TrustRules(), NOW)
