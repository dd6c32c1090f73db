"""What each kind of value in a recipe may be, and the reader that takes values and gathers faults.

Recipes are data from strangers: every value passes an allow-list by full match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from imagefactory import match_spec
from imagefactory.errors import RecipeError
from imagefactory.match_spec import channel_name, normal_spec, parse_spec
from imagefactory.model import Where
from imagefactory.verify.suite import table
from imagefactory.verify.suite.gpu import table as gpu_table
from imagefactory.yaml_tree import Node, show

# The checks of the CPU-level smoke test (verify/suite), in the order in which they run.
SMOKE_CHECKS = ("packages", "libraries", "import", "cuda-version", "compute", "compiler", "unprivileged")
# The checks of the GPU suite that a recipe may do without: not those that tell a GPU from none, nor controls.
WAIVABLE = tuple(
    check
    for part in ("numbers", "jit", "portability")
    for check in gpu_table.PARTS[part]
    if not check.endswith("-controls")
)
SOURCES = ("pypi", "conda")
PLATFORMS = ("linux/amd64",)
PRIORITIES = ("strict", "disabled")
ARCHSPECS = ("x86_64", "x86_64_v2", "x86_64_v3", "x86_64_v4")

MAX_FAULTS = 50


# --- what may be written -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """The allow-list of one kind of value: `pattern` must match all of it, `limit` counts characters.

    `write` completes the sentence "write ..." in an error.
    """

    pattern: str
    limit: int
    write: str

    def allows(self, value: str) -> bool:
        return len(value) <= self.limit and re.fullmatch(self.pattern, value, re.ASCII) is not None


_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_RELEASE = r"[0-9]{1,8}(\.[0-9]{1,8})*"
_VERSION = rf"{_RELEASE}((a|b|rc)[0-9]{{1,4}})?(\.post[0-9]{{1,4}})?(\.dev[0-9]{{1,4}})?"
# The bounds of PEP 440 without epochs, local versions and arbitrary equality.
_BOUND = rf"((==|!=) ?{_RELEASE}\.\*|(==|!=|<=|>=|<|>) ?{_VERSION}|~= ?[0-9]{{1,8}}\.{_VERSION})"
_BOUNDS = rf"{_BOUND}(, ?{_BOUND})*"
_PYTHON = r"3\.[0-9]{1,2}"
# An image of a registry by digest: the host written out, a tag beside the digest for readers alone.
_HOST = r"(([a-z0-9-]+\.)+[a-z0-9-]+|localhost|[a-z0-9-]+(?=:))(:[0-9]{1,5})?"
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = (
    rf"(?!docker\.io/[^/]*$){_HOST}(/{_PART})+(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?@sha256:[0-9a-f]{{64}}"
)


def _one_of(values: Sequence[str]) -> Rule:
    written = " or ".join(f'"{value}"' for value in values)
    return Rule("|".join(re.escape(value) for value in values), 40, written)


# Neither JSON schemas nor editors know Python's named groups.
_SPEC = re.sub(r"\(\?P<[a-z_]+>", "(", match_spec.SPEC)
_PACKAGE = rf"{_NAME}(\[{_NAME}(, ?{_NAME})*\])?( ?{_BOUNDS})?"

RULES: Mapping[str, Rule] = {
    "family": Rule(
        r"[a-z][a-z0-9]*(-[a-z0-9]+)*", 40, 'lower-case letters, digits and single hyphens, such as "pytorch"'
    ),
    "description": Rule(
        r"[A-Za-z0-9]([A-Za-z0-9 .,;:()/+_=-]*[A-Za-z0-9.,;:()/+_=-])?",
        200,
        "one line of letters, digits, spaces and . , ; : ( ) / + _ = - that starts with a letter or digit "
        "and ends in no space",
    ),
    "source": _one_of(SOURCES),
    "platform": _one_of(PLATFORMS),
    "channel": Rule(
        match_spec.CHANNEL,
        200,
        'a channel, such as "conda-forge" or "https://conda.example.org/lab", by its own name (not defaults '
        "or local), without a user, a token or a platform",
    ),
    "channel-priority": _one_of(PRIORITIES),
    "archspec": _one_of(ARCHSPECS),
    "driver": Rule(r"[1-9][0-9]?\.[0-9]", 4, 'the CUDA version of a driver in quotes, such as "12.4"'),
    "on": Rule(
        r"[a-z][a-z0-9]*(-[a-z0-9]+(\.[0-9]+)*)+", 100, 'the name of a target, such as "pytorch-2.3-cu121"'
    ),
    "framework": Rule(_NAME, 100, 'a distribution\'s name without version or extras, such as "torch"'),
    "base": Rule(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", 40, 'the name of a base, such as "debian-12"'),
    "image": Rule(
        _IMAGE, 255, 'an image by digest, such as "docker.io/library/debian@sha256:" and 64 hex digits'
    ),
    "interpreter": Rule(
        r"(/[A-Za-z0-9_][A-Za-z0-9._+-]*)+",
        200,
        'the absolute path of the Python in the image, such as "/usr/local/bin/python3.11"',
    ),
    "python": Rule(_PYTHON, 8, 'the minor version in quotes, such as "3.11"'),
    "capability": Rule(r"[0-9]{1,2}\.[0-9]", 4, 'a compute capability in quotes, such as "8.0"'),
    "check": Rule(
        "|".join(map(re.escape, SMOKE_CHECKS)), 40, f"one of the known checks: {', '.join(SMOKE_CHECKS)}"
    ),
    "waived": Rule(
        "|".join(map(re.escape, WAIVABLE)), 40, f"a check of the GPU suite: {', '.join(WAIVABLE)}"
    ),
    "package": Rule(
        _PACKAGE, 200, 'a package with bounds, such as "numpy<2"; no addresses, markers or options'
    ),
    "match spec": Rule(
        _SPEC,
        200,
        'a package as conda matches it: name, bounds and build, such as "numpy <2", "numpy 1.26.*" or '
        '"jaxlib * *cuda12*"; no brackets, no | and no star after >= or ==',
    ),
    "added package": Rule(
        f"{_PACKAGE}|{_SPEC}",
        200,
        'a package with bounds, such as "numpy<2"; no addresses, markers or options',
    ),
    "constraint": Rule(
        rf"{_NAME} ?{_BOUNDS}", 200, 'a package and its bounds, such as "numpy<2"; no extras, no addresses'
    ),
    "extra": Rule(_NAME, 40, 'the name of an extra, such as "cuda12"'),
    "version": Rule(
        r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}", 20, 'the version in quotes, such as "2.3", and no bounds'
    ),
    "cuda": Rule(r"[1-9][0-9]?(\.[0-9]{1,2})?", 5, 'the CUDA version in quotes, such as "12.1" or "12"'),
    "variable": Rule(r"[A-Z][A-Z0-9_]*", 64, 'capital letters, digits and underscores, such as "OMP_PLACES"'),
    "value": Rule(
        r"[A-Za-z0-9_./:=,+@%-]*", 1024, "letters, digits and _ . / : = , + @ % - alone, without spaces"
    ),
    # bases.yaml
    "suite": Rule(r"[a-z]+", 20, 'the suite\'s code name, such as "bookworm"'),
    "glibc": Rule(r"2\.[0-9]{1,2}", 5, 'the C library\'s version in quotes, such as "2.36"'),
    "debian package": Rule(r"[a-z0-9][a-z0-9+.-]+", 80, 'the name of a Debian package, such as "python3"'),
    "public": Rule(
        r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)+:[A-Za-z0-9._-]+",
        200,
        'registry, repository and tag, such as "docker.io/library/debian:12-slim"',
    ),
}

# --- requirements ---------------------------------------------------------------------------------

# Which rules judge packages and constraints, and how they are kept; what is added to a target that only
# `expand` knows is kept as it stands.
REQUIREMENT_RULES = {"pypi": ("package", "constraint"), "conda": ("match spec", "match spec")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What requirements are held against. `on` names the target that brings all of it, empty for none."""

    kind: str
    framework: str
    channels: tuple[str, ...]
    on: str = ""


