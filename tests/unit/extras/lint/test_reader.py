"""Submit files are read as condor_submit reads them, with lines; nothing is run and what grows is bounded."""

from __future__ import annotations

import contextlib
from pathlib import Path

import htcondor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import UsageError
from imagefactory.extras.lint.reader import (
    MAX_BYTES,
    MAX_LINES,
    MAX_QUEUES,
    MAX_SETTINGS,
    MAX_VALUE,
    QueueStatement,
    parse_submit_file,
    read_submit_file,
)


def jobs_of(text: str) -> QueueStatement:
    (only,) = parse_submit_file(text, "a.sub").jobs
    return only


def values(text: str) -> dict[str, str]:
    jobs = jobs_of(text)
    return {key: value for key in jobs.settings if (value := jobs.value(key))}


def theirs(text: str) -> dict[str, str]:
    """What HTCondor's own parser makes of it, names in small letters and empty values left out."""
    submit, found = htcondor2.Submit(text), {}
    for key in submit:
        with contextlib.suppress(KeyError):  # set to nothing
            found[key.lower()] = submit.expand(key).strip()
    return {key: value for key, value in found.items() if value}


def in_words(found: dict[str, str]) -> dict[str, list[str]]:
    return {key: value.split() for key, value in found.items()}


SAME = (
    "x = 1\nX = 2\nqueue",
    "  x   =    1   2   \nqueue",
    "x = one \\\n   two # no comment\n # a comment\ny=3\nqueue",
    "# a comment \\\nx = 1\nqueue",
    "x = one \\ \n two = 3\nqueue",
    "x = one \\\\\n two\ny=3\nqueue",
    "x = a\\\n  b\ny =  \\\n 3\nqueue",
    "x = 1\r\ny = 2\r\nqueue\r\n",
    "a.b = 1\n_x = 2\nMY.z = 3\n+q=4\nx/y = 5\n1a = 6\nqueue",
    "x @=end\n a $(y)\n\n# c\n @end\ny=1\nqueue",
    "x @= end  \n a\n@end\ny=1\nqueue",
    "if true\nif false\nx=1\nelse\nx=2\nendif\nelse\nx=3\nendif\nqueue",
    "if 0\nx=1\nelif 2\nx=2\nendif\nqueue",
    "a=1\nif defined a\nx=1\nendif\nif ! defined b\ny=1\nendif\nif defined $(a)\nz=1\nendif\nqueue",
    "if yes\nx=1\nendif\nif TRUE\ny=1\nendif\nif no\nz=1\nendif\nqueue",
    "If true\nx=1\nENDIF\nQUEUE 3",
    "if 0.5\nx=1\nendif\nif 0.0\ny=1\nendif\nif -1\nz=1\nendif\nqueue",
    "if $(q:true)\nx=1\nendif\nif $(r)\ny=1\nendif\nqueue",
    "if version >= 23.0\nx=1\nendif\nif version < 99.1.1\ny=1\nendif\nqueue",
    "+a=1\nif defined MY.a\nx=1\nendif\nqueue",
    "if true\nx=1\nelse foo\ny=1\nendif bar\nqueue",
    "x = $(a:$(b:c))\ny = $(a:(1))\nz = $( a )$(a :3)$(a\nqueue",
    "x = $(later) $(unset)\nlater = 7\nqueue",
    "self = 1\nself = $(self)$(SELF) t\nself=$(self) $(self)\nnew = $(new:zz) t\nqueue",
    "x = a$b $ $$ $$(y) $(DOLLAR)(a)\ny = 2\nqueue",
    "x = $$([a]) $$(a:b) $$(c$(d))\nd=4\nqueue",
    "x == b\ny = a == b\nqueue",
    "include = 3\nerror = x\nwarning = y\nuse = z\nqueues = 2\nqueue",
    "warning : mind this\nx = 1\nqueue",
    "c =\nb = x$(c:d)y $(c) $(c:$(e))\ne = 5\nqueue",
    "e =\nc = $(e)\nb = x$(c:d)y\nqueue",
    "c =\nc = x$(c:d)\nc = $(c:e)y\nqueue",
)


@pytest.mark.parametrize("text", SAME)
def test_a_file_is_read_as_htcondor_reads_it(text: str) -> None:
    assert values(text) == theirs(text)


LINES = st.sampled_from(
    [
        "a = 1",
        "A = $(a) x",
        "b = $(a)$(c:d) $(a:3)",
        "c = \\",
        "   two",
        "# no",
        "if true",
        "if defined b",
        "elif 0",
        "else",
        "endif",
        "+f = $(c)",
        "MY.f = 2",
        "",
        "b =",
    ]
)


