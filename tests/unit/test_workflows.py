"""The workflows of CI: zizmor finds nothing, and no job has a right that it does not need.

Everybody may open a pull request with workflows of its own. They run in this repository without its secrets,
and leave runs, artifacts and caches there: no job that holds anything may take one of these for its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagefactory import __version__
from imagefactory.errors import DISTRIBUTION
from imagefactory.project import load_project
from imagefactory.settings.load import load_settings
from imagefactory.verify import kits
from imagefactory.verify.kits import program_files
from imagefactory.verify.nonces import LIFETIME
from imagefactory.verify.suite_files import write_suite

FOLDER = Path(__file__).parents[2] / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
NIGHTLY = FOLDER / "nightly.yml"
PROMOTE = FOLDER / "promote.yml"
PLAN, CANDIDATES, SIGN = (FOLDER / f"{name}.yml" for name in ("plan", "candidates", "sign"))
CALLED = (PLAN, CANDIDATES, SIGN)
"""What nightly.yml and promote.yml call, here and in projects of `init --github`."""
RELOCK = FOLDER / "relock.yml"
RELEASE = FOLDER / "release.yml"
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
OWN = re.compile(r"\$/\.github/workflows/([a-z]+)\.yml")
EXPRESSION = re.compile(r"\$\{\{")
TOOL = {
    "repository": "${{ job.workflow_repository }}",
    "ref": "${{ job.workflow_sha }}",
    "path": ".imagefactory",
    "persist-credentials": False,
}
"""A checkout of imagefactory beside the caller's project, at the commit of the called workflow."""


def read(path: Path) -> Any:
    """A workflow; YAML 1.1 takes its key `on` for true."""
    value = yaml.safe_load(path.read_text())
    value["on"] = value.pop(True)
    return value


def night_jobs() -> Any:
    """The jobs of a night that have steps, whatever file they are in."""
    verify = {"verify": read(NIGHTLY)["jobs"]["verify"]}
    return {**read(PLAN)["jobs"], **read(CANDIDATES)["jobs"], **verify}


def zizmor(*paths: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("zizmor")
    command = [program, "--offline", "--no-config", "--no-ignores", "--color=never", *paths]
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("GH_", "ZIZMOR_"))}
    return subprocess.run(command, capture_output=True, text=True, env=clean, timeout=60)


def test_zizmor_finds_nothing() -> None:
    done = zizmor(*WORKFLOWS)
    assert (done.returncode, "No findings to report" in done.stdout) == (0, True), done.stdout + done.stderr


def test_zizmor_finds_what_is_wrong(tmp_path: Path) -> None:
    """Else finding nothing would say nothing."""
    spoilt = tmp_path / ".github" / "workflows" / "spoilt.yml"
    spoilt.parent.mkdir(parents=True)
    text = NIGHTLY.read_text().replace('cd "$RUNNER_TEMP/kits/$KIT"', 'cd "${{ github.head_ref }}"')
    spoilt.write_text(re.sub(r"(actions/download-artifact)@\w+", r"\1@main", text))
    done = zizmor(spoilt)
    assert done.returncode != 0
    assert "template-injection" in done.stdout
    assert "unpinned-uses" in done.stdout


