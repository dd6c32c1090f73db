"""A pool of the tests' own: HTCondor with GPUs that its own discovery simulates, in a root of its own.

    access point, central manager and four machines are processes of one root (`install_condor`) on one port
    of 127.0.0.1; the first process of that root is condor_master, so with it all of them end

Each machine has one GPU of another capability, so a job's capability says where it runs:

    v100        7.0   as HTCondor simulates it, driver for CUDA 12.2
    full        7.5   the same, but its disk is full: nothing can be brought there
    a100        8.0   the same as v100, driver for CUDA 12.4
    standin     9.0   told to be the device of libcuda.c, which an image must bring itself

No job meets a GPU on any of them. `run` runs a command as an ordinary user of the access point, where the
folder of users' homes is `homes` on this machine. REGISTRY is this machine's 127.0.0.1 there, for who starts
a registry; `trust` makes all machines of the pool believe in a CA, as a center's staff would.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from imagefactory.errors import DISTRIBUTION
from tests.made.documents import check_printed
from tests.services import uv
from tests.services.apptainer import fuse_for_everyone
from tests.services.libcuda import MEMORY, NAME, UUID
from tests.services.processes import ENGINES, Job, Program, ServiceError, need_root, running

HERE = Path(__file__).parent
TREE = HERE.parents[1]
ROOT = ENGINES / "condor/root"
USER, OTHER = "researcher", "facilitator"
IDS = {USER: 20001, OTHER: 20002}
"""As `install_condor` gives them."""
REGISTRY = "registry.pool.test"
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
PATH = "/opt/imagefactory/light/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
MACHINES = ("v100", "full", "a100", "standin")

# What condor_gpu_discovery prints for its own simulation, with what it adds where there is a driver; $1 is
# the machine. `told` takes the simulated model, the first digits of a uuid, and the driver's newest CUDA.
DISCOVER = f"""\
#!/bin/sh -e
told() {{
    version=$(echo "$3" | awk -F. '{{ print $1 * 1000 + $2 * 10 }}')
    /usr/libexec/condor/condor_gpu_discovery -properties -extra "-simulate:$1,1" |
        sed "s/a0223334/$2/g; s/^Common=\\[/& DriverVersion=$3; MaxSupportedVersion=$version;/"
}}
case $1 in
    v100) told 2 a7223334 12.2 ;;
    full) told 3 a6223334 12.4 ;;
    a100) told 4 a8223334 12.4 ;;
    standin) cat <<TOLD ;;
DetectedGPUs="{UUID[:12]}"
Common=[ Capability=9.0; DeviceName="{NAME}"; DriverVersion=12.4; MaxSupportedVersion=12040; \
NvidiaDriver="550.54.15"; ECCEnabled=true; GlobalMemoryMb={MEMORY >> 20}; ]
{UUID[:12].replace("-", "_")}=[ id="{UUID[:12]}"; DevicePciBusId="0000:40:00.0"; \
DeviceUuid="{UUID.removeprefix("GPU-")}"; ]
TOLD
esac
"""

CONFIG = """\
RELEASE_DIR = /usr
LOCAL_DIR = /pool
LOCAL_CONFIG_DIR =
RUN = /pool/run
LOG = /pool/log
LOCK = /pool/log
SPOOL = /pool/spool
EXECUTE = /var/lib/condor/execute
BIN = /usr/bin
SBIN = /usr/sbin
LIB = /usr/lib/condor
LIBEXEC = /usr/libexec/condor
SHARE = /usr/share/condor
SINGULARITY = /usr/bin/singularity

use ROLE: CentralManager
use ROLE: Submit
use ROLE: Execute
use SECURITY: recommended_v9_0
use FEATURE: GPUs
use FEATURE: PartitionableSlot
MACHINE_RESOURCE_INVENTORY_GPUs = /pool/gpus $(MACHINE_OF_THE_TESTS)

