"""The exact text of the errors that people meet most in the stages m to z, and in projects."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from imagefactory.access import Access, registry_place
from imagefactory.actions.definition import find_own_files
from imagefactory.actions.images import find_stored
from imagefactory.actions.plan import read_rows
from imagefactory.actions.run import find_built, offered_reference
from imagefactory.actions.sweep import check_limits, find_sweep
from imagefactory.actions.verify import check_output
from imagefactory.errors import ImagefactoryError
from imagefactory.extras.nightly.nights import read_address, read_saved_plan
from imagefactory.extras.site.action import write_report
from imagefactory.model import FilesSpec, SourceLocation
from imagefactory.project import recipes_directory, require_own_project
from imagefactory.schedulers.pool import JobLimits
from imagefactory.settings.load import load_settings
from tests.made.catalog import make_image
from tests.made.values import make_target


def access(path: Path) -> Access:
    environ = {"HOME": str(path), "XDG_CONFIG_DIRS": str(path), "IMAGEFACTORY_STORE": f"{path}/store"}
    return Access(settings=load_settings(directory=None, start=path, environ=environ), environ=environ)


def own_files(path: Path) -> None:
    where = SourceLocation(file="recipes/lab.yaml", line=5, column=9)
    find_own_files(path, [FilesSpec(folder="/app", pattern="*.py", where=where)])


@pytest.mark.parametrize(
    ("raises", "code", "message", "hint"),
    [
        (
            lambda path: registry_place(access(path)),
            "no-registry-set",
            "no registry is set",
            'pass --registry HOST[:PORT][/PATH], or set registry = "..." in imagefactory.toml',
        ),
        (
            lambda path: require_own_project(access(path).settings, "lock"),
            "project-not-found",
            "lock needs a project, and no imagefactory.toml is here or in a parent directory",
            "create one: imagefactory init (--with pytorch,jax adds recipes)",
        ),
        (
            lambda path: recipes_directory(load_settings(directory=path, start=path, environ={"HOME": "/"})),
            "project-not-found",
            "PATH is not a project: it has no recipes/bases.yaml",
            "create one: imagefactory init PATH",
        ),
        (
            lambda path: find_built(access(path), make_target(name="lab-1.0-cu121"), ""),
            "image-not-built",
            "lab-1.0-cu121 is not built",
            "run imagefactory build lab-1.0-cu121",
        ),
        (
            lambda path: find_stored(access(path), "lab:1.0"),
            "image-not-found",
            "no image 'lab:1.0' in PATH/store",
            "see imagefactory image list",
        ),
        (
            lambda _: offered_reference(make_image(target="lab-1.0-cu121", reference="", sifs=())),
            "image-not-pullable",
            "lab-1.0-cu121 is in no registry",
            "to see other images, run imagefactory search",
        ),
        (
            lambda path: find_sweep(access(path).settings, "20261122-061500-1f3a"),
            "sweep-unknown",
            "no sweep '20261122-061500-1f3a'",
            "start one: imagefactory sweep start TARGET",
        ),
        (
            lambda _: check_limits(JobLimits(idle=timedelta(days=5))),
            "sweep-too-long",
            "a job could take 18 days with its retries, but its result must be signed within 14 days",
            "lower --idle-limit, --run-limit or --retries",
        ),
        (
            lambda path: check_output(path / "file" / "report.json"),
            "cannot-write-file",
            "cannot write PATH/file/report.json: file exists",
            "choose another file: --output FILE",
        ),
        (
            lambda path: write_report(path, {"index.html": ""}),
            "output-foreign-files",
            "PATH contains files of other programs",
            "choose another directory with --output, or overwrite them with --force",
        ),
        (
            lambda path: read_rows(path / "space.csv"),
            "cannot-read-file",
            "cannot read PATH/space.csv: no such file or directory",
            "pass a CSV file",
        ),
        (
            lambda path: read_saved_plan(path / "file"),
            "night-file-not-json",
            "PATH/file is not JSON",
            "pass a file that `plan --keep FILE` wrote",
        ),
        (
            lambda _: read_address("http://chat.example.org/x"),
            "webhook-invalid",
            "the --webhook address must start with https://",
            "http:// is allowed only for a service on this machine",
        ),
        (
            own_files,
            "recipe-invalid",
            "recipes/lab.yaml:5:9: '*.py' in 'files' matches no file (write a path or a glob below PATH)",
            "",
        ),
    ],
)
def test_the_message_and_its_hint(
    tmp_path: Path, raises: Callable[[Path], object], code: str, message: str, hint: str
) -> None:
    (tmp_path / "file").write_text("{")
    with pytest.raises(ImagefactoryError) as caught:
        raises(tmp_path)
    error = caught.value
    texts = (error.message.replace(str(tmp_path), "PATH"), error.hint.replace(str(tmp_path), "PATH"))
    assert (error.code, *texts) == (code, message, hint)