def actionlint(*paths: Path, cwd: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    """With .github/actionlint.yaml of the tree that the files are in."""
    program = Path(sys.executable).with_name("actionlint")
    command = [program, "-no-color", *paths]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_actionlint_finds_nothing() -> None:
    done = actionlint(*WORKFLOWS)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("nightly", "outputs.matrix", "outputs.matrices"),
        ("nightly", "needs: plan", "needs: plans"),
        ("plan", "job.workflow_sha", "job.workflow_commit"),
        ("nightly", "[self-hosted, gpu,", "[self-hosted, gpus,"),
    ],
)
def test_actionlint_finds_what_is_wrong(tmp_path: Path, name: str, right: str, wrong: str) -> None:
    """Else finding nothing would say nothing. It reads what is called too."""
    (tmp_path / ".git").mkdir()
    shutil.copytree(FOLDER.parent, tmp_path / ".github")
    path = tmp_path / ".github/workflows" / f"{name}.yml"
    path.write_text(path.read_text().replace(right, wrong))
    assert actionlint(path, cwd=tmp_path).returncode == 1


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_rights_start_at_none_and_actions_are_pinned(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert "permissions" in job
        assert ("steps" in job) != bool(OWN.fullmatch(job.get("uses", "")))
        for step in job.get("steps", ()):
            assert PINNED.fullmatch(step["uses"]) if "uses" in step else True
            assert not EXPRESSION.search(step.get("run", "")), "a shell gets values by its environment"


def test_nothing_of_the_night_runs_on_a_pull_request_or_a_fork() -> None:
    jobs = read(NIGHTLY)["jobs"]
    for path in (NIGHTLY, PROMOTE):
        assert set(read(path)["on"]) == {"schedule", "workflow_dispatch"}
    for path in CALLED:
        assert set(read(path)["on"]) == {"workflow_call"}
    has_variables = "vars.REGISTRY != '' && vars.GPUS != ''"  # a fork has none
    assert jobs["plan"]["if"] == has_variables
    for name, empty in (("candidates", "targets"), ("verify", "matrix")):  # of CPUs alone the matrix is
        assert "plan" in jobs[name]["needs"]
        assert f"needs.plan.outputs.{empty} != '{{\"include\":[]}}'" in jobs[name]["if"]
        after_all = "cancelled()" in jobs[name]["if"]
        assert after_all == (name == "verify")
        assert ("needs.plan.result == 'success'" in jobs[name]["if"]) == after_all
    assert read(PROMOTE)["jobs"]["promote"]["if"] == has_variables
    later = read(SIGN)["jobs"]
    for name in ("night", "issue"):
        assert "needs.promote.result != 'skipped'" in later[name]["if"]
    assert "vars.PAGES != ''" in later["pages"]["if"]


def test_the_catalog_waits_for_no_gpu_and_is_signed_whatever_failed_before() -> None:
    """A job waits a day for a runner that is away: yesterday's ends where the next night begins."""
    assert read(NIGHTLY)["concurrency"] == {"group": "nightly", "cancel-in-progress": True}
    assert "imagefactory site publish" not in NIGHTLY.read_text()
    workflow = read(SIGN)
    assert not any("self-hosted" in str(job["runs-on"]) for job in workflow["jobs"].values())
    promote = workflow["jobs"]["promote"]
    assert "needs" not in promote
    moved = [step for step in promote["steps"] if "download-artifact" in step.get("uses", "")]
    attempt, run = "${{ steps.last.outputs.attempt }}", "${{ steps.last.outputs.run }}"
    assert [step["with"].get("pattern") or step["with"]["name"] for step in moved] == [
        f"nonces-{attempt}-*",
        f"result-{attempt}-*",
        "plan",
        f"spent-{run}-{attempt}",
    ]
    for step in moved:  # where there was no night yet: without a run's id it would look in its own run
        name = "spent" if "name" in step["with"] else "run"
        assert step["if"] == f"steps.last.outputs.{name} != ''"
        assert step["with"]["run-id"] == f"${{{{ steps.last.outputs.{name} }}}}"
    (signs,) = (step for step in promote["steps"] if "imagefactory site publish" in step.get("run", ""))
    assert "if" not in signs


def test_results_of_a_night_are_signed_before_the_next_one_ends_it() -> None:
    (night,), (later,) = (
        [row["cron"] for row in read(path)["on"]["schedule"]] for path in (NIGHTLY, PROMOTE)
    )
    minute, hour = (int(word) for word in night.split()[:2])
    times = [int(one) * 60 + int(later.split()[0]) for one in later.split()[1].split(",")]
    before = [hour * 60 + minute - time for time in times if time < hour * 60 + minute]
    assert len(times) == 4
    assert 60 <= min(before) <= 120  # GitHub starts them late


def test_a_gpu_machine_keeps_nothing_for_the_next_job_and_a_job_can_be_run_again() -> None:
    """Its runner empties its scratch before each job, never its workspace; names of artifacts are taken."""
    jobs = night_jobs()
    moved = [step["with"] for step in jobs["verify"]["steps"] if "uses" in step]
    assert [row["path"].partition("/")[0] for row in moved] == ["${{ runner.temp }}"] * 2
    for job in (*jobs.values(), *read(SIGN)["jobs"].values()):
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/upload-artifact@"):
                assert step["with"]["overwrite"] is True


def test_the_jobs_on_gpus_hold_no_right_and_one_promoter_holds_the_key() -> None:
    nightly, later = night_jobs(), read(SIGN)["jobs"]
    verify, jobs = nightly["verify"], {**nightly, **later}
    assert len(jobs) == len(nightly) + len(later)
    for name in ("plan", "candidates", "night"):
        assert jobs[name]["environment"] == "candidates"  # whose secret no other branch gets
    assert verify["permissions"] == {}
    assert verify["runs-on"] == ["self-hosted", "gpu", "${{ matrix.runner }}"]
    assert not any("checkout" in step.get("uses", "") for step in verify["steps"])
    with_secrets = [name for name, job in jobs.items() if "secrets." in str(job)]
    assert with_secrets == ["plan", "candidates", "promote", "night"]
    assert [name for name, job in jobs.items() if "secrets.SIGNING_KEY" in str(job)] == ["promote"]
    assert "github.token" not in str(verify)
    assert read(PROMOTE)["concurrency"] == {"group": "promoter", "cancel-in-progress": False}
    assert later["promote"]["environment"] == "promotion"
    assert [name for name, job in jobs.items() if "actions" in job["permissions"]] == ["promote"]
    writing = {name for name, job in jobs.items() if job["permissions"].get("packages") == "write"}
    assert writing == {"candidates", "promote"}


def test_a_caller_grants_what_is_called_asks_for_and_passes_its_secrets() -> None:
    """GitHub starts no run that is granted less; more is what no job needs."""
    for path in (NIGHTLY, PROMOTE):
        for job in read(path)["jobs"].values():
            if not (found := OWN.fullmatch(job.get("uses", ""))):
                continue
            called = read(FOLDER / f"{found[1]}.yml")
            asked: dict[str, str] = {}
            for row in called["jobs"].values():
                for name, right in row["permissions"].items():
                    asked[name] = "write" if "write" in (right, asked.get(name)) else right
            assert job["permissions"] == asked
            names = called["on"]["workflow_call"]["secrets"]
            # Never `inherit`: GitHub does not do that for another owner's workflow.
            assert job["secrets"] == {name: f"${{{{ secrets.{name} }}}}" for name in names}
            assert names.keys() == set(re.findall(r"secrets\.([A-Z_]+)", str(called["jobs"])))
            assert not any(row["required"] for row in names.values())
            inputs = called["on"]["workflow_call"].get("inputs", {})
            assert job.get("with", {}).keys() == inputs.keys()


def test_a_run_never_cancels_what_it_calls() -> None:
    """A group of the same name in both would."""
    assert not any("concurrency" in read(path) for path in CALLED)


def test_what_is_called_runs_its_own_commit_of_imagefactory() -> None:
    for path in CALLED:
        for job in read(path)["jobs"].values():
            runs = [step["run"] for step in job["steps"] if "run" in step]
            ours = [step for step in job["steps"] if step.get("with") == TOOL]
            assert len(ours) == any(".imagefactory/" in run for run in runs)
            assert not re.search(r"(?<!\.imagefactory/)(\.venv|\.github|setup\.sh)", "".join(runs))


def test_one_job_publishes_the_site_and_another_makes_it() -> None:
    jobs = read(SIGN)["jobs"]
    assert jobs["pages"]["needs"] == "night"
    assert "needs.night.result == 'success'" in jobs["pages"]["if"]
    assert "write" not in jobs["night"]["permissions"].values()
    assert {name for name, job in jobs.items() if "pages" in job["permissions"]} == {"pages"}
    assert jobs["pages"]["permissions"] == {"pages": "write", "id-token": "write"}
    assert [list(step) for step in jobs["pages"]["steps"]] == [["uses"]]


def test_who_writes_issues_may_do_nothing_else_and_runs_no_code_of_the_tree() -> None:
    called = (path for path in WORKFLOWS if path not in (NIGHTLY, PROMOTE))
    every = {name: job for path in called for name, job in read(path)["jobs"].items()}
    assert [name for name, job in every.items() if "issues" in job["permissions"]] == ["issue"]
    issue = every["issue"]
    assert issue["permissions"] == {"issues": "write"}
    assert [step["uses"].partition("@")[0] for step in issue["steps"] if "uses" in step] == [
        "actions/download-artifact"
    ]


GH = """\
#!/bin/sh
[ "$1" = api ] && shift
for word; do
  case "$word" in
    body=@*) cat "${word#body=@}" ;;
    body=*) echo "${word#body=}" ;;
    *) echo "$word" ;;
  esac
done > "$SAID.$(ls "$SAID".* 2>/dev/null | wc -l)"
case "$*" in *--jq*) echo "$OPEN" ;; esac
"""


@pytest.mark.parametrize(
    ("text", "found", "promote", "done"),
    [
        ("", "", "success", ""),
        ("- `a`\n", "", "success", "- `a`"),
        ("- `a`\n", "7", "success", "- `a`"),
        ("", "7", "success", "Nothing is broken any more"),
        ("", "", "failure", "- the job `promote` ended as failure: RUN"),
    ],
)
def test_there_is_one_issue_as_long_as_something_is_broken(
    tmp_path: Path, text: str, found: str, promote: str, done: str
) -> None:
    (tmp_path / "issue").mkdir()
    (tmp_path / "issue" / "issue.md").write_text(text)
    program = tmp_path / "bin" / "gh"
    program.parent.mkdir()
    program.write_text(GH)
    program.chmod(0o755)
    environ = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(tmp_path),
        "SAID": str(tmp_path / "said"),
        "OPEN": found,
        "REPOSITORY": "o/r",
        "PROMOTE": promote,
        "NIGHT": "success",
        "RUN": "RUN",
    }
    script = read(SIGN)["jobs"]["issue"]["steps"][-1]["run"]
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    calls = [path.read_text() for path in sorted(tmp_path.glob("said.*"))]
    assert calls[0].startswith("repos/o/r/issues?state=open&creator=github-actions%5Bbot%5D")
    assert len(calls) == (2 if done else 1)
    if done:
        assert done in calls[1]
        assert ("repos/o/r/issues/7\n" in calls[1]) == bool(found)
        assert ("state=closed" in calls[1]) == (not text and bool(found))


