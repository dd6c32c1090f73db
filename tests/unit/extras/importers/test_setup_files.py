"""setup.py and setup.cfg: what is literal is read, nothing is run, and the rest is known as unknown."""

# ruff: noqa: E501 -- files of others, a line a line
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.extras.importers.setup_files import read_setup, read_setup_cfg, read_setup_py


def needs(text: str) -> list[str]:
    facts = read_setup_py(text, "setup.py")
    assert facts is not None
    return [line for line, _ in facts.needs]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("setup(install_requires=['torch>=2', 'numpy'])", ["torch>=2", "numpy"]),
        ("import setuptools\nsetuptools.setup(install_requires='torch\\n  numpy\\n')", ["torch", "  numpy"]),
        ("A = ['a']\nB = A + ['b']\nB += ('c',)\nB.append('d')\nsetup(install_requires=[*B, 'e'])", [*"abcde"]),
        ("V = '2.1'\nsetup(install_requires=[f'torch=={V}', 'x=={}'.format(V), 'y==%s' % V])", ["torch==2.1", "x==2.1", "y==2.1"]),
        ("setup(**dict(install_requires=['a']))", ["a"]),
        ("K = {'install_requires': ['a']}\nif __name__ == '__main__':\n    setup(**K)", ["a"]),
        ("def main():\n    deps = ['a']\n    setup(install_requires=deps)\nmain()", ["a"]),
        ("import sys\nD = ['a']\nif sys.platform == 'linux':\n    D.append('b')\nelse:\n    D.append('c')\nsetup(install_requires=D)", ["a", "b"]),
        ("E = {'x': ['a'], 'y': ['b']}\nsetup(install_requires=sum(E.values(), []))", ["a", "b"]),
        ("E = {'x': ['a'], 'y': ['b']}\nsetup(install_requires=[p for e in E.values() for p in e])", ["a", "b"]),
        ("import sys\nD = ['a']\nif '--cpu' in sys.argv:\n    D = ['b']\nsetup(install_requires=D)", ["a"]),
        ("import os\nmore = {'ext_modules': x()} if os.environ.get('X') else {}\nsetup(install_requires=['a'], **more)", ["a"]),
        ("setup(install_requires=['a'], extras_require={':python_version<\"3.8\"': ['old']})", ["a", "old ; python_version<\"3.8\""]),
        (
            "import re\n_d = ['torch>=2', 'hub[cli]>=1']\n"
            "deps = {b: a for a, b in (re.findall(r'^(([^!=<>~ \\[]+).*)$', x)[0] for x in _d)}\n"
            "def deps_list(*names):\n    return [deps[name] for name in names]\n"
            "setup(install_requires=deps_list('hub', 'torch'))",
            ["hub[cli]>=1", "torch>=2"],
        ),
    ],
)  # fmt: skip
def test_what_is_literal(text: str, expected: list[str]) -> None:
    assert needs(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "setup(install_requires=open('r.txt').read().splitlines())",
        "with open('r.txt') as f:\n    r = f.readlines()\nsetup(install_requires=r)",
        "r = [l.strip() for l in open('r.txt') if not l.startswith('#')]\nsetup(install_requires=r)",
        "import os\nhere = os.path.abspath(os.path.dirname(__file__))\n"
        "setup(install_requires=open(os.path.join(here, 'r.txt')).read().split('\\n'))",
        "from pathlib import Path\nhere = Path(__file__).parent.resolve()\n"
        "setup(install_requires=(here / 'r.txt').read_text().splitlines())",
        "def load(name):\n    with open(name) as f:\n        return [l for l in f if l]\nsetup(install_requires=load('r.txt'))",
        "def load():\n    p = 'r.txt'\n    out = []\n    for l in open(p):\n        out.append(l)\n    return out\nsetup(install_requires=load())",
        "r = []\nwith open('r.txt') as f:\n    for l in f:\n        r.append(l.strip())\nsetup(install_requires=r)",
        "import pkg_resources\nsetup(install_requires=[str(r) for r in pkg_resources.parse_requirements(open('r.txt'))])",
        "setup(install_requires=[str(i.req) for i in parse_requirements('r.txt', session=None)])",
        "setup(pbr=True)",
    ],
)  # fmt: skip
def test_code_that_reads_a_file_stands_for_the_file(text: str) -> None:
    name = "requirements.txt" if "pbr" in text else "'r.txt'"
    assert needs(text) == [f"-r {name}"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import x\nsetup(\n    install_requires=x.find())", 3),
        ("import os\nD = ['a']\nif os.environ.get('X'):\n    D.append('b')\nsetup(install_requires=D)", 3),
        ("import os\nD = ['a']\ntry:\n    import x\n    D.remove('a')\nexcept ImportError:\n    pass\nsetup(install_requires=D)", 5),
        ("V = x()\nsetup(install_requires=[\n  f'torch=={V}'])", 3),
        ("setup(**x())", 1),
    ],
)  # fmt: skip
def test_what_is_computed_is_known_with_its_line(text: str, line: int) -> None:
    facts = read_setup_py(text, "setup.py")
    assert facts is not None
    ((what, where, _),) = facts.unknown
    assert (what, where.line) == ("install_requires", line)