@given(st.lists(LINES, max_size=12))
def test_what_htcondor_takes_is_read_the_same(lines: list[str]) -> None:
    text = "\n".join([*lines, "queue"])
    try:
        expected = theirs(text)
    except ValueError:
        return  # the test below has what both refuse
    try:
        # Blanks at the end of a value that goes on in an empty line are lost here, and mean nothing.
        assert in_words(values(text)) == in_words(expected)
    except UsageError as error:
        # HTCondor forgives what ends in the middle, and takes a comment for a value; a person is told
        codes = ("submit-block-unclosed", "submit-line-invalid", "submit-comment-misplaced")
        assert error.code in codes  # noqa: PT017
    except ValueError:
        assert text.rstrip().endswith("\\\nqueue")  # the last line belongs to the one above


REFUSED = (
    ("garbage\nqueue", 1, "submit-line-invalid"),
    ("x = 1\nx-y = 3\nqueue", 2, "submit-line-invalid"),
    ("if foo\nx=1\nendif\nqueue", 1, "submit-condition-invalid"),
    ("if 1 == 1\nx=1\nendif\nqueue", 1, "submit-condition-invalid"),
    ("if true # c\nx=1\nendif\nqueue", 1, "submit-condition-invalid"),
    ("if true\nx=1\nelse\nelse\nendif\nqueue", 4, "submit-condition-invalid"),
    ("endif\nqueue", 1, "submit-condition-invalid"),
    ("error : not here\nqueue", 1, "submit-error-statement"),
    ("x @=end\n1\nqueue", 1, "submit-block-unclosed"),
)


