"""From a target to a kit, from what it brought back to a verdict: signed once, attached, then tags follow.

The GPU is made up, docker is a program of the tests, and the key is thrown away with the test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory import cli
from imagefactory.actions import promote, verdicts, verify
from imagefactory.actions.transfer import PushOptions, push_target
from imagefactory.actions.verdicts import find_in, nonce_store, read_verification_policy, registry_of
from imagefactory.actions.verify import (
    CollectOptions,
    KitDestination,
    KitResult,
    VerifyOptions,
    collect,
    format_signed_numbers,
    write_kit,
)
from imagefactory.errors import (
    EXIT_REGISTRY,
    CheckFailedError,
    NoGpuError,
    RegistryError,
    StatementError,
    UsageError,
)
from imagefactory.model import Outcome, Target
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import Image
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.serialize import format_time
from imagefactory.trust.keys import PublicKey, keys_directory, make_key
from imagefactory.trust.policy import TrustGrant, add_key
from imagefactory.trust.verdict import VerdictStatus, VerificationResult, sign
from imagefactory.verify.nonces import NonceStore
from imagefactory.verify.report import EVIDENCE_ACTIONS, EVIDENCE_KIT
from tests.made.command import say
from tests.made.errors import fails
from tests.made.factory import NAME, put_image
from tests.made.kit import Bench, answer, docker, suite_report
from tests.made.registry import RegistryMadeHere, registry_made_here
from tests.made.trusted import write_settings
from tests.made.verdicts import LAB
from tests.services.gpu_host import make_host

TAG = "2.3-cu121-sm80"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A factory with a pushed image, a trusted key and a registry; the kit of that image, and its machine."""

    factory: Project
    target: Target
    image: Image
    registry: RegistryMadeHere
    bench: Bench
    key: PublicKey

    def runs(self, **changes: Any) -> None:
        """Runs the kit: what the suite says in the image is whole but for `changes`."""
        run = {"report": suite_report(target=NAME, **changes)}
        docker(self.bench, run, Id=self.image.config)
        self.bench.run()

    def collects(self, **options: Any) -> KitResult:
        now = datetime.now(UTC)
        return collect(self.factory, self.bench.kit, CollectOptions(**options), now, QuietProgress())

    def judged(self, elsewhere: Project | None = None) -> tuple[VerificationResult, ...]:
        """The verdicts that the registry has, as this factory judges them."""
        site = elsewhere or self.factory
        place, court = (
            registry_of(site, "pytorch", self.registry.host),
            read_verification_policy(site, datetime.now(UTC)),
        )
        subject = self.bench.issued.run.subject
        return find_in(site, place, subject, court).judged


@pytest.fixture
def site(factory: Project, target: Target, tmp_path: Path) -> Iterator[Site]:
    put_image(factory, target)
    image = factory.layout.image(reference(target))
    assert image is not None
    key = make_key(keys_directory(factory.environ), "lab")
    today = datetime.now(UTC).date()
    grant = TrustGrant(key=key, since=today - timedelta(days=1), until=today + timedelta(days=9))
    write_settings(factory.settings.root_path, add_key("", grant, "imagefactory.toml"), factory.environ)
    with registry_made_here() as made:
        push_target(factory, target, PushOptions(now=datetime.now(UTC), registry=made.host), QuietProgress())
        options = VerifyOptions(level="quick", registry=made.host)
        written = write_kit(factory, NAME, options, KitDestination(folder=tmp_path / "kit"), QuietProgress())
        (tmp_path / "bin").mkdir()
        bench = Bench(
            nonces=nonce_store(factory),
            issued=nonce_store(factory).look(written.nonce),
            kit=tmp_path / "kit",
            places=make_host(tmp_path / "host"),
            programs=tmp_path / "bin",
        )
        yield Site(factory=factory, target=target, image=image, registry=made, bench=bench, key=key)


def other_factory(site: Site, tmp_path: Path) -> Project:
    """The same recipes and trust with an empty store, as a job of CI has them."""
    store = replace(site.factory.settings.store, value=str(tmp_path / "fresh"))
    return replace(site.factory, settings=replace(site.factory.settings, store=store))


# --- collected -------------------------------------------------------------------------------------


