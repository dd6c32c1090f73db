"""YAML -> Recipe and Base -> Target; every fault says file:line:column, what is wrong and what to write.

Recipes are data from strangers: yaml_tree.py reads the text within caps and keeps the place of every
value, and here each value passes an allow-list by full match. All faults of a file are told at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from imagefactory.errors import NothingSelectedError, RecipeError, UsageError
from imagefactory.gpu import knowledge
from imagefactory.model import Base, MatrixRow, Recipe, Target, Where
from imagefactory.yaml_tree import MAX_BYTES, Node, parse_tree, refused, show, too_large

BASES_FILE = "bases.yaml"

# The checks of the CPU-level smoke test (verify/suite), in the order in which they run.
SMOKE_CHECKS = ("packages", "libraries", "import", "cuda-version", "compute", "compiler", "unprivileged")
SOURCES = ("pypi",)
PLATFORMS = ("linux/amd64",)

# The factory sets these itself, in every image.
OWNED_VARIABLES = ("PATH", "VIRTUAL_ENV", "LANG")
OWNED_PREFIX = "NVIDIA_"

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
    "package": Rule(
        rf"{_NAME}(\[{_NAME}(, ?{_NAME})*\])?( ?{_BOUNDS})?",
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

# Key -> an example of the line, told when it is missing.
_FAMILY_REQUIRED = {
    "family": "family: pytorch",
    "description": "description: what the image is for",
    "source": "source: pypi",
    "framework": "framework: torch",
    "platform": "platform: linux/amd64",
    "base": "base: debian-12",
    "python": 'python: "3.11"',
    "matrix": "matrix: and its rows",
}
_OVERRIDABLE = ("capabilities", "checks", "packages", "constraints", "environment")
_BESIDE_IMAGE = ("glibc", "interpreter")
_FAMILY_KEYS = (*_FAMILY_REQUIRED, *_BESIDE_IMAGE, *_OVERRIDABLE)
_ROW_REQUIRED = {"version": 'version: "2.3"', "cuda": 'cuda: ["12.1"]'}
_ROW_KEYS = (*_ROW_REQUIRED, "extras", "python", "base", *_BESIDE_IMAGE, "platforms", *_OVERRIDABLE)
_BASE_REQUIRED = {
    "name": "name: debian-12",
    "suite": "suite: bookworm",
    "python": 'python: "3.11"',
    "glibc": 'glibc: "2.36"',
    "packages": "packages: [python3]",
    "public": "public: docker.io/library/debian:12-slim",
}
_IMAGE_REQUIRED = {
    "name": "name: cuda-devel",
    "image": "image: docker.io/nvidia/cuda@sha256:... with its 64 hex digits",
    "python": 'python: "3.11"',
    "glibc": 'glibc: "2.36" (`ldd --version` inside the image says it)',
}


# --- parsing -------------------------------------------------------------------------------------


def parse_recipe(text: str, file: str) -> Recipe:
    """One family from the text of its YAML file; `file` is how errors name it.

    What needs other files (the base, what the source offers) is judged by `expand`.
    Raises RecipeError with all faults of the file.
    """
    reader = _Reader(file)
    root = parse_tree(text, file)
    fields = reader.mapping(root, _FAMILY_KEYS, _FAMILY_REQUIRED)
    texts = {
        key: reader.text(fields.get(key), key, key)
        for key in _FAMILY_REQUIRED
        if key not in ("base", "matrix")
    }
    family = _Family(texts=texts, base=_named_base(reader, fields), common=_common(reader, fields))
    framework = _canonical(texts["framework"])
    rows = reader.items(fields.get("matrix"), "matrix", "rows, each starting with - version:")
    matrix = tuple(_row(reader, fields, family, row) for row in rows)
    for section in (root, *rows):
        _refuse_framework(reader, section, framework)
    reader.finish()
    return Recipe(
        family=texts["family"],
        description=texts["description"],
        source=texts["source"],
        framework=framework,
        python=texts["python"],
        base=family.base.name,
        platform=texts["platform"],
        matrix=matrix,
        where=root.where,
    )


def parse_bases(text: str, file: str) -> tuple[Base, ...]:
    """The bases from the text of bases.yaml, in its order. Raises RecipeError with all faults."""
    reader = _Reader(file)
    fields = reader.mapping(parse_tree(text, file), ("bases",), {"bases": "bases: and its rows"})
    bases: list[Base] = []
    for node in reader.items(fields.get("bases"), "bases", "rows, each starting with - name:"):
        base = _base(reader, node)
        for other in bases:
            if base.name and other.name == base.name:
                reader.fault(node.where, f"base '{base.name}' is also at {other.where}", "remove one of them")
        bases.append(base)
    reader.finish()
    return tuple(bases)


def _base(reader: _Reader, node: Node) -> Base:
    """A row of bases.yaml: of Debian's packages, or with `image` one that is pulled by digest."""
    pulled = node.kind == "map" and any(key.text == "image" for key, _ in node.pairs)
    required = _IMAGE_REQUIRED if pulled else _BASE_REQUIRED
    row = reader.mapping(node, (*required, "interpreter") if pulled else tuple(required), required)
    image = reader.image(row.get("image"), "image")
    return Base(
        name=reader.text(row.get("name"), "name", "base"),
        suite=reader.text(row.get("suite"), "suite", "suite"),
        python=reader.text(row.get("python"), "python", "python"),
        glibc=reader.text(row.get("glibc"), "glibc", "glibc"),
        packages=reader.texts(row.get("packages"), "packages", "debian package", empty=False),
        public=_without_tag(image) or reader.text(row.get("public"), "public", "public"),
        where=node.where,
        image=image,
        interpreter=reader.text(row.get("interpreter"), "interpreter", "interpreter"),
    )


