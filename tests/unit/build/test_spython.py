"""What spython makes of the definitions: its users move between docker and apptainer with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from spython.main.parse.parsers import DockerParser, SingularityParser
from spython.main.parse.writers import DockerWriter, SingularityWriter

from tests.made.rendered import body, parsed, sections

ROOT = Path(__file__).parents[3]
FOLDERS = sorted(path.parent.name for path in ROOT.glob("definitions/*/apptainer.def"))


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = ROOT / "definitions" / request.param
    monkeypatch.chdir(path)  # spython looks for what is copied in the folder that it is called in
    return path


def joined(text: str) -> str:
    return " ".join(text.replace("\\\n", " ").split())


def variables(dockerfile: str) -> dict[str, str]:
    return dict(pair for each in parsed(dockerfile) if each.keyword == "ENV" for pair in each.pairs)


def test_a_dockerfile_of_the_same_commands(folder: Path) -> None:
    definition = (folder / "apptainer.def").read_text()
    made = DockerWriter(SingularityParser("apptainer.def").recipe).convert()
    found = parsed(made)
    header, _ = sections(definition)
    assert found[0].value.split()[0] == header["from"]
    assert {each.keyword for each in found} == {"FROM", "ADD", "LABEL", "ENV", "RUN", "CMD"}
    files = {each.value.split()[0] for each in found if each.keyword == "ADD"}
    assert files == {line.split()[0] for line in body(definition, "files").splitlines() if line.strip()}
    ran = [joined(each.value) for each in found if each.keyword == "RUN"]
    # Each step is one RUN, however many commands it has: what it sets or fails with holds to its end.
    steps = joined("\n".join(line for line in body(definition, "post").splitlines() if "#" not in line[:5]))
    assert " ".join(ran) == steps
    assert sum(each.startswith("set -eu;") for each in ran) == steps.count("set -eu; ") > 3
    (started,) = body(definition, "runscript").splitlines()
    assert found[-1].value == started.strip()


def test_its_dockerfile_sets_what_ours_sets(folder: Path) -> None:
    ours = variables((folder / "Dockerfile").read_text())
    assert ours.pop("HOME")  # apptainer has one for everybody
    assert variables(DockerWriter(SingularityParser("apptainer.def").recipe).convert()) == ours


def test_a_definition_of_our_dockerfile(folder: Path) -> None:
    made = SingularityWriter(DockerParser("Dockerfile").recipe).convert()
    assert made.startswith("Bootstrap: docker\nFrom: ")
    for command in ("apt-get install", "chmod 1777 /home/user", "/opt/pip/bin/pip"):
        assert command in made