def test_the_weekly_one_writes_in_one_job_alone_and_in_no_fork() -> None:
    workflow = read(RELOCK)
    assert set(workflow["on"]) == {"schedule", "workflow_dispatch"}
    watch, relock = workflow["jobs"]["watch"], workflow["jobs"]["relock"]
    assert watch["if"] == "vars.RELOCK != ''"  # a fork has no variables
    assert watch["permissions"] == {"contents": "read"}
    assert relock["permissions"] == {"contents": "write", "pull-requests": "write"}
    assert "needs.watch.outputs.families != ''" in relock["if"]
    assert "needs.watch.outputs.families != '{\"include\":[]}'" in relock["if"]
    assert "secrets." not in str(workflow)


def test_the_token_of_the_weekly_one_is_seen_by_the_step_that_pushes_and_by_no_solver() -> None:
    steps = [step for job in read(RELOCK)["jobs"].values() for step in job["steps"]]
    with_token = [step for step in steps if "github.token" in str(step)]
    assert [step["name"] for step in with_token] == ["open the pull request, or bring it up to date"]
    assert "imagefactory" not in with_token[0]["run"]
    for step in steps:
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_each_shell_is_sound(path: Path) -> None:
    for job in read(path)["jobs"].values():
        for step in job.get("steps", ()):
            done = subprocess.run(["bash", "-n"], input=step.get("run", ""), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_a_release_is_made_of_a_tag_and_in_no_fork() -> None:
    workflow = read(RELEASE)
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    jobs = workflow["jobs"]
    assert jobs["build"]["if"] == "vars.RELEASE != ''"  # a fork has no variables
    assert (jobs["publish"]["needs"], jobs["image"]["needs"]) == ("build", "publish")
    assert "secrets." not in str(workflow)


def test_what_speaks_to_the_index_runs_no_code_of_the_tree() -> None:
    """Whoever changed a test or a dependency could else publish as this project."""
    jobs = read(RELEASE)["jobs"]
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "pypi"
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]
    assert publish["steps"][1]["with"]["attestations"] is True
    assert jobs["build"]["permissions"] == {"contents": "read"}
    assert jobs["image"]["permissions"].get("contents") == "read"


