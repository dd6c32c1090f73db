"""A facilitator's year in minutes, by the commands of docs/site-*.md, on a real HTCondor and Slurm.

Ada keeps the site, Ben is a second facilitator, Cleo and Dora submit jobs. Each season begins where the one
before it ended: a test asks for its season, so any of them can be run alone. On both pools the GPU of
capability 9.0 is made up, and this project alone trusts who signs here.
"""

from __future__ import annotations

import json
import shlex
import shutil
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from imagefactory.oci.manifests import MANIFEST_TYPE, digest_of
from imagefactory.settings.choices import HTCONDOR, SLURM
from imagefactory.settings.load import NONCE_STORE_KEY
from tests.engines.pool_ground import PoolGround, make_ground
from tests.engines.pool_sweeps import BAD, SweepRun, node, somebody_else, submit, wait_for
from tests.services import slurm
from tests.services.authority import make_authority
from tests.services.clock import build_clock, later
from tests.services.condor import REGISTRY, CondorPool, free_port
from tests.services.registry import RegistryOptions, RegistryServer, registry_server

ON_SLURM = {"good": "verified", "driver-too-old": "driver-too-old"}
ON_CONDOR = {"wrong-numbers": "wrong-numbers", "no-kernel": "no-kernel"}
BENS = "load-failed"
NIGHTLY = ("good", "wrong-numbers")
NO_REGISTRY, NO_SPACE = 8, 7
UNKNOWN = 11


