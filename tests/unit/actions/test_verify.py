"""`verify` from a name to a verdict: which image is meant, what is signed, attached and shown. The image only
says that all is well, and the machine's evidence is made up; what signs here is a throwaway key.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory.actions import resolve, verdicts, verify
from imagefactory.actions.transfer import PushOptions, push_target
from imagefactory.actions.verdicts import find_in, local_place, read_verification_policy, registry_of
from imagefactory.actions.verify import KitDestination, write_kit
from imagefactory.cli import verify as verify_command
from imagefactory.errors import (
    BuildError,
    ImagefactoryError,
    NoGpuError,
    NothingSelectedError,
    StaleError,
    UsageError,
)
from imagefactory.model import Outcome, Target
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import CONFIG_TYPE, Image, SifArtifact, canonical_json, digest_of
from imagefactory.oci.sif import SifOrigin, store_sif
from imagefactory.oci.store import ImageReference
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.settings.choices import SettingValue
from imagefactory.settings.load import Settings
from imagefactory.suite import table as frameworks
from imagefactory.trust.keys import keys_directory, make_key
from imagefactory.trust.policy import TrustGrant, add_key
from imagefactory.trust.verdict import VerdictStatus
from imagefactory.verify.report import Hardware
from tests.made.command import Call, say
from tests.made.engine_of_one_row import remember_runners
from tests.made.errors import fails
from tests.made.factory import NAME, put_image
from tests.made.gpu_run import never, well_behaved
from tests.made.registry import registry_made_here
from tests.made.trial import ScriptedRunner
from tests.made.verdicts import HOST, HOST_OF_TWO

ROOT = Path(__file__).parents[3]
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@dataclass
class MadeUp:
    """Evidence of a machine that is none."""

    hardware: Hardware | None = HOST

    def read(self) -> Hardware:
        if self.hardware is None:
            raise NoGpuError("no-gpu", "no GPU: there is none", hint="run this where there is one")
        return self.hardware


def make_bench(runner: ScriptedRunner | None = None, **changes: Any) -> verify.VerifyDependencies:
    clock: Callable[[], datetime] = iter(NOW + timedelta(seconds=n) for n in range(1000)).__next__
    return verify.VerifyDependencies(
        **{"evidence": MadeUp(), "clock": clock, "runner": runner or well_behaved(), **changes}
    )


def run(factory: Project, name: str = NAME, bench: Any = None, **options: Any) -> verify.VerifyResult:
    chosen = verify.VerifyOptions(**{"level": "quick", "runner": "unshare", **options})
    return verify.verify_and_attach(factory, name, chosen, bench or make_bench(), QuietProgress())


def resolved(factory: Project, name: str) -> resolve.ResolvedImage:
    resolve.check_name(factory, name)
    return resolve.resolve_image(factory, name, "", QuietProgress())


# --- which image ---------------------------------------------------------------------------------


def test_every_name_of_an_image_means_it(factory: Project, target: Target) -> None:
    digest = put_image(factory, target)
    image = factory.layout.image(reference(target))
    assert image is not None
    for name in (NAME, reference(target), digest, f"{NAME}@{digest}", f"{reference(target)}@{digest}"):
        chosen = resolved(factory, name)
        assert isinstance(chosen.made, Image)
        assert (chosen.subject.index, chosen.subject.manifest) == (digest, image.manifest)
        assert (chosen.subject.config, chosen.subject.target) == (image.config, NAME)
        assert chosen.definition.target == target
        assert chosen.where is None
    alone = resolved(factory, image.manifest)
    assert (alone.subject.index, alone.subject.manifest) == (image.manifest, image.manifest)


def test_an_image_for_cpus_has_nothing_to_verify(factory: Project, target: Target) -> None:
    digest = put_image(factory, target)
    cpu = replace(target, cuda="none", capabilities=())
    cpus = replace(factory, targets=(cpu,))
    no_gpu = make_bench(evidence=MadeUp(None))
    for name in (NAME, f"{NAME}@{digest}"):
        with fails("target-without-gpu", hint=f"imagefactory build {NAME}"):
            resolve.check_name(cpus, name)
    with pytest.raises(UsageError) as caught:
        run(cpus, bench=no_gpu)
    assert caught.value.code == "target-without-gpu"  # and not that there is no GPU here


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("pytorch-2.3-cu12", NothingSelectedError, "no target 'pytorch-2.3-cu12'"),
        ("pytorch-2.3-cu12@sha256:" + "0" * 64, NothingSelectedError, "no target"),
        (NAME, BuildError, "is not built"),
        ("pytorch:2.9", NothingSelectedError, "no image 'pytorch:2.9'"),
        ("sha256:" + "0" * 64, NothingSelectedError, "no image sha256:000"),
        (f"{NAME}@sha256:" + "0" * 64, NothingSelectedError, "no image sha256:000"),
        ("somewhere/pytorch:2.3", UsageError, "no registry host"),
        (f"{NAME}@sha256:12", UsageError, "is not a sha256 digest"),
    ],
)
def test_names_that_mean_no_image(
    factory: Project, name: str, kind: type[ImagefactoryError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        resolved(factory, name)


def test_an_image_of_another_lock_is_refused(factory: Project, target: Target) -> None:
    put_image(factory, target, **{"imagefactory.lock": "sha256:" + "0" * 64})
    with pytest.raises(StaleError, match="current lock") as error:
        resolved(factory, NAME)
    assert f"imagefactory build {NAME}" in error.value.hint


def test_a_strangers_image_is_refused(factory: Project, target: Target) -> None:
    put_image(factory, target, **{"imagefactory.target": "mxnet-1.0-cu92"})
    with fails("image-target-unknown", r"'mxnet-1\.0-cu92'"):
        resolved(factory, NAME)


def test_an_image_that_names_no_lock_is_refused(factory: Project, target: Target) -> None:
    put_image(factory, target, **{"imagefactory.lock": None})
    with pytest.raises(StaleError, match="current lock"):
        resolved(factory, NAME)


@pytest.mark.parametrize(
    "config",
    [
        [],
        {"config": ["x"]},
        {"config": {"Labels": "abc"}},
        {"config": {"Labels": ["abc"]}},
        {"config": {"Labels": {"imagefactory.target": [NAME]}}},
        {"config": {"Labels": {"imagefactory.target": "\x1b[2J\u202e"}}},
    ],
)
def test_a_config_that_a_stranger_wrote(factory: Project, target: Target, config: Any) -> None:
    put_image(factory, target)
    image = factory.layout.image(reference(target))
    assert image is not None
    written = factory.layout.add(canonical_json(config), CONFIG_TYPE)
    made = replace(image, config=written.digest)
    with pytest.raises(UsageError) as raised:
        resolve.definition_of(factory, made, "it")
    assert raised.value.code == "image-target-unknown"
    assert raised.value.message.isprintable()


def test_a_digest_of_another_target_is_not_this_one(factory: Project, target: Target) -> None:
    digest = put_image(factory, target)
    other = next(one.name for one in factory.targets if one.name != NAME)
    with pytest.raises(UsageError, match=f"is an image of {NAME}"):
        resolved(factory, f"{other}@{digest}")


def test_a_sif_is_what_its_file_is(factory: Project, target: Target, tmp_path: Path) -> None:
    layout = factory.layout
    with layout.in_use(QuietProgress()):
        (layout.tmp / "x.sif").parent.mkdir(parents=True, exist_ok=True)
        (layout.tmp / "x.sif").write_bytes(b"sif")
        origin = SifOrigin(target=NAME, compression="fast")
        sif = store_sif(layout, layout.tmp / "x.sif", origin, tag=f"{reference(target)}.sif")
    chosen = resolved(factory, NAME)
    assert isinstance(chosen.made, SifArtifact)
    assert (chosen.subject.manifest, chosen.subject.config) == (sif.digest, digest_of(b"sif"))
    assert verify.runner_name(factory, chosen.made, "") == "apptainer"
    with fails("runner-no-sif", "unshare"):
        verify.runner_name(factory, chosen.made, "unshare")


# --- from the run to the verdict -----------------------------------------------------------------


def test_without_a_gpu_nothing_is_looked_for(factory: Project) -> None:
    bench = make_bench(ScriptedRunner(write=never), evidence=MadeUp(None))
    for name in (NAME, "127.0.0.1:1/pytorch:2.3"):  # neither built nor a registry that answers
        with pytest.raises(NoGpuError, match="no GPU"):
            run(factory, name, bench)
    assert not factory.layout.path.exists()


def test_without_a_key_it_stays_a_report(factory: Project, target: Target) -> None:
    put_image(factory, target)
    done = run(factory)
    assert done.report.outcome is Outcome.VERIFIED
    assert done.signed.signed is None
    assert done.signed.why.startswith("unsigned: no key")
    assert done.attached == ()
    assert json.loads(done.path.read_text())["outcome"] == "verified"
    assert done.path == factory.layout.path / "reports" / f"{done.report.nonce}.json"


def test_a_verdict_wants_the_store_looked_at(
    factory: Project, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_image(factory, target)
    runners = remember_runners(monkeypatch)
    run(factory, bench=verify.VerifyDependencies(evidence=MadeUp()), runner="echo")
    assert [runner.checked for runner in runners] == [True]


def test_a_verdict_of_a_throwaway_key_counts_nowhere(factory: Project, target: Target) -> None:
    put_image(factory, target)
    key = make_key(keys_directory(factory.environ), "throwaway")
    done = run(factory)
    assert done.signed.signed is not None
    assert done.signed.signed.verdict.keyid == key.keyid
    assert done.attached == (str(factory.layout.path),)
    court = read_verification_policy(factory, NOW + timedelta(hours=1))
    found = find_in(factory, local_place(factory, "any"), done.chosen.subject, court)
    (judged,) = found.judged
    assert (judged.standing, judged.proves) == (VerdictStatus.WRONG_KEY, False)


def test_a_nonce_is_spent_once(factory: Project, target: Target) -> None:
    put_image(factory, target)
    make_key(keys_directory(factory.environ), "throwaway")
    done = run(factory)
    with fails("nonce-replayed"):
        verdicts.sign_report(factory, done.report, verdicts.signing_key(factory, NOW), NOW)


def test_a_report_that_this_machine_did_not_make_is_not_signed(factory: Project, target: Target) -> None:
    put_image(factory, target)
    make_key(keys_directory(factory.environ), "throwaway")
    done = run(factory)
    key = verdicts.signing_key(factory, NOW)
    with fails("nonce-unknown"):
        verdicts.sign_report(factory, replace(done.report, nonce="f" * 32), key, NOW + timedelta(hours=1))


def test_what_no_gpu_said_is_not_signed(factory: Project, target: Target) -> None:
    put_image(factory, target)
    make_key(keys_directory(factory.environ), "throwaway")
    stranger = well_behaved(
        lambda report: report["device"].update(uuid="GPU-" + HOST.known[0][4:].replace("0", "9"))
    )
    done = run(factory, bench=make_bench(stranger))
    assert done.report.outcome is Outcome.INFRASTRUCTURE
    assert done.signed.signed is None
    assert "says nothing of the image" in done.signed.why
    other = run(factory, capability="9.0", bench=make_bench(ScriptedRunner(write=never)))
    assert (other.report.outcome, other.signed.signed) == (Outcome.WRONG_GPU, None)


def test_evidence_that_is_not_whole_is_not_signed(factory: Project, target: Target) -> None:
    put_image(factory, target)
    make_key(keys_directory(factory.environ), "throwaway")
    done = run(factory, bench=make_bench(evidence=MadeUp(replace(HOST, known=()))))
    assert done.report.outcome is Outcome.VERIFIED
    assert done.signed.signed is None
    assert "which the driver does not list" in done.signed.why


def test_the_answer_of_a_failed_run_is_signed_too(factory: Project, target: Target) -> None:
    put_image(factory, target)
    make_key(keys_directory(factory.environ), "throwaway")

    def change(report: dict[str, Any]) -> None:
        next(row for row in report["checks"] if row["name"] == "matmul").update(
            state="failed", outcome="wrong-numbers"
        )

    done = run(factory, bench=make_bench(well_behaved(change)))
    assert done.report.outcome is Outcome.WRONG_NUMBERS
    assert done.signed.signed is not None


def test_promotion_needs_a_key_before_it_needs_ten_minutes(factory: Project, target: Target) -> None:
    put_image(factory, target)
    with fails("promote-key-missing"):
        run(factory, promote=True, bench=make_bench(ScriptedRunner(write=never)))


def test_the_caller_says_which_gpus_are_its_own(factory: Project, target: Target) -> None:
    put_image(factory, target)
    environ = {**factory.environ, "CUDA_VISIBLE_DEVICES": "0"}
    seen = []

    class Runner(ScriptedRunner):
        def run(self, image: Any, spec: Any) -> Any:
            seen.append((spec.environment, spec.selected_gpus))
            return super().run(image, spec)

    def verified(hardware: Hardware = HOST, **options: str) -> Any:
        bench = make_bench(Runner(write=well_behaved().write), evidence=MadeUp(hardware))
        run(replace(factory, environ=environ), bench=bench, **options)
        return seen.pop()

    assert verified() == ((("CUDA_VISIBLE_DEVICES", "0"),), ())
    # --gpus takes the place of the batch system.
    first, second = (gpu.uuid for gpu in HOST_OF_TWO.gpus)
    for text in ("1", second):
        selected = ((("CUDA_VISIBLE_DEVICES", second),), ((1, second, ""),))
        assert verified(HOST_OF_TWO, gpus=text) == selected
    assert verified(HOST_OF_TWO, gpus="all") == ((("CUDA_VISIBLE_DEVICES", first),), ())
    environ["CUDA_VISIBLE_DEVICES"] = "7"
    assert verified(HOST, gpus="all") == ((), ())


def test_a_gpu_that_is_not_there_stops_before_anything_is_fetched(factory: Project) -> None:
    with fails("gpu-not-selectable", hint=HOST.gpus[0].uuid):
        run(factory, gpus="1")  # not even the image is there


# --- registries ----------------------------------------------------------------------------------


def test_an_image_of_a_registry(factory: Project, target: Target, tmp_path: Path) -> None:
    """Pulled by digest under a name of its own, verified, and its verdict is there for the next one."""
    digest = put_image(factory, target)
    make_key(keys_directory(factory.environ), "throwaway")
    with registry_made_here() as made:
        push_target(factory, target, PushOptions(now=NOW, registry=made.host), QuietProgress())
        other = replace(factory, settings=_with_store(factory, tmp_path / "other"))
        for name in (f"{made.host}/pytorch@{digest}", f"{made.host}/pytorch:2.3-cu121-{digest[7:19]}"):
            done = run(other, name)
            assert done.chosen.subject.index == digest
            assert str(done.chosen.where) == f"{made.host}/pytorch@{digest}"
            assert done.attached == (f"{tmp_path}/other", f"{made.host}/pytorch")
        assert reference(target) not in other.layout.tags()
        place = registry_of(other, "pytorch", made.host)
        court = read_verification_policy(other, NOW + timedelta(hours=1))
        assert len(find_in(other, place, done.chosen.subject, court).judged) == 2


def test_the_registry_must_have_what_is_verified_for_it(factory: Project, target: Target) -> None:
    put_image(factory, target)
    with registry_made_here() as made, pytest.raises(UsageError, match="has no image sha256:"):
        run(factory, registry=made.host, bench=make_bench(ScriptedRunner(write=never)))


def test_a_promoted_verdict_needs_a_trusted_key(factory: Project, target: Target) -> None:
    """Nobody trusts the throwaway key, so no tag follows it; trusted, the tag of the capability does."""
    put_image(factory, target)
    key = make_key(keys_directory(factory.environ), "throwaway")
    done = run(factory, promote=True)
    assert done.promotion is not None
    assert not any(fate.moved for fate in done.promotion.fates)
    grant = TrustGrant(key=key, since=NOW.date(), until=(NOW + timedelta(days=9)).date())
    settings = factory.settings.root_path / "imagefactory.toml"
    settings.write_text(add_key("", grant, settings.name))
    again = run(factory, promote=True)
    assert again.promotion is not None
    assert [fate.tag for fate in again.promotion.fates if fate.moved] == ["2.3-cu121-sm80"]
    assert factory.layout.tags()["pytorch:2.3-cu121-sm80"].digest == done.chosen.subject.index


def _with_store(factory: Project, path: Path) -> Settings:
    return replace(factory.settings, store=SettingValue(value=str(path), origin="default"))


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def call(factory: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command line on the factory; the machine's GPU is what `bench` says."""
    for name, value in factory.environ.items():
        monkeypatch.setenv(name, value)
    for name in ("XDG_CONFIG_HOME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def command(
        *arguments: str, code: int, bench: verify.VerifyDependencies | None = None
    ) -> tuple[str, str]:
        if bench is not None:
            monkeypatch.setattr(verify_command, "verify_dependencies", lambda: bench)
        said = say(capsys, "-C", factory.settings.root.value, *arguments)
        assert said.code == code, said
        return said.out, said.err

    return command


