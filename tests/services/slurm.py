"""A Slurm cluster in the root of the tests' HTCondor pool, whose nodes have GPUs that are none.

    a1  gpu:a100:2  features a100, new      v1  gpu:v100:1  feature v100
    h1  gpu:h100:1  features h100, new      q1  gpu:old:1
    h2  gpu:h100:1  features h100, new, takes no jobs until `awake` wakes it

Each GPU is a null device. In `bin` on the nodes, which jobs find first, `nvidia-smi` says what its node's GPU
would be, and `python3` runs a kit with what `hosts` has of its node in place of the machine's own /dev, /proc
and NVML. Only h1 has some there: it tells of the device that libcuda.c plays. A script `node-NODE` is the
prolog and the health check of that node. All ends with the pool.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services import libcuda
from tests.services.condor import PATH, CondorPool, free_port
from tests.services.gpu_host import Told, make_host
from tests.services.processes import LIMIT, ServiceError

PLACE = "/pool/slurm"
BIN = f"{PLACE}/bin"
ASLEEP = "h2"
NODES = {
    "a1": ("a100", 2, "a100,new"),
    "h1": ("h100", 1, "h100,new"),
    "h2": ("h100", 1, "h100,new"),
    "v1": ("v100", 1, "v100"),
    "q1": ("old", 1, ""),
}
CONFIG = """\
ClusterName=tests
SlurmctldHost=access.pool.test(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPidFile={place}/ctld.pid
SlurmdPidFile={place}/%n.pid
SlurmctldLogFile={place}/log/slurmctld
SlurmdLogFile={place}/log/%n
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1,bf_continue,batch_sched_delay=0
GresTypes=gpu
Prolog={place}/hook
HealthCheckProgram={place}/hook
HealthCheckInterval=3
HealthCheckNodeState=IDLE
{nodes}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=2-00:00:00 DefaultTime=01:00:00
"""
HOOK = f"""\
#!/bin/sh
[ ! -x "{PLACE}/node-$SLURMD_NODENAME" ] || exec "{PLACE}/node-$SLURMD_NODENAME"
"""
HOST = Told(uuid=libcuda.UUID, name=libcuda.NAME, capability="9.0", memory=libcuda.MEMORY, driver="550.54.15")
SMI = """\
#!/bin/sh
case $SLURMD_NODENAME in a1) is=8.0 ;; h1) is=9.0 ;; v1) is=7.0 ;; *) is=7.5 ;; esac
case $1 in
"--id=$CUDA_VISIBLE_DEVICES") echo "$is, 16384, 550.54.15" ;;
-L) for at in 0 1 2 3 4 5 6 7; do echo "GPU $at: GPU of the tests (UUID: GPU-$at)"; done ;;
--query-gpu=uuid,compute_cap) for at in 0 1 2 3 4 5 6 7; do echo "GPU-$at, $is"; done ;;
*) echo "| Driver: 550.54.15  CUDA Version: 12.4 |" ;;
esac
"""
PYTHON = f"""\
#!/bin/sh
case "$*" in */run.py*) [ ! -d "{PLACE}/hosts/$SLURMD_NODENAME" ] || set -- {PLACE}/hosted.py "$@" ;; esac
exec /usr/bin/python3 "$@"
"""
HOSTED = f"""\
import importlib, importlib.machinery, importlib.util, os, sys
from pathlib import Path
(at,) = (place for place, word in enumerate(sys.argv) if word.endswith("/run.py"))
here, host = Path(sys.argv[at]).parent, Path("{PLACE}/hosts", os.environ["SLURMD_NODENAME"])
spec = importlib.machinery.ModuleSpec("kit_of_the_tests", None, is_package=True)
spec.submodule_search_locations = [str(here / "kit")]
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
program = importlib.import_module(f"{{spec.name}}.program")
places = program.hardware.Places(
    dev=str(host / "dev"), proc=str(host / "proc"), nvml=str(host / "libnvidia-ml.so.1")
)
sys.exit(program.main(sys.argv[at + 1 :], os.environ, here, places))
"""
DAEMONS = """\
munged --force --socket={place}/munge.sock --key-file={place}/key --pid-file={place}/munge.pid \\
    --log-file={place}/log/munged --seed-file={place}/seed