def test_a_kit_becomes_a_verdict_that_can_be_relied_on(site: Site) -> None:
    site.runs()
    done = site.collects(promote=True)
    assert (done.passed, done.again) == (True, False)
    assert done.attached == (str(site.factory.layout.path), f"{site.registry.host}/pytorch")
    (judged,) = site.judged()
    assert (judged.standing, judged.proves) == (VerdictStatus.GOOD, True)
    assert judged.verdict is not None
    assert judged.verdict.keyid == site.key.keyid
    hardware = judged.verdict.report.hardware
    assert hardware is not None
    assert hardware.kind == EVIDENCE_KIT
    assert done.promotion is not None
    assert [fate.tag for fate in done.promotion.fates if fate.moved] == [TAG]
    place = registry_of(site.factory, "pytorch", site.registry.host)
    pointed = place.store.manifest(place.repository, TAG)
    assert pointed is not None
    assert pointed[0].digest == site.image.digest


def test_a_kit_is_collected_once(site: Site) -> None:
    site.runs()
    site.collects()
    with fails("nonce-replayed"):
        site.collects()
    site.runs()  # nor does another run of the same kit help
    with fails("nonce-replayed"):
        site.collects()
    assert len(site.judged()) == 1


def test_a_run_that_says_no_is_signed_too_and_proves_nothing(site: Site) -> None:
    rows = suite_report()["checks"]
    rows[2] = {**rows[2], "state": "failed", "outcome": "wrong-numbers", "detail": "1 is wrong"}
    site.runs(checks=rows)
    done = site.collects(promote=True)
    assert (done.passed, done.report.outcome) == (False, Outcome.WRONG_NUMBERS)
    (judged,) = site.judged()
    assert (judged.standing, judged.proves) == (VerdictStatus.GOOD, False)
    assert done.promotion is not None
    assert not any(fate.moved for fate in done.promotion.fates)


@pytest.mark.parametrize("changes", [{"checks": []}, {"device": None, "checks": []}])
def test_a_run_that_says_nothing_of_the_image_is_not_signed(site: Site, changes: dict[str, Any]) -> None:
    site.runs(**changes)
    with pytest.raises(CheckFailedError, match=r"^(not-tested|load-failed|this report cannot be signed)"):
        site.collects()
    assert site.judged() == ()
    site.runs()
    assert site.collects().passed


def test_without_a_gpu_there_nothing_is_signed_here(site: Site) -> None:
    assert site.bench.run(places=site.bench.places._replace(proc="/nowhere")) == 9
    with pytest.raises(NoGpuError, match="no-gpu"):
        site.collects(promote=True)
    assert site.judged() == ()


def test_without_a_key_nothing_is_spent(site: Site) -> None:
    site.runs()
    for path in keys_directory(site.factory.environ).iterdir():
        path.rename(path.with_suffix(".away"))
    with fails("kit-key-missing"):
        site.collects()
    assert site.bench.nonces.look(site.bench.issued.nonce).spent is None


def test_a_policy_may_refuse_kits(site: Site) -> None:
    settings = site.factory.settings.root_path / "imagefactory.toml"
    settings.write_text(settings.read_text() + '\n[policy]\nevidence = ["local"]\n')
    site.runs()
    done = site.collects(promote=True)
    (judged,) = site.judged()
    assert judged.standing is VerdictStatus.EVIDENCE_REFUSED
    assert done.promotion is not None
    assert not any(fate.moved for fate in done.promotion.fates)


# --- elsewhere, and interrupted ----------------------------------------------------------------------


def test_a_job_without_a_store_signs_by_a_nonce_store_that_travelled(site: Site, tmp_path: Path) -> None:
    site.runs()
    fresh = other_factory(site, tmp_path)
    now = datetime.now(UTC)
    with fails("nonce-unknown"):
        collect(fresh, site.bench.kit, CollectOptions(), now, QuietProgress())
    options = CollectOptions(nonce_dir=site.bench.nonces.folder, registry=site.registry.host, promote=True)
    done = collect(fresh, site.bench.kit, options, now, QuietProgress())
    assert done.attached == (f"{site.registry.host}/pytorch",)
    assert [judged.proves for judged in site.judged(fresh)] == [True]


