"""What of a site is set up: a fresh project, one with all of it, and each thing that breaks in a year."""

from __future__ import annotations

import base64
import json
import os
import pwd
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.actions import doctor_site
from imagefactory.actions.doctor import examine_for
from imagefactory.actions.doctor_site import examine_site
from imagefactory.doctor.facts import Diagnosis
from imagefactory.doctor.use import is_working
from imagefactory.extras.nightly.nights import allocate_reserve, nightly_directory, write_nightly
from imagefactory.extras.nightly.units import NAME, format_units
from imagefactory.http import RetryPolicy
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.project import Project
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.settings.load import load_settings
from imagefactory.trust.audit import AuditEntry, append_audit
from imagefactory.trust.catalog import LIFE, sign_catalog
from imagefactory.trust.invitation import Invitation, format_invitation
from imagefactory.trust.keys import PublicKey, SigningKey, keys_directory, make_key, read_signing_key
from imagefactory.trust.offers import publish_catalog, publish_invitation, write_catalog
from imagefactory.trust.policy import TrustGrant, format_row
from tests.made.catalog import make_catalog
from tests.made.command import json_of, say
from tests.made.night import night_report
from tests.made.registry import PASSWORD, USER, Asked, RegistryMadeHere, Ways, registry_made_here
from tests.made.trusted import write_settings
from tests.made.verdicts import STRANGER

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
DAY = timedelta(days=1)
NAMES = (
    "project", "store", "registry", "push", "signing key", "trusted keys", "site", "pool", "catalog",
    "invitation", "log", "mirrors", "nightly run", "last night", "messages", "disk reserve",
)  # fmt: skip


@dataclass(frozen=True)
class Center:
    """A project, the machine that it is on, and its registry."""

    factory: Project
    registry: RegistryMadeHere
    machine: Path

    @property
    def root(self) -> Path:
        return self.factory.settings.root_path

    @property
    def units(self) -> Path:
        return self.machine / "home/.config/systemd/user"

    @property
    def environ(self) -> dict[str, str]:
        home = str(self.machine / "home")
        return {**self.factory.environ, "HOME": home, "PATH": str(self.machine / "bin")}

    @property
    def place(self) -> StoreRepository:
        return StoreRepository(store=RegistryClient(self.registry.host), repository="gpu/catalog")

    def write(self, text: str = "", until: datetime = NOW + 300 * DAY, key: SigningKey | None = None) -> None:
        """The project's settings, with the key `lab` trusted until then, or another."""
        own = key or self.key
        grant = TrustGrant(
            key=PublicKey(name=own.name, raw=own.public), since=(NOW - 60 * DAY).date(), until=until.date()
        )
        settings = f'registry = "{self.registry.host}/gpu"\nsite = "chtc"\n{text}\n'
        write_settings(self.root, settings + format_row(grant), self.environ)

    @property
    def key(self) -> SigningKey:
        folder = keys_directory(self.environ)
        if not (folder / "lab.pem").exists():
            make_key(folder, "lab")
        return read_signing_key(folder / "lab.pem")

    def publish(self, made: datetime = NOW - DAY, key: SigningKey | None = None) -> bytes:
        envelope = sign_catalog(make_catalog(created=made, expires=made + LIFE), key or self.key)
        publish_catalog(self.place, envelope, made)
        return envelope

    def invite(self, key: SigningKey | None = None) -> None:
        own = key or self.key
        grant = TrustGrant(
            key=PublicKey(name=own.name, raw=own.public), since=NOW.date(), until=(NOW + 9 * DAY).date()
        )
        invited = Invitation(catalog=f"{self.registry.host}/gpu", site="chtc", sif_folder="", keys=(grant,))
        publish_invitation(self.place, format_invitation(invited), NOW)

    def install(self, *words: str, enabled: bool = True, lingers: bool = True) -> None:
        """As `site nightly --install` and the two commands do."""
        self.units.mkdir(parents=True, exist_ok=True)
        for name, text in format_units(str(self.root), ("imagefactory", "night", *words), {}).items():
            (self.units / name).write_text(text)
        wants = self.units / "timers.target.wants"
        if enabled:
            wants.mkdir(exist_ok=True)
            (wants / f"{NAME}.timer").symlink_to(self.units / f"{NAME}.timer")
        folder = self.machine / "var/lib/systemd/linger"
        folder.mkdir(parents=True, exist_ok=True)
        if lingers:
            (folder / pwd.getpwuid(os.geteuid()).pw_name).touch()

    def night(self, ended: datetime = NOW - timedelta(hours=9), **changes: object) -> None:
        folder = nightly_directory(self.factory.settings) / "20261127"
        folder.mkdir(parents=True, exist_ok=True)
        write_nightly(folder / "night.json", night_report(ended=ended, started=ended - DAY / 8, **changes))

    def look(self, now: datetime = NOW) -> tuple[Diagnosis, ...]:
        settings = load_settings(directory=self.root, start=self.root, environ=self.environ, strict=False)
        return examine_site(settings, self.environ, now, self.machine)

    def states(self, now: datetime = NOW) -> dict[str, str]:
        return {one.name: one.state.value for one in self.look(now)}


