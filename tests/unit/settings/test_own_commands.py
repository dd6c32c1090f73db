"""What the settings add to jobs: what may stand there, and where it comes to stand."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from imagefactory.errors import UsageError
from imagefactory.schedulers.htcondor.dag import format_common, site_lines
from imagefactory.schedulers.sites import check_needs, find_site, job_additions
from imagefactory.schedulers.slurm.batch import JobArray, format_batch, jobs_of
from imagefactory.settings.load import Settings, load_settings
from imagefactory.settings.own_commands import (
    is_machine_selected,
    parse_commands,
    parse_machines,
    parse_mounts,
    parse_options,
    parse_time,
)
from tests.made.errors import fails
from tests.made.pool import node
from tests.made.pool import sweep as dag
from tests.made.slurm_sweep import sweep, sweep_node

COMMANDS = """
accounting_group = igwn.dev.o4
nice_user=true
+WantGPULab = false
requirements = (Machine =!= "gpu07.example.org")
"""
OPTIONS = "--account=gpu-tests --partition=gpu\n --qos=low --time=2:00:00"


def settings(tmp_path: Path, **variables: str) -> Settings:
    environ = {"HOME": str(tmp_path), **{f"IMAGEFACTORY_{name}": text for name, text in variables.items()}}
    return load_settings(directory=None, start=tmp_path, environ=environ)


def test_a_sweep_gets_the_sites_lines_and_the_settings_own(tmp_path: Path) -> None:
    own = job_additions("htcondor", settings(tmp_path, SUBMIT_COMMANDS=COMMANDS))
    made = replace(dag(node()), site="chtc", own=own)
    lines = format_common(made.limits, site_lines(made, tmp_path)).splitlines()
    assert {"accounting_group = igwn.dev.o4", "nice_user = true", "+WantGPULab = false"} <= set(lines)
    assert "+WantGPULab = true" not in lines
    (needs,) = (line for line in lines if line.startswith("requirements"))
    assert needs == 'requirements = $(elsewhere) && $(first) && ((Machine =!= "gpu07.example.org"))'


@pytest.mark.parametrize(
    ("patterns", "machines"),
    [
        ("", ["gpu01.x.org", "gpu07.x.org", "glidein_7@gpu1.y", "big"]),
        ("gpu0?", ["gpu01.x.org", "gpu07.x.org"]),
        ("gpu*,!gpu07", ["gpu01.x.org", "glidein_7@gpu1.y"]),
        ("!GPU07.x !*.y", ["gpu01.x.org", "big"]),
        ("gpu1", ["glidein_7@gpu1.y"]),
    ],
)
def test_machines_are_chosen_by_name(tmp_path: Path, patterns: str, machines: list[str]) -> None:
    """HTCondor's expression is the one that Python reads; its dot is a letter of names."""
    names = ("gpu01.x.org", "gpu07.x.org", "glidein_7@gpu1.y", "big")
    asked = parse_machines(patterns)
    assert [name for name in names if is_machine_selected(name, asked)] == machines
    lines = site_lines(replace(dag(node()), patterns=asked), tmp_path)
    assert sum("TARGET.Machine" in line for line in lines) == bool(asked)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('gpu"07', "machine-name-invalid"),
        ("gpu(1)", "machine-name-invalid"),
        ("!", "machine-name-invalid"),
        ("a" * 1001, "machine-name-invalid"),
        ("gpu{1}", "machine-name-invalid"),
        (" ".join(map(str, range(101))), "machine-list-too-long"),
    ],
)
def test_a_machine_that_cannot_be_called_so_is_refused(text: str, code: str) -> None:
    with fails(code):
        parse_machines(text)


def test_limits_are_whole_numbers(tmp_path: Path) -> None:
    assert settings(tmp_path, SWEEP_JOBS="20").sweep_jobs.value == "20"
    with fails("limit-invalid", "sweep-gpu-hours"):
        settings(tmp_path, SWEEP_GPU_HOURS="0")