def all_bases(bases: Sequence[Base], recipes: Iterable[Recipe]) -> tuple[Base, ...]:
    """`bases` and those that recipes name by digest themselves, each once.

    Raises RecipeError for one image that is described in two ways.
    """
    found = {base.name: base for base in bases}
    faults = []
    for base in (row.own_base for recipe in recipes for row in recipe.matrix):
        if base is None:
            continue
        other = found.setdefault(base.name, base)
        if _described(other) != _described(base):
            faults.append(
                f"{base.where}: base '{base.name}' is described in another way at {other.where} "
                "(write the same glibc, interpreter and python, or give each a name in bases.yaml)"
            )
    if faults:
        raise RecipeError(dict.fromkeys(faults))
    return tuple(found.values())


def _described(base: Base) -> tuple[str, ...]:
    """What may not differ; the tag beside a digest may."""
    return base.public, base.python, base.glibc, base.python_path


def _without_tag(image: str) -> str:
    """The reference as all tools take it: some refuse a tag beside a digest."""
    place, at, digest = image.partition("@")
    host, slash, path = place.partition("/")
    return f"{host}{slash}{path.partition(':')[0]}{at}{digest}"


def read_recipes(folder: Path) -> tuple[Recipe, ...]:
    """All recipes of a folder, sorted by file name.

    Raises UsageError when there is no such folder, RecipeError with the faults of all files.
    """
    if not folder.is_dir():
        raise UsageError(
            f"there are no recipes at {show(str(folder), limit=200)}",
            hint="name the factory's folder with -C DIR, or make a recipe with `imagefactory new FAMILY`",
        )
    recipes: list[Recipe] = []
    faults: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.suffix not in (".yaml", ".yml") or path.name == BASES_FILE:
            continue
        try:
            recipe = parse_recipe(*_read(path))
            if recipe.family != path.stem:
                faults.append(
                    f"{recipe.where}: this file is family {show(recipe.family)}'s: one family, one file "
                    f"(name it {recipe.family}.yaml, or write family: {path.stem})"
                )
            recipes.append(recipe)
        except RecipeError as error:
            faults.extend(error.faults)
    if faults:
        raise RecipeError(faults)
    return tuple(recipes)


def read_bases(folder: Path) -> tuple[Base, ...]:
    """The bases of `folder`/bases.yaml. Raises RecipeError; a missing file is one."""
    return parse_bases(*_read(folder / BASES_FILE))