CONDOR_HOST = 127.0.0.1
COLLECTOR_HOST = 127.0.0.1:{port}
COLLECTOR_NAME = pool of the tests
SHARED_PORT_PORT = {port}
NETWORK_INTERFACE = 127.0.0.1
BIND_ALL_INTERFACES = False
NETWORK_HOSTNAME = access.pool.test
DEFAULT_DOMAIN_NAME = pool.test
UID_DOMAIN = pool.test
FILESYSTEM_DOMAIN = pool.test
TRUST_DOMAIN = pool.test
SEC_DEFAULT_AUTHENTICATION_METHODS = FS, IDTOKENS
SEC_PASSWORD_DIRECTORY = /pool/passwords.d
SEC_TOKEN_SYSTEM_DIRECTORY = /pool/tokens.d
ALLOW_DAEMON = condor@pool.test root@pool.test
ALLOW_NEGOTIATOR = condor@pool.test root@pool.test
ALLOW_ADMINISTRATOR = root@pool.test condor@pool.test
ALLOW_READ = *
ALLOW_WRITE = *

# Of this machine nothing is changed: neither the kernel's settings nor its control groups.
ENABLE_KERNEL_TUNING = False
BASE_CGROUP =
JAVA =
DOCKER =
RUNBENCHMARKS = 0
STARTD_CRON_JOBLIST =
STARTD_RECOMPUTE_DISK_FREE = False
NUM_CPUS = 64
MEMORY = 64000
DISK = 200000000

# Every minute of a real pool is seconds here.
SCHEDD_INTERVAL = 1
SCHEDD_MIN_INTERVAL = 1
NEGOTIATOR_INTERVAL = 2
NEGOTIATOR_MIN_INTERVAL = 1
NEGOTIATOR_CYCLE_DELAY = 1
NEGOTIATOR_UPDATE_INTERVAL = 5
UPDATE_INTERVAL = 2
SHADOW_QUEUE_UPDATE_INTERVAL = 2
PERIODIC_EXPR_INTERVAL = 1
MAX_PERIODIC_EXPR_INTERVAL = 1
PERIODIC_EXPR_TIMESLICE = 1
JOB_START_DELAY = 0
SCHEDD_UNIVERSE_IDLE_TIME = 1
DAGMAN_USER_LOG_SCAN_INTERVAL = 1
DAGMAN_QUEUE_UPDATE_INTERVAL = 1
DAGMAN_PENDING_REPORT_INTERVAL = 5
MASTER_BACKOFF_CONSTANT = 1
SHUTDOWN_FAST_TIMEOUT = 5
# A job that was removed while its result came back would wait for its shadow as long as its lease is.
MachineMaxVacateTime = 5