def test_a_submit_file_gets_them_too(tmp_path: Path) -> None:
    own = job_additions("htcondor", settings(tmp_path, SUBMIT_COMMANDS=COMMANDS))
    site = replace(find_site("igwn"), own=own)
    for gpus in (True, False):
        assert "accounting_group = igwn.dev.o4" in site.lines(None, gpus=gpus)
    assert site.comments(gpus=True) == ()  # what advises to write it
    assert find_site("igwn").comments(gpus=True)
    assert site.requirements("docker://x") == ('((Machine =!= "gpu07.example.org"))',)


def test_a_site_that_refuses_jobs_without_a_command_is_said_before_anything_is_made() -> None:
    site = find_site("igwn")
    with pytest.raises(UsageError, match="accounting_group") as fault:
        check_needs(site, {"request_memory", "request_disk"})
    assert "submit-commands" in fault.value.hint
    check_needs(site, {"request_disk", "accounting_group"})


def test_an_array_gets_the_options_of_sbatch_and_is_as_long_as_they_say(tmp_path: Path) -> None:
    own = job_additions("slurm", settings(tmp_path, SBATCH_OPTIONS=OPTIONS))
    assert own == ("--account=gpu-tests", "--partition=gpu", "--qos=low", "--time=2:00:00")
    jobs = jobs_of(replace(sweep(sweep_node()), own=own))
    assert jobs.jobs[0].seconds == 7200
    text = format_batch(JobArray(options=("--gres=gpu:1",), jobs=jobs.jobs), 1, jobs, own)
    given = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--account=gpu-tests", "--partition=gpu", "--qos=low", "--time=120"} <= set(given)
    assert sum(one.startswith("--time") for one in given) == 1


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("queue", "submit-command-invalid"),
        ("request_gpus = 2", "submit-command-reserved"),
        ("Periodic_Remove = false", "submit-command-reserved"),
        ("a = b\na = c", "setting-duplicate"),
        ("a =", "submit-command-invalid"),
        ("x = {1}", "submit-command-invalid"),
        ("universe=local", "submit-command-reserved"),
    ],
)
def test_a_line_that_cannot_be_added_is_refused(tmp_path: Path, line: str, code: str) -> None:
    with fails(code):
        parse_commands(line)
    with fails(code, r"submit-commands \(\$IMAGEFACTORY_SUBMIT_COMMANDS\)"):
        settings(tmp_path, SUBMIT_COMMANDS=line)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("-A x", "sbatch-option-invalid"),
        ("account=x", "sbatch-option-invalid"),
        ("--gres=gpu:8", "submit-command-reserved"),
        ("--array=0-9", "submit-command-reserved"),
        ("--time=soon", "sbatch-option-invalid"),
        ("--time=0", "sbatch-option-invalid"),
        ("--qos=a --qos=b", "setting-duplicate"),
        ("--x=$(y)", "sbatch-option-invalid"),
    ],
)
def test_a_word_that_cannot_be_added_is_refused(tmp_path: Path, words: str, code: str) -> None:
    with fails(code):
        parse_options(words)
    with fails(code, "sbatch-options"):
        settings(tmp_path, SBATCH_OPTIONS=words)


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("90", timedelta(minutes=90)),
        ("90:30", timedelta(minutes=90, seconds=30)),
        ("2:00:00", timedelta(hours=2)),
        ("1-6", timedelta(days=1, hours=6)),
        ("1-6:30", timedelta(days=1, hours=6, minutes=30)),
        ("soon", None),
    ],
)
def test_times_as_sbatch_takes_them(text: str, time: timedelta | None) -> None:
    assert parse_time(text) == time


def test_mounts_are_absolute_paths_of_the_nodes() -> None:
    assert parse_mounts("/opt/plugin, /usr/lib64/ofi:/opt/ofi ,") == (
        "/opt/plugin:/opt/plugin",
        "/usr/lib64/ofi:/opt/ofi",
    )
    for text in ("opt", "/", "/a/../b", "/a:b", "/a:/b:rw", "/a b", "/a;b", "/$HOME", "/a\n/b", "/a/"):
        with fails("site-mount-invalid"):
            parse_mounts(text)
