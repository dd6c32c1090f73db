"""An engine and a runner beside those that are there, as one row of ENGINES and one of RUNNERS name them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from imagefactory.access import Access
from imagefactory.build.base.image import BuiltBase
from imagefactory.build.protocol import BuildInputs, Engine
from imagefactory.model import BuildSpec, CommandResult, RunSpec
from imagefactory.oci.layout import Layout, reference
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.progress import Progress
from imagefactory.runtime.protocol import Runner, RunnerSupport
from imagefactory.settings.choices import RUNNERS, RunnerRow
from tests.made.layout import add_image


@dataclass
class OneLayer:
    """Makes an image whose one layer says what it is made of."""

    layout: Layout

    def require(self) -> str:
        return "one layer 1.0"

    def find(self, definition: BuildSpec, base: BuiltBase) -> Image | SifArtifact | None:
        return self.layout.image(reference(definition.target))

    def build(self, definition: BuildSpec, supplies: BuildInputs, progress: Progress) -> Image | SifArtifact:
        told = f"{definition.lock.content_hash} on {supplies.base().identity}".encode()
        add_image(self.layout, reference(definition.target), [told])
        made = self.layout.image(reference(definition.target))
        assert made is not None
        return made

    def toolchain(self, definition: BuildSpec) -> str:
        return ""

    def tag(self, definition: BuildSpec, image: Image | SifArtifact) -> None:
        assert isinstance(image, Image)


@dataclass
class Echo:
    """Starts nothing: a command's output is what was prepared, and the command."""

    ground: RunnerSupport
    prepared: str = ""
    checked: bool = False
    unpacked: None = None

    def require(self) -> str:
        return "echo 1.0"

    def prepare(self, made: Image | SifArtifact, *, checked: bool) -> Image | SifArtifact:
        assert isinstance(made, Image)
        self.prepared, self.checked = made.manifest, checked
        return made

    def run(self, image: Image | SifArtifact, spec: RunSpec) -> CommandResult:
        return CommandResult(
            returncode=0, stdout=f"{self.prepared} {' '.join(spec.argv)}", stderr="", seconds=0.0
        )


def make_engine(access: Access) -> Engine:
    return OneLayer(access.layout)


def make_runner(ground: RunnerSupport) -> Runner:
    return Echo(ground)


def remember_runners(monkeypatch: pytest.MonkeyPatch) -> list[Echo]:
    """A row `echo` of RUNNERS, and each runner that is made by it."""
    made: list[Echo] = []

    def remember(ground: RunnerSupport) -> Runner:
        made.append(Echo(ground))
        return made[-1]

    monkeypatch.setattr(sys.modules[__name__], "make_runner", remember)
    monkeypatch.setitem(RUNNERS, "echo", RunnerRow(module=__name__, extra="build"))
    return made