@dataclass(kw_only=True)
class Center:
    """The registry, which can be lost for a while, and `clock`, the library of another time."""

    pool: CondorPool
    folder: Path
    options: RegistryOptions
    clock: str = ""
    starts: ExitStack = field(default_factory=ExitStack)

    def start(self) -> RegistryServer:
        return self.starts.enter_context(registry_server(self.folder, self.options))

    def catalog(self) -> str:
        """The digest of the one that researchers read."""
        context = ssl.create_default_context(
            cafile=self.options.certificate and self.options.certificate.authority
        )
        address = f"https://127.0.0.1:{self.options.port}/v2/gpu/catalog/manifests/current"
        request = urllib.request.Request(address, headers={"Accept": MANIFEST_TYPE})
        with urllib.request.urlopen(request, context=context) as answer:
            return digest_of(answer.read())

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.starts.close()
        try:
            yield
        finally:
            self.start()


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody at the access point with a home of their own."""

    center: Center
    ground: PoolGround
    light: bool = False

    def run(self, *words: str, code: int | None = 0, days: float = 0) -> tuple[str, str]:
        """What a command prints and says, by default today."""
        environ = dict(self.ground.environ) | (later(self.center.clock, days) if days else {})
        command = self.center.pool.imagefactory if self.light else self.center.pool.factory
        folder = self.ground.pool.here(environ["HOME"]) if self.light else self.ground.root
        done = command(*words, folder=folder, code=code, **environ)
        return done.stdout, done.stderr

    def ask(self, *words: str, code: int | None = 0, days: float = 0) -> Any:
        return json.loads(self.run(*words, "--json", code=code, days=days)[0])


@pytest.fixture(scope="module")
def center(cluster: CondorPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Center]:
    folder = tmp_path_factory.mktemp("year")
    known = make_authority(folder / "known", "CA of the year")
    cluster.trust(known.path)
    home = cluster.home / "year"
    home.mkdir()
    shutil.copy(known.path, home / "ca.pem")
    clock = cluster.there(build_clock(home))
    storage = folder / "storage"
    options = RegistryOptions(certificate=known.sign(REGISTRY), port=free_port(), storage=storage)
    made = Center(pool=cluster, folder=folder / "registry", options=options, clock=clock)
    made.start()
    with made.starts:
        yield made
    shutil.rmtree(storage)


@pytest.fixture(scope="module")
def ada(center: Center) -> Iterator[Person]:
    """Her store is empty and its disk small; the images are in the registry only, from another machine."""
    pool, home = center.pool, center.pool.home / "year"
    tricks = (*ON_SLURM, *ON_CONDOR, BENS)
    built = make_ground(pool, home / "build", tricks)
    registry = f"{REGISTRY}:{center.options.port}/gpu"
    text = f'registry = "{registry}"\ncertificates = "{pool.there(home / "ca.pem")}"\n'
    (built.root / "imagefactory.toml").write_text(text)
    shared = {**built.environ, **slurm.environ(), NONCE_STORE_KEY: "k" * 64}
    built = replace(built, environ=shared)
    built.run("config", "--trust")
    built.run("push", *(built.name(trick) for trick in tricks))
    store = pool.there(home / "store")
    mount = (
        f"mkdir {store} && mount -t tmpfs -o size=256m tmpfs {store} && chown --reference={store}/.. {store}"
    )
    pool.own(home)
    pool.run(["sh", "-ec", mount], user="root", folder=pool.homes)
    made = Person(center=center, ground=replace(built, environ={**shared, "IMAGEFACTORY_STORE": store}))
    made.run("key", "create", "ada")
    made.run("key", "trust", "ada")
    yield made
    pool.run(["scancel", "--me"], folder=home, **slurm.environ())
    slurm.wait_for_jobs(pool, home)
    pool.run(["umount", "--lazy", store], user="root", folder=pool.homes)


@pytest.fixture(scope="module")
def ben(center: Center, ada: Person) -> Person:
    """A second facilitator: in the same project, which trusts both keys, with a store of his own."""
    home = center.pool.home / "year/ben"
    place = center.pool.there(home)
    environ = {**ada.ground.environ, "HOME": place, "IMAGEFACTORY_STORE": f"{place}/store"}
    made = Person(center=center, ground=replace(ada.ground, environ=environ))
    home.mkdir()
    center.pool.own(home)
    made.run("key", "create", "ben")
    ada.run("key", "trust", f"{place}/.config/imagefactory/keys/ben.pub")
    made.run("config", "--trust")
    return made


def reader(center: Center, ada: Person, name: str) -> Person:
    """A researcher with the light install and nothing else."""
    home = center.pool.home / "year" / name
    home.mkdir()
    (home / "train.sh").write_text("#!/bin/sh\n")
    center.pool.own(home)
    environ = {
        "HOME": center.pool.there(home),
        "IMAGEFACTORY_CERTIFICATES": center.pool.there(center.pool.home / "year/ca.pem"),
    }
    return Person(center=center, ground=replace(ada.ground, environ=environ), light=True)


# --- the first sweep ------------------------------------------------------------------------------

Sweep = dict[str, Any]
"""What `sweep status --json` has of one."""


@dataclass(frozen=True, kw_only=True)
class Swept:
    """The first sweeps by pool, and their results; on HTCondor the sweep of the night after.

    `bens` is the second facilitator's, on Slurm. `holes` are the machines that fail every job.
    """

    first: dict[str, Sweep]
    second: Sweep
    bens: SweepRun
    collected: dict[str, dict[str, Any]]
    holes: dict[str, str]


@pytest.fixture(scope="module")
def swept(ada: Person, ben: Person) -> Swept:
    """On each pool a machine fails every job at once, while another job has the good one."""
    pool, ground = ada.center.pool, ada.ground
    here = ("--capability", "9.0")
    hold = ("sbatch", "--parsable", "--nodelist=h1", "--gres=gpu:h100:1", "--mem=100M", "--wrap=sleep 1800")
    other = pool.run([*hold], folder=pool.home, **slurm.environ()).stdout.strip()
    with slurm.awake(pool), somebody_else(pool, "9.0") as leaves, pool.black_hole() as hole:
        first = {
            SLURM: submit(ground, tuple(ON_SLURM), *here, to=SLURM),
            HTCONDOR: submit(ground, tuple(ON_CONDOR), *here),
        }
        for name, sweep in first.items():
            wait_for(f"both to fail on {name}", lambda one=sweep: faults_of(one) == [2])
        leaves()
        pool.run(["scancel", other], folder=pool.home, **slurm.environ())
        bens = submit(ben.ground, (BENS,), *here, to=SLURM)
        told = {HTCONDOR: first[HTCONDOR].end()}
        second = submit(ground, tuple(ON_CONDOR), *here, "--ignore-rule", "uncollected")
        told[SLURM] = first[SLURM].end()
        bens.end()
        after = second.end()
    collected: dict[str, Any] = {}
    for sweep in first.values():
        collected |= sweep.collect(code=BAD)
    holes = {SLURM: "h2", HTCONDOR: hole}
    return Swept(first=told, second=after, bens=bens, collected=collected, holes=holes)


def faults_of(sweep: SweepRun) -> list[int]:
    return [len(one["faults"]) for one in sweep.status()["machines"]]


def outcomes(sweep: Sweep) -> dict[str, str]:
    return {row["node"]: row["outcome"] for row in sweep["nodes"]}


def machines(sweep: Sweep) -> set[tuple[str, ...]]:
    return {tuple(one["machine"] for one in row["attempts"]) for row in sweep["nodes"]}


def expected(ada: Person, words: dict[str, str]) -> dict[str, str]:
    return {node(ada.ground, trick): word for trick, word in words.items()}


@pytest.mark.parametrize(
    ("on", "words", "good"), [(SLURM, ON_SLURM, "h1"), (HTCONDOR, ON_CONDOR, "standin.pool.test")]
)
def test_a_black_hole_decides_no_cell(
    ada: Person, swept: Swept, on: str, words: dict[str, str], good: str
) -> None:
    sweep, hole = swept.first[on], swept.holes[on]
    assert outcomes(sweep) == expected(ada, words)
    assert machines(sweep) == {(hole, good)}
    (told,) = sweep["machines"]
    assert (told["machine"], told["excluded"]) == (hole, True)
    assert {one["node"] for one in told["faults"]} == set(expected(ada, words))


def test_a_black_hole_gets_no_job_the_night_after(ada: Person, swept: Swept) -> None:
    assert outcomes(swept.second) == expected(ada, ON_CONDOR)
    assert machines(swept.second) == {("standin.pool.test",)}
    assert [one["machine"] for one in swept.second["machines"] if one["excluded"]] == [swept.holes[HTCONDOR]]


def test_a_first_sweep_makes_the_store_that_collects_it(ada: Person, swept: Swept) -> None:
    rows = swept.collected
    assert {name: row["outcome"] for name, row in rows.items()} == expected(ada, ON_SLURM | ON_CONDOR)
    unsigned = node(ada.ground, "driver-too-old")  # no GPU was met
    assert {name for name, row in rows.items() if not row["keyid"]} == {unsigned}
    place = f"{registry(ada.center)}/tiny"
    assert {name for name, row in rows.items() if place not in row["attached"]} == {unsigned}


# --- published ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cleo(center: Center, ada: Person, swept: Swept) -> Person:
    """She joins when the first catalog is there, and writes a job file."""
    name = ada.ground.name("good")
    ada.run("image", "promote", name)
    ada.run("site", "publish")
    ada.run("site", "invite", "--push")
    made = reader(center, ada, "cleo")
    made.run("site", "join", registry(center), "--yes")
    made.run("job", "write", name, "--executable", "train.sh", "-o", "good.sub")
    return made


def registry(center: Center) -> str:
    return f"{REGISTRY}:{center.options.port}/gpu"


def known(person: Person, **options: Any) -> dict[str, str]:
    """What `search` says of the good image, by capability."""
    name = person.ground.name("good")
    (image,) = person.ask("search", name, **options)["images"]
    return {row["capability"]: row["basis"] for row in image["gpus"]}


def test_researchers_see_what_was_verified(cleo: Person) -> None:
    assert known(cleo)["9.0"] == "verified"
    assert cleo.ask("job", "check", "good.sub")["failed"] is False


# --- a new key ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rotated(ada: Person, cleo: Person) -> dict[str, Any]:
    told = ada.ask("key", "rotate")
    assert isinstance(told, dict)
    return told


@pytest.fixture(scope="module")
def dora(center: Center, ada: Person, cleo: Person, rotated: dict[str, Any]) -> Person:
    """She joins after the rotation, and has Cleo's job file."""
    made = reader(center, ada, "dora")
    made.run("site", "join", registry(center), "--yes")
    home = center.pool.home / "year"
    shutil.copy(home / "cleo/good.sub", home / "dora")
    center.pool.own(home / "dora")
    return made