@pytest.fixture
def bare(factory: Project, registry: RegistryMadeHere, tmp_path: Path) -> Center:
    (tmp_path / "bin").mkdir()
    return Center(factory, registry, tmp_path)


@pytest.fixture
def center(bare: Center) -> Center:
    """All is set up."""
    store = bare.factory.settings.store_path
    bare.factory.layout.make()
    envelope = bare.publish()
    write_catalog(bare.machine / "mirror.json", envelope)
    bare.write(f'catalog-mirrors = "{bare.machine}/mirror.json"\n')
    bare.invite()
    bare.install("--mail", "mail -s night me")
    bare.night(broken=())
    allocate_reserve(bare.factory.settings)
    append_audit(store, [AuditEntry(action="publish", what="catalog")], NOW)
    return bare


def test_a_site_with_all_of_it(center: Center) -> None:
    begun = center.registry.count["POST upload"]
    found = center.look()
    states = {one.name: one.state.value for one in found}
    assert tuple(states) == NAMES
    assert {name for name, state in states.items() if state != "ok"} <= {
        "pool",
        "store",
        "push",
    }  # of this machine
    assert states["push"] == "warning"  # anyone may
    assert is_working(found)
    assert not center.registry.shelves.uploads  # nothing is left there
    assert center.registry.count["POST upload"] == begun


def test_a_fresh_project(bare: Center) -> None:
    write_settings(bare.root, "", bare.environ)
    found = bare.look()
    states = {one.name: one.state.value for one in found}
    assert {name for name, state in states.items() if state == "missing"} == {
        "registry", "signing key", "trusted keys", "catalog", "invitation", "nightly run", "last night"
    }  # fmt: skip
    assert all(one.remedy for one in found if one.state != "ok")
    assert not is_working(found)
    assert not bare.registry.log


@pytest.mark.parametrize("status", ["401", "403"])
def test_an_account_that_may_not_push(center: Center, status: str) -> None:
    center.registry.fault = lambda one: status if one.kind == "upload" else None
    states = center.states()
    assert (states["registry"], states["push"], states["catalog"]) == ("ok", "denied", "ok")


def test_a_registry_that_hangs_is_given_up_and_asked_nothing_more(
    center: Center, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_site, "HURRY", RetryPolicy(attempts=1, connect=0.2, read=0.2))
    asked: list[Asked] = []

    def hang(one: Asked) -> str:
        asked.append(one)
        return "hang"

    center.registry.fault = hang
    states = center.states()
    assert (states["registry"], states["catalog"], states["invitation"]) == ("denied", "warning", "warning")
    assert {one.kind for one in asked} == {"ping"}
    assert states["nightly run"] == "ok"


@pytest.mark.parametrize(
    ("days", "state"), [(-1, "missing"), (10, "warning"), (40, "ok")], ids=["over", "soon", "long"]
)
def test_the_time_of_the_key(bare: Center, days: int, state: str) -> None:
    bare.write(until=NOW + days * DAY)
    states = bare.states()
    assert states["signing key"] == {"missing": "denied"}.get(state, state)  # a retired key signs nothing
    assert states["trusted keys"] == ("missing" if days < 0 else "ok")


def test_a_key_that_is_not_trusted_here(bare: Center) -> None:
    assert bare.key
    bare.write(key=STRANGER)
    states = bare.states()
    assert (states["signing key"], states["trusted keys"]) == ("missing", "ok")