def test_the_command_shows_what_ran(call: Call, factory: Project, target: Target, tmp_path: Path) -> None:
    digest = put_image(factory, target)
    report = tmp_path / "report.json"
    out, err = call("verify", NAME, "--suite", "quick", "-o", str(report), code=0, bench=make_bench())
    assert "error" not in err
    assert "quick suite on A GPU of the tests (8.0, 16 GiB), driver 550.54.15, CUDA 12.4, by unshare" in out
    assert "matmul" in out
    assert "unsigned: no key" in out
    assert f"{report} (unsigned: it proves nothing)" in out
    assert json.loads(report.read_text())["subject"]["index"] == digest


def test_the_command_as_json(call: Call, factory: Project, target: Target) -> None:
    put_image(factory, target)
    call("key", "create", "throwaway", code=0)
    out, _ = call("verify", NAME, "--suite", "quick", "--json", code=0, bench=make_bench())
    document = json.loads(out)
    (result,) = document["results"]
    assert document["format"] == "imagefactory.verify/1"
    assert (result["outcome"], result["signed"]) == ("verified", True)
    assert result["report"]["device"]["capability"] == "8.0"
    assert result["expires"].startswith("2026-04-02")


def test_the_command_without_a_gpu(call: Call, factory: Project) -> None:
    out, err = call("verify", NAME, "--json", code=9, bench=make_bench(evidence=MadeUp(None)))
    document = json.loads(out)
    assert [row["outcome"] for row in document["results"]] == ["no-gpu"]
    assert document["errors"][0]["exit_code"] == 9
    assert f"{NAME}: no-gpu: no GPU" in err