def normal_requirement(requirement: str, kind: str) -> str:
    """A requirement that RULES allows, in its source's one form."""
    return {"pypi": _normal_pypi, "conda": normal_spec}.get(kind, str)(requirement)


def _normal_pypi(requirement: str) -> str:
    """Name as PEP 503 has it, no spaces, sorted bounds."""
    name = re.split(r"[ \[<>=!~]", requirement, maxsplit=1)[0]
    extras = requirement.partition("[")[2].partition("]")[0]
    bounds = requirement[len(name) :].rpartition("]")[2].replace(" ", "")
    wanted = ",".join(sorted({canonical(extra.strip()) for extra in extras.split(",") if extra}))
    limits = ",".join(sorted(set(bounds.split(","))))
    return f"{canonical(name)}{f'[{wanted}]' if wanted else ''}{limits}"


def default_checks(framework: str) -> tuple[str, ...]:
    """The checks that an image must pass where its recipe names none: all that know its framework."""
    return SMOKE_CHECKS if framework in table.FRAMEWORKS else table.OTHER_CHECKS


def check_fault(check: str, framework: str) -> tuple[str, str] | None:
    """What is wrong with asking for a check of this framework and what to write, or None."""
    allowed = default_checks(framework)
    if not framework or check not in SMOKE_CHECKS or check in allowed:
        return None
    return f"no check '{check}' is known for '{framework}'", f"write checks: [{', '.join(allowed)}]"