@pytest.mark.parametrize(("text", "line", "code"), REFUSED)
def test_both_refuse_and_this_one_says_where(text: str, line: int, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_submit_file(text, "a.sub")
    assert caught.value.code == code
    assert caught.value.message.startswith(f"a.sub:{line}: ")
    with pytest.raises((ValueError, KeyError)):
        htcondor2.Submit(text)


def test_nothing_is_included_or_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for line in (f"include command : touch {mark}", f"include : touch {mark} |", "include : /etc/hosts"):
        with pytest.raises(UsageError) as caught:
            parse_submit_file(f"{line}\nqueue", "a.sub")
        assert caught.value.code == "submit-include-unsupported"
        assert "a.sub:1: " in caught.value.message
    (jobs,) = parse_submit_file(f"queue x from touch {mark} |", "a.sub").jobs
    assert (jobs.count, jobs.variables) == (None, ("x",))
    assert not mark.exists()
    assert parse_submit_file("if false\ninclude : /etc/hosts\nendif\nqueue", "a.sub").jobs


def test_macros_that_grow_or_turn_in_circles_are_refused() -> None:
    circle = jobs_of("a = $(b)\nb = $(a)\nqueue")
    with pytest.raises(UsageError) as caught:
        circle.value("a")
    assert caught.value.code == "macro-recursive"
    doubling = ["a0 = xxxxxxxxxx", *(f"a{n + 1} = $(a{n})$(a{n})" for n in range(29)), "queue"]
    with pytest.raises(UsageError) as caught:
        jobs_of("\n".join(doubling)).value("a29")
    assert caught.value.code == "submit-value-too-long"
    empty = ["a0 =", *(f"a{n + 1} = $(a{n})$(a{n})" for n in range(29)), "queue"]
    assert jobs_of("\n".join(empty)).value("a29") == ""
    with pytest.raises(UsageError) as caught:
        parse_submit_file("\n".join(["a = xxxxxxxxxx", *["a = $(a)$(a)"] * 20, "queue"]), "a.sub")
    assert caught.value.code == "submit-value-too-long"
    assert "a.sub:" in caught.value.message


@pytest.mark.parametrize(
    ("text", "code", "what"),
    [
        ("x = 1\n" * (MAX_LINES + 1), "job-file-too-large", f"{MAX_LINES} lines"),
        ("queue\n" * (MAX_QUEUES + 1), "job-file-too-large", f"{MAX_QUEUES} queue lines"),
        (
            "\n".join(f"a{n} = 1" for n in range(MAX_SETTINGS + 1)),
            "job-file-too-large",
            f"{MAX_SETTINGS} different commands",
        ),
        ("\n".join(["if true"] * 40), "submit-condition-invalid", "nested"),
        (f"a = {'x' * (MAX_VALUE + 1)}", "submit-value-too-long", "a.sub:1: "),
    ],
)
def test_sizes_are_bounded(text: str, code: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_submit_file(text, "a.sub")
    assert caught.value.code == code
    assert what in caught.value.message


def test_a_file_that_is_no_text_or_too_large_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.sub"
    file.write_bytes(b"x = \xff\xfe\nqueue\n")
    with pytest.raises(UsageError) as caught:
        read_submit_file(file)
    assert caught.value.code == "job-file-not-text"
    assert str(file) in caught.value.message
    file.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(UsageError) as caught:
        read_submit_file(file)
    assert caught.value.code == "job-file-too-large"
    assert "KiB" in caught.value.message
    file.write_text("x = 1\nqueue\n")
    assert read_submit_file(file).jobs[0].value("x") == "1"


@pytest.mark.parametrize(
    ("queue", "count", "variables"),
    [
        ("queue", 1, ()),
        ("queue 5", 5, ()),
        ("n = 3\nqueue $(n)", 3, ()),
        ("queue 2 x in (a b, c)", 6, ("x",)),
        ("queue x, y from (\na, 1\nb, 2\n)", 2, ("x", "y")),
        ("queue in (a b)", 2, ("item",)),
        ("queue x from list.txt", None, ("x",)),
        ("queue x matching files *.dat", None, ("x",)),
        ("queue x in (\na\nb\n)\n", 2, ("x",)),
        ("queue x from [1:] (\n1\n2\n3\n)", 2, ("x",)),
        ("queue 2 x in [0:2] (a b c)", 4, ("x",)),
        ("queue x in [::2] (a b c)", 2, ("x",)),
        ("queue x in [1] (a b c)", None, ("x",)),
        ("queue x in [::0] (a b c)", None, ("x",)),
        ("queue x in [ : ](a b c)", 3, ("x",)),
        ("queue x in a b c", 3, ("x",)),
        ("queue x from (\na\n# no item\nb\n)", 2, ("x",)),
        ("queue x from list.py |", None, ("x",)),
        ("queue x from $ENV(LIST)", None, ("x",)),
        ("queue $ENV(N)", None, ()),
        ("queue $(set_by_condor_submit) a, b from $(too)", None, ("a", "b")),
        ("queue $ENV(N) x in (a b)", None, ("x",)),
        ("queue 2 * 3", 6, ()),
        ("queue 0", 0, ()),
    ],
)
def test_queue_lines(queue: str, count: int | None, variables: tuple[str, ...]) -> None:
    jobs = jobs_of(queue)
    assert (jobs.count, jobs.variables) == (count, variables)


def test_a_list_beside_the_file_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.sub"
    (tmp_path / "list.txt").write_text("a, 1\n\nb, 2\n# an item too\n")
    for queue, count in (
        ("queue x from list.txt", 3),
        ("queue 10 from list.txt", 30),
        ("queue x, y from [:1] list.txt", 1),
        ("queue x from none.txt", None),
        ("queue x from .", None),
    ):
        file.write_text(f"x = 1\n{queue}\n")
        assert read_submit_file(file).jobs[0].count == count, queue


def test_a_comment_within_a_line_that_goes_on() -> None:
    jobs = jobs_of("x = a \\\n  # why \\\n  b \\\n#\\\n  c\ny = 1\nqueue")
    assert (jobs.value("x"), jobs.settings["x"].end, jobs.value("y")) == ("a b c", 5, "1")
    with pytest.raises(UsageError) as caught:
        parse_submit_file("x = a \\\n# why\ny = 1\nqueue", "a.sub")
    assert caught.value.code == "submit-comment-misplaced"
    assert "a.sub:2: " in caught.value.message
    assert theirs("x = a \\\n# why\ny = 1\nqueue")["x"] == "a y"


@pytest.mark.parametrize(
    "queue", ["queue abc", "queue 3 4", "queue -1", "queue x in", "queue 5 # five", "queue 2 *"]
)
def test_a_queue_that_htcondor_refuses_is_refused(queue: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_submit_file(f"x = 1\n{queue}\n", "a.sub")
    assert caught.value.code == "submit-queue-invalid"
    assert "a.sub:2: 'queue " in caught.value.message
    with pytest.raises(ValueError, match=r"Queue count|invalid qargs"):
        list(htcondor2.Submit(f"x = 1\n{queue}\n").itemdata() or ())


def test_each_queue_has_what_stands_above_it_and_knows_the_lines() -> None:
    file = parse_submit_file(
        "x = 1\n\nrequirements = a\nRequirements = b\nqueue\nx = 2\nrequirements = c\nqueue 2\n", "a.sub"
    )
    first, second = file.jobs
    assert (first.line, first.value("x"), second.line, second.value("x")) == (5, "1", 8, "2")
    setting = first.settings["requirements"]
    assert (setting.line, setting.before and setting.before.line) == (4, 3)
    assert second.settings["requirements"].before is None  # the jobs of line 5 had the other


def test_what_only_the_submission_tells_is_said() -> None:
    jobs = jobs_of(
        "a = $(img)\nb = $ENV(HOME)/x.sif\nc = $(zz)\nd = $(q:1)\ne = $(Process)\nqueue img in (x y)"
    )
    assert [jobs.unknown(key) for key in "abcde"] == ["$(img)", "$ENV(...)", "", "", ""]
    assert [jobs.undefined(key) for key in "abcde"] == [(), (), ("zz",), (), ()]


def test_a_batch_script_is_told_so() -> None:
    """HTCondor itself takes its lines for comments, up to the first command."""
    with pytest.raises(UsageError) as caught:
        parse_submit_file("#!/bin/bash\n#SBATCH --gres=gpu:1\n./train.sh\n", "a.sbatch")
    assert caught.value.code == "submit-file-is-script"
    assert "a.sbatch:1: " in caught.value.message