def test_this_machines_own_answer(call: Call, factory: Project) -> None:
    """Where there is no GPU the command says so; where there is one, that nothing is built."""
    here = Path("/proc/driver/nvidia/version").exists()
    _, err = call("verify", NAME, code=7 if here else 9)
    assert ("is not built" if here else "no-gpu") in err


def test_where_the_report_goes_is_looked_at_before_the_run(
    call: Call, factory: Project, target: Target, tmp_path: Path
) -> None:
    put_image(factory, target)
    (tmp_path / "file").write_text("")
    never_run = make_bench(ScriptedRunner(write=never))
    _, err = call("verify", NAME, "-o", str(tmp_path / "file/report.json"), code=2, bench=never_run)
    assert "--output" in err


def test_a_failure_has_its_word_and_its_exit_code(call: Call, factory: Project, target: Target) -> None:
    put_image(factory, target)
    out, err = call("verify", NAME, "--capability", "sm_90", code=9, bench=make_bench())
    assert "outcome   wrong-gpu: asked for a GPU of capability 9.0" in out
    assert f"error: {NAME}: wrong-gpu" in err


def test_a_promotion_that_cannot_be_is_a_failure(call: Call, factory: Project, target: Target) -> None:
    """The suite passed, but the host does not know the GPU in all of its ways: nothing is signed or moved."""
    put_image(factory, target)
    call("key", "create", "throwaway", code=0)
    half = make_bench(evidence=MadeUp(replace(HOST, known=())))
    out, err = call("verify", NAME, "--suite", "quick", "--promote", code=9, bench=half)
    assert " verified: " in out
    assert "no tag is moved: unsigned: " in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--capability", "A100"), "not a compute capability"),
        (("--nonce-dir", "x"), "--nonce-dir"),
        (("--kit", "x", "--promote"), "a kit runs elsewhere"),
        ((NAME, "-o", "x"), "--output and --kit"),
    ],
)
def test_options_that_do_not_go_together(call: Call, arguments: tuple[str, ...], words: str) -> None:
    _, err = call("verify", NAME, *arguments, code=2, bench=make_bench())
    assert words in err


