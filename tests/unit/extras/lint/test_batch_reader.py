"""Reading #SBATCH lines as sbatch does; what of it was seen with 22.05's `sbatch --test-only -vv`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from imagefactory.errors import UsageError
from imagefactory.extras.lint.batch_reader import BatchScript, is_batch, parse_batch


def read(*lines: str, first: str = "#!/bin/bash") -> BatchScript:
    return parse_batch("\n".join([first, *lines, "true", ""]), "a.sbatch")


def options(*lines: str) -> dict[str, str]:
    script = read(*lines)
    assert not script.findings
    return {name: option.value for name, option in script.options.items()}


@pytest.mark.parametrize(
    ("lines", "read"),
    [
        (["#SBATCH --gres=gpu:1"], {"gres": "gpu:1"}),
        (["#SBATCH --gres gpu:1"], {"gres": "gpu:1"}),
        (["#SBATCH\t-N1 -n 2 -J a"], {"nodes": "1", "ntasks": "2", "job-name": "a"}),
        (["#SBATCH --job-name='a b' --comment=\"c d\""], {"job-name": "a b", "comment": "c d"}),
        (["#SBATCH --wckey=a\\ b"], {"wckey": "a b"}),
        (["#SBATCH --mem=1G # of each node"], {"mem": "1G"}),
        (["#SBATCH --comment=a#b"], {"comment": "a"}),
        (["#SBATCH --gpus-per-no=2"], {"gpus-per-node": "2"}),
        (["#SBATCH --exclusive --nice=3 --no-kill"], {"exclusive": "", "nice": "3", "no-kill": ""}),
        (["", "# a", "#SBATCH --mem=1G", "  # b", "##SBATCH --mem=2G", "#SBATCHES"], {"mem": "1G"}),
        (["#SBATCH --container-image=a/b:1"], {"container-image": "a/b:1"}),
    ],
)
def test_options(lines: Sequence[str], read: dict[str, str]) -> None:
    assert options(*lines) == read


@pytest.mark.parametrize(
    ("lines", "rule", "at", "said"),
    [
        (["#SBATCH --gpu=1"], "option", (2, 9), "did you mean --gpus?"),
        (["#SBATCH --gers=gpu:1"], "option", (2, 9), "did you mean --gres?"),
        (["#SBATCH --xyzzyx=1"], "option", (2, 9), "--xyzzyx"),
        (["#SBATCH --mem 1G  foo"], "option", (2, 19), "'foo'"),
        (["#SBATCH --mem"], "option", (2, 9), "--mem has no value"),
        (["#SBATCH -c=3"], "option", (2, 9), "the = is part of the value"),
        (["#SBATCH --gres=gpu:$N"], "variable", (2, 9), "--gres has gpu:$N"),
        (["cd /tmp", "#SBATCH --mem=1G"], "after", (3, 0), "line 2"),
        (["# SBATCH --mem=1G"], "comment", (2, 0), "only #SBATCH at the start of a line"),
        ([" #SBATCH --mem=1G"], "comment", (2, 0), "only #SBATCH at the start of a line"),
        (["#sbatch --mem=1G"], "comment", (2, 0), "only #SBATCH at the start of a line"),
        (["#SBATCH hetjob", "#SBATCH --mem=1G"], "note", (2, 0), "another part of the job"),
    ],
)  # fmt: skip
def test_what_sbatch_does_not_take(lines: Sequence[str], rule: str, at: tuple[int, int], said: str) -> None:
    (finding,) = read(*lines).findings
    assert (finding.rule, (finding.line, finding.column)) == (rule, at)
    assert said in finding.message


def test_what_makes_sbatch_refuse_the_whole_script() -> None:
    assert [one.rule for one in read("#SBATCH --mem=1G", first="cd /tmp").findings] == [
        "interpreter",
        "after",
    ]
    (ends,) = parse_batch("#!/bin/sh\r\n#SBATCH --mem=1G\r\n", "a.sbatch").findings
    assert ends.rule == "line-ends"
    with pytest.raises(UsageError) as caught:
        parse_batch("#!/bin/sh\n" * 6000, "a.sbatch")
    assert caught.value.code == "job-file-too-large"
    assert "5000 lines" in caught.value.message


def test_a_later_option_knows_the_earlier() -> None:
    script = read("#SBATCH --mem=1G", "#SBATCH --mem=2G")
    assert (script.options["mem"].value, script.options["mem"].before) == ("2G", "1G")


def test_options_that_a_comment_says_are_given_later() -> None:
    assert read("# sbatch --time=1:00:00 -A me FILE").promised == {"time", "account"}
    assert not read("#SBATCH --time=1:00:00").promised


def test_another_programs_script_is_no_shells() -> None:
    assert read("import os", first="#!/usr/bin/env python3").shell is None
    assert read(first="#!/usr/bin/env bash").shell is not None


@pytest.mark.parametrize(
    ("text", "name", "batch"),
    [
        ("#!/bin/sh\n", "a.sbatch", True),
        ("#!/bin/sh\n#SBATCH --mem=1G\n", "a.sh", True),
        ("#!/bin/sh\n", "a.sh", False),
        ("executable = a\nqueue\n", "a.sub", False),
    ],
)
def test_which_file_is_a_batch_script(text: str, name: str, batch: bool) -> None:
    assert is_batch(text, name) == batch
