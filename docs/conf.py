"""The website of the documentation: `make site` writes it to site/ with Sphinx. A warning fails the build.

Its pages are the files of this repository, so each link works here and on GitHub. A comment such as
`<!-- table: settings -->` in a page is replaced by a table that is generated from the code. The site loads no
fonts, scripts or styles from other servers.
"""

from __future__ import annotations

import ast
import gc
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from sphinx.application import Sphinx

from docs.error_codes import DIAGNOSTIC, error_classes, find_errors
from docs.json_schemas import FORMAT, document_type, document_types, file_name, schema_of
from imagefactory import errors
from imagefactory.cli import cli
from imagefactory.extras.nightly import changes
from imagefactory.lock.conda import file as conda_lock
from imagefactory.lock.debian import lock as base_lock
from imagefactory.lock.pypi import requirements as wheel_lock
from imagefactory.schedulers import inventory
from imagefactory.settings.sources import MEANINGS, REASONS
from imagefactory.trust import catalog, invitation, judgement, verdict
from imagefactory.verify import report
from imagefactory.verify.kit import program as kit

ROOT = Path(__file__).parents[1]
gc.disable()  # documents stay until the end: looking for garbage among them takes a third of the time

project = "imagefactory"
copyright = "Apache-2.0"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/*.md", "docs/**.md"]
exclude_patterns = [
    ".*",
    *(row.name for row in ROOT.iterdir() if row.name not in ("benchmarks", "docs") and row.is_dir()),
]
myst_heading_anchors = 3
highlight_language = "none"
smartquotes = False  # they turn -- of an option into a dash
html_theme = "furo"
html_title = "imagefactory"
html_copy_source = False
html_show_sphinx = False
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
PAGES = {
    "Get started": (
        "docs/install",
        "docs/first-image",
        "docs/first-job",
        "docs/glossary",
        "docs/project-status",
    ),
    "Run jobs": (
        "docs/choose-image",
        "docs/write-job",
        "docs/throughput-ml",
        "docs/size-job",
        "docs/check-job",
        "docs/portability",
    ),
    "Build images": (
        "docs/build",
        "docs/recipes",
        "docs/own-code",
        "docs/import-files",
        "docs/keep-lock",
        "docs/import-dockerfile",
        "docs/own-wheels",
        "docs/conda",
        "docs/platforms",
        "docs/update-packages",
        "docs/share-images",
        "docs/store",
        "docs/engines",
        "docs/audit-images",
    ),
    "Run a site": (
        "docs/site-setup",
        "docs/site-keys",
        "docs/verify-image",
        "docs/site-sweeps",
        "docs/site-nodes",
        "docs/site-catalog",
        "docs/site-nightly",
        "docs/site-ci",
        "docs/site-repair",
        "docs/site-housekeeping",
        "docs/site-reports",
    ),
    "Look up details": (
        "docs/reference/commands",
        "docs/reference/recipe-keys",
        "docs/reference/settings",
        "docs/reference/exit-codes",
        "docs/reference/errors",
        "docs/reference/json",
        "docs/reference/outcomes",
        "docs/reference/suite",
        "docs/reference/limits",
        "docs/reference/inventory",
    ),
    "Understand how it works": (
        "docs/compatibility",
        "docs/trust",
        "docs/locks",
        "docs/security",
        "docs/emulation",
    ),
    "Contribute": (
        "CONTRIBUTING",
        "docs/architecture",
        "docs/dev/decisions",
        "docs/dev/gpu-day",
        "docs/benchmarks",
        "docs/projects",
        "benchmarks/README",
        "benchmarks/packages",
        "benchmarks/startup",
        "CHANGELOG",
    ),
}
"""The sidebar: its captions, and the pages of each in order."""


def setup(app: Sphinx) -> None:
    app.connect("source-read", complete)
    app.connect("html-page-context", level_captions, priority=900)
    app.connect("build-finished", add_accessibility)
    app.connect("build-finished", name_first_page)
    app.connect("build-finished", write_schemas)


def complete(_: Sphinx, page: str, source: list[str]) -> None:
    source[0] = _MARK.sub(lambda found: TABLES[found[1]](), source[0]) + (
        contents() if page == root_doc else ""
    )


def contents() -> str:
    """Return the toctrees of PAGES. Other pages of docs/ come last."""
    placed = {page for pages in PAGES.values() for page in pages}
    found = {path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n" + "\n".join(pages) + "\n```\n"
        for caption, pages in {**PAGES, "More": sorted(found - placed)}.items()
        if pages
    )


def level_captions(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: object) -> None:
    """Add the heading level to the captions of the sidebar: furo omits it, and screen readers need it."""
    tree = context["furo_navigation_tree"]
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def add_accessibility(app: Sphinx, failed: Exception | None) -> None:
    """Rewrite the pages with `accessible`: parts of them are in the templates of furo."""
    for path in () if failed else sorted(app.outdir.rglob("*.html")):
        path.write_text(accessible(path.read_text(encoding="utf-8")), encoding="utf-8")


def accessible(page: str) -> str:
    """Return a page whose landmarks have names, and whose scrolling parts a keyboard can reach.

    An empty cell in the head of a table is not a header.
    """
    for old, new in (
        ('<aside class="sidebar-drawer"', '<aside aria-label="All pages" class="sidebar-drawer"'),
        ('<aside class="toc-drawer', '<aside aria-label="This page" class="toc-drawer'),
        ("<pre>", '<pre tabindex="0">'),
        ('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
        ('<th class="head"><p></p></th>', "<td></td>"),
    ):
        page = page.replace(old, new)
    return page


def name_first_page(app: Sphinx, failed: Exception | None) -> None:
    """Copy the first page to index.html, which web servers open."""
    if not failed:
        shutil.copyfile(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def write_schemas(app: Sphinx, failed: Exception | None) -> None:
    """Publish the JSON Schema of each document."""
    if not failed:
        directory = app.outdir / "schemas"
        directory.mkdir(exist_ok=True)
        for name in document_types():
            text = json.dumps(schema_of(name), indent=2)
            (directory / file_name(name)).write_text(f"{text}\n", encoding="utf-8")


# --- tables ---------------------------------------------------------------------------------------

_MARK = re.compile(r"<!-- table: ([a-z-]+) -->")


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def text(words: str) -> str:
    """Return plain text as Markdown; backticks mark code."""
    parts = re.split(r"(`[^`]*`)", " ".join(words.split()))
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\*_<>\[\]])", r"\\\1", part) for part in parts
    )


# --- commands -------------------------------------------------------------------------------------


def commands(group: click.Group = cli, name: str = "imagefactory", level: int = 2) -> str:
    return "\n\n".join(
        command_text(command, f"{name} {word}", level) for word, command in sorted(group.commands.items())
    )


def global_options() -> str:
    records = (option.get_help_record(click.Context(cli)) for option in cli.params)
    return table(("option", "what it does"), ((option_name(row[0]), text(row[1])) for row in records if row))


def option_name(names: str) -> str:
    """Return an option as code. With blanks between its values it wraps in a narrow table."""
    return f"`{names.replace('|', ' | ')}`"


def command_text(command: click.Command, name: str, level: int) -> str:
    context = click.Context(command, info_name=name)
    parts = [f"{'#' * level} {name}", help_text(command.help or "")]
    records = [found for option in command.params if (found := option.get_help_record(context))]
    parts.append("```text\n" + " ".join((name, *command.collect_usage_pieces(context))) + "\n```")
    if options := [(option_name(names), text(words)) for names, words in records if words]:
        parts.append(table(("option", "what it does"), options))
    if isinstance(command, click.Group):
        parts.append(commands(command, name, level + 1))
    return "\n\n".join(parts)


def help_text(words: str) -> str:
    """Return a docstring as Markdown: paragraphs, and those after \\b as code."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(words))
    return "\n\n".join(
        f"```text\n{inspect.cleandoc(paragraph[1:])}\n```" if paragraph.startswith("\b") else text(paragraph)
        for paragraph in paragraphs
    )


# --- recipes, settings, exit codes ----------------------------------------------------------------


def recipe_keys() -> str:
    recipe, bases = (
        json.loads((ROOT / "recipes" / name).read_text())
        for name in ("recipe.schema.json", "bases.schema.json")
    )
    shared, own = recipe["$defs"], bases["$defs"]
    return "\n\n".join(
        (
            "## A family",
            keys(recipe, shared),
            "## A row of `matrix`",
            keys(shared["row"], shared),
            "## `virtual`",
            keys(recipe["properties"]["virtual"], shared),
            "## A base of Debian packages, in `recipes/bases.yaml`",
            keys(own["row"], own),
            "## A base of a registry",
            keys(own["pulled-row"], own),
        )
    )


def keys(schema: dict[str, Any], known: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    return table(
        ("key", "meaning", "type", "required"),
        (
            (f"`{key}`", text(row["description"]), shape(row, known), "yes" if key in needed else "")
            for key, row in schema["properties"].items()
        ),
    )


def shape(row: dict[str, Any], known: dict[str, Any]) -> str:
    """Return the type of a key, or its permitted values."""
    row = row | known.get(row.get("$ref", "").rpartition("/")[2], {})
    if "enum" in row:
        return ", ".join(f"`{word}`" for word in row["enum"])
    if row.get("type") == "array":
        inner = shape(row["items"], known)
        return (
            f"list of {inner}"
            if inner.startswith("`")
            else {"text": "list", "table": "list of tables"}[inner]
        )
    return "table" if row.get("type") == "object" else "text"


def settings() -> str:
    rows = (
        (f"`{name}`", default, meaning, "no" if REASONS[name] else "yes")
        for name, (default, meaning) in MEANINGS.items()
    )
    return table(("key", "default", "meaning", "any project"), rows)


def exit_codes() -> str:
    base = errors.ImagefactoryError
    examples: dict[int, list[str]] = {}
    for error in vars(errors).values():
        if inspect.isclass(error) and issubclass(error, base) and error is not base:
            examples.setdefault(error.exit_code, []).append(text(first_sentence(error)))
    return table(
        ("code", "meaning", "examples"),
        (
            (str(code), text(words), " ".join(examples.get(code, ())))
            for code, words in errors.EXIT_CODES.items()
        ),
    )


def error_codes() -> str:
    """Return a row for each error code, with the first of its messages."""
    parents = error_classes()

    def exit_code(name: str) -> int:
        if name == "ImagefactoryError":
            return errors.EXIT_INTERRUPTED  # the only error of the base class itself
        known = errors.RecipeError if name == DIAGNOSTIC else getattr(errors, name, None)
        return known.exit_code if known else exit_code(parents[name])

    rows = {call.code: call for call in reversed(find_errors()) if call.code}
    return table(
        ("code", "exit code", "message"),
        ((f"`{code}`", str(exit_code(row.error)), text(row.message)) for code, row in sorted(rows.items())),
    )


# --- JSON -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """A function: the formats in its body, and the functions that it calls."""

    formats: frozenset[str]
    calls: frozenset[tuple[str, str]]


def printed() -> str:
    """Return a row for each document: its schema, what it is, and the commands that print it."""
    functions = {
        key: function
        for room in ("cli", "views", "actions", "extras")
        for path in sorted((ROOT / "imagefactory" / room).rglob("*.py"))
        for key, function in functions_of(path)
    }
    commands: dict[str, list[str]] = {}
    for name, command in leaves(cli, "imagefactory"):
        called = inspect.unwrap(command.callback or leaves)
        for row in reached((called.__module__, called.__name__), functions):
            commands.setdefault(row, []).append(f"`{name}`")
    commands["imagefactory.error/1"] = ["each command that fails without a document of its own"]
    commands[changes.NIGHTLY_FORMAT] = ["`imagefactory site nightly`"]
    commands["imagefactory.image-export-module/1"] = ["`imagefactory image export --format module`"]
    commands["imagefactory.progress/1"] = ["each command with `--progress json`"]
    return table(
        ("format", "what it is", "printed by"),
        (
            (schema_link(name), text(first_sentence(document_type(name))), ", ".join(printers))
            if name in document_types()
            else (f"`{name}`", "", ", ".join(printers))
            for name, printers in sorted(commands.items())
        ),
    )


def schema_link(document_format: str) -> str:
    """Return a link from a page in docs/reference/. It is HTML: Sphinx would look for a file in the tree."""
    return f'<a href="../../schemas/{file_name(document_format)}"><code>{document_format}</code></a>'


def first_sentence(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n\n")[0]


def functions_of(path: Path) -> Iterator[tuple[tuple[str, str], Function]]:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = {
        row.asname or row.name: (node.module, row.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for row in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            parts = list(ast.walk(node))
            words = {part.value for part in parts if isinstance(part, ast.Constant)}
            formats = {word for word in words if isinstance(word, str) and FORMAT.fullmatch(word)}
            names = {
                part.func.id
                for part in parts
                if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
            }
            calls = {imports.get(name, (module, name)) for name in names}
            yield (module, node.name), Function(frozenset(formats), frozenset(calls))


def reached(start: tuple[str, str], functions: dict[tuple[str, str], Function]) -> set[str]:
    """Return the formats in a function and in all that it calls."""
    seen, left = set(), [start]
    while left:
        if (key := left.pop()) in functions and key not in seen:
            seen.add(key)
            left += functions[key].calls
    return {name for key in seen for name in functions[key].formats}


def leaves(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    for word, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def stored_formats() -> str:
    rows = (
        (
            schema_link(inventory.FORMAT),
            "`gpus -o`, or written manually: [inventory](inventory.md)",
        ),
        (schema_link("imagefactory.emulate/1"), "`emulate --output`, for `job write --resources-from`"),
        (schema_link(changes.PLAN_FORMAT), "`plan --keep`, to compare with in `site nightly --kept`"),
        (schema_link(changes.NIGHTLY_FORMAT), "`night.json` in `<store>/nights`"),
        (f"`{verdict.VERDICT}`", "the predicate of a verdict; `imagefactory/trust/verdict.schema.json`"),
        (f"`{judgement.REVOCATION}`", "the predicate of a revocation"),
        (f"catalog, `format` {catalog.FORMAT}", "a signed catalog, in a DSSE envelope"),
        (
            f"`{invitation.FORMAT}`",
            "the [invitation](../site-catalog.md) of a site, in TOML",
        ),
        (f"report, `format` {report.FORMAT}", "the unsigned result of `verify` on a GPU"),
        (f"kit, `format` {kit.FORMAT}", "the directory of `verify --kit`, and its result"),
        (
            f"wheel lock, {wheel_lock.FORMAT}",
            "`lockfiles/*.requirements.txt`: hashed requirements that pip and uv install",
        ),
        (
            f"conda lock, {conda_lock.FORMAT}",
            "`lockfiles/*.conda-lock.yml`: the format of conda-lock, with a comment at the start",
        ),
        (f"`{base_lock.FORMAT}`", "`lockfiles/bases/`: the Debian packages of a base"),
    )
    return table(("format", "what it is"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "options": global_options,
    "recipe-keys": recipe_keys,
    "settings": settings,
    "exit-codes": exit_codes,
    "errors": error_codes,
    "printed": printed,
    "stored-formats": stored_formats,
}