DAEMON_LIST = MASTER COLLECTOR NEGOTIATOR SCHEDD {daemons}
DC_DAEMON_LIST = + {daemons}
{startds}
"""
STARTD = """\
{daemon} = $(STARTD)
{daemon}_ARGS = -local-name {name}
{daemon}_ENVIRONMENT = "_CONDOR_NETWORK_HOSTNAME={name}.pool.test _CONDOR_MACHINE_OF_THE_TESTS={name} \
_CONDOR_EXECUTE=/var/lib/condor/{execute}"
STARTD.{name}.STARTD_LOG = $(LOG)/StartLog.{name}
STARTD.{name}.STARTD_ADDRESS_FILE = $(LOG)/.startd_{name}_address
"""
FULL_SIZE = "64k"
REST = 300.0
"""Seconds that jobs which are removed may take to leave their machines, loaded as they may be."""

LIGHT, BUILDS = "light", "builds"
INSTALLS = {LIGHT: "condor,sign", BUILDS: "build,apptainer,condor,sign"}
PROGRAM = """\
#!{python}
import sys
from imagefactory.cli import main
sys.exit(main())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CondorPool:
    """`homes` shows here what `/home` is there. `version` is HTCondor's. `pid` is its first process."""

    folder: Path
    homes: Path
    port: int
    pid: int

    @property
    def home(self) -> Path:
        """The ordinary user's, on this machine."""
        return self.homes / USER

    @property
    def logs(self) -> Path:
        return self.folder / "pool/log"

    def here(self, there: str | PurePosixPath) -> Path:
        """Where this machine has a path below /home of the access point."""
        return self.homes / PurePosixPath(there).relative_to("/home")

    def there(self, here: Path) -> str:
        return f"/home/{here.relative_to(self.homes)}"

    def start(
        self, argv: list[str], *, user: str = USER, folder: Path | None = None, **environ: str
    ) -> subprocess.Popen[str]:
        """Starts a command on the access point, in `folder` (else at home), with a login's environment."""
        home = f"/home/{user}"
        plain = {"HOME": home, "USER": user, "LOGNAME": user, "PATH": PATH, "LANG": "C.UTF-8", **environ}
        where = self.there(folder) if folder else home
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--pid", "--root", f"--wdns={where}"]
        identity = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all"]
        clean = ["env", "-i", *(f"{name}={value}" for name, value in plain.items())]
        return subprocess.Popen(
            [*enter, *identity, "--", *clean, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        argv: list[str],
        *,
        user: str = USER,
        folder: Path | None = None,
        code: int | None = 0,
        **environ: str,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as `start` does. AssertionError where it does not end with `code`."""
        process = self.start(argv, user=user, folder=folder, **environ)
        out, err = process.communicate(timeout=600)
        assert code is None or process.returncode == code, f"{argv}: {process.returncode}\n{out}\n{err}"
        check_printed(out)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def imagefactory(
        self, *arguments: str, folder: Path | None = None, code: int | None = 0, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """The light install's command, as the ordinary user."""
        return self.run(["imagefactory", *arguments], folder=folder, code=code, **environ)

    def factory(
        self, *arguments: str, folder: Path | None = None, code: int | None = 0, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """The command with the extra that builds, as who keeps a factory has it."""
        command = f"/opt/imagefactory/{BUILDS}/bin/imagefactory"
        return self.run([command, *arguments], folder=folder, code=code, **environ)

    def trust(self, authority: Path) -> None:
        """Adds a CA to what all machines of the pool and their access point believe in."""
        with (self.folder / "bundle.crt").open("ab") as file:
            file.write(authority.read_bytes())

    @contextmanager
    def black_hole(self) -> Iterator[str]:
        """One more machine, which says it has the GPU of `standin`. Its disk is full: it fails every job."""
        with self.machine("hole", "full") as name:
            yield name

    @contextmanager
    def machine(self, machine: str, disk: str = "execute", **environ: str) -> Iterator[str]:
        """One more machine with the GPU of `standin`, whose daemon has `environ` too."""
        name = f"{machine}.pool.test"
        with (self.folder / "hosts").open("a") as file:
            file.write(f"127.0.0.1 {name}\n")
        place, ids = f"/var/lib/condor/{disk}/{machine}", f"/pool/run/{machine}.pid"

        def as_root(*argv: str) -> None:
            self.run([*argv], user="root", folder=self.homes)

        as_root("install", "-d", "-o", "condor", place)
        settings = {
            **environ,
            "_CONDOR_NETWORK_HOSTNAME": name,
            "_CONDOR_MACHINE_OF_THE_TESTS": "standin",
            "_CONDOR_EXECUTE": place,
            "_CONDOR_STARTD_LOG": f"/pool/log/StartLog.{machine}",
            "_CONDOR_STARTD_ADDRESS_FILE": f"/pool/log/.startd_{machine}_address",
            "_CONDOR_SEC_USE_FAMILY_SESSION": "False",  # that of the master's own children
        }
        argv = ["condor_startd", "-f", "-pidfile", ids]
        startd = self.start(argv, user="root", folder=self.homes, **settings)
        try:
            asked = ["condor_status", name, "-af", "HasSIF"]
            until = time.monotonic() + REST
            while self.run(asked, code=None).stdout.strip() != "true":
                if startd.poll() is not None or time.monotonic() > until:
                    raise ServiceError(
                        f"{name} did not come up: {(self.logs / f'StartLog.{machine}').read_text()}"
                    )
                time.sleep(0.2)
            yield name
        finally:
            as_root("sh", "-c", f"kill -QUIT $(cat {ids})")
            startd.communicate(timeout=REST)

    def come_to_rest(self) -> None:
        """Removes every job and waits until every GPU is free again.

        A job is out of the queue some time before its machine says that it is free: whoever looks at the
        machines next, or wants one, must not meet the claims of a test that is over.
        """
        until = time.monotonic() + REST
        while left := self._jobs() + self._taken():
            if time.monotonic() > until:
                raise ServiceError(f"jobs of tests that are over did not leave the pool: {', '.join(left)}")
            # Each time: a DAGMan may submit one more before it hears of its end. Code 1: there is no job.
            self.run(["condor_rm", "-all"], user="root", folder=self.homes, code=None)
            time.sleep(0.2)

    def _jobs(self) -> list[str]:
        asked = ["condor_q", "-allusers", "-af:j", "JobStatus"]
        told = self.run(asked, user="root", folder=self.homes, code=None)
        lines = told.stdout.splitlines() if told.returncode == 0 else [f"unknown: {told.stderr.strip()}"]
        return [f"job {line}" for line in lines]

    def _taken(self) -> list[str]:
        """Machines that do not offer their GPU."""
        asked = ["condor_status", "-constraint", "DynamicSlot =!= true", "-af", "Machine", "GPUs", "State"]
        told = self.run(asked, code=None).stdout
        offers = {line.split()[0] for line in told.splitlines() if line.split()[1:] == ["1", "Unclaimed"]}
        return [f"{name}.pool.test" for name in MACHINES if f"{name}.pool.test" not in offers]

    def is_whole(self) -> bool:
        """Whether machines offer their GPUs and run images, somebody matches jobs, and the queue answers."""
        images = self.run(["condor_status", "-af", "HasSIF"], code=None).stdout.split()
        matching = self.run(["condor_status", "-negotiator", "-af", "Name"], code=None).stdout.split()
        return images.count("true") == len(MACHINES) and bool(matching) and not self._taken() + self._jobs()

    def own(self, *folders: Path, user: str = USER) -> None:
        """Gives what lies there to a user of the access point."""
        ids = f"{IDS[user]}:{IDS[user]}"
        subprocess.run(["chown", "--recursive", "--no-dereference", ids, *map(str, folders)], check=True)


def free_port() -> int:
    """Below what the kernel gives to programs that ask for any port, so none of them takes it meanwhile."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServiceError("no free port between 20000 and 30000")


def format_config(port: int) -> str:
    daemons = {name: f"STARTD_{name.upper().replace('-', '_')}" for name in MACHINES}
    startds = "".join(
        STARTD.format(
            daemon=daemon,
            name=name,
            execute="full" if name == "full" else "execute",
        )
        for name, daemon in daemons.items()
    )
    return CONFIG.format(port=port, daemons=" ".join(daemons.values()), startds=startds)


@contextmanager
def condor_pool(folder: Path) -> Iterator[CondorPool]:
    """A pool with all its state in `folder`, and the light install of this tree on its access point.

    Raises ServiceError when it is missing, when this is not root, or when it does not start.
    """
    need_root("HTCondor's pool")
    if not (ROOT / "usr/sbin/condor_master").exists():
        raise ServiceError(f"there is no HTCondor in {ROOT}: run ./setup.sh --tests as root")
    port = free_port()
    mounts = _lay_out(folder, port)
    install(folder / "opt", INSTALLS)
    pid_file = folder / "pid"
    order = {
        "root": str(ROOT),
        "pid_file": str(pid_file),
        "host": "access.pool.test",
        "mounts": [(str(source), place) for source, place in mounts.items()],
        "argv": ["/usr/sbin/condor_master", "-f"],
        "environ": {"PATH": PATH, "CONDOR_CONFIG": "/etc/condor/condor_config"},
    }
    uid, gid = _condor_ids()
    small = f"size={FULL_SIZE},mode=755,uid={uid},gid={gid}"
    full = ("mount", "-t", "tmpfs", "-o", small, "full", str(folder / "full"))
    program = Program(argv=(sys.executable, str(HERE / "condor_enter.py"), json.dumps(order)))

    def pool() -> CondorPool:
        return CondorPool(folder=folder, homes=folder / "home", port=port, pid=int(pid_file.read_text()))

    def ready() -> bool:
        return pid_file.exists() and pool().is_whole()

    removed = tuple(folder / name for name in ("full", "execute", "opt", "tmp", "home"))
    job = Job(folder=folder, programs=(program,), ready=ready, before=(full,), remove=removed)
    with running(job):
        yield pool()


def _lay_out(folder: Path, port: int) -> dict[Path, str]:
    """Makes the folders and files of a pool; what is mounted where."""
    condor = _condor_ids()
    pool = folder / "pool"
    for name in ("log", "spool", "run", "passwords.d", "tokens.d"):
        (pool / name).mkdir(parents=True, exist_ok=True)
    for name in ("execute", "full", "tmp", "var-tmp", "run", "opt", "home"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name).chmod(0o1777 if "tmp" in name else 0o755)
    for place in (pool / "log", pool / "spool", pool / "run", folder / "execute"):
        os.chown(place, *condor)
    for name, number in IDS.items():
        (folder / "home" / name).mkdir(exist_ok=True)
        os.chown(folder / "home" / name, number, number)
    password = pool / "passwords.d/POOL"
    password.write_bytes(os.urandom(48))
    password.chmod(0o600)
    (pool / "gpus").write_text(DISCOVER)
    (pool / "gpus").chmod(0o755)
    files = {
        "condor_config": format_config(port),
        "hosts": f"127.0.0.1 localhost access.pool.test access {REGISTRY}\n"
        + "".join(f"127.0.0.1 {name}.pool.test\n" for name in MACHINES),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    shutil.copyfile(ROOT / BUNDLE.lstrip("/"), folder / "bundle.crt")
    mounts = {
        pool: "/pool",
        folder / "run": "/run",
        folder / "tmp": "/tmp",
        folder / "var-tmp": "/var/tmp",
        folder / "home": "/home",
        folder / "execute": "/var/lib/condor/execute",
        folder / "full": "/var/lib/condor/full",
        folder / "opt": "/opt/imagefactory",
        folder / "condor_config": "/etc/condor/condor_config",
        folder / "hosts": "/etc/hosts",
        folder / "bundle.crt": BUNDLE,
    }
    if fuse := fuse_for_everyone(folder):
        mounts[fuse] = "/dev/fuse"
    return mounts


def _condor_ids() -> tuple[int, int]:
    for line in (ROOT / "etc/passwd").read_text().splitlines():
        name, _, uid, gid, *_ = line.split(":")
        if name == "condor":
            return int(uid), int(gid)
    raise ServiceError(f"{ROOT} has no user condor")


def install(folder: Path, installs: Mapping[str, str]) -> None:
    """This tree for the access point's own Python, with some of its extras each, in `folder`/NAME.

    Versions and hashes are those of requirements/dev.txt.
    """
    (python,) = (ROOT / "usr/lib").glob("python3.[0-9]*")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "wheel")]
    subprocess.run(build, cwd=TREE, check=True, capture_output=True)
    (wheel,) = (folder / "wheel").glob("*.whl")
    for name, extras in installs.items():
        place = folder / name
        (place / "bin").mkdir(parents=True)
        target = place / "lib" / python.name / "site-packages"
        where = ["--python", sys.executable, "--python-version", python.name.removeprefix("python")]
        versions = ["--constraint", TREE / "requirements/dev.txt"]
        uv.install(*where, "--target", target, *versions, f"{DISTRIBUTION}[{extras}] @ {wheel.as_uri()}")
        (place / "bin/python3").symlink_to("/usr/bin/python3")
        (place / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
        (place / "bin/imagefactory").write_text(
            PROGRAM.format(python=f"/opt/imagefactory/{name}/bin/python3")
        )
        (place / "bin/imagefactory").chmod(0o755)