def test_a_copy_of_a_nonce_store_makes_nobody_sign_a_second_time(site: Site, tmp_path: Path) -> None:
    """Each job that collects the results of a night has its nonce store anew, in which nothing is spent."""
    site.runs()
    fresh, now = other_factory(site, tmp_path), datetime.now(UTC)
    for number in range(3):
        copy = tmp_path / f"nonces-{number}"
        shutil.copytree(site.bench.nonces.folder, copy)
        options = CollectOptions(nonce_dir=copy, registry=site.registry.host, promote=True)
        done = collect(fresh, site.bench.kit, options, now, QuietProgress())
        assert (done.passed, done.again) == (True, number > 0)
        assert done.attached == (f"{site.registry.host}/pytorch",)
        assert done.promotion is not None
        assert done.promotion.proven
    assert [judged.proves for judged in site.judged(fresh)] == [True]


def test_a_nonce_gives_no_second_verdict_whatever_is_kept_of_the_first(site: Site, tmp_path: Path) -> None:
    """A job of CI gets a fresh copy of the nonces: the registry or an earlier job says what is spent."""
    site.runs()
    fresh, now = other_factory(site, tmp_path), datetime.now(UTC)

    def collect_with(name: str, spent: Path | None) -> KitResult:
        copy = tmp_path / name
        shutil.copytree(tmp_path / "issued", copy)
        if spent:
            shutil.copytree(spent, copy / "spent", dirs_exist_ok=True)
        options = CollectOptions(nonce_dir=copy, registry=site.registry.host)
        return collect(fresh, site.bench.kit, options, now, QuietProgress())

    shutil.copytree(site.bench.nonces.folder, tmp_path / "issued")
    assert not collect_with("first", None).again
    kept = tmp_path / "first" / "spent"
    assert collect_with("the same result", kept).again
    rows = suite_report()["checks"]
    site.runs(checks=[{**rows[0], "numbers": {"elements": 1.0}}, *rows[1:]])
    for name, spent in (("another result", None), ("another, with what was kept", kept)):
        with fails("nonce-replayed"):
            collect_with(name, spent)
    manifests = site.registry.shelves.repositories["pytorch"].manifests
    for digest in [digest for digest, (_, data) in manifests.items() if "subject" in json.loads(data)]:
        del manifests[digest]
    assert site.judged() == ()
    with fails("nonce-replayed"):
        collect_with("a registry that lost the verdict", kept)
    assert site.judged() == ()


def test_a_nonce_store_of_another_run_is_refused(site: Site, tmp_path: Path) -> None:
    job = {
        **site.factory.environ,
        "GITHUB_ACTIONS": "true",
        "GITHUB_REPOSITORY": "lab/images",
        "GITHUB_RUN_ID": "7",
        "GITHUB_RUN_ATTEMPT": "1",
        "IMAGEFACTORY_NONCE_KEY": "k" * 32,
    }
    here, now = replace(site.factory, environ=job), datetime.now(UTC)
    place = KitDestination(folder=tmp_path / "ours", nonce_dir=tmp_path / "nonces")
    options = VerifyOptions(level="quick", registry=site.registry.host)
    written = write_kit(here, NAME, options, place, QuietProgress())
    issued = nonce_store(here, place.nonce_dir).look(written.nonce)
    bench = replace(site.bench, kit=place.folder, issued=issued)
    replace(site, bench=bench).runs()
    bench.run(**{name: value for name, value in job.items() if name.startswith("GITHUB_")})
    wanted = CollectOptions(nonce_dir=place.nonce_dir, registry=site.registry.host)
    for change in (
        {"GITHUB_RUN_ATTEMPT": "2"},
        {"GITHUB_RUN_ID": "8"},
        {"GITHUB_REPOSITORY": "fork/images"},
        {"GITHUB_ACTIONS": ""},
    ):
        with fails("nonce-other-run"):
            collect(replace(here, environ=job | change), place.folder, wanted, now, QuietProgress())
    assert collect(here, place.folder, wanted, now, QuietProgress()).passed
    again = collect(here, place.folder, wanted, now, QuietProgress())
    assert again.again
    assert again.report.hardware is not None
    assert again.report.hardware.kind == EVIDENCE_ACTIONS


