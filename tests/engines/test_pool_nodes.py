"""docs/site-nodes.md on the tests' Slurm and HTCondor: what the page says to install is installed, with other
paths. The GPU is made up: in one image its driver computes as it should, in the other it does not.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.actions.promote import PromotionRequest, list_verdicts
from imagefactory.actions.verdicts import attach_signed, local_place
from imagefactory.progress import QuietProgress
from imagefactory.trust.verdict import sign
from imagefactory.verify.report import GpuIdentity
from imagefactory.verify.suite_files import suite_digest
from tests.engines.pool_ground import TREE, PoolGround, make_ground
from tests.engines.pool_sweeps import wait_for
from tests.made.verdicts import HOST, LAB, LAB_ROW, whole_report
from tests.services import libcuda, slurm
from tests.services.condor import CondorPool
from tests.services.gpu_host import make_host

NODE = "q1"
PAGE = (TREE / "docs/site-nodes.md").read_text()
WORKS, FAILS = "good", "wrong-numbers"


def block(language: str, mark: str) -> str:
    """Return the only block of the page that contains `mark`."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (text,) = (each for each in blocks if mark in each)
    return str(text)


@pytest.fixture(scope="module")
def ground(cluster: CondorPool) -> Iterator[PoolGround]:
    """A project with two verified images, and in /pool a kit for nodes and a .sif of each."""
    whole = make_ground(cluster, cluster.home / "nodes", (WORKS, FAILS))
    home = cluster.home / "nodes"
    config = home / ".config/imagefactory/imagefactory.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(LAB_ROW)
    for trick in (WORKS, FAILS):
        verify(whole, trick)
    cluster.own(home)
    for trick in (WORKS, FAILS):
        place = cluster.there(home / trick)
        whole.run("image", "export", whole.name(trick), "--format", "sif", "--output", f"{place}.sif")
        whole.run("verify", whole.name(trick), "--suite", "node", "--kit", place)
        shutil.copytree(home / trick, cluster.folder / "pool" / trick)
        shutil.copy(home / f"{trick}.sif", cluster.folder / "pool" / f"{trick}.sif")
    yield whole
    for trick in (WORKS, FAILS):
        shutil.rmtree(cluster.folder / "pool" / trick)
        (cluster.folder / "pool" / f"{trick}.sif").unlink()


def verify(ground: PoolGround, trick: str) -> None:
    """Attach a verdict of a key that the user trusts: the image of `trick` is verified on such a GPU."""
    factory, now = ground.factory, datetime.now(UTC).replace(microsecond=0)
    target = factory.select_single(ground.name(trick))
    request = PromotionRequest(target=target, place=local_place(factory, target.family), now=now)
    (image,) = list_verdicts(factory, request, QuietProgress())
    gpu = GpuIdentity(name=libcuda.NAME, capability="9.0", uuid=slurm.HOST.uuid, memory=slurm.HOST.memory)
    report = whole_report(
        subject=image.subject,
        suite=suite_digest(),
        nonce=trick.ljust(32, "0"),
        started=now - timedelta(minutes=2),
        ended=now - timedelta(minutes=1),
        device=gpu,
        hardware=replace(HOST, gpus=(gpu,), known=(gpu.uuid,)),
    )
    attach_signed(factory, sign(report, LAB, now=now, days=30), None, QuietProgress())


def node_state(pool: CondorPool) -> str:
    """Return what Slurm says of the node, as one line."""
    shown = pool.run(["scontrol", "--oneliner", "show", "node", NODE], code=None, **slurm.environ())
    return str(shown.stdout)


def test_slurm_drains_a_node_that_computes_wrongly_and_resumes_it_after_its_repair(
    ground: PoolGround,
) -> None:
    pool, folder = ground.pool, ground.pool.folder / "pool"
    make_host(folder / f"slurm/hosts/{NODE}", slurm.HOST)
    script = block("sh", "ImagefactoryNode")
    for old, new in (
        ("PATH=/usr/sbin", f"SLURM_CONF={slurm.PLACE}/slurm.conf PATH={slurm.BIN}:/usr/sbin"),
        ("export PATH", "export SLURM_CONF PATH"),
        ("/srv/gpu-node", "/pool/node"),
    ):
        assert old in script
        script = script.replace(old, new)
    hook = folder / f"slurm/node-{NODE}"
    job = ["srun", "--nodelist", NODE, "--gres=gpu:1", "--mem=100M", "--immediate=600", "true"]
    try:
        install(folder, WORKS)
        hook.write_text(script)
        hook.chmod(0o755)
        pool.run(job, folder=pool.home, **slurm.environ())
        assert "DRAIN" not in node_state(pool)
        install(folder, FAILS)
        pool.run(job, folder=pool.home, code=None, **slurm.environ())
        wait_for("a drained node", lambda: "DRAIN" in node_state(pool))
        assert 'Reason=ImagefactoryNode = "failed: ' in node_state(pool)
        assert "vector-add: wrong-numbers" in node_state(pool)
        install(folder, WORKS)
        wait_for("a resumed node", lambda: "DRAIN" not in node_state(pool))
    finally:
        hook.unlink(missing_ok=True)
        shutil.rmtree(folder / f"slurm/hosts/{NODE}")
        resume = ["scontrol", "update", f"NodeName={NODE}", "State=RESUME"]
        pool.run(resume, user="root", folder=pool.homes, code=None, **slurm.environ())


def install(folder: Path, trick: str) -> None:
    """Put the kit and the .sif of `trick` where the scripts of the page look for them."""
    for name in ("", ".sif"):
        new = folder / f"new{name}"
        new.symlink_to(f"{trick}{name}")
        new.rename(folder / f"node{name}")


def test_htcondor_starts_no_job_where_the_node_computes_wrongly(ground: PoolGround) -> None:
    pool, folder = ground.pool, ground.pool.folder / "pool"
    install(folder, FAILS)
    make_host(folder / "slurm/hosts/condor", slurm.HOST)
    settings = block("text", "STARTD_CRON")
    for old, new in (
        ("EXECUTABLE = /usr/bin/python3", f"EXECUTABLE = {slurm.BIN}/python3"),
        ("PERIOD = 1h", 'PERIOD = 2s\nSTARTD_CRON_GPUNODE_ENV = "SLURMD_NODENAME=condor"'),
        ("/srv/gpu-node", "/pool/node"),
    ):
        assert old in settings
        settings = settings.replace(old, new)
    (folder / "node.conf").write_text(f"include : /etc/condor/condor_config\n{settings}")

    def answer() -> tuple[str, str]:
        """Return the first word of the machine's attribute, and whether a job may start there."""
        names = ["-compact", "-af", "ImagefactoryNode", "eval(START)"]
        shown = pool.run(["condor_status", name, *names], code=None).stdout.split()
        return shown[0].partition(":")[0] if shown else "", shown[-1] if shown else ""

    with pool.machine("node", CONDOR_CONFIG="/pool/node.conf") as name:
        wait_for("a failed machine", lambda: answer() == ("failed", "false"))
        install(folder, WORKS)
        wait_for("a machine that passes", lambda: answer() == ("passed", "true"))
