"""Files as people bring them, through the command: what `new --from` takes, what it says, where it stops.

Every text is written for these tests; `shape` names the public file that writes so,
or says that none was looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from imagefactory.cli import main

FOLDER = Path(__file__).parents[3] / "recipes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`said` must stand in what the command says, `unsaid` must not; `code` is its exit code."""

    shape: str
    file: str
    text: str
    asked: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    code: int = 0


ENVIRONMENTS = (
    Case(
        shape="rapidsai/cuml conda/environments/all_cuda-133_arch-x86_64.yaml",
        file="environment.yml",
        text="channels: [rapidsai, conda-forge]\ndependencies:\n- cuda-version=12.9\n"
        "- cudf==26.10.*,>=0.0.0a0\n- pytorch>=2.7.0=cuda12*\n- python=3.12\n",
        asked=("--framework", "pytorch=2.7"),
        said=('"cudf 26.10.*,>=0.0.0a0"', "pytorch * cuda12*", 'cuda: ["12.9"]'),
        unsaid=("cannot be taken over",),
    ),
    Case(
        shape="quotes and a star behind ==, as an issue reported them without a file",
        file="environment.yml",
        text="channels: [pytorch, conda-forge]\ndependencies:\n- python='3.10'\n- pytorch=1.12.1\n"
        "- conda-forge::cudatoolkit==11.3.*\n",
        said=('python: "3.10"', 'cuda: ["11.3"]', "was read as 'conda-forge::cudatoolkit=11.3.*'"),
        unsaid=("cannot be taken over",),
    ),
    Case(
        shape="conda/conda-lock docs/src_environment_yml.md",
        file="environment.yml",
        text="channels: [conda-forge]\ndependencies:\n- python=3.11  # [linux]\n- pytorch=2.5  # [not win]\n"
        "- libomp  # [osx or win]\n- cuda-version=12.6  # [linux64]\n- numpy  # [fast]\n",
        said=("'libomp' is not for linux-64", "selector '# [fast]' is not judged", "- numpy"),
        unsaid=("- libomp",),
    ),
    Case(
        shape="reyessanchezo/evGrandPrix-Simulator extras/environment_cross.py",
        file="environment.yml",
        text="channels: [conda-forge]\ndependencies: [python=3.11, 'pytorch[version=2.5]']\n",
        said=("note: environment.yml:2:29: 'pytorch[version=2.5]' cannot be taken over", "no framework"),
        code=2,
    ),
    Case(
        shape="three = and a v, as an issue reported them without a file",
        file="requirements.txt",
        text="torch===2.9.0\nxformers==v0.6.0\n",
        said=("- xformers==0.6.0", 'version: "2.9.0"'),
        unsaid=("cannot be taken over",),
    ),
)


@pytest.mark.parametrize("case", ENVIRONMENTS, ids=lambda case: case.shape)
def test_what_people_bring(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for name in ("bases.yaml", "pytorch.yaml"):
        (recipes / name).write_bytes((FOLDER / name).read_bytes())
    (tmp_path / "imagefactory.toml").touch()
    source = tmp_path / case.file
    source.write_text(case.text)
    with pytest.raises(SystemExit) as ended:
        main(["-C", str(tmp_path), "new", "lab", "--from", str(source), "--print", *case.asked])
    heard = capsys.readouterr()
    told = " ".join(f"{heard.out} {heard.err}".split())
    assert int(ended.value.code or 0) == case.code, told
    for text in case.said:
        assert text in told
    for text in case.unsaid:
        assert text not in told