def test_who_joins_after_a_rotation_takes_the_old_verdicts(
    center: Center, ada: Person, cleo: Person, dora: Person
) -> None:
    assert known(dora)["9.0"] == "verified"
    cleo.run("search", code=BAD)
    cleo.run(
        "site", "join", registry(center), "--yes", code=BAD
    )  # the key has changed: her center must say so
    told = ada.ask(
        "sweep", "start", ada.ground.name("good"), "--scheduler", SLURM, "--dry-run", "--capability", "9.0"
    )
    assert [row["rule"] for row in told["skipped"]] == ["verified"]


# --- what expires, what is taken back, a registry that is away ------------------------------------


def test_what_expires_is_verified_again_and_readers_are_warned(ada: Person, dora: Person) -> None:
    again = (
        "sweep",
        "start",
        ada.ground.name("good"),
        "--scheduler",
        SLURM,
        "--dry-run",
        "--capability",
        "9.0",
    )
    told = ada.ask(*again, days=95)
    assert [row["capability"] for row in told["queued"]] == ["9.0"]
    assert "this catalog expires on" in dora.run("search", days=25)[1]
    dora.run("search", days=31, code=BAD)


def test_a_night_without_the_registry(center: Center, ada: Person, dora: Person) -> None:
    """It cannot sign, and the catalog expires soon. Researchers use the one that they have."""
    mail, name = ada.ground.root / "mail", ada.ground.name("good")
    with center.outage():
        assert dora.ask("search", name)["catalogs"][0]["source"] == "cached"
        dora.run("job", "write", name, "--executable", "train.sh", "-o", "kept.sub")
        told = ada.ask("site", "nightly", name, "--mail", "cat >mail", code=NO_REGISTRY, days=25)
    assert [row["what"] for row in told["broken"]] == ["plan", "catalog", "catalog expiry"]
    assert told["directory"] in mail.read_text()
    center.pool.run(["rm", "-r", told["directory"]], folder=ada.ground.root)  # it is today again