@pytest.mark.parametrize(
    "text",
    [
        "print('no call')",
        "print 'of Python 2'\nsetup()",
        "setup(\x00)",
        "x = " + "(" * 5000,
        "x = " + "-" * 50_000 + "1\nsetup()",
        "# " + "x" * 300_000,
    ],
)
def test_what_cannot_be_read_says_nothing(text: str) -> None:
    assert read_setup_py(text, "setup.py") is None


def test_a_script_that_grows_without_end_is_not_followed() -> None:
    doubled = "a = ['x']\n" + "a = a + a\n" * 60 + "b = 'x'\n" + "b = b + b\n" * 60
    facts = read_setup_py(f"{doubled}setup(install_requires=a + [b])", "setup.py")
    assert facts is not None
    assert (facts.needs, len(facts.unknown)) == ([], 1)


CONFIG = """\
[metadata]
name = lab
[options]
python_requires = >=3.9
install_requires =
    torch>=2   # the model
    numpy; python_version < "3.12"
[options.extras_require]
train = lightning; wandb
docs = file: docs.txt, more.txt
[flake8]
max-line-length = 100
"""


def test_setup_cfg() -> None:
    facts = read_setup_cfg(CONFIG, "setup.cfg")
    assert facts is not None
    assert (facts.name, facts.python) == ("lab", ">=3.9")
    assert [line for line, _ in facts.needs] == ["torch>=2   # the model", 'numpy; python_version < "3.12"']
    assert facts.needs[0][1].line == 6
    extras = {name: [line for line, _ in lines] for name, lines in facts.extras.items()}
    assert extras == {"train": ["lightning", "wandb"], "docs": ["-r docs.txt", "-r more.txt"]}


@pytest.mark.parametrize("text", ["[flake8]\nx = 1\n", "no section\n", "[options\n"])
def test_a_setup_cfg_of_other_tools_says_nothing(text: str) -> None:
    assert read_setup_cfg(text, "setup.cfg") is None


def test_what_setup_py_does_not_say_setup_cfg_says() -> None:
    files = {"a/setup.py": "setup(install_requires=['jax'])", "a/setup.cfg": CONFIG}
    facts = read_setup(files.get, "a")
    assert facts is not None
    assert ([line for line, _ in facts.needs], facts.name) == (["jax"], "lab")
    assert set(facts.extras) == {"train", "docs"}
    assert read_setup({}.get, "a") is None


PIECES = [
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "*",
    "**",
    "+",
    "=",
    ":",
    "\n",
    "    ",
    "'",
    '"',
    "open",
    "setup",
    "f'{x}'",
    "lambda",
    "if x",
    "\\",
]


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.integers(0, 400))
def test_near_valid_scripts_are_read_or_not(pieces: list[str], at: int) -> None:
    text = "A = ['a', 'b'] + [f'c{x}']\nE = {'x': A}\nE['y'] = sum(E.values(), [])\nsetup(install_requires=A, extras_require=E)\n"
    at %= len(text)
    read_setup_py(text[:at] + "".join(pieces) + text[at:], "setup.py")