def _read(path: Path) -> tuple[str, str]:
    """The file's text and how errors name the file (`recipes/pytorch.yaml`)."""
    file = f"{path.parent.name}/{show(path.name)[1:-1]}"
    start = Where(file=file, line=1, column=1)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.yaml", path.name, re.ASCII):
        raise refused(start, "a recipe's file is named by letters, digits and . _ -", "name it FAMILY.yaml")
    try:
        if path.resolve().parent != path.parent.resolve():
            raise refused(start, "is a link out of its folder", "put the file itself here")
        if path.exists() and not path.is_file():
            raise refused(start, "is not a file", "put a file here")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise refused(start, f"cannot be read: {error.strerror}", "put a readable file here") from error
    if len(data) > MAX_BYTES:
        raise too_large(file)
    try:
        return data.decode("utf-8"), file
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        where = Where(file=file, line=line, column=column)
        raise refused(where, "is not UTF-8", "save the file as UTF-8") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The family's values that rows fall back on: its texts by key, its base, and its lists."""

    texts: Mapping[str, str]
    base: _NamedBase
    common: _Common


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedBase:
    """What stands at `base`: the name of a row of bases.yaml, or an image and what is said beside it."""

    name: str
    image: str = ""
    glibc: str = ""
    interpreter: str = ""
    where: Where | None = None

    def own(self, python: str) -> Base | None:
        """The base that the recipe describes itself, if it does."""
        if not self.image or self.where is None:
            return None
        return Base(
            name=self.name,
            suite="",
            python=python,
            glibc=self.glibc,
            packages=(),
            public=_without_tag(self.image),
            where=self.where,
            image=self.image,
            interpreter=self.interpreter,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """What a family and a row can both say."""

    capabilities: tuple[str, ...]
    checks: tuple[str, ...]
    packages: tuple[str, ...]
    constraints: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


def _named_base(reader: _Reader, fields: Mapping[str, Node]) -> _NamedBase:
    """`base` with what stands beside it: a name, or a reference to an image with its glibc."""
    node = fields.get("base")
    beside = {key: fields[key] for key in _BESIDE_IMAGE if key in fields}
    if node is None or node.kind != "text" or node.made or not re.search("[/:@]", node.text):
        for key, value in beside.items():
            reader.fault(
                value.where,
                f"'{key}' describes an image, and no 'base' beside it names one by digest",
                "remove it: bases.yaml says it for the bases there",
            )
        return _NamedBase(name=reader.text(node, "base", "base"))
    if "glibc" not in beside:
        reader.fault(
            node.where,
            "'glibc' is missing: no image is pulled to lock, so the recipe says which C library it carries",
            'write glibc: "2.36" beside it, as `ldd --version` inside the image says',
        )
    image = reader.image(node, "base")
    glibc, interpreter = (reader.text(beside.get(key), key, key) for key in _BESIDE_IMAGE)
    return _NamedBase(
        name=_image_name(image), image=image, glibc=glibc, interpreter=interpreter, where=node.where
    )


def _image_name(image: str) -> str:
    """The name of a base that only a reference names: its last part and 12 digits of its digest."""
    place, _, digest = image.partition("@sha256:")
    last = place.rpartition("/")[2].partition(":")[0]
    return f"{re.sub('[^a-z0-9]+', '-', last)}-{digest[:12]}" if image else ""


def _common(reader: _Reader, fields: Mapping[str, Node]) -> _Common:
    def requirements(key: str, rule: str) -> tuple[str, ...]:
        return tuple(_normal(text) for text in reader.texts(fields.get(key), key, rule))

    capabilities = reader.texts(fields.get("capabilities"), "capabilities", "capability", empty=False)
    checks = reader.texts(fields.get("checks"), "checks", "check", empty=False)
    return _Common(
        capabilities=tuple(sorted(capabilities, key=_natural)),
        checks=tuple(check for check in SMOKE_CHECKS if "checks" not in fields or check in checks),
        packages=requirements("packages", "package"),
        constraints=requirements("constraints", "constraint"),
        environment=_environment(reader, fields.get("environment")),
    )


def _row(reader: _Reader, fields: Mapping[str, Node], family: _Family, node: Node) -> MatrixRow:
    """One row of the matrix, completed by the family's values (added to packages and constraints)."""
    row = reader.mapping(node, _ROW_KEYS, _ROW_REQUIRED)
    own, common = _common(reader, row), family.common
    if "capabilities" not in row and "capabilities" not in fields:
        reader.fault(node.where, "neither the row nor the family has 'capabilities'", _MISSING_CAPABILITIES)
    places = {
        key: found.where for key in ("base", "python", "extras") if (found := row.get(key) or fields.get(key))
    }
    if cuda := row.get("cuda"):
        places |= {f"cuda.{index}": item.where for index, item in enumerate(cuda.items)}
    platforms = reader.texts(row.get("platforms"), "platforms", "platform", empty=False)
    written = _named_base(reader, row)
    python = reader.text(row.get("python"), "python", "python") or family.texts["python"]
    base, carried = (written, python) if "base" in row else (family.base, family.texts["python"])
    return MatrixRow(
        version=reader.text(row.get("version"), "version", "version"),
        cuda=reader.texts(cuda, "cuda", "cuda", empty=False),
        extras=tuple(_canonical(extra) for extra in reader.texts(row.get("extras"), "extras", "extra")),
        python=python,
        base=base.name,
        platforms=platforms or (family.texts["platform"],),
        capabilities=(own if "capabilities" in row else common).capabilities,
        checks=(own if "checks" in row else common).checks,
        packages=tuple(dict.fromkeys((*common.packages, *own.packages))),
        constraints=tuple(dict.fromkeys((*common.constraints, *own.constraints))),
        environment=(own if "environment" in row else common).environment,
        where=node.where,
        own_base=base.own(carried),
        places=tuple(places.items()),
    )


_MISSING_CAPABILITIES = 'write capabilities: ["8.0"] with those that the image must support'


def _environment(reader: _Reader, node: Node | None) -> tuple[tuple[str, str], ...]:
    values = {}
    for name, key, value in reader.pairs(node, "environment"):
        if not reader.text(key, "environment", "variable"):
            continue
        if name in OWNED_VARIABLES or name.startswith(OWNED_PREFIX):
            reader.fault(key.where, f"'{name}' is set by the factory in every image", "remove it")
        values[name] = reader.text(value, name, "value")
    return tuple(values.items())


def _normal(requirement: str) -> str:
    """A requirement that RULES allows in its one form: name as PEP 503 has it, no spaces, sorted bounds."""
    name = re.split(r"[ \[<>=!~]", requirement, maxsplit=1)[0]
    extras = requirement.partition("[")[2].partition("]")[0]
    bounds = requirement[len(name) :].rpartition("]")[2].replace(" ", "")
    wanted = ",".join(sorted({_canonical(extra.strip()) for extra in extras.split(",") if extra}))
    limits = ",".join(sorted(set(bounds.split(","))))
    return f"{_canonical(name)}{f'[{wanted}]' if wanted else ''}{limits}"


def _refuse_framework(reader: _Reader, node: Node, framework: str) -> None:
    """The framework's own requirement is made from version and extras, and from nowhere else."""
    for key, value in node.pairs:
        if key.text not in ("packages", "constraints"):
            continue
        for item in value.items:
            name = re.match(_NAME, item.text, re.ASCII)
            if framework and name and _canonical(name[0]) == framework:
                reader.fault(
                    item.where,
                    f"'{framework}' is the framework and may not stand in '{key.text}'",
                    "set its version by the row's 'version' and its extras by 'extras'",
                )


# --- expanding and selecting ---------------------------------------------------------------------


def expand(recipe: Recipe, bases: Sequence[Base]) -> tuple[Target, ...]:
    """The targets of one recipe, in the order of its matrix.

    Raises RecipeError for a base that is not there, a Python that the base does not carry, a CUDA
    version that the source does not offer, or a target that is made twice.
    """
    targets, faults = _expand(recipe, bases)
    return _unique(targets, faults)


def expand_all(recipes: Iterable[Recipe], bases: Sequence[Base]) -> tuple[Target, ...]:
    """The targets of all recipes, sorted naturally (1.13 before 2.3 before 2.15). Raises like `expand`."""
    targets: list[Target] = []
    faults: list[str] = []
    for recipe in recipes:
        made, wrong = _expand(recipe, bases)
        targets += made
        faults += wrong
    return tuple(sorted(_unique(targets, faults), key=lambda target: _natural(target.name)))


def select(targets: Sequence[Target], names: Sequence[str]) -> tuple[Target, ...]:
    """The targets that `names` ask for (exact names or patterns such as `pytorch-*`); all when empty.

    Raises NothingSelectedError for a name or pattern that fits no target.
    """
    wanted: set[str] = set()
    for name in names:
        found = {target.name for target in targets if target.name == name or fnmatchcase(target.name, name)}
        if not found:
            raise NothingSelectedError(f"there is no target {show(name)}", hint=_meant(name, targets))
        wanted |= found
    return tuple(target for target in targets if not names or target.name in wanted)


def _meant(name: str, targets: Sequence[Target]) -> str:
    families = sorted({target.family for target in targets})
    if name.startswith("base:"):
        return "a base is made with the first target on it, and locked by `imagefactory lock base:NAME`"
    family = name if name in families else _nearest(name, families)
    near = _nearest(name, [target.name for target in targets])
    if family and not near:
        return f"did you mean '{family}-*', in quotes?"
    return f"did you mean '{near}'?" if near else "`imagefactory list` shows all targets"


def _expand(recipe: Recipe, bases: Sequence[Base]) -> tuple[list[Target], list[str]]:
    targets = []
    faults: list[str] = []
    for row in recipe.matrix:
        faults += _base_faults(row, bases)
        for platform in row.platforms:
            for index, cuda in enumerate(row.cuda):
                faults += _source_faults(recipe, row, index)
                targets.append(_target(recipe, row, cuda, platform))
    return targets, faults


def _target(recipe: Recipe, row: MatrixRow, cuda: str, platform: str) -> Target:
    name = f"{recipe.family}-{row.version}-cu{cuda.replace('.', '')}"
    if row.python != recipe.python:
        name += f"-py{row.python.replace('.', '')}"
    if platform != recipe.platform:
        name += f"-{platform.rpartition('/')[2]}"
    extras = f"[{','.join(row.extras)}]" if row.extras else ""
    return Target(
        name=name,
        family=recipe.family,
        description=recipe.description,
        source=recipe.source,
        framework=recipe.framework,
        version=row.version,
        cuda=cuda,
        python=row.python,
        base=row.base,
        platform=platform,
        capabilities=row.capabilities,
        checks=row.checks,
        requirements=(f"{recipe.framework}{extras}=={row.version}.*", *row.packages),
        constraints=row.constraints,
        environment=row.environment,
        where=row.where,
    )


def _base_faults(row: MatrixRow, bases: Sequence[Base]) -> Iterator[str]:
    base = row.own_base or next((base for base in bases if base.name == row.base), None)
    if base is None:
        names = [base.name for base in bases]
        near = _nearest(row.base, names)
        hint = f"did you mean '{near}'?" if near else f"the bases are {', '.join(names) or 'none yet'}"
        yield f"{_place(row, 'base')}: there is no base '{row.base}' ({hint})"
    elif base.python != row.python:
        yield (
            f"{_place(row, 'python')}: base '{base.name}' carries Python {base.python}, not {row.python} "
            f'(write "{base.python}", or another base)'
        )


def _source_faults(recipe: Recipe, row: MatrixRow, index: int) -> Iterator[str]:
    """What the source is known not to offer. A version that the table lacks is left to the solver."""
    cuda, name = row.cuda[index], f"{recipe.framework} {row.version}"
    wheels = knowledge.offered(recipe.framework, row.version)
    if not wheels:
        return
    fitting = [wheel for wheel in wheels if wheel.cuda == cuda]
    if not fitting:
        known = sorted({wheel.cuda for wheel in wheels}, key=_natural)
        offers = " and ".join(known)
        write = " or ".join(f'"{version}"' for version in known)
        place = _place(row, f"cuda.{index}")
        yield f"{place}: {name} on PyPI is built for CUDA {offers}, not {cuda} (write {write})"
        return
    wheel = fitting[0]
    if missing := [extra for extra in wheel.extras if extra not in row.extras]:
        yield (
            f"{_place(row, 'extras')}: {name} on PyPI comes with CUDA {cuda} only through "
            f"{' and '.join(map(repr, missing))} (write extras: [{', '.join(wheel.extras)}])"
        )
    if wheel.python and _natural(row.python) < _natural(wheel.python):
        yield (
            f"{_place(row, 'python')}: {name} on PyPI needs Python {wheel.python} or newer, not {row.python} "
            "(write a base that carries it)"
        )


def _place(row: MatrixRow, key: str) -> Where:
    return dict(row.places).get(key, row.where)


def _unique(targets: Iterable[Target], faults: Iterable[str]) -> tuple[Target, ...]:
    """The targets, unless there are faults or two of one name."""
    found = list(dict.fromkeys(faults))  # rows that inherit a fault tell it once
    first: dict[str, Target] = {}
    for target in targets:
        if (other := first.setdefault(target.name, target)) is not target:
            found.append(
                f"{target.where}: target '{target.name}' is also made at {other.where} (remove one of them)"
            )
    if found:
        raise RecipeError(found)
    return tuple(first.values())


# --- a recipe to start from ----------------------------------------------------------------------


def scaffold(family: str, bases: Sequence[Base], *, framework: str = "") -> str:
    """The text of a commented recipe for `family` that parses and expands without a fault.

    A family or framework that the knowledge table holds gets its newest version there, with the CUDA
    and the extras that it comes with; another gets values to change. Raises UsageError for a name
    that is not allowed, or when there is no base.
    """
    framework = framework or knowledge.families().get(family, family)
    for value, rule in ((family, "family"), (framework, "framework")):
        if not RULES[rule].allows(value):
            raise UsageError(f"{show(value)} is not a name for a {rule}", hint=f"write {RULES[rule].write}")
    framework = _canonical(framework)
    if not bases:
        raise UsageError("there is no base to build on", hint=f"add one to recipes/{BASES_FILE}")
    fits = [
        (_natural(wheel.version), _natural(wheel.cuda), wheel, base)
        for wheel in knowledge.cuda_wheels()
        for base in bases[:1]
        if wheel.package == framework and _natural(base.python) >= _natural(wheel.python)
    ]
    if fits:
        *_, wheel, base = max(fits, key=lambda fit: fit[:2])
        version, cuda, extras = wheel.version, wheel.cuda, wheel.extras
        known = f"  # {wheel.source}\n"
    else:
        version, cuda, extras, base = "1.0", "12", (), bases[0]
        known = "  # nothing is known about this framework yet: look up its versions and their CUDA\n"
    extras_line = f"    extras: [{', '.join(extras)}]\n" if extras else ""
    return _SCAFFOLD.format(
        family=family,
        framework=framework,
        base=base.name,
        python=base.python,
        checks=", ".join(SMOKE_CHECKS),
        known=known,
        version=version,
        cuda=cuda,
        extras=extras_line,
    )


_SCAFFOLD = """\
# yaml-language-server: $schema=recipe.schema.json
family: {family}
description: {framework} with the CUDA libraries from PyPI
source: pypi
framework: {framework}    # the distribution's name in the source
platform: linux/amd64
base: {base}    # a name of bases.yaml
python: "{python}"    # what that base carries; versions always stand in quotes

# The compute capabilities that every image of this family must support.
capabilities: ["8.0", "9.0"]

# The checks that every image must pass; without this line it is all of them.
checks: [{checks}]

# Packages beside the framework, and bounds on what it brings along. Rows can add their own.
packages: []
constraints: []

matrix:
{known}  - version: "{version}"
    cuda: ["{cuda}"]
{extras}"""


# --- values with places --------------------------------------------------------------------------


class _Reader:
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
                node.where, f"here must be keys and values, not {node.called}", f"write {_example(required)}"
            )
            return {}
        found: dict[str, Node] = {}
        for name, key, value in self.pairs(node, "keys"):
            if name in known:
                found[name] = value
                continue
            near = _nearest(name, known)
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
            near = (
                _nearest(node.text, allowed.pattern.replace("\\", "").split("|")) if rule == "check" else ""
            )
            write = f"did you mean '{near}'?" if near else f"write {allowed.write}"
            size = len(node.text)
            long = (
                f" of {size} characters, more than {allowed.limit}" if size > max(allowed.limit, 20) else ""
            )
            self.fault(node.where, f"'{key}' cannot be {show(node.text)}{long}", write)
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


def _example(required: Mapping[str, str]) -> str:
    return next(iter(required.values()), "key: value")


def _nearest(word: str, known: Iterable[str]) -> str:
    import difflib  # only faults pay for it

    return next(iter(difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.6)), "")


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    """Sort key that reads runs of digits as numbers."""
    return tuple(
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", text) if part
    )


def _canonical(name: str) -> str:
    """A distribution's or extra's name in normal form (PEP 503, PEP 685)."""
    return re.sub(r"[-_.]+", "-", name).lower()