def test_a_key_that_can_be_guessed_is_refused(site: Site, tmp_path: Path) -> None:
    """Whoever can read an entry can try keys until its MAC fits."""
    environ = {**site.factory.environ, "IMAGEFACTORY_NONCE_KEY": "secret"}
    with pytest.raises(UsageError, match="IMAGEFACTORY_NONCE_KEY"):
        nonce_store(replace(site.factory, environ=environ), tmp_path)


def test_what_was_signed_arrives_when_the_registry_is_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nonce is spent and the registry is down: the next call attaches the very same verdict."""
    site.runs()
    attach = verdicts.attach_signed

    def refuse(*_: Any) -> tuple[str, ...]:
        raise RegistryError("registry-down", "it is down")

    monkeypatch.setattr(verify, "attach_signed", refuse)
    with pytest.raises(RegistryError):
        site.collects()
    first = verify.unsettled(site.bench.nonces, site.bench.kit)
    assert first is not None
    monkeypatch.setattr(verify, "attach_signed", attach)
    done = site.collects()
    assert done.again
    assert (done.verdict, [judged.proves for judged in site.judged()]) == (first[0].verdict, [True])
    with fails("nonce-replayed"):
        site.collects()


def test_tags_that_could_not_move_are_moved_by_the_same_call_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.runs()
    move = promote.promote

    def refuse(*_: Any) -> None:
        raise RegistryError("registry-down", "it is down")

    monkeypatch.setattr(verify, "promote", refuse)
    with pytest.raises(RegistryError):
        site.collects(promote=True)
    monkeypatch.setattr(verify, "promote", move)
    done = site.collects(promote=True)
    assert done.again
    assert done.promotion is not None
    assert [fate.tag for fate in done.promotion.fates if fate.moved] == [TAG]
    assert len(site.judged()) == 1


@pytest.mark.parametrize("options", [{"promote": True}, {"registry": "127.0.0.1:1"}])
def test_a_factory_without_the_target_says_where_to_collect(site: Site, options: dict[str, Any]) -> None:
    site.runs()
    key = site.factory
    with fails("target-not-in-project", f"'{NAME}'"):
        replace(site, factory=replace(key, targets=())).collects(**options)
    assert site.collects(promote=True).passed  # nothing is lost by it


def test_an_image_in_no_registry_is_attached_to_in_the_store(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = VerifyOptions(level="quick")
    written = write_kit(
        site.factory, NAME, options, KitDestination(folder=tmp_path / "local"), QuietProgress()
    )
    assert written.reference == ""
    bench = replace(site.bench, kit=tmp_path / "local", issued=site.bench.nonces.look(written.nonce))
    docker(bench, {"report": suite_report(target=NAME)}, Id=site.image.config)
    answer(bench, "docker", {"docker image inspect .*-- gone": {"code": 1}})
    assert bench.run() == 2
    assert "is not in a registry: pass it with --image" in capsys.readouterr().err
    assert bench.run("--image", "loaded:latest") == 0
    done = replace(site, bench=bench).collects(promote=True)
    assert done.attached == (str(site.factory.layout.path),)
    assert site.factory.layout.tags()[f"pytorch:{TAG}"].digest == site.image.digest


# --- the command ---------------------------------------------------------------------------------------


@pytest.fixture
def command(site: Site, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in site.factory.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)

    def call(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main(["-C", site.factory.settings.root.value, *arguments, "-q"])
        return int(str(ended.value.code))

    return call


def test_the_command_collects_several_kits(
    site: Site, command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.runs()
    capsys.readouterr()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert command("sweep", "collect", str(empty), str(site.bench.kit), "--promote", "--json") == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], [row["outcome"] for row in told["results"]]) == (
        "imagefactory.sweep-collect/1",
        ["verified"],
    )
    assert [row["tag"] for row in told["results"][0]["promotion"]["tags"] if row["moved"]] == [TAG]
    assert told["errors"][0]["code"] == "kit-invalid"
    assert command("sweep", "collect", str(site.bench.kit)) == 9
    assert "already spent" in capsys.readouterr().err


def test_with_a_nonce_store_no_folder_is_taken_for_a_sweep(
    site: Site, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have come back from anywhere: that it has a sweep.json does not make it one."""
    site.runs()
    (site.bench.kit / "sweep.json").write_text("{}")
    assert (
        command(
            "sweep", "collect", str(site.bench.kit), "--nonce-dir", str(site.bench.nonces.folder), "--json"
        )
        == 0
    )
    assert command("sweep", "collect", str(site.bench.kit)) == 2  # a sweep that is not whole
    capsys.readouterr()