def test_the_image_of_a_release_is_of_its_version() -> None:
    """Its lock is made when the index has the release, so none is kept."""
    root = FOLDER.parents[1] / "release"
    factory = load_project(load_settings(directory=root, start=root, environ={}), {})
    (target,) = factory.targets
    assert (target.framework, target.version) == (DISTRIBUTION, __version__)
    names = {step.get("name"): step.get("run", "") for step in read(RELEASE)["jobs"]["image"]["steps"]}
    assert f"build {target.family}" in names["build and try it"]
    assert f"push {target.family} " in names["push it"]


def test_an_image_for_cpus_has_no_kit_and_its_tag_follows_without_a_verdict() -> None:
    steps = night_jobs()["candidates"]["steps"]
    asked = {step["if"]: step for step in steps if "imagefactory image promote" in step.get("run", "")}
    assert set(asked) == {"matrix.gpu == 'none'"}  # one for AMD's has no kits either, and needs a verdict
    uploads = [step for step in steps if step.get("uses", "").startswith("actions/upload-artifact@")]
    assert [step.get("if") for step in uploads] == ["matrix.kits != ''"] * 2


# --- what strangers may start, and leave here ------------------------------------------------------

STEPS = [
    (f"{path.stem}.{name}", step)
    for path in WORKFLOWS
    for name, job in read(path)["jobs"].items()
    for step in job.get("steps", ())
]