@pytest.mark.parametrize(("days", "state"), [(5, "ok"), (25, "warning"), (31, "denied")])
def test_the_time_of_the_catalog(center: Center, days: int, state: str) -> None:
    made = NOW - DAY
    assert center.states(made + days * DAY)["catalog"] == state


def test_a_catalog_that_another_key_signed(center: Center) -> None:
    center.publish(NOW - DAY / 2, STRANGER)
    assert center.states()["catalog"] == "denied"
    center.invite(STRANGER)
    assert center.states()["invitation"] == "denied"


def test_a_second_facilitator_need_not_sign_the_catalog(center: Center) -> None:
    key = PublicKey(name="other", raw=STRANGER.public)
    center.write(format_row(TrustGrant(key=key, since=NOW.date() - DAY, until=NOW.date() + 90 * DAY)))
    center.publish(NOW - DAY / 2, STRANGER)
    center.invite(STRANGER)
    states = center.states()
    assert (states["catalog"], states["invitation"]) == ("ok", "warning")


def test_a_catalog_in_a_file(bare: Center) -> None:
    key, made = bare.key, NOW - DAY
    envelope = sign_catalog(make_catalog(created=made, expires=made + LIFE), key)
    write_catalog(bare.machine / "catalog.json", envelope)
    bare.write(f'catalog = "{bare.machine}/catalog.json"')
    text = (bare.root / "imagefactory.toml").read_text().partition("\n")[2]  # without the registry
    write_settings(bare.root, text, bare.environ)
    states = bare.states()
    assert (states["registry"], states["catalog"], states["invitation"]) == ("missing", "ok", "missing")


@pytest.mark.parametrize("fault", ["older", "gone", "no catalog"])
def test_mirrors(center: Center, fault: str) -> None:
    path = center.machine / "mirror.json"
    if fault == "older":
        made = NOW - 3 * DAY
        envelope = sign_catalog(make_catalog(created=made, expires=made + LIFE), center.key)
        path.unlink()
        write_catalog(path, envelope)
    elif fault == "gone":
        path.unlink()
    else:
        path.write_text("nothing")
    assert center.states()["mirrors"] == ("warning" if fault == "older" else "denied")


@pytest.mark.parametrize(
    ("enabled", "lingers", "state"),
    [(True, True, "ok"), (False, True, "denied"), (True, False, "denied")],
)
def test_a_timer(bare: Center, enabled: bool, lingers: bool, state: str) -> None:
    bare.write()
    assert bare.states()["nightly run"] == "missing"
    bare.install(enabled=enabled, lingers=lingers)
    states = bare.states()
    assert states["nightly run"] == state
    assert states["messages"] == "warning"


def test_a_timer_of_another_project(bare: Center) -> None:
    bare.write()
    bare.install()
    service = bare.units / f"{NAME}.service"
    service.write_text(service.read_text().replace(str(bare.root), str(bare.root.parent)))
    assert bare.states()["nightly run"] == "missing"


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("17 2 * * * cd {root} && imagefactory site nightly -q --webhook hook.txt", "ok"),
        ("17 2 * * * imagefactory -C {root} site nightly", "ok"),
        ("# 17 2 * * * imagefactory -C {root} site nightly", "missing"),
        ("17 2 * * * imagefactory -C /elsewhere site nightly", "missing"),
    ],
)
@pytest.mark.parametrize("where", ["crontab", "cron.d"])
def test_cron(bare: Center, where: str, line: str, state: str) -> None:
    bare.write()
    text = line.format(root=bare.root)
    if where == "crontab":
        program = bare.machine / "bin/crontab"
        program.write_text(f"#!/bin/sh\n[ \"$*\" = -l ] && echo '{text}'\n")
        program.chmod(0o755)
    else:
        (bare.machine / "etc/cron.d").mkdir(parents=True)
        (bare.machine / "etc/cron.d/night").write_text(f"{text}\n")
    states = bare.states()
    assert states["nightly run"] == state
    if state == "ok":
        assert states["messages"] == ("ok" if "--webhook" in line else "warning")