def requirement_fault(text: str, key: str, source: Source) -> tuple[str, str] | None:
    """What is wrong and what to write, or None; a text that its rule refuses is told there.

    The framework's own requirement is made from the row's version, and Python's from `python`.
    """
    conda = source.kind == "conda"
    if not RULES["match spec" if conda else "package"].allows(text):
        return None
    spec = parse_spec(text) if conda else None
    name = spec.name if spec else canonical(re.split(r"[ \[<>=!~]", text, maxsplit=1)[0])
    if name == source.framework and not (spec and key == "constraints" and not spec.version):
        write = "set its version by the row's 'version' and its extras by 'extras'"
        if conda:
            write = f"set its version by the row's 'version', its build by a constraint '{name} * BUILD'"
        if source.on:
            write = f"remove it: it comes from {source.on}"
        return f"'{name}' is the framework and may not stand in '{key}'", write
    if spec is None:
        return None
    if name == "python" and key == "packages":
        return (
            "'python' is no package here: the environment has it",
            "remove it, and write python: beside base:",
        )
    if key == "constraints" and not (spec.version or spec.build or spec.channel):
        return f"'{name}' bounds nothing", f"write bounds, such as '{name} <2', or move it to 'packages'"
    if spec.channel and source.channels and spec.channel not in source.channels:
        known = ", ".join(map(channel_name, source.channels))
        if source.on:
            return f"{show(text)} names a channel that {source.on} does not have", f"name one of {known}"
        return (
            f"{show(text)} names a channel that is not in 'channels'",
            f"add {channel_name(spec.channel)} there, or name one of {known}",
        )
    return None


def what_to_write(text: str, rule: str) -> str:
    """What to write in place of a text that RULES[rule] refuses."""
    if rule == "channel":
        if text in ("defaults", "nodefaults", "local"):
            return f"'{text}' stands for others: write the channel that you mean, such as \"conda-forge\""
        if re.match(r"[/.~]", text):
            return 'write a folder by its absolute path: "file:///data/channel"'
        if text != without_secrets(text):
            return (
                "write it without user or token: this machine's netrc or ~/.rattler/credentials.json has them"
            )
        if text.startswith("http://"):
            return "write https://, and name a mirror without it in the setting 'channels'"
        if found := re.fullmatch(r"(.+)/(linux-64|noarch)/?", text):
            return f'write it without the platform: "{found[1]}"'
    elif rule in ("package", "added package", "match spec", "constraint") and re.match(r"[<>=!~]", text):
        return 'bounds with a comma between them stand in quotes, with their package: "numpy>=1,<2"'
    return f"write {RULES[rule].write}"


def without_secrets(text: str) -> str:
    """An address without the user and the token that it may hold."""
    return re.sub(r"/t/[^/]+", "/t/...", re.sub(r"(?<=://)[^/@\s]*@", "...@", text))


# --- values with places --------------------------------------------------------------------------


