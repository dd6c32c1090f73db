"""Submit files written by the light install in an empty folder, read and matched by a real HTCondor pool. The
verdicts behind them are made up and signed by a throwaway key, which the test's own user is told to believe.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.extras.lint.batch_reader import split_directive
from imagefactory.jobs.slurm import write_slurm
from imagefactory.oci.manifests import digest_of
from imagefactory.oci.sif import sif_name
from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sites import find_site
from imagefactory.trust.catalog import LIFE, Catalog, CatalogImage, CatalogSif, sign_catalog
from imagefactory.trust.invitation import Invitation, format_invitation
from imagefactory.trust.keys import PublicKey
from imagefactory.trust.policy import TrustGrant
from imagefactory.trust.verdict import sign
from imagefactory.verify.report import GpuIdentity, VerifiedImage
from imagefactory.verify.suite_files import suite_digest
from tests.made.catalog import make_image
from tests.made.offers import job_spec
from tests.made.verdicts import HOST, LAB, digest, whole_report
from tests.services import slurm
from tests.services.condor import MACHINES, CondorPool

NOW = datetime.now(UTC).replace(microsecond=0)
PROGRAM = """\
#!/bin/sh
echo "in the image of $(cat /which) with $1 on $CUDA_VISIBLE_DEVICES"
"""
# Capability -> the CUDA that the driver took where it was verified.
PROVEN: Mapping[str, Mapping[str, str]] = {
    "tiny-1.1-cu121": {"8.0": "12.2"},
    "tiny-1.2-cu121": {"7.0": "12.0", "9.0": "12.4"},
    "tiny-1.3-cu121": {"7.0": "12.2", "7.5": "12.4"},
    "tiny-1.4-cu121": {"7.0": "12.4"},
    "tiny-1.5-cu121": {},
}
MATCHED = {
    "tiny-1.1-cu121": {"a100.pool.test"},
    "tiny-1.2-cu121": {"v100.pool.test", "standin.pool.test"},
    "tiny-1.3-cu121": {"v100.pool.test", "full.pool.test"},
    "tiny-1.4-cu121": set(),
}


def make_root(root: Path) -> None:
    """A small image's files: this machine's shell and what it loads."""
    for name in ("bin", "tmp", "var/tmp", "proc", "sys", "dev", "etc"):
        (root / name).mkdir(parents=True)
    for program in ("/bin/sh", "/bin/cat"):
        told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in (program, *re.findall(r"(/\S+) \(0x", told)):
            (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(path).resolve(), root / path.lstrip("/"))


def make_sif(root: Path, target: str, sif: Path) -> Path:
    """An image that says which it is."""
    (root / "which").write_text(f"{target}\n")
    subprocess.run(["apptainer", "--silent", "build", str(sif), str(root)], check=True, capture_output=True)
    return sif


def cataloged(target: str, sif: Path, proven: Mapping[str, str]) -> CatalogImage:
    """An image whose .sif is verified on these capabilities, says a key of the tests."""
    sha256 = digest_of(sif.read_bytes())
    subject = VerifiedImage(target=target, index=digest("6"), manifest=digest("6"), config=sha256)

    def envelope(number: int, capability: str, cuda: str) -> tuple[str, bytes]:
        gpu = GpuIdentity(
            name=f"made up {capability}",
            capability=capability,
            uuid=f"GPU-0000000{number}-89ab-cdef-0123-456789abcdef",
            memory=1 << 34,
        )
        report = whole_report(
            subject=subject,
            suite=suite_digest(),
            nonce=f"{number:032x}",
            device=gpu,
            cuda=cuda,
            hardware=replace(HOST, gpus=(gpu,), known=(gpu.uuid,)),
            started=NOW - timedelta(minutes=9),
            ended=NOW - timedelta(minutes=8),
        )
        return digest(f"{number}"), sign(report, LAB, now=NOW - timedelta(minutes=7), days=30).envelope

    envelopes = tuple(envelope(1 + n, *row) for n, row in enumerate(sorted(proven.items())))
    offered = CatalogSif(
        sha256=sha256, size=sif.stat().st_size, reference="", subject=subject, envelopes=envelopes
    )
    image = VerifiedImage(target=target, index=digest("a"), manifest=digest("b"), config=digest("c"))
    return make_image(
        target=target, family="tiny", subject=image, reference="", sifs=(offered,), envelopes=()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """A researcher's: a folder for each thing tried, with a program in it."""

    pool: CondorPool

    def folder(self, name: str) -> Path:
        found = self.pool.home / "desk" / name
        found.mkdir(parents=True)
        (found / "train.sh").write_text(PROGRAM)
        (found / "train.sh").chmod(0o755)
        self.pool.own(self.pool.home / "desk")
        return found

    def submit(self, folder: Path, *arguments: str, code: int = 0, command: str = "write") -> str:
        done = self.pool.imagefactory("job", command, *arguments, folder=folder, code=code)
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def desk(pool: CondorPool, apptainer: str, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("sif")
    make_root(folder / "root")
    images = pool.home / "images"
    images.mkdir()
    sifs = {target: make_sif(folder / "root", target, folder / f"{target}.sif") for target in PROVEN}
    rows = tuple(cataloged(target, sifs[target], proven) for target, proven in PROVEN.items())
    for row in rows:
        shutil.copy(sifs[row.target], images / sif_name(row.target, row.sifs[0].sha256))
    made = NOW - timedelta(minutes=5)
    catalog = Catalog(
        created=made, expires=made + LIFE, images=rows, suites=(suite_digest(),), keyid=LAB.keyid
    )
    (pool.home / "catalog").write_bytes(sign_catalog(catalog, LAB))
    today = NOW.date()
    grant = TrustGrant(
        key=PublicKey(name="lab", raw=LAB.public),
        since=today - timedelta(days=1),
        until=today + timedelta(days=30),
    )
    invitation = Invitation(
        catalog="/home/researcher/catalog",
        site="generic",
        sif_folder="/home/researcher/images",
        keys=(grant,),
    )
    (pool.home / "invitation.toml").write_text(format_invitation(invitation))
    pool.own(images, pool.home / "catalog", pool.home / "invitation.toml")
    told = pool.imagefactory("site", "join", "invitation.toml", "--yes", folder=pool.home)
    assert f"its catalog of {made:%Y-%m-%d} has {len(PROVEN)} images" in told.stdout
    return Desk(pool=pool)


def test_what_is_found_is_verified_on_this_pool(desk: Desk) -> None:
    """In an empty folder, by the light install, with the pool's own word on its GPUs."""
    folder = desk.folder("finds")
    desk.pool.come_to_rest()
    told = json.loads(desk.pool.imagefactory("search", "tiny", "--json", folder=folder).stdout)
    assert (told["source"], told["pool"]["total"], told["pool"]["free_when"]) == (
        "catalog",
        len(MACHINES),
        "now",
    )
    counts = {
        one["target"]: sum(gpu["total"] for gpu in one["gpus"] if gpu["basis"] == "verified")
        for one in told["images"]
    }
    assert counts == {target: len(MATCHED.get(target, ())) for target in PROVEN}
    assert "zebra" in desk.pool.imagefactory("search", "zebra", folder=folder, code=3).stderr


@pytest.mark.parametrize("target", MATCHED)
def test_it_matches_the_gpus_that_are_proven_and_no_others(desk: Desk, target: str) -> None:
    folder = desk.folder(target)
    desk.submit(folder, target, "--executable", "train.sh")
    told = desk.pool.run(["condor_submit", "-dry-run", "-", f"{target}.sub"], folder=folder).stdout
    job = dict(re.findall(r"^(\w+)=(.*)$", told, re.MULTILINE))
    wanted = re.sub(r"\bGPUs(Min|Max)\w+", lambda name: job[name[0]], job["RequireGPUs"])
    asked = ["condor_status", "-constraint", "DynamicSlot =!= true", "-af", "Machine"]
    asked.append(f"countMatches({wanted}, AvailableGPUs)")
    desk.pool.come_to_rest()  # a GPU that a job has is offered to no other
    counts = dict(line.split() for line in desk.pool.run(asked).stdout.splitlines())
    assert {machine for machine, count in counts.items() if count != "0"} == MATCHED[target], wanted


def test_a_job_runs_where_the_image_is_proven(desk: Desk) -> None:
    folder = desk.folder("runs")
    desk.submit(folder, "tiny-1.1-cu121", "--executable", "train.sh", "--arguments", "'two words'")
    pool = desk.pool
    job = pool.run(["condor_submit", "-terse", "tiny-1.1-cu121.sub"], folder=folder).stdout.split()[0]
    log = next(folder.glob("*.log"))
    pool.run(["condor_wait", "-wait", "600", log.name], folder=folder)
    # Not from the history: a job comes there a moment after its log says that it ended.
    assert re.findall(r"SlotName: \S+@(\S+)", log.read_text()) == ["a100.pool.test"], (job, log.read_text())
    said = "".join(path.read_text() for path in folder.glob("*.out"))
    assert said == "in the image of tiny-1.1-cu121 with two words on GPU-a8223334\n", log.read_text()


def test_a_sweep_of_runs(desk: Desk) -> None:
    """Of values whose names are commands of a job too."""
    folder = desk.folder("sweep")
    (folder / "values.csv").write_text("rank,input\n1,a\n2,b\n3,c\n")
    desk.pool.own(folder)
    sweep = ("--executable", "train.sh", "--params", "values.csv", "--arguments", "$(rank)$(input)")
    desk.submit(folder, "tiny-1.2-cu121", *sweep, "-o", "jobs/tiny.sub")
    pool = desk.pool
    pool.run(["condor_submit_dag", "jobs/tiny.dag"], folder=folder)
    pool.run(["condor_wait", "-wait", "600", "jobs/tiny.dag.dagman.log"], folder=folder)
    said = sorted(path.read_text() for path in folder.rglob("*.out") if "run-" in str(path))
    assert len(said) == 3, [str(path) for path in folder.rglob("*")]
    assert all(re.search(r"with (?:1a|2b|3c) on GPU-(a7223334|f0f1f2f3)$", text.strip()) for text in said), (
        said
    )


def test_without_a_verdict_nothing_is_written(desk: Desk) -> None:
    folder = desk.folder("none")
    told = desk.submit(folder, "tiny-1.5-cu121", "--executable", "train.sh", code=9)
    assert "predicted" in told
    assert [path.name for path in folder.iterdir()] == ["train.sh"]


def test_what_is_written_stands_its_own_check(desk: Desk) -> None:
    folder = desk.folder("check")
    wrote = desk.submit(folder, "tiny-1.3-cu121", "--executable", "train.sh")
    assert re.search(r"^  GPUs that match: 2 of 4, [0-2] free now\b", wrote, re.MULTILINE), wrote
    told = desk.submit(folder, "tiny-1.3-cu121.sub", command="check")
    assert "each matches 2 of 4 GPUs of this cluster" in told
    text = (folder / "tiny-1.3-cu121.sub").read_text()
    (folder / "old.sub").write_text(re.sub(r"(?m)^(gpus_|require_gpus).*\n", "", text))
    desk.pool.own(folder)
    wrong = desk.submit(folder, "old.sub", code=9, command="check")
    assert re.search(r"^old\.sub:[0-9]+: wrong: .*not verified on", wrong, re.MULTILINE), wrong


# --- Slurm ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm_desk(desk: Desk, cluster: CondorPool) -> Desk:
    assert cluster is desk.pool
    return desk


def sbatch(desk: Desk, folder: Path, target: str, *arguments: str, code: int = 0) -> str:
    """Writes a script for this cluster; what was said."""
    asked = ("job", "write", target, "--site", "slurm", "--executable", "train.sh", *arguments)
    done = desk.pool.imagefactory(*asked, folder=folder, code=code, **slurm.environ())
    return done.stdout + done.stderr


def ran(desk: Desk, folder: Path, *command: str) -> str:
    """What the jobs of a script wrote."""
    desk.pool.run(["sbatch", *command], folder=folder, **slurm.environ())
    slurm.wait_for_jobs(desk.pool, folder)
    return "".join(path.read_text() for path in sorted(folder.glob("*.out")))


def test_slurm_runs_a_job_on_the_type_that_is_proven(slurm_desk: Desk) -> None:
    folder = slurm_desk.folder("slurm-runs")
    told = sbatch(slurm_desk, folder, "tiny-1.1-cu121", "--arguments", "'two words'", "--time", "90m")
    assert "GPUs that match: 2 of 5, 2 free now" in told
    script = (folder / "tiny-1.1-cu121.sbatch").read_text()
    assert "\n#SBATCH --gres=gpu:a100:1\n" in script
    assert "\n#SBATCH --time=0-01:30:00\n" in script
    said = ran(slurm_desk, folder, "tiny-1.1-cu121.sbatch")
    assert "in the image of tiny-1.1-cu121 with two words on 0\n" in said, said


def test_slurm_runs_a_sweep_where_types_differ(slurm_desk: Desk) -> None:
    """7.0 and 9.0: no feature is theirs alone but their own two."""
    folder = slurm_desk.folder("slurm-sweep")
    (folder / "values.csv").write_text("rank,input\n1,a\n2,b c\n3,c\n")
    slurm_desk.pool.own(folder)
    sbatch(slurm_desk, folder, "tiny-1.2-cu121", "--params", "values.csv", "--arguments", "$(rank)-$(input)")
    script = (folder / "tiny-1.2-cu121.sbatch").read_text()
    assert "\n#SBATCH --gres=gpu:1\n#SBATCH --constraint=h100|v100\n#SBATCH --array=1-3\n" in script
    said = re.findall(r"with (.*) on 0\n", ran(slurm_desk, folder, "tiny-1.2-cu121.sbatch"))
    assert sorted(said) == ["1-a", "2-b c", "3-c"]
    assert {path.name for path in folder.glob("run-*")} == {"run-1", "run-2", "run-3"}


def test_slurm_job_stops_on_a_gpu_that_is_not_proven(slurm_desk: Desk) -> None:
    folder = slurm_desk.folder("slurm-stops")
    sbatch(slurm_desk, folder, "tiny-1.1-cu121")
    said = ran(slurm_desk, folder, "--gres=gpu:v100:1", "tiny-1.1-cu121.sbatch")
    assert "this GPU has compute capability 7.0, but the image is verified on 8.0\n" in said
    assert "in the image" not in said


def test_slurm_gives_podman_the_gpus_of_the_job(slurm_desk: Desk) -> None:
    """The nodes have no podman, so a program prints how it was started."""
    folder = slurm_desk.folder("slurm-podman")
    there = slurm_desk.pool.there(folder)
    site = replace(find_site("slurm"), container="podman", kinds=(ImageKind.DOCKER,))
    (text,) = write_slurm(
        replace(job_spec("8.0", site="slurm", kind=ImageKind.DOCKER, gpus=2), site=site)
    ).values()
    (folder / "cdi").mkdir()
    (folder / "cdi/nvidia.yaml").write_text("kind: nvidia.com/gpu\ndevices: GPU-0 GPU-1\n")
    (folder / "podman").write_text('#!/bin/sh\n[ "$1" = info ] || printf "%s " "$@" "$SLURM_JOB_GPUS"\n')
    (folder / "podman").chmod(0o755)
    (folder / "job.sbatch").write_text(
        text.replace("/etc/cdi", f"{there}/cdi").replace("=gpu:2", "=gpu:a100:2")
    )
    slurm_desk.pool.own(folder)
    environ = slurm.environ()
    environ["PATH"] = f"{there}:{environ['PATH']}"
    slurm_desk.pool.run(["sbatch", "job.sbatch"], folder=folder, **environ)
    slurm.wait_for_jobs(slurm_desk.pool, folder)
    (said,) = (path.read_text() for path in folder.glob("*.out"))
    assert (
        "--device nvidia.com/gpu=GPU-0 --device nvidia.com/gpu=GPU-1 --env CUDA_VISIBLE_DEVICES=GPU-0,GPU-1"
        in said
    )
    assert said.split()[1:2] == ["--rm"]
    assert f"--volume {there}:{there} --workdir {there} --entrypoint ./train.sh" in said
    assert said.endswith(" 0,1 ")
    assert "--userns=keep-id" in said


def test_slurm_tells_what_the_cluster_lacks(slurm_desk: Desk) -> None:
    folder = slurm_desk.folder("slurm-lacks")
    told = sbatch(slurm_desk, folder, "tiny-1.3-cu121", "--gpus", "3", code=9)
    assert "this cluster has a100 (8.0), h100 (9.0), old (?), v100 (7.0)" in told
    assert [path.name for path in folder.iterdir()] == ["train.sh"]


def check_script(desk: Desk, folder: Path, name: str, code: int = 0) -> str:
    told: str = desk.pool.imagefactory(
        "job", "check", name, folder=folder, code=code, **slurm.environ()
    ).stdout
    return told


def test_slurm_script_stands_its_own_check(slurm_desk: Desk) -> None:
    folder = slurm_desk.folder("slurm-check")
    sbatch(slurm_desk, folder, "tiny-1.2-cu121", "--runs", "3")
    told = check_script(slurm_desk, folder, "tiny-1.2-cu121.sbatch")
    assert "the script: 3 jobs of tiny-1.2-cu121, each matches 2 of 5 GPUs of this cluster" in told
    assert told.endswith("tiny-1.2-cu121.sbatch: no errors\n"), told
    script = (folder / "tiny-1.2-cu121.sbatch").read_text()
    (folder / "old.sbatch").write_text(script.replace("--constraint=h100|v100", "--constraint=new"))
    slurm_desk.pool.own(folder)
    told = check_script(slurm_desk, folder, "old.sbatch", code=0)
    assert "each matches 1 of 5 GPUs of this cluster" in told
    told = " ".join(told.split())
    assert "the other 4 do not match: the script stops there (2); its node has not the features" in told
    (folder / "old.sbatch").write_text(script.replace("--constraint=h100|v100", "--constraint=none"))
    assert "[no-match]" in check_script(slurm_desk, folder, "old.sbatch", code=9)


DIRECTIVES = (
    "#SBATCH --job-name='a b' --comment=\"c  d\" -N 1 # --mem=1G",
    "#SBATCH\t--comment=a#b",
    "#SBATCH --wckey=a\\ b --mem=1G",
    "#SBATCH -n2 -c 3",
)


def test_directives_are_read_as_sbatch_reads_them(slurm_desk: Desk) -> None:
    folder = slurm_desk.folder("slurm-reads")
    lines = ["#!/bin/sh", *DIRECTIVES, " #SBATCH -N2", "# SBATCH -N2", "##SBATCH -N2", "true", "#SBATCH -N2"]
    (folder / "a.sbatch").write_text("\n".join([*lines, ""]))
    slurm_desk.pool.own(folder)
    asked = ["sbatch", "--test-only", "-vvv", "a.sbatch"]
    said = slurm_desk.pool.run(asked, folder=folder, code=None, **slurm.environ()).stderr
    words = [word for number, line in enumerate(DIRECTIVES) for word, _ in split_directive(line, number)]
    assert re.findall(r'Found in script, argument "(.*)"', said) == words, said
