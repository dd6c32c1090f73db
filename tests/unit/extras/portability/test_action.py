"""`portability` from a name to a statement that others read: what is exported, tried, signed and attached.

The image only says that all is well; what signs here is a throwaway key.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.actions.transfer import PushOptions, push_target
from imagefactory.actions.verdicts import local_place
from imagefactory.actions.verify import VerifyDependencies
from imagefactory.errors import BuildError, NoGpuError, NothingSelectedError, UsageError
from imagefactory.extras.portability import action
from imagefactory.extras.portability.action import (
    PortabilityOptions,
    PortabilityResult,
    PortableStatements,
    port_models,
    read_portable,
    resolve_models,
    write_models,
)
from imagefactory.model import CommandResult, RunSpec, Target
from imagefactory.oci.candidates import MODELS_TYPE, PORTABLE_TYPE
from imagefactory.oci.manifests import Image
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.trust.keys import keys_directory, make_key
from imagefactory.trust.policy import TrustGrant, add_key
from imagefactory.trust.verdict import VerdictStatus
from imagefactory.verify.report import Hardware
from tests.made.factory import NAME, put_image
from tests.made.portable import EXPORT, MODEL, ROW, TRIED
from tests.made.registry import registry_made_here
from tests.made.verdicts import HOST

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@dataclass
class Programs:
    """An image in which both programs say that all is the same, or `wrong` of a runtime."""

    wrong: str = ""
    specs: list[RunSpec] = field(default_factory=list)

    def require(self) -> str:
        return "1"

    def run(self, image: Image, spec: RunSpec) -> CommandResult:
        self.specs.append(spec)
        mounts = {mount.target: mount.source for mount in spec.mounts}
        asked = json.loads((mounts["/imagefactory/expect"] / "asked.json").read_text())
        folder, program = mounts["/imagefactory/report"], spec.argv[-3]
        if program == "export":
            rows = [ROW, {**ROW, "model": "lost", "state": "failed", "outcome": "load-failed", "error": None}]
            models = [MODEL, {**MODEL, "name": "lost"}]
            whole = self.wrong != "lost"
            document = {**EXPORT, "models": models[: 1 if whole else 2], "rows": rows[: 1 if whole else 2]}
            (folder / "net.onnx").write_bytes(b"the model")
            (folder / "net.npz").write_bytes(b"data")
        else:
            assert [model["name"] for model in asked["models"]] == ["net"]
            rows = [{**ROW, "by": by} for by in asked["runtimes"]]
            for row in rows:
                if row["by"] == self.wrong:
                    row |= {"state": "failed", "outcome": "wrong-numbers", "detail": "off", "error": 0.5}
            document = {**TRIED, "rows": rows}
        name = "export.json" if program == "export" else "try.json"
        (folder / name).write_text(json.dumps({**document, "nonce": asked["nonce"]}))
        return CommandResult(returncode=0, stdout="", stderr="", seconds=0.1)


@dataclass
class Machine:
    hardware: Hardware | None = None

    def read(self) -> Hardware:
        if self.hardware is None:
            raise NoGpuError("no-gpu", "no GPU: there is none", hint="run this where there is one")
        return self.hardware


@pytest.fixture(autouse=True)
def _brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of these tests holds no runtime; that one must is tried where it is decided."""
    monkeypatch.setattr(action, "check_has_runtime", lambda name, definition: None)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "models.py"
    path.parent.mkdir()
    path.write_text("def models(): ...\n")
    return path


def port(
    factory: Project, models: Path, *to: str, inside: Programs | None = None, gpu: bool = False, **more: Any
) -> PortabilityResult:
    clock: Callable[[], datetime] = iter(NOW + timedelta(seconds=n) for n in range(1000)).__next__
    bench = VerifyDependencies(
        evidence=Machine(HOST if gpu else None),
        clock=clock,
        runner=inside or Programs(),  # type: ignore[arg-type]
    )
    options = PortabilityOptions(
        models=models,
        to=to or ("onnxruntime-cpu", "openvino-cpu"),
        batches=(1,),
        output=models.parent.parent / "out",
        runner="unshare",
        **more,
    )
    return port_models(factory, NAME, options, bench, QuietProgress())


def trust_own_key(factory: Project) -> None:
    key = make_key(keys_directory(factory.environ), "throwaway")
    grant = TrustGrant(key=key, since=NOW.date(), until=(NOW + timedelta(days=9)).date())
    settings = factory.settings.root_path / "imagefactory.toml"
    settings.write_text(add_key("", grant, settings.name))


def found(factory: Project, registry: str = "") -> PortableStatements:
    return read_portable(factory, NAME, registry, NOW + timedelta(hours=1), QuietProgress())


def test_without_a_key_it_stays_a_report(factory: Project, target: Target, models: Path) -> None:
    put_image(factory, target)
    done = port(factory, models)
    assert done.report.portable
    assert done.why.startswith("unsigned: no key")
    assert done.attached == ()
    assert [row.by for row in done.report.rows] == ["torch-cpu", "onnxruntime-cpu", "openvino-cpu"]
    assert done.report.gpus == ()
    out = models.parent.parent / "out"
    assert sorted(path.name for path in out.iterdir()) == ["net.npz", "net.onnx"]
    assert found(factory).judged == ()