def uses(step: Any, action: str) -> bool:
    return bool(step.get("uses", "").startswith(f"{action}@"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_strangers_start_tests_alone_and_those_hold_nothing(path: Path) -> None:
    """`pull_request_target`, `workflow_run`, comments and the like run with this repository's rights."""
    workflow = read(path)
    if path in CALLED:
        assert set(workflow["on"]) == {"workflow_call"}  # its caller's event counts, and no other
        return
    assert set(workflow["on"]) <= {"schedule", "workflow_dispatch", "push", "pull_request"}
    if "pull_request" not in workflow["on"]:
        return
    text = path.read_text()
    for word in ("secrets.", "vars.", "github.token", "self-hosted", "environment:", "artifact", "cache"):
        assert word not in text
    for job in workflow["jobs"].values():
        assert job["permissions"] == {"contents": "read"}


def test_a_job_on_a_machine_of_ours_is_started_by_nobody_else() -> None:
    hosted = re.compile(r"ubuntu-[0-9.]+")
    for path in WORKFLOWS:
        workflow = read(path)
        jobs = [job for job in workflow["jobs"].values() if "steps" in job]
        if not all(hosted.fullmatch(str(job["runs-on"])) for job in jobs):
            assert set(workflow["on"]) == {"schedule", "workflow_dispatch"}, path.name


def test_no_step_takes_what_another_run_left() -> None:
    """Artifacts of the run that night_run.py chose, and no cache, which any run may have filled."""
    chosen = {"${{ steps.last.outputs.run }}", "${{ steps.last.outputs.spent }}"}
    for where, step in STEPS:
        script, given = step.get("run", ""), step.get("with", {})
        assert not re.search(r"gh run|actions/(runs|workflows|artifacts)", script), where
        assert ("night_run.py" in script) == (step.get("id") == "last"), where
        assert not any("cache" in name for name in (step.get("uses", ""), *given)), where
        if uses(step, "actions/download-artifact"):
            assert given.get("run-id") in {None, *chosen}, where
            assert ("github-token" in given) == ("run-id" in given), where
            assert "repository" not in given, where
        if uses(step, "actions/checkout"):
            assert given in ({"persist-credentials": False}, TOOL), where
        # Of the event, strangers write most: titles, branches, messages. None of it is needed.
        assert not re.search(r"github\.(event|head_ref|base_ref)", str(step)), where


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_secret_belongs_to_an_environment(path: Path) -> None:
    """A secret of the repository is anybody's who may push a branch: a workflow there prints it."""
    for name, job in read(path)["jobs"].items():
        if "secrets." in str(job) and "steps" in job:  # others pass names on, see above
            assert job.get("environment"), name


def test_what_is_kept_between_promoters_is_whole() -> None:
    """A promoter that could not read what was spent signs nothing, and keeps nothing for the next one."""
    steps = read(SIGN)["jobs"]["promote"]["steps"]
    (kept,) = (
        step for step in steps if uses(step, "actions/upload-artifact") and "spent" in step["with"]["name"]
    )
    (collects,) = (step for step in steps if step.get("id") == "collect")
    (brings,) = (step for step in steps if "steps.last.outputs.spent" in step.get("if", ""))
    assert steps.index(brings) < steps.index(collects) == steps.index(kept) - 1
    condition = "always() && steps.last.outputs.run != '' && steps.collect.outcome != 'skipped'"
    assert kept["if"] == f"${{{{ {condition} }}}}"
    assert kept["with"]["name"] == brings["with"]["name"]
    assert kept["with"]["path"] == brings["with"]["path"] == "nonces/spent"
    assert kept["with"]["retention-days"] > LIFETIME.days
    assert collects["timeout-minutes"] < read(SIGN)["jobs"]["promote"]["timeout-minutes"]


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        (lambda _: None, True),
        (lambda kit: (kit / "kit.json").write_text("{}"), True),  # `sweep collect` finds out
        (lambda kit: (kit / "run.py").write_text("print('ran')\n#"), False),
        (lambda kit: (kit / "suite" / "table.py").write_text(""), False),
        (lambda kit: (kit / "kit" / "start.py").unlink(), False),
        (lambda kit: (kit / "json.py").write_text(""), False),
        (lambda kit: (kit / "kit" / "kit.json").write_text(""), False),
        (lambda kit: (kit / "kit" / "a\nb.so").write_text(""), False),
        (lambda kit: (kit / "json").symlink_to("/tmp"), False),
        (lambda kit: os.mkfifo(kit / "json.py"), False),
    ],
)
def test_a_gpu_machine_runs_no_program_that_another_one_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], runs: bool
) -> None:
    """Each GPU job can replace every artifact of its run, kits among them."""
    files = {**program_files(), "run.py": b"print('ran')\n"}
    monkeypatch.setattr(kits, "program_files", lambda: files)
    kit = tmp_path / "kits" / "sm80"
    write_suite(kit, {**files, "kit.json": b"", "expectations.json": b""})
    environ = {
        "PATH": os.environ["PATH"],
        "RUNNER_TEMP": str(tmp_path),
        "KIT": "sm80",
        "PROGRAM": kits.program_checksum(),
    }
    change(kit)
    (step,) = (step for step in read(NIGHTLY)["jobs"]["verify"]["steps"] if "run" in step)
    command = ["bash", "-e", "-c", step["run"]]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (ran.returncode == 0, "ran\n" in ran.stdout) == (runs, runs), ran.stderr