@pytest.mark.parametrize("path", [".github/workflows/nightly.yml", ".gitlab-ci.yml"])
def test_nights_of_a_ci_service_are_seen_by_their_catalog(bare: Center, path: str) -> None:
    bare.write()
    file = bare.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("uses: lab/imagefactory/.github/workflows/plan.yml@0\n")
    states = bare.states()
    assert (states["nightly run"], states["last night"]) == ("ok", "missing")
    assert not {"messages", "disk reserve"} & set(states)
    bare.publish()
    assert bare.states()["last night"] == "ok"
    assert bare.states(NOW + 2 * DAY)["last night"] == "warning"


def test_a_clone_that_brings_a_pipe_holds_up_nothing(bare: Center) -> None:
    bare.write()
    os.mkfifo(bare.root / ".gitlab-ci.yml")
    assert bare.states()["nightly run"] == "missing"


@pytest.mark.parametrize(
    ("ended", "failed", "state"),
    [(NOW - DAY, False, "ok"), (NOW - 5 * DAY, False, "warning"), (NOW - DAY, True, "warning")],
)
def test_the_last_night(center: Center, ended: datetime, failed: bool, state: str) -> None:
    center.night(ended, **({} if failed else {"broken": ()}))
    assert center.states()["last night"] == state


def test_an_untrusted_project_sets_nothing(center: Center) -> None:
    """Its registry is not asked, and no line of its file says who is trusted."""
    path = center.root / "imagefactory.toml"
    path.write_text(f"{path.read_text()}\n# changed\n")
    before = len(center.registry.log)
    states = center.states()
    assert len(center.registry.log) == before
    assert (states["registry"], states["trusted keys"]) == ("missing", "missing")
    settings = load_settings(directory=None, start=center.root, environ=center.environ, strict=False)
    found, good = examine_for("site", settings, center.environ, NOW)
    assert [(one.name, one.state.value) for one in found] == [("project", "denied")]  # no line misleads
    assert not good


def test_a_pool_s_account(bare: Center, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def require(self) -> str:
            return "24.0"

        def inventory(self, now: datetime) -> object:
            return replace(inventory, taken=now)

    gpu = PoolGpu(
        id="GPU-1", uuid="", name="A100", capability="8.0", memory=1, driver="", cuda="", mig=False, free=True
    )
    machine = PoolMachine(name="a", attributes={}, start="", gpus=(gpu,))
    inventory = Inventory(pool="p", taken=NOW, machines=(machine,))
    monkeypatch.setattr(doctor_site, "open_pool", lambda *_: Pool())
    for batch, text, key, state in (
        ("htcondor", "", "submit-commands", "ok"),
        ("htcondor", 'site = "igwn"', "submit-commands", "missing"),
        ("htcondor", 'site = "igwn"\nsubmit-commands = "accounting_group = a.b"', "submit-commands", "ok"),
        ("slurm", "", "sbatch-options", "warning"),
        ("slurm", 'sbatch-options = "--account=a"', "sbatch-options", "ok"),
    ):
        monkeypatch.setattr(doctor_site, "local_pool", lambda _, name=batch: name)
        bare.write()
        lines = [
            line
            for line in (bare.root / "imagefactory.toml").read_text().splitlines()
            if not (text.startswith("site") and line.startswith("site"))
        ]
        write_settings(bare.root, "\n".join([text, *lines]), bare.environ)
        states = bare.states()
        assert (states["pool"], states[key]) == ("ok", state), (batch, text)


def test_the_command(
    center: Center, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**center.environ, "XDG_CONFIG_DIRS": "/none"}.items():
        monkeypatch.setenv(name, value)
    said = say(capsys, "-C", str(center.root), "doctor", "--for", "site", "--json")
    told = json_of(said, "doctor")
    assert told["purpose"] == "site"
    assert {row["name"] for row in told["findings"]} == set(NAMES)
    assert said.code == (0 if told["ready"] else 6)


def test_a_registry_with_a_login(factory: Project, tmp_path: Path) -> None:
    with registry_made_here(Ways(auth="basic")) as registry:
        (tmp_path / "bin").mkdir()
        center = Center(factory, registry, tmp_path)
        center.write()
        assert center.states()["registry"] == "denied"
        folder = tmp_path / "home/.docker"
        folder.mkdir(parents=True)
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        (folder / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
        states = center.states()
        assert (states["registry"], states["push"]) == ("ok", "ok")
        assert PASSWORD not in "".join(one.detail for one in center.look())