def test_what_holds_is_signed_and_its_files_come_back(
    factory: Project, target: Target, models: Path, tmp_path: Path
) -> None:
    put_image(factory, target)
    trust_own_key(factory)
    done = port(factory, models)
    assert (done.why, done.attached) == ("signed by 'throwaway'", (str(factory.layout.path),))
    (judged,) = found(factory).judged
    assert (judged.standing, judged.statement and judged.statement.report) == (
        VerdictStatus.GOOD,
        done.report,
    )
    (path,) = write_models(found(factory), tmp_path / "again")
    assert (path.name, path.read_bytes()) == ("net.onnx", b"the model")
    port(factory, models)  # of the same models: a second statement, and no second copy
    assert len(found(factory).judged) == 2
    place = local_place(factory, target.family)
    assert len(place.store.referrers(place.repository, found(factory).manifest, MODELS_TYPE)) == 1


def test_it_goes_to_a_registry_that_has_the_image(
    factory: Project, target: Target, models: Path, tmp_path: Path
) -> None:
    put_image(factory, target)
    trust_own_key(factory)
    with registry_made_here() as registry:
        with pytest.raises(UsageError, match="has no image sha256:"):
            port(factory, models, registry=registry.host)
        push_target(factory, target, PushOptions(registry=registry.host, now=NOW), QuietProgress())
        done = port(factory, models, registry=registry.host)
        assert done.attached == (str(factory.layout.path), f"{registry.host}/{target.family}")
        there = found(factory, registry.host)
        assert there.newest
        assert there.place.store.name == registry.host
        assert write_models(there, tmp_path / "again")[0].read_bytes() == b"the model"
        kinds = (PORTABLE_TYPE, MODELS_TYPE)
        for kind in kinds:
            assert there.place.store.referrers(there.place.repository, there.manifest, kind)


def test_a_statement_of_a_stranger_gives_no_files(factory: Project, target: Target, models: Path) -> None:
    put_image(factory, target)
    make_key(keys_directory(factory.environ), "throwaway")
    assert port(factory, models).attached
    assert [one.standing for one in found(factory).judged] == [VerdictStatus.WRONG_KEY]
    with pytest.raises(NothingSelectedError, match="wrong-key") as caught:
        write_models(found(factory), models.parent)
    assert caught.value.code == "portability-not-verified"
    assert "imagefactory key trust FILE.pub" in caught.value.hint


@pytest.mark.parametrize(
    ("wrong", "rows"),
    [
        ("openvino-cpu", {("net", "openvino-cpu"): "failed", ("net", "onnxruntime-cpu"): "passed"}),
        ("lost", {("lost", "torch-cpu"): "failed", ("lost", "openvino-cpu"): "not-run"}),
    ],
)
def test_what_differs_anywhere_is_not_signed(
    factory: Project, target: Target, models: Path, wrong: str, rows: dict[tuple[str, str], str]
) -> None:
    put_image(factory, target)
    make_key(keys_directory(factory.environ), "throwaway")
    done = port(factory, models, inside=Programs(wrong))
    assert not done.report.portable
    assert done.why == "unsigned: not every model computed the same"
    states = {(row.model, row.by): row.state.value for row in done.report.rows}
    assert rows.items() <= states.items()
    assert found(factory).judged == ()


def test_a_runtime_in_another_image_is_its_own_run(factory: Project, target: Target, models: Path) -> None:
    digest = put_image(factory, target)
    inside = Programs()
    done = port(factory, models, "onnxruntime-cpu", f"openvino-cpu@{digest}", "tvm-cpu", inside=inside)
    asked = [spec.argv[-3] for spec in inside.specs]
    assert asked == ["export", "try", "try"]
    assert {one.by for one in done.report.served} == {"onnxruntime-cpu", "openvino-cpu", "tvm-cpu"}
    assert all(one.subject.index == digest for one in done.report.served)


def test_a_gpu_is_shown_where_a_runtime_needs_it(factory: Project, target: Target, models: Path) -> None:
    digest = put_image(factory, target)
    inside = Programs()
    done = port(factory, models, "onnxruntime-cuda", f"tvm-cpu@{digest}", inside=inside, gpu=True)
    assert [spec.gpus for spec in inside.specs] == [True, True, False]
    assert (done.report.gpus, done.report.driver) == (HOST.gpus, HOST.driver)
    with pytest.raises(NoGpuError):
        port(factory, models, "onnxruntime-cuda")


@pytest.mark.parametrize(
    ("to", "kind", "said"),
    [
        (("tvm",), UsageError, "'tvm'"),
        (("tvm-cpu", "tvm-cpu"), UsageError, "--to tvm-cpu is repeated"),
        (("tvm-cpu", f"tvm-cpu@{NAME}"), UsageError, "--to tvm-cpu is repeated"),
        (("tvm-cpu@other-1.0-cpu",), NothingSelectedError, "'other-1.0-cpu'"),
        (("tvm-cpu@pytorch-2.15-cu132",), BuildError, "pytorch-2.15-cu132"),
    ],
)
def test_runtimes_that_cannot_be(
    factory: Project, target: Target, models: Path, to: tuple[str, ...], kind: type[Exception], said: str
) -> None:
    put_image(factory, target)
    with pytest.raises(kind, match=said):
        port(factory, models, *to, inside=Programs())


def test_models_that_cannot_be_shown(factory: Project, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    (home / "models.py").touch()
    for path, code in (
        (home / "models.py", "models-directory-private"),
        (tmp_path / "nothing.py", "models-file-invalid"),
        (tmp_path, "models-file-invalid"),
    ):
        with pytest.raises(UsageError) as caught:
            resolve_models(factory, path)
        assert caught.value.code == code