def test_a_plan_that_a_gpu_machine_put_there_is_taken_for_none(tmp_path: Path) -> None:
    plan_step, check_step = (
        next(step for step in read(path)["jobs"][job]["steps"] if "mac.py" in step.get("run", ""))
        for path, job in ((PLAN, "plan"), (SIGN, "promote"))
    )
    shutil.copytree(FOLDER.parent, tmp_path / ".imagefactory" / ".github")
    environ = {"PATH": os.environ["PATH"], "NONCE_KEY": "k" * 32, "RUN": "7"}

    def run(step: Any, **changes: str) -> int:
        command = ["bash", "-e", "-c", step["run"]]
        done = subprocess.run(command, cwd=tmp_path, env=environ | changes, capture_output=True)
        return done.returncode

    plan = tmp_path / "plan"
    assert run(check_step) == 0  # there is none
    (tmp_path / "plan.json").write_text("{}")
    assert run(plan_step) == 0
    assert run(check_step) == 0
    assert {path.name for path in plan.iterdir()} == {"plan.json", "plan.mac"}
    shutil.copytree(plan, tmp_path / "kept")
    changed: list[tuple[str, str | None, dict[str, str]]] = [
        ("plan.json", "{} ", {}),
        ("plan.mac", "", {}),
        ("plan.mac", "0" * 64 + "\n", {}),
        ("plan.mac", None, {}),
        ("plan.json", "{}", {"RUN": "8"}),
        ("plan.json", "{}", {"NONCE_KEY": "other"}),
        ("plan.mac", "", {"NONCE_KEY": ""}),
        ("plan.json", "{}", {"RUN": ""}),
    ]
    for name, content, changes in changed:
        if content is None:
            (plan / name).unlink()
        else:
            (plan / name).write_text(content)
        assert run(check_step, **changes) != 0
        assert not plan.exists()
        shutil.copytree(tmp_path / "kept", plan)