@pytest.fixture(scope="module")
def revoked(ada: Person, dora: Person) -> dict[str, Any]:
    why = ("--reason", "wrong sums on long rows")
    told = ada.ask("verdict", "revoke", ada.ground.name("good"), "--capability", "9.0", *why)
    assert isinstance(told, dict)
    return told


def test_a_revocation_reaches_everybody(dora: Person, rotated: Any, revoked: dict[str, Any]) -> None:
    assert len(revoked["revoked"]) == 1
    name = dora.ground.name("good")
    (image,) = dora.ask("search", name, code=UNKNOWN)["images"]  # the GPUs without a verdict
    (row,) = image["revoked"]
    assert (row["capability"], row["keyid"], row["reason"]) == (
        "9.0", rotated["keyid"], "wrong sums on long rows"
    )  # fmt: skip
    assert image["gpus"] == []
    dora.run("job", "write", name, "--executable", "train.sh", "-o", "again.sub", code=BAD)
    checked = dora.ask("job", "check", "good.sub", code=BAD)
    assert [one["rule"] for one in checked["findings"] if one["severity"] == "wrong"] == ["revoked"]


# --- a second facilitator -------------------------------------------------------------------------


def test_two_facilitators_see_what_the_other_signed(ada: Person, ben: Person, swept: Swept) -> None:
    plan = ("sweep", "start", "--scheduler", SLURM, "--dry-run", "--capability", "9.0")
    ben.run("config", "--trust")  # Ada's new key has changed the project
    told = ben.ask(*plan, ada.ground.name("wrong-numbers"))
    assert [row["rule"] for row in told["skipped"]] == ["wrong-numbers"]
    (row,) = swept.bens.collect(code=BAD).values()
    assert row["outcome"] == "load-failed"
    assert row["keyid"] not in ("", *(one["keyid"] for one in swept.collected.values()))
    told = ada.ask(*plan, ada.ground.name(BENS))
    assert [row["rule"] for row in told["skipped"]] == ["load-failed"]
    ben.run("site", "publish", code=BAD)  # the one that readers trust is Ada's


# --- nights ---------------------------------------------------------------------------------------


def night(person: Person, *words: str) -> tuple[str, ...]:
    return ("site", "nightly", *(person.ground.name(trick) for trick in NIGHTLY), *words)


def rows(person: Person, told: dict[str, Any], kind: str) -> dict[tuple[str, str], str]:
    """What a night says of the images, by trick and GPU: a row of several names of each."""
    tricks = {person.ground.name(trick): trick for trick in NIGHTLY}
    return {
        (tricks[name], row["on"]): row["reason"]
        for row in told[kind]
        for name in row["what"].split(", ")
        if name in tricks
    }


