"""The nightly build that `init` writes: pinned, linted, never over a user's file, its shells run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagefactory import __version__, errors
from imagefactory.actions import new_project
from imagefactory.actions.new_project import SOURCE, ImagefactorySource, find_source
from imagefactory.errors import UsageError
from imagefactory.settings.load import SHIPPED
from imagefactory.views.plan import TargetJob
from tests.made.command import Call
from tests.made.errors import fails

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
URL = "https://github.com/imagefactory/imagefactory"
GITHUB = [
    ".github/runner_hook.sh",
    ".github/workflows/README.md",
    ".github/workflows/nightly.yml",
    ".github/workflows/promote.yml",
]
GITLAB = [".gitlab-ci.yml", ".gitlab/README.md"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and an imagefactory whose commit is known."""
    monkeypatch.setattr(
        new_project, "find_source", lambda package: ImagefactorySource(url=URL, commit=COMMIT)
    )
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def tool(name: str, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name(name)
    clean = {key: text for key, text in os.environ.items() if not key.startswith(("GH_", "ZIZMOR_"))}
    return subprocess.run([program, *words], cwd=cwd, env=clean, capture_output=True, text=True, timeout=60)


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


# --- what is written -------------------------------------------------------------------------------


def test_an_empty_folder_becomes_a_project_with_its_nights(call: Call, here: Path) -> None:
    plain = set(call("init", "plain", "--json", root=None).json()["written"])  # type: ignore[call-overload]
    assert set(call("init", "a", "--github", "--json", root=None).json()["written"]) == plain | set(GITHUB)  # type: ignore[call-overload]
    assert call("init", "b", "--gitlab", root=None).code == 0
    assert files(here / "b") == plain | set(GITLAB)
    assert call("init", "b", "--github", "--gitlab", "--json", root=None).json()["written"] == GITHUB
    again = call("init", "b", "--github", "--gitlab", "--json", root=None).json()
    assert again["written"] == []


def test_a_caller_is_ours_pinned_to_the_commit_that_is_installed(call: Call, here: Path) -> None:
    call("init", "--github", root=None)
    for name in ("nightly", "promote"):
        text = (here / f".github/workflows/{name}.yml").read_text()
        ours = (ROOT / f".github/workflows/{name}.yml").read_text()
        assert text == re.sub(r"\$/(\S+)", rf"imagefactory/imagefactory/\1@{COMMIT} # v{__version__}", ours)
        called = [job["uses"] for job in yaml.safe_load(text)["jobs"].values() if "uses" in job]
        assert called
        for one in called:
            path = one.removeprefix("imagefactory/imagefactory/").removesuffix(f"@{COMMIT}")
            assert (ROOT / path).is_file()
    assert (here / GITHUB[0]).read_bytes() == (ROOT / GITHUB[0]).read_bytes()


def test_no_mark_is_left_and_every_variable_and_secret_is_in_the_readme(call: Call, here: Path) -> None:
    call("init", "--github", "--gitlab", root=None)
    assert not [
        name for name in (*GITHUB, *GITLAB) if re.search(r"@[A-Z]+@|\$/\.", (here / name).read_text())
    ]
    workflows = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    asked = set(re.findall(r"(?:vars|secrets)\.([A-Z_]+)", workflows)) - {"RELEASE", "RELOCK"}
    assert asked == named(here / GITHUB[1])
    gitlab = (here / ".gitlab-ci.yml").read_text()
    theirs = named(here / GITLAB[1])
    assert {name for name in theirs if re.search(rf"\$\{{?{name}\b", gitlab)} == theirs


def named(readme: Path) -> set[str]:
    """What the first column of its tables names."""
    rows = re.findall(r"^\| (`[A-Z_`, ]+`) ", readme.read_text(), re.MULTILINE)
    return set(re.findall(r"[A-Z_]+", " ".join(rows)))


@pytest.mark.parametrize("name", [*GITHUB, *GITLAB])
def test_a_file_of_the_user_stops_it_before_anything_is_written(call: Call, here: Path, name: str) -> None:
    path = here / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine\n")
    said = call("init", "--github", "--gitlab", root=None)
    assert said.code == errors.EXIT_USAGE
    assert name in said.err
    assert (files(here), path.read_text()) == ({name}, "mine\n")


def test_a_link_of_the_user_is_not_replaced(call: Call, here: Path) -> None:
    (here / ".gitlab-ci.yml").symlink_to("of-another-branch.yml")
    assert call("init", "--gitlab", root=None).code == errors.EXIT_USAGE
    assert [path.name for path in here.iterdir()] == [".gitlab-ci.yml"]
    assert (here / ".gitlab-ci.yml").is_symlink()


def test_a_folder_within_a_repository_has_no_nights(call: Call, here: Path) -> None:
    """GitHub and GitLab read the files at its top only."""
    (here / ".git").mkdir()
    for option in ("--github", "--gitlab"):
        said = call("init", "lab", option, root=None)
        assert (said.code, said.error_codes) == (errors.EXIT_USAGE, ("not-repository-root",))
    assert not (here / "lab").exists()
    assert call("init", "lab", root=None).code == 0
    (here / "lab/.git").mkdir()
    assert call("init", "lab", "--github", root=None).code == 0
    assert call("init", "--gitlab", root=None).code == 0
    assert call("init", ".", "--gitlab", root=None).code == 0


# --- where this imagefactory comes from ------------------------------------------------------------


def package_of(tmp_path: Path) -> Path:
    package = tmp_path / "site" / "imagefactory"
    package.mkdir(parents=True)
    return package


def test_release_records_where_a_release_comes_from(tmp_path: Path) -> None:
    """The step of release.yml, and what reads its file."""
    package = package_of(tmp_path)
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["build"]["steps"]
    scripts = [step.get("run", "") for step in steps]
    (at,) = (number for number, script in enumerate(scripts) if SOURCE in script)
    assert at < next(number for number, script in enumerate(scripts) if "hatchling build" in script)
    environ = {
        "PATH": os.environ["PATH"],
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_REPOSITORY": "imagefactory/imagefactory",
        "GITHUB_SHA": COMMIT,
    }
    command = ["bash", "-e", "-c", scripts[at]]
    subprocess.run(command, cwd=package.parent, env=environ, check=True)
    assert find_source(package) == ImagefactorySource(url=URL, commit=COMMIT)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("https://github.com/lab/tool", "https://github.com/lab/tool"),
        ("https://me:secret@github.com/lab/tool.git", "https://github.com/lab/tool"),
        ("git@github.com:lab/tool.git", "https://github.com/lab/tool"),
        ("ssh://git@gitlab.example.org:2222/a/b/tool.git", "https://gitlab.example.org/a/b/tool"),
        ("https://gitlab.example.org:8443/a/b/tool/", "https://gitlab.example.org:8443/a/b/tool"),
        ("/srv/git/tool.git", ""),
        ("../tool/x/y", ""),
        ("https://github.com/lab/tool'; id; '", ""),
        ("https://github.com/lab", ""),
        ("", ""),
    ],
)
def test_an_address_of_a_repository_is_read_without_passwords(tmp_path: Path, url: str, found: str) -> None:
    package = package_of(tmp_path)
    (package / SOURCE).write_text(json.dumps({"url": url, "commit": COMMIT}))
    if found:
        assert find_source(package) == ImagefactorySource(url=found, commit=COMMIT)
    else:
        with fails("commit-unknown"):
            find_source(package)


