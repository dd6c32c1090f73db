"""A command in an image of a catalog: fetched once by its digest, and started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.access import Access
from imagefactory.actions.run import fetch_offered, own_start, run_artifact
from imagefactory.errors import NothingSelectedError
from imagefactory.model import ContainerStart, RunSpec
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.manifests import Image
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.progress import QuietProgress
from imagefactory.settings.choices import SettingValue
from imagefactory.trust.attached import read_subject
from tests.made.catalog import make_image
from tests.made.engine_of_one_row import remember_runners
from tests.made.errors import fails
from tests.made.signing import Bench
from tests.made.values import make_target

INIT = ("/usr/bin/tini", "-s", "--")
SPEC = RunSpec(argv=("echo", "it runs"))


def test_it_is_fetched_once_and_started(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody with a store of his own, and no factory."""
    runners = remember_runners(monkeypatch)
    digest = bench.push(b"a", 22)
    subject = read_subject(
        StoreRepository(store=RegistryClient(bench.registry.host), repository="one"), digest
    )
    image = make_image(reference=f"{bench.registry.host}/one@{digest}", subject=subject, sifs=())
    settings = replace(
        bench.factory.settings, store=SettingValue(value=str(tmp_path / "own"), origin="default")
    )
    access = Access(settings=settings, environ={})
    for _ in range(2):
        done = run_artifact(
            access, fetch_offered(access, image, QuietProgress()), SPEC, "echo", QuietProgress()
        )
        assert done.stdout == f"{subject.manifest} echo it runs"
        bench.registry.find("one").manifests.clear()  # a second fetch would fail
    assert len(runners) == 2
    assert len(access.layout.tags()) == 1


def test_what_no_registry_has_is_told(bench: Bench) -> None:
    image = make_image(reference="")
    with fails("image-not-pullable", r"\.sif", hint="imagefactory job write"):
        fetch_offered(bench.factory, image, QuietProgress())
    sif = replace(image.sifs[0], reference=f"registry.example.org/gpu/pytorch@{image.sifs[0].subject.index}")
    with pytest.raises(NothingSelectedError) as caught:
        fetch_offered(bench.factory, replace(image, sifs=(sif,)), QuietProgress())
    assert "apptainer exec --nv oras://registry.example.org/gpu/pytorch@sha256:" in caught.value.hint


@pytest.mark.parametrize(
    ("start", "own"),
    [
        (ContainerStart(entrypoint=INIT, command=("python",), workdir="/"), ContainerStart()),
        (
            ContainerStart(
                entrypoint=(*INIT, "start.sh"),
                command=("python", "train.py"),
                workdir="/app",
                user="1000:100",
            ),
            ContainerStart(command=("start.sh", "python", "train.py"), workdir="/app", user="1000"),
        ),
        (ContainerStart(command=("train",), user="somebody"), ContainerStart(command=("train",))),
        (ContainerStart(), ContainerStart()),
    ],
)
def test_a_container_starts_as_its_image_says(start: ContainerStart, own: ContainerStart) -> None:
    image = Image(
        name="a", digest="d", manifest="m", config="c", size=0, layers=(), environment=(), start=start
    )
    assert own_start(image, None) == own
    target = make_target(start=ContainerStart(entrypoint=("a",), command=("b",), workdir="/c"))
    assert own_start(image, target) == ContainerStart(command=("a", "b"), workdir="/c")