COLLECT = """\
#!/bin/bash
[ "$1 $2" != "sweep collect" ] || {
  echo "$3 $GITHUB_RUN_ID $GITHUB_RUN_ATTEMPT" >> said
  find nonces -type f | sort >> said
  echo signed > "nonces/spent/$(basename "$3").json"
}
"""


def test_results_are_collected_for_their_run_and_with_what_was_spent(tmp_path: Path) -> None:
    for name in ("issued/a.json", "issued/spent/a.json", "issued/b.txt", "nonces/spent/c.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "results" / "result-2-$(touch broken)").mkdir(parents=True)
    program = tmp_path / ".imagefactory" / ".venv" / "bin" / "imagefactory"
    program.parent.mkdir(parents=True)
    program.write_text(COLLECT)
    program.chmod(0o755)
    environ = {
        "PATH": os.environ["PATH"],
        "RUNNER_TEMP": str(tmp_path),
        "REGISTRY": "r",
        "SIGNING_KEY": "k",
        "IMAGEFACTORY_NONCE_KEY": "k",
        "RUN": "7",
        "ATTEMPT": "2",
        "GITHUB_RUN_ID": "8",
        "GITHUB_RUN_ATTEMPT": "1",
    }
    (step,) = (step for step in read(SIGN)["jobs"]["promote"]["steps"] if step.get("id") == "collect")
    command = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "said").read_text().splitlines() == [
        "results/result-2-$(touch broken)/ 7 2",
        "nonces/a.json",
        "nonces/spent/c.json",
    ]
    assert not (tmp_path / "signing-key.pem").exists()