def test_no_kit_is_written_for_gpus_that_it_cannot_start(
    factory: Project, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_image(factory, target)
    chosen = resolved(factory, NAME)
    definition = replace(chosen.definition, target=replace(target, cuda="rocm7"))
    amd = replace(chosen, definition=definition)
    monkeypatch.setattr("imagefactory.actions.verify.resolve_image", lambda *_: amd)
    with fails("amd-not-supported"):
        write_kit(
            factory, NAME, verify.VerifyOptions(), KitDestination(folder=tmp_path / "kit"), QuietProgress()
        )
    assert not (tmp_path / "kit").exists()


def test_a_kit_is_written_without_a_gpu(call: Call, factory: Project, target: Target, tmp_path: Path) -> None:
    digest = put_image(factory, target)
    out, _ = call(
        "verify", NAME, "--kit", str(tmp_path / "kit"), "--nonce-dir", str(tmp_path / "nonces"), code=0
    )
    assert f"python3 {tmp_path / 'kit'}/run.py" in out
    assert "add --image: no registry has it" in out
    kit = json.loads((tmp_path / "kit/kit.json").read_text())
    assert (kit["subject"]["index"], kit["level"]) == (digest, "full")
    assert (tmp_path / "nonces" / f"{kit['nonce']}.json").is_file()
    asked = json.loads((tmp_path / "kit/expectations.json").read_text())
    assert asked["nonce"] == kit["nonce"]
    assert "8.0" in asked["predicted"]
    _, err = call("verify", NAME, "--kit", str(tmp_path / "kit"), code=2)
    assert f"{tmp_path / 'kit'} already exists" in err
    (tmp_path / "link").symlink_to("nowhere")
    _, err = call("verify", NAME, "--kit", str(tmp_path / "link"), code=2)
    assert f"cannot create {tmp_path / 'link'}: " in err
    assert not list(tmp_path.glob(".link-*"))


# --- several GPUs --------------------------------------------------------------------------------


def test_several_gpus_by_the_command(call: Call, factory: Project, target: Target) -> None:
    put_image(factory, target)
    call("key", "create", "throwaway", code=0)
    call("key", "trust", "throwaway", code=0)
    two = make_bench(evidence=MadeUp(HOST_OF_TWO))
    out, err = call("verify", NAME, "--suite", "several", code=0, bench=two)
    assert "several suite on 2 x A GPU of the tests" in out
    assert "outcome   together: 10 checks passed on 2 x A GPU of the tests (8.0)" in out
    assert "verdict   signed by 'throwaway'" in out
    assert f"verdict list {NAME}" in err
    shown, _ = call("verdict", "list", NAME, code=0)
    assert "together" in shown
    assert "2 x A GPU of the tests" in shown
    call("verdict", "list", NAME, "--capability", "8.0", code=9)


def test_what_fails_on_several_ends_as_what_fails_on_one(
    call: Call, factory: Project, target: Target
) -> None:
    def apart(report: dict[str, Any]) -> None:
        (check,) = [check for check in report["checks"] if check["name"] == "all-reduce"]
        check.update(state="failed", outcome="wrong-numbers", detail="wrong sums")

    put_image(factory, target)
    two = make_bench(well_behaved(apart), evidence=MadeUp(HOST_OF_TWO))
    _, err = call("verify", NAME, "--suite", "several", code=9, bench=two)
    assert f"error: {NAME}: apart: all-reduce: wrong-numbers: wrong sums" in err


def test_several_gpus_are_not_there(call: Call, factory: Project, target: Target) -> None:
    put_image(factory, target)
    never_run = make_bench(ScriptedRunner(write=never))
    out, _ = call("verify", NAME, "--suite", "several", code=9, bench=never_run)
    assert "wrong-gpu: asked for several GPUs of one capability, this machine has A GPU" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--promote",), "--promote"),
    ],
)
def test_what_goes_with_one_gpu_alone(call: Call, options: tuple[str, ...], said: str) -> None:
    _, err = call("verify", NAME, "--suite", "several", *options, code=2, bench=make_bench())
    assert said in err