def test_the_command_shows_checks_and_says_who_saw_the_gpu(
    site: Site, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    site.runs()
    capsys.readouterr()
    assert (
        command(
            "sweep",
            "collect",
            str(site.bench.kit),
            "--nonce-dir",
            str(NonceStore(site.bench.nonces.folder).folder),
        )
        == 0
    )
    told = capsys.readouterr().out
    assert "vector-add" in told
    assert site.key.keyid[:12] in told
    assert f"{site.registry.host}/pytorch" in told


def test_a_tag_that_stays_fails_the_command_but_not_the_verdict(
    site: Site, command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stays = promote.PromotionResult(
        target=NAME,
        place="there",
        fates=(),
        faults=((TAG, RegistryError("tag-kept", f"cannot delete {TAG}")),),
    )
    monkeypatch.setattr(verify, "promote", lambda *_: stays)
    site.runs()
    capsys.readouterr()
    assert command("sweep", "collect", str(site.bench.kit), "--promote", "--json") == EXIT_REGISTRY
    told = json.loads(capsys.readouterr().out)
    assert [row["outcome"] for row in told["results"]] == ["verified"]
    assert [error["message"] for error in told["errors"]] == [f"cannot delete {TAG}"]


# --- a kit for nodes ------------------------------------------------------------------------------


def test_a_kit_for_nodes_has_the_numbers_of_valid_verdicts(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = VerifyOptions(level="node", registry=site.registry.host)
    order = KitDestination(folder=tmp_path / "node")
    with fails("not-verified"):
        write_kit(site.factory, NAME, options, order, QuietProgress())
    assert not order.folder.exists()
    checks = suite_report()["checks"]
    for row in checks:
        if row["name"] == "transfers":
            row["numbers"] = {"pinned-up-gb-per-s": 24.5, "bytes": 1.0}
        if row["name"] == "matmul":
            row["numbers"] = {"float32-odd-error": 1e-6, "float32-odd-bound": 1e-4, "exact-error": 0.0}
    site.runs(checks=checks)
    report = site.collects().report
    assert report.outcome is Outcome.VERIFIED
    assert report.hardware is not None
    written = write_kit(site.factory, NAME, options, order, QuietProgress())
    ((name, end),) = written.gpus
    assert (name, end) == ("Test GPU", written.expires.strftime("%Y-%m-%dT%H:%M:%SZ"))
    signed = json.loads((order.folder / "signed.json").read_text())
    gpu = signed["gpus"]["Test GPU"]
    assert gpu["driver"] == "550.90.07"
    assert gpu["checks"]["transfers"] == {"pinned-up-gb-per-s": 24.5}
    assert gpu["checks"]["matmul"] == {"float32-odd-error": pytest.approx(0.01)}
    bench = replace(site.bench, kit=order.folder)
    docker(bench, {"report": suite_report("node", target=NAME)}, Id=site.image.config)
    capsys.readouterr()
    assert bench.run() == 0
    assert capsys.readouterr().out == 'ImagefactoryNode = "passed: 1 x Test GPU"\n'
    with fails("kit-without-result"):
        collect(site.factory, order.folder, CollectOptions(), datetime.now(UTC), QuietProgress())
    now = datetime.now(UTC)
    with pytest.raises(StatementError):
        sign(replace(report, level="node"), LAB, now=now, days=9)
    lower = replace(report, hardware=replace(report.hardware, driver="550.9.1"))
    both = format_signed_numbers([(report, now), (lower, now + timedelta(days=1))], waive=("memory",))
    assert (both["gpus"]["Test GPU"]["driver"], "memory" in both["checks"]) == ("550.9.1", False)
    assert both["gpus"]["Test GPU"]["expires"] == format_time(now + timedelta(days=1))


@pytest.mark.parametrize(
    "more", [(), ("--kit", "k", "--nonce-dir", "n"), ("--kit", "k", "--capability", "8.0")]
)
def test_the_level_of_nodes_is_for_kits(
    factory: Project, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = say(capsys, "-C", factory.settings.root.value, "verify", NAME, "--suite", "node", *more)
    assert (said.code, said.error_codes) == (2, ("option-conflict",))