slurmctld
for node in {nodes}; do slurmd -N $node; done
"""


@contextmanager
def slurm_cluster(pool: CondorPool) -> Iterator[None]:
    """Raises ServiceError when it does not start."""
    folder = pool.folder / "pool/slurm"
    for name in ("bin", "log", "state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    ports = [free_port() for _ in (*NODES, "slurmctld")]
    nodes, gres, number = [], [], 0
    for (node, (kind, count, features)), port in zip(NODES.items(), ports[1:], strict=True):
        last = number + count - 1
        for device in range(number, last + 1):
            os.mknod(folder / f"gpu{device}", 0o020666, os.makedev(1, 3))
        file = f"{PLACE}/gpu[{number}-{last}]" if count > 1 else f"{PLACE}/gpu{number}"
        gres.append(f"NodeName={node} Name=gpu Type={kind} File={file}")
        about = f"CPUs=4 RealMemory=64000 Gres=gpu:{kind}:{count}"
        about += (f" Feature={features}" if features else "") + (" State=DRAIN" if node == ASLEEP else "")
        nodes.append(f"NodeName={node} NodeHostname=access.pool.test NodeAddr=127.0.0.1 Port={port} {about}")
        number += count
    (folder / "slurm.conf").write_text(CONFIG.format(port=ports[0], place=PLACE, nodes="\n".join(nodes)))
    (folder / "gres.conf").write_text("\n".join([*gres, ""]))
    (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    (folder / "hosted.py").write_text(HOSTED)
    make_host(folder / "hosts/h1", HOST)
    for name, text in (("bin/nvidia-smi", SMI), ("bin/python3", PYTHON), ("hook", HOOK)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "key").write_bytes(os.urandom(64))
    (folder / "key").chmod(0o600)
    started = pool.start(
        ["/bin/sh", "-ec", DAEMONS.format(place=PLACE, nodes=" ".join(NODES))],
        user="root",
        folder=pool.homes,
        **environ(),
    )
    out, err = started.communicate(timeout=LIMIT)
    until = time.monotonic() + LIMIT
    while (told := _idle(pool)) != len(NODES) - 1:
        if time.monotonic() > until or started.returncode:
            logs = "\n".join(path.read_text()[-1500:] for path in sorted((folder / "log").iterdir()))
            raise ServiceError(f"Slurm's nodes did not come up ({told}): {out}{err}\n{logs}")
        time.sleep(0.2)
    yield
    pool.run(["scancel", "--user=researcher"], user="root", folder=pool.homes, code=None, **environ())
    for pid in folder.glob("*.pid"):
        pool.run(["kill", pid.read_text().strip()], user="root", folder=pool.homes, code=None)


def environ() -> dict[str, str]:
    """What a login of the cluster has: where its configuration lies, and what its nodes' programs are."""
    return {"SLURM_CONF": f"{PLACE}/slurm.conf", "PATH": f"{BIN}:{PATH}"}


@contextmanager
def awake(pool: CondorPool, node: str = ASLEEP) -> Iterator[None]:
    """A node that takes jobs for a while, and is known to take them: its slurmd may have started last."""
    update = ["scontrol", "update", f"NodeName={node}"]
    try:
        pool.run([*update, "State=RESUME"], user="root", folder=pool.homes, **environ())
        asked, until = ["sinfo", "--noheader", f"--nodes={node}", "--format=%T"], time.monotonic() + LIMIT
        while (told := pool.run(asked, **environ()).stdout.strip()) not in ("idle", "mixed", "allocated"):
            if time.monotonic() > until:
                raise ServiceError(f"{node} did not wake up: {told}")
            time.sleep(0.2)
        yield
    finally:
        drain = [*update, "State=DRAIN", "Reason=asleep"]
        pool.run(drain, user="root", folder=pool.homes, code=None, **environ())


def _idle(pool: CondorPool) -> int:
    asked = ["sinfo", "--noheader", "--Node", "--format=%T"]
    told: subprocess.CompletedProcess[str] = pool.run(asked, code=None, **environ())
    return told.stdout.split().count("idle")


def wait_for_jobs(pool: CondorPool, folder: Path) -> None:
    """Waits until the researcher has no job in the queue: files of tests leave it so."""
    until = time.monotonic() + LIMIT
    while pool.run(["squeue", "--noheader", "--user=researcher"], folder=folder, **environ()).stdout.strip():
        if time.monotonic() > until:
            raise ServiceError("the jobs did not end")
        time.sleep(0.2)