class Reader:
    """Takes typed values out of nodes and gathers the faults. A faulty value reads as empty."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.faults: set[tuple[int, int, str]] = set()

    def fault(self, where: Where, what: str, write: str) -> None:
        self.faults.add((where.line, where.column, f"{where}: {what} ({write})"))

    def finish(self) -> None:
        """Raises RecipeError with all faults in the order of the file."""
        if self.faults:
            told = [text for *_, text in sorted(self.faults)]
            if len(told) > MAX_FAULTS:
                told[MAX_FAULTS:] = [f"{self.file}: and {len(told) - MAX_FAULTS} more faults"]
            raise RecipeError(told)

    def mapping(self, node: Node, known: Sequence[str], required: Mapping[str, str]) -> dict[str, Node]:
        """Key -> value; unknown, repeated and missing keys are faults."""
        if node.kind != "map":
            self.fault(
                node.where,
                f"here must be keys and values, not {node.called}",
                f"write {_example(required, known)}",
            )
            return {}
        found: dict[str, Node] = {}
        for name, key, value in self.pairs(node, "keys"):
            if name in known:
                found[name] = value
                continue
            near = nearest(name, known)
            hint = f"did you mean '{near}'?" if near else f"the keys here are {', '.join(known)}"
            self.fault(key.where, f"unknown key {show(name)}", hint)
        for name, example in required.items():
            if name not in found:
                self.fault(node.where, f"'{name}' is missing", f"write {example}")
        return found

    def pairs(self, node: Node | None, key: str) -> Iterator[tuple[str, Node, Node]]:
        """Name, key node, value node of a map; repeated names are faults and come once."""
        if node is None:
            return
        if node.kind != "map":
            self.fault(
                node.where, f"'{key}' must hold names and values, not {node.called}", 'write NAME: "value"'
            )
            return
        seen: dict[str, Where] = {}
        for name, value in node.pairs:
            if name.kind != "text":
                self.fault(name.where, f"a key cannot be {name.called}", "write a plain word")
            elif name.text in seen:
                self.fault(
                    name.where,
                    f"{show(name.text)} is already set at {seen[name.text]}",
                    "remove one of them",
                )
            elif name.text == "<<":
                self.fault(name.where, "merge keys (<<) are not used here", "write the values out")
            else:
                seen[name.text] = name.where
                yield name.text, name, value

    def items(self, node: Node | None, key: str, write: str) -> list[Node]:
        """The items of a list that must not be empty."""
        if node is None:
            return []
        if node.kind != "list":
            self.fault(node.where, f"'{key}' must be a list, not {node.called}", f"write {write}")
        elif not node.items:
            self.fault(node.where, f"'{key}' is empty", f"write {write}")
        return node.items

    def text(self, node: Node | None, key: str, rule: str) -> str:
        """The text that RULES[rule] allows; empty when the key is missing (which is told elsewhere)."""
        if node is None:
            return ""
        allowed = RULES[rule]
        if node.kind != "text" or node.made == "nothing":
            self.fault(node.where, f"'{key}' must be text, not {node.called}", f"write {allowed.write}")
        elif node.made:
            quoted = f'"{node.text}"' if allowed.allows(node.text) else allowed.write
            self.fault(
                node.where,
                f"'{key}' must be text, and without quotes {show(node.text)} is {node.made} in YAML",
                f"write it in quotes: {quoted}",
            )
        elif not allowed.allows(node.text):
            named = rule in ("check", "waived")
            near = nearest(node.text, allowed.pattern.replace("\\", "").split("|")) if named else ""
            write = f"did you mean '{near}'?" if near else what_to_write(node.text, rule)
            size = len(node.text)
            long = (
                f" of {size} characters, more than {allowed.limit}" if size > max(allowed.limit, 20) else ""
            )
            self.fault(node.where, f"'{key}' cannot be {show(without_secrets(node.text))}{long}", write)
        else:
            return node.text
        return ""

    def image(self, node: Node | None, key: str) -> str:
        """A reference to an image by digest; docker's short names and floating tags are faults."""
        if node is None or node.kind != "text" or node.made or RULES["image"].allows(node.text):
            return self.text(node, key, "image")
        full, shown = _written_out(node.text), show(node.text, limit=160)
        digest = node.text.partition("@")[2]
        if not full or full == node.text:
            return self.text(node, key, "image")
        if digest:
            self.fault(node.where, f"'{key}' cannot be {shown}, a short name", f"write {full}")
        else:
            self.fault(
                node.where,
                f"'{key}' cannot be {shown}, which may be another image tomorrow",
                f"write {full}; `skopeo inspect docker://{full.partition('@')[0]}` tells the digest",
            )
        return ""

    def texts(self, node: Node | None, key: str, rule: str, *, empty: bool = True) -> tuple[str, ...]:
        """The texts of a list, each allowed by RULES[rule] and none twice; `empty` allows an empty list."""
        if node is None:
            return ()
        if node.kind != "list" or not (node.items or empty):
            self.items(node, key, f"{key}: [...] with {RULES[rule].write}")
            return ()
        seen: dict[str, Where] = {}
        for item in node.items:
            text = self.text(item, key, rule)
            if text and (first := seen.setdefault(text, item.where)) is not item.where:
                self.fault(
                    item.where, f"{show(text)} stands in '{key}' twice, first at {first}", "remove one"
                )
        return tuple(seen)


def _written_out(text: str) -> str:
    """The reference that `text` means, as a recipe writes it; empty when it is none.

    Docker reads a name without a host as docker.io's, and one without a folder there as library's.
    """
    place, _, digest = text.partition("@")
    host, slash, rest = place.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, rest = "docker.io", place
    if host == "docker.io" and "/" not in rest:
        rest = f"library/{rest}"
    found = f"{host}/{rest}@{digest or 'sha256:' + 64 * '0'}"
    if not RULES["image"].allows(found):
        return ""
    return found if digest else found.replace(64 * "0", "<64 hex digits>")


def _example(required: Mapping[str, str], known: Sequence[str]) -> str:
    return next(iter(required.values()), f"{known[0]}: and its value")


def nearest(word: str, known: Iterable[str]) -> str:
    import difflib  # only faults pay for it

    return next(iter(difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.6)), "")


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """Sort key that reads runs of digits as numbers."""
    return tuple(
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", text) if part
    )


def canonical(name: str) -> str:
    """A distribution's or extra's name in normal form (PEP 503, PEP 685)."""
    return re.sub(r"[-_.]+", "-", name).lower()