def test_an_image_that_several_gpus_cannot_be_asked_of(
    factory: Project, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its nonce is issued, here or in a kit."""
    put_image(factory, target)
    monkeypatch.delitem(frameworks.FRAMEWORKS, target.framework)
    options = verify.VerifyOptions(level="several", runner="unshare")
    with fails("suite-not-applicable"):
        verify.verify_and_attach(
            factory, NAME, options, make_bench(ScriptedRunner(write=never)), QuietProgress()
        )
    with fails("suite-not-applicable"):
        write_kit(factory, NAME, options, KitDestination(folder=tmp_path / "kit"), QuietProgress())
    assert not (factory.layout.path / "nonces").exists()
    assert not (tmp_path / "kit").exists()


def promoted(monkeypatch: pytest.MonkeyPatch, where: ImageReference | None) -> Any:
    """Where tags are moved after a verdict on an image that was found there."""
    chosen = SimpleNamespace(
        where=where, definition=SimpleNamespace(target=SimpleNamespace(family="pytorch"))
    )
    stages = {
        "check_name": None,
        "signing_key": "a key",
        "resolve_image": chosen,
        "verify_image": "a report",
        "write_unsigned_report": Path("report.json"),
        "sign_report": SimpleNamespace(signed="signed"),
        "attach_signed": ("there",),
    }
    for name, gives in stages.items():
        monkeypatch.setattr(verify, name, lambda *_, gives=gives, **__: gives)
    monkeypatch.setattr(
        verify,
        "place_of",
        lambda _, where, family: f"registry {where.registry}" if where else f"store {family}",
    )
    monkeypatch.setattr(verify, "promote", lambda factory, wanted, progress: wanted.place)
    bench = SimpleNamespace(evidence=SimpleNamespace(read=lambda: None), clock=lambda: NOW)
    options = verify.VerifyOptions(promote=True)
    project = SimpleNamespace(environ={})
    done = verify.verify_and_attach(project, "pytorch", options, bench, QuietProgress())  # type: ignore[arg-type]
    assert done.attached == ("there",)
    return done.promotion


def test_tags_move_where_the_image_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    where = ImageReference(registry="box.example", repository="images/pytorch", tag="2.3")
    assert promoted(monkeypatch, where) == "registry box.example"
    assert promoted(monkeypatch, None) == "store pytorch"