@pytest.fixture(scope="module")
def caught_up(ada: Person, dora: Person, revoked: Any) -> Iterator[dict[str, Any]]:
    """After the outage one on Slurm, killed while it waits for a GPU that another has; then a whole one, on
    HTCondor. The black hole of Slurm is awake.
    """
    pool, ground, signed = ada.center.pool, ada.ground, ada.center.catalog()
    hold = ["sbatch", "--parsable", "--gres=gpu:v100:1", "--mem=100M", "--time=300", "--wrap=sleep 18000"]
    with somebody_else(pool), slurm.awake(pool):
        other = pool.run(hold, folder=pool.home, **slurm.environ()).stdout.strip()
        command = shlex.join(("imagefactory", *night(ada, "--scheduler", SLURM)))
        path = {"PATH": f"{slurm.BIN}:/opt/imagefactory/builds/bin:{ground.environ['PATH']}"}
        script = ["sh", "-c", f"echo $$ >pid && exec {command}"]
        killed = pool.start(script, folder=ground.root, **{**ground.environ, **path})

        def left() -> set[str]:
            *_, last = ada.ask("sweep", "list")["sweeps"]
            open_ones = {one["node"].rpartition("-")[2] for one in last["nodes"] if one["outcome"] is None}
            return open_ones if last["scheduler"] == SLURM and len(last["nodes"]) > 2 else {"none"}

        wait_for("all but the busy GPU's", lambda: left() == {"sm70"})
        pool.run(["sh", "-c", "kill -9 $(cat pid)"], folder=ground.root)
        killed.communicate(timeout=60)
        told = ada.ask(*night(ada, "--scheduler", HTCONDOR, "--wait-limit", "1s", "--html", "site"), code=BAD)
        assert ada.center.catalog() != signed
        yield told
        pool.run(["scancel", other], folder=pool.home, **slurm.environ())


def test_the_next_night_catches_up(ada: Person, dora: Person, caught_up: dict[str, Any]) -> None:
    """It collects what came of the killed one."""
    assert set(rows(ada, caught_up, "verified")) == {("good", "9.0")}
    broken = rows(ada, caught_up, "broken")
    assert broken["wrong-numbers", "9.0"].startswith("wrong-numbers: ")
    # One GPU may be broken twice: on Slurm, and on HTCondor if its job ended within the second.
    good = [row for row in caught_up["broken"] if ada.ground.name("good") in row["what"].split(", ")]
    assert {row["on"] for row in good if row["reason"].startswith("no-gpu: ")} == {"8.0"}, good
    due = {on for trick, on in rows(ada, caught_up, "due") if trick == "good"}
    assert due == {"7.0, 7.5, 8.0"}
    assert any("still on the pool" in note for note in caught_up["notes"])
    assert "due" in (ada.ground.root / "site/night.html").read_text()
    assert known(dora)["9.0"] == "verified"


def test_each_pool_gets_what_is_not_known_and_no_bad_machine(ada: Person, caught_up: dict[str, Any]) -> None:
    *_, on_slurm, on_condor = ada.ask("sweep", "list")["sweeps"]
    (good,) = (row for row in on_slurm["nodes"] if row["node"] == node(ada.ground, "good"))
    assert [one["machine"] for one in good["attempts"]] == ["h1"]
    assert [one["machine"] for one in on_slurm["machines"] if one["excluded"]] == ["h2"]
    # 7.0 is in hand on Slurm, of 9.0 a result is there
    assert {row["node"].rpartition("-")[2] for row in on_condor["nodes"]} == {"sm75", "sm80"}


# --- a full disk ----------------------------------------------------------------------------------


def test_nights_on_a_full_disk_sign_the_catalog_and_send_mail(ada: Person, caught_up: dict[str, Any]) -> None:
    """stdout is on that disk too. The first full night has the reserve for its log, the second nothing."""
    pool, ground = ada.center.pool, ada.ground
    store = ground.environ["IMAGEFACTORY_STORE"]
    mail = ground.root / "mail"
    fill = f"dd if=/dev/zero of={store}/filled bs=1 seek=$(stat -c %s {store}/filled) 2>/dev/null"
    signed = {ada.center.catalog()}
    for number in range(2):
        pool.run(["sh", "-c", f"cat /dev/zero >>{store}/filled; {fill}"], folder=ground.root, code=None)
        mail.unlink(missing_ok=True)
        command = shlex.join(("imagefactory", *night(ada, "--json", "--mail", "cat >mail")))
        path = {"PATH": f"/opt/imagefactory/builds/bin:{ground.environ['PATH']}"}
        done = pool.run(
            ["sh", "-c", f"{command} >{store}/out-{number}"],
            folder=ground.root, code=NO_SPACE, **{**ground.environ, **path},
        )  # fmt: skip
        assert "Traceback" not in done.stderr
        assert "no space left" in mail.read_text()
        assert ada.center.catalog() not in signed
        signed.add(ada.center.catalog())
        if number == 0:
            kept = f"cd {store}/nights && cd $(ls -d */ | tail -n 1) && cat night.json && cat log.txt >&2"
            read = pool.run(["sh", "-ec", kept], folder=ground.root)
            broken = json.loads(read.stdout)["broken"]
            assert [row["what"] for row in broken if row["exit_code"] == NO_SPACE] == ["nights"]
            assert "imagefactory site publish" in read.stderr