@pytest.mark.parametrize(
    ("event", "workflow", "code"),
    [
        ("schedule", "lab/images/.github/workflows/nightly.yml@refs/heads/main", 0),
        ("workflow_dispatch", "lab/images/.github/workflows/nightly.yml@refs/heads/main", 0),
        ("pull_request", "lab/images/.github/workflows/nightly.yml@refs/heads/main", 1),
        ("pull_request", "lab/images/.github/workflows/nightly.yml@refs/pull/7/merge", 1),
        ("schedule", "lab/images/.github/workflows/evil.yml@refs/heads/main", 1),
        ("workflow_dispatch", "lab/images/.github/workflows/nightly.yml@refs/heads/topic", 1),
        ("workflow_dispatch", "lab/images/.github/workflows/nightly.yml@refs/tags/main", 1),
        ("schedule", "mallory/images/.github/workflows/nightly.yml@refs/heads/main", 1),
        ("", "", 1),
    ],
)
def test_a_gpu_runner_takes_the_night_alone(tmp_path: Path, event: str, workflow: str, code: int) -> None:
    text = (FOLDER.parent / "runner_hook.sh").read_text()
    hook = tmp_path / "hook.sh"
    environ = {"GITHUB_EVENT_NAME": event, "GITHUB_WORKFLOW_REF": workflow}
    for content, expected in ((text.replace("OWNER/NAME", "lab/images"), code), (text, 1)):
        hook.write_text(content)
        ran = subprocess.run(["/bin/bash", "-e", hook], env=environ if event else {}, capture_output=True)
        assert ran.returncode == expected


def test_a_pull_request_that_updates_locks_is_opened_against_the_default_branch(tmp_path: Path) -> None:
    """The event of a schedule has no repository: the default branch is asked for."""
    program = tmp_path / "bin" / "gh"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$*" >> "$SAID"\ncase "$*" in *default_branch) echo trunk ;; esac\n')
    program.chmod(0o755)
    (tmp_path / "bin" / "git").write_text('#!/bin/sh\n[ "$1" != log ] || echo title\n')
    (tmp_path / "bin" / "git").chmod(0o755)
    (tmp_path / "message.txt").write_text("title\n")
    environ = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_WORKSPACE": str(tmp_path),
        "SAID": str(tmp_path / "said"),
        "REPOSITORY": "o/r",
        "OWNER": "o",
        "SERVER": "https://example.org",
        "BRANCH": "relock/tiny",
    }
    (step,) = (step for step in read(RELOCK)["jobs"]["relock"]["steps"] if "gh api" in step.get("run", ""))
    command = ["bash", "-e", "-o", "pipefail", "-u", "-c", step["run"]]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert any(
        line.startswith("api repos/o/r/pulls -f base=trunk -f head=relock/tiny")
        for line in (tmp_path / "said").read_text().splitlines()
    )


FORMS = FOLDER.with_name("ISSUE_TEMPLATE")


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ("github-issue-forms", [path for path in FORMS.iterdir() if path.name != "config.yml"]),
        ("github-issue-config", [FORMS / "config.yml"]),
        ("citation-file-format", [FOLDER.parents[1] / "CITATION.cff"]),
    ],
)
def test_files_that_github_reads_are_valid(schema: str, paths: list[Path]) -> None:
    program = Path(sys.executable).with_name("check-jsonschema")
    subprocess.run([program, "--builtin-schema", f"vendor.{schema}", *paths], check=True, timeout=60)


def test_the_citation_has_the_version_of_the_package() -> None:
    assert yaml.safe_load((FOLDER.parents[1] / "CITATION.cff").read_text())["version"] == __version__