def test_a_clone_is_pinned_to_a_commit_that_its_origin_has(tmp_path: Path) -> None:
    package = package_of(tmp_path)

    def git(*words: str) -> str:
        command = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words)
        return subprocess.run(
            command, cwd=package.parent, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    with fails("commit-unknown"):
        find_source(package)
    git("commit", "-q", "--allow-empty", "-m", "one")
    git("remote", "add", "origin", "git@github.com:lab/tool.git")
    with pytest.raises(UsageError, match=git("rev-parse", "HEAD")[:12]) as caught:
        find_source(package)
    assert caught.value.code == "commit-not-pushed"
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert find_source(package) == ImagefactorySource(
        url="https://github.com/lab/tool", commit=git("rev-parse", "HEAD")
    )
    git("commit", "-q", "--allow-empty", "-m", "two")
    with pytest.raises(UsageError, match=git("rev-parse", "HEAD")[:12]) as caught:
        find_source(package)
    assert caught.value.code == "commit-not-pushed"


@pytest.mark.parametrize(
    ("told", "commit"),
    [
        ({"url": f"{URL}.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}, COMMIT),
        ({"url": "file:///home/me/imagefactory", "dir_info": {}}, ""),
        (None, ""),
    ],
)
def test_pip_records_what_it_installed_from_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any, commit: str
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return json.dumps(told) if told else None

    monkeypatch.setattr(new_project, "distribution", lambda name: Installed())
    if commit:
        assert find_source(package_of(tmp_path)) == ImagefactorySource(url=URL, commit=commit)
    else:
        with pytest.raises(UsageError):
            find_source(package_of(tmp_path))


def test_without_a_commit_nothing_is_written(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_project, "find_source", lambda package: find_source(package_of(tmp_path)))
    monkeypatch.setattr(new_project, "distribution", no_distribution)
    lab = tmp_path / "lab"
    assert call("init", str(lab), "--github", root=None).code == errors.EXIT_USAGE
    assert not lab.exists()


def no_distribution(name: str) -> None:
    raise new_project.PackageNotFoundError(name)


def test_github_cannot_call_what_gitlab_has(call: Call, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = ImagefactorySource(url="https://gitlab.example.org/a/b/tool", commit=COMMIT)
    monkeypatch.setattr(new_project, "find_source", lambda package: mirror)
    assert call("init", "--github", root=None).code == errors.EXIT_USAGE
    assert list(here.iterdir()) == []
    assert call("init", "--gitlab", root=None).code == 0
    assert f"'{mirror.url}' {COMMIT}" in (here / ".gitlab-ci.yml").read_text()


# --- linters ---------------------------------------------------------------------------------------


def test_linters_of_github_find_nothing(call: Call, here: Path) -> None:
    call("init", "--github", root=None)
    (here / ".git").mkdir()  # where actionlint looks for a project
    callers = sorted((here / ".github/workflows").glob("*.yml"))
    assert len(callers) == 2
    words = ("--offline", "--no-config", "--no-ignores", "--color=never", *callers)
    done = tool("zizmor", *words, cwd=here)
    assert (done.returncode, "No findings to report" in done.stdout) == (0, True), done.stdout
    done = tool("actionlint", "-no-color", "-ignore", 'label "gpu" is unknown', *callers, cwd=here)
    assert (done.returncode, done.stdout) == (0, "")


def schema(path: Path) -> int:
    return tool("check-jsonschema", "--builtin-schema", "vendor.gitlab-ci", path, cwd=path.parent).returncode


def test_gitlabs_schema_takes_the_file_and_no_wrong_one(call: Call, here: Path) -> None:
    call("init", "--gitlab", root=None)
    path = here / ".gitlab-ci.yml"
    assert schema(path) == 0
    path.write_text(path.read_text().replace("when: always, paths", "when: allways, paths"))
    assert schema(path) == 1


# --- GitLab ----------------------------------------------------------------------------------------


@pytest.fixture
def jobs(call: Call, here: Path) -> Any:
    """The jobs of GitLab, with what they extend."""
    call("init", "--gitlab", root=None)
    rows = yaml.safe_load((here / ".gitlab-ci.yml").read_text())
    rows.pop("stages")

    def whole(name: str) -> Any:
        row = rows[name]
        return {**(whole(row["extends"]) if "extends" in row else {}), **row}

    return {name: whole(name) for name in rows if not name.startswith(".")}


def test_only_the_protected_default_branch_has_nights_and_no_merge_request(jobs: Any) -> None:
    assert list(jobs) == ["candidates", "packages", "verify", "promote"]
    assert [name for name, job in jobs.items() if job.get("allow_failure")] == ["packages"]
    for job in jobs.values():
        (rule,) = job["rules"]
        terms = rule["if"].split(" && ")
        assert terms == [
            "$GPUS",
            '$CI_COMMIT_REF_PROTECTED == "true"',
            "$CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH",
            "$CI_PIPELINE_SOURCE =~ /^(schedule|web)$/",
        ]
        assert job["artifacts"]["when"] == "always" if "artifacts" in job else True
    # What failed before ends no night: the others are verified, and the catalog is signed.
    assert [job["rules"][0].get("when") for job in jobs.values()] == [None, None, "always", "always"]


def test_a_job_on_a_gpu_has_no_environment_whose_keys_it_could_read(jobs: Any) -> None:
    assert {name: job.get("environment", {}).get("name") for name, job in jobs.items()} == {
        "candidates": "imagefactory/candidates",
        "packages": "imagefactory/candidates",
        "verify": None,
        "promote": "imagefactory/promotion",
    }
    assert [name for name, job in jobs.items() if "SIGNING_KEY" in str(job)] == ["promote"]
    assert "NONCE_KEY" not in str(jobs["verify"])
    assert jobs["verify"]["tags"] == ["gpu", "$GPU"]
    assert jobs["promote"]["resource_group"]


PROGRAM = """\
#!/bin/bash
echo "$*" >> "$SAID"
case "$1 $2" in
  "plan "*) printf '%s\\n' "$PLANNED" 'matrix={"include":[]}' program=0 ;;
  "build $BROKEN") exit 5 ;;
  "verify "*) mkdir -p "$8" "${10}"; echo "print('ran')" > "$8/run.py"; echo {} > "${10}/$RANDOM.json" ;;
  "sweep collect") { stat -c %a "$IMAGEFACTORY_SIGNING_KEY"; cat "$IMAGEFACTORY_SIGNING_KEY"; } >> "$SAID" ;;
esac
"""
A100 = "8.0/sm80-a100-535.54.03"
ROWS = [
    TargetJob(target="one-1", status="build", gpu="nvidia", digest="", kits=f"{A100} 9.0/sm90"),
    TargetJob(target="two-2", status="verify", gpu="nvidia", digest="sha256:ab", kits=A100),
    TargetJob(target="bad-3", status="build", gpu="nvidia", digest="", kits=A100),
    TargetJob(target="cpu-4", status="build", gpu="none", digest="", kits=""),
]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """What GitLab's jobs see, and an imagefactory that says how it was called."""
    assert all(row.keys() == TargetJob.__annotations__.keys() for row in ROWS)
    program = tmp_path / "bin" / "imagefactory"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return {
        "PATH": f"{program.parent}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "SAID": str(tmp_path / "said"),
        "PLANNED": "targets=" + json.dumps({"include": ROWS}),
        "BROKEN": "bad-3",
        "GPUS": '[{name: A100, capability: "8.0"}]',
        "TARGETS": "one-* *",
        "REGISTRY": "registry.example.org/gpu",
    }


def run(job: Any, folder: Path, environ: dict[str, str], key: str = "script") -> int:
    """A job's shell as GitLab's runner starts it."""
    (script,) = job[key]
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    print(done.stdout, done.stderr)
    return done.returncode


def test_a_night_of_gitlab_from_the_plan_to_the_catalog(
    jobs: Any, tmp_path: Path, environ: dict[str, str]
) -> None:
    work, said = tmp_path / "work", Path(environ["SAID"])
    work.mkdir()
    at = "--registry registry.example.org/gpu"
    assert run(jobs["candidates"], work, environ) == 5, "bad-3 does not build"
    assert (work / "gpus.yaml").read_text().strip() == environ["GPUS"]

    def kit(target: str, name: str, capability: str) -> str:
        folder = f"kits/{target.partition('@')[0]}/{name}"
        return f"verify {target} {at} --capability {capability} --kit {folder} --nonce-dir nonces"

    assert said.read_text().splitlines() == [
        f"plan one-* * --inventory gpus.yaml {at} --github",
        f"build one-1 --push {at}",
        kit("one-1", "sm80-a100-535.54.03", "8.0"),
        kit("one-1", "sm90", "9.0"),
        kit("two-2@sha256:ab", "sm80-a100-535.54.03", "8.0"),
        f"build bad-3 --push {at}",
        f"build cpu-4 --push {at}",
        f"image promote cpu-4 {at}",
    ]
    for gpu in ("sm80", "sm90"):  # each in a workspace of its own, with the artifacts of `candidates`
        folder = tmp_path / gpu
        shutil.copytree(work, folder)
        assert run(jobs["verify"], folder, environ | {"GPU": gpu}) == 0
        assert not list(folder.glob(f"kits/*/{gpu}*"))
        if gpu == "sm80":
            shutil.copytree(folder / "results", work / "results")

    said.write_text("")
    (tmp_path / "key").write_text("a key\n")
    (tmp_path / "key").chmod(0o644)
    assert run(jobs["promote"], work, environ | {"SIGNING_KEY": str(tmp_path / "key")}) == 9, "no sm90"
    calls = said.read_text().splitlines()
    assert [line for line in calls if line.startswith("sweep collect")] == [
        f"sweep collect results/{target}/sm80-a100-535.54.03/ --nonce-dir nonces {at} --promote"
        for target in ("one-1", "two-2")
    ]
    assert calls.count("600") == calls.count("a key") == 2
    assert calls[-2:] == [f"verdict sync {at}", f"site publish {at}"]
    assert not (tmp_path / "signing-key.pem").exists()


def test_the_catalog_is_signed_where_nothing_was_due(
    jobs: Any, tmp_path: Path, environ: dict[str, str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    environ["PLANNED"] = 'targets={"include":[]}'
    assert run(jobs["candidates"], work, environ) == 0
    assert run(jobs["verify"], work, environ | {"GPU": "sm80"}) == 0
    assert run(jobs["promote"], work, environ) != 0, "no key, no night"
    (tmp_path / "key").write_text("a key\n")
    assert run(jobs["promote"], work, environ | {"SIGNING_KEY": str(tmp_path / "key")}) == 0
    assert Path(environ["SAID"]).read_text().splitlines()[-1].startswith("site publish ")


def test_gitlab_sets_up_the_commit_that_is_pinned(
    call: Call, here: Path, tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = tmp_path / "origin"
    (origin / ".github").mkdir(parents=True)
    shutil.copy(ROOT / ".github" / "login.sh", origin / ".github")
    (origin / "setup.sh").write_text("mkdir -p .venv/bin; echo set up >> $SAID\n")
    script = f"git init -q && git add . && {GIT} commit -q -m one && git rev-parse HEAD"
    done = subprocess.run(["bash", "-ec", script], cwd=origin, capture_output=True, text=True, check=True)
    monkeypatch.setattr(
        new_project,
        "find_source",
        lambda package: ImagefactorySource(url=str(origin), commit=done.stdout.strip()),
    )
    call("init", "--gitlab", root=None)
    (origin / "setup.sh").write_text("exit 1\n")
    subprocess.run(["bash", "-ec", f"{GIT} commit -q -a -m two"], cwd=origin, check=True)
    job = yaml.safe_load((here / ".gitlab-ci.yml").read_text())[".imagefactory"]
    environ |= {"CI_REGISTRY_USER": "ci", "CI_REGISTRY_PASSWORD": "token"}
    assert run(job, here, environ, "before_script") != 0, "without a NONCE_KEY"
    shutil.rmtree(here / ".imagefactory")  # as GitLab cleans it
    assert run(job, here, environ | {"NONCE_KEY": "k"}, "before_script") == 0
    assert Path(environ["SAID"]).read_text().splitlines() == ["set up", "set up", "-C . config --trust"]
    config = here / ".imagefactory/home/.docker/config.json"
    assert json.loads(config.read_text())["auths"].keys() == {"registry.example.org"}
    assert (config.stat().st_mode & 0o777, config.parents[1].stat().st_mode & 0o777) == (0o600, 0o700)


GIT = "git -c user.name=a -c user.email=a@example.org"


def test_what_ships_is_what_is_written() -> None:
    wanted = {name for row in new_project.NIGHTLY_FILES.values() for name in row.values()}
    assert {path.name for path in (SHIPPED / "nights").iterdir()} == wanted
