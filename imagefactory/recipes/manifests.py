"""Projects that say what they want: `pixi.toml`, and `pyproject.toml` of pixi, Poetry or PEP 621."""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagefactory.recipes.pip_lines import Beside, take_pip_line
from imagefactory.recipes.wish import PLATFORM, Wish, poetry_bounds, take_channels, take_match_spec, text_of
from imagefactory.recipes.yaml_tree import YamlNode, refused, show

_TARGETS = ("unix", "linux", PLATFORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectAsk:
    """`python` is what markers are judged by, `environment` one of pixi's, `extras` those wanted too."""

    python: str
    environment: str = ""
    extras: tuple[str, ...] = ()


def read_project(root: YamlNode, file: str, asked: ProjectAsk) -> Wish:
    """What a project wants of an image. Raises RecipeError for what names no packages."""
    python, environment = asked.python, asked.environment
    wish, tools = Wish(file=file), _at(root, "tool")
    pixi = _at(tools, "pixi") if _at(tools, "pixi").pairs else root
    poetry, project = _at(tools, "poetry"), _at(root, "project")
    is_pixi = bool(
        _at(pixi, "workspace").pairs
        or (_at(pixi, "project").pairs and pixi is root and file != "pyproject.toml")
    )
    is_pixi = is_pixi or pixi is not root
    if environment and not is_pixi:
        raise refused(root.where, "has no environments to choose from", "leave out --environment")
    if is_pixi:
        _pixi(wish, pixi, python, environment)
    if poetry.pairs:
        _poetry(wish, poetry, python)
    if project.pairs and not (is_pixi and pixi is root):
        _project(wish, root, asked)
    if not (is_pixi or poetry.pairs or project.pairs):
        raise refused(
            root.where, "lists no packages", "give the file that lists them, such as a requirements.txt"
        )
    return wish


# --- PEP 621, and uv's word on indexes -----------------------------------------------------------


def _project(wish: Wish, root: YamlNode, asked: ProjectAsk) -> None:
    project, uv = _at(root, "project"), _at(root, "tool", "uv")
    if not wish.python:
        wish.bound_python(text_of(project, "requires-python"), project.where)
    for item in _at(project, "dependencies").items:
        take_pip_line(wish, item.text, item.where, Beside(asked.python))
    for key in [*_at(project, "optional-dependencies").pairs, *_at(root, "dependency-groups").pairs]:
        name, value = key
        if name.text in asked.extras:
            for item in value.items:
                take_pip_line(wish, item.text, item.where, Beside(asked.python))
        elif value.items:
            wish.leave(
                name.where, f"the packages of {show(name.text)} are not taken", "add what must be there"
            )
    for dynamic in _at(project, "dynamic").items:
        if dynamic.text == "dependencies":
            wish.leave(
                dynamic.where, "its dependencies stand in another file", "import that file: --from FILE"
            )
    indexes = {text_of(one, "name"): text_of(one, "url") for one in _at(uv, "index").items}
    for _, source in _at(uv, "sources").pairs:
        for one in source.items or [source]:
            if "linux" in text_of(one, "marker") or not text_of(one, "marker"):
                wish.hints += _cuda(indexes.get(text_of(one, "index"), ""))


def _cuda(address: str) -> list[str]:
    return re.findall(r"/cu[0-9]{2,3}\b", address)


# --- Poetry --------------------------------------------------------------------------------------


def _poetry(wish: Wish, poetry: YamlNode, python: str) -> None:
    addresses = {text_of(one, "name"): text_of(one, "url") for one in _at(poetry, "source").items}
    for key, value in _at(poetry, "dependencies").pairs:
        if key.text == "python":
            wish.bound_python(poetry_bounds(value.text) or "", value.where)
            continue
        for one in value.items or [value]:
            _poetry_row(wish, key, one, python)
            wish.hints += _cuda(addresses.get(text_of(one, "source"), "")) if one.kind == "map" else []
    for key, _ in _at(poetry, "group").pairs:
        wish.leave(key.where, f"the group {show(key.text)} is not taken", "add what must be there")


def _poetry_row(wish: Wish, key: YamlNode, value: YamlNode, python: str) -> None:
    written = value.text if value.kind == "text" else text_of(value, "version")
    if not written or text_of(value, "optional") == "true":
        why = "is optional" if written else "does not come from an index"
        wish.leave(key.where, f"{show(key.text)} {why}", "add it if it must be there")
        return
    if (bounds := poetry_bounds(written)) is None:
        wish.leave(key.where, f"{show(key.text)} {show(written)} cannot be taken over", "write plain bounds")
        return
    extras = ",".join(item.text for item in _at(value, "extras").items)
    marker = text_of(value, "markers")
    line = f"{key.text}{f'[{extras}]' if extras else ''}{bounds}{f' ; {marker}' if marker else ''}"
    take_pip_line(wish, line, key.where, Beside(python))


# --- pixi ----------------------------------------------------------------------------------------

_LIKE_DEPENDENCIES = ("dependencies", "host-dependencies", "build-dependencies")
# What a table of pixi's holds that is read here, or that says nothing of an environment.
_READ = {
    *(
        "workspace",
        "project",
        "package",
        "feature",
        "environments",
        "tasks",
        "target",
        "activation",
        "channels",
    ),
    *(*_LIKE_DEPENDENCIES, "pypi-dependencies", "pypi-options", "system-requirements", "constraints"),
    *("platforms", "build-system", "dependency-groups", "tool"),
}
_CHOICES = ("channel-priority", "solve-strategy", "exclude-newer")
"""What decides which of several versions pixi takes, of those that are asked for."""
_ROW = {"version", "build", "channel", "extras", "index", "subdir", "path", "git", "url"}


def _pixi(wish: Wish, root: YamlNode, python: str, environment: str) -> None:
    workspace = _at(root, "workspace") if _at(root, "workspace").pairs else _at(root, "project")
    platforms = [
        item.text if item.kind == "text" else text_of(item, "platform")
        for item in _at(workspace, "platforms").items
    ]
    if platforms and not any(name.startswith(PLATFORM) for name in platforms):
        wish.note(workspace.where, f"{PLATFORM} is not among its platforms: see whether it locks")
    parts = [_at(root, "feature", name) for name in _features(wish, root, environment)]
    if not _alone(root, environment):
        parts.insert(0, root)
    for part in [*parts[1:], *parts[:1]] if len(parts) > 1 else parts:  # a feature's channels come first
        take_channels(wish, _at(part, "channels"))
    take_channels(wish, _at(workspace, "channels"))
    for node in _at(workspace, "platforms").items:
        _driver(wish, node.get("cuda") if node.kind == "map" else None)
    for part in (workspace, *parts):
        _pypi_options(wish, _at(part, "pypi-options"), python)
        for key in (key for key, _ in part.pairs if key.text in _CHOICES):
            wish.note(
                key.where, f"{show(key.text)} is not taken over: of what is allowed the newest is taken"
            )
    for part in parts:
        _pixi_part(wish, part, python, is_root=part is root)


def _pixi_part(wish: Wish, part: YamlNode, python: str, *, is_root: bool) -> None:
    """The packages and variables of a feature, or of all environments."""
    cuda = _at(part, "system-requirements").get("cuda")
    _driver(wish, cuda.get("version") or cuda if cuda else None)
    for table in (part, *(_at(part, "target", name) for name in _TARGETS)):
        for name in _LIKE_DEPENDENCIES:
            for key, value in _at(table, name).pairs:
                _conda_row(wish, key, value)
        bounds = Wish(file=wish.file)
        for key, value in _at(table, "constraints").pairs:
            _conda_row(bounds, key, value)
        wish.conda_bounds += bounds.conda
        wish.left += bounds.left
        for key, value in _at(table, "pypi-dependencies").pairs:
            _pypi_row(wish, key, value, python)
        for key, value in _at(table, "activation", "env").pairs:
            wish.variable(key.text, value.text, key.where)
        for item in _at(table, "activation", "scripts").items:
            do = "write the variables that it sets under environment"
            wish.leave(item.where, f"{show(item.text)} is run on activation, and not here", do)
    for key, value in part.pairs:
        if key.text == "tasks" and value.pairs:
            wish.note(key.where, "the tasks are not run: what they install is not in the image")
        elif is_root and key.text not in _READ and value.kind != "text":
            wish.leave(key.where, f"{show(key.text)} is not read", "write its packages under dependencies")


def _driver(wish: Wish, cuda: YamlNode | None) -> None:
    """The CUDA that a machine's driver is to have: for it a solver chooses builds, as a recipe's row says."""
    if cuda and (found := re.match(r"[0-9]{1,2}\.[0-9]", cuda.text)):
        wish.hints.append(f"cuda{found[0]}")
        wish.note(
            cuda.where, f"CUDA {found[0]} is what the driver is to have at least: it says the row's CUDA"
        )


def _pypi_options(wish: Wish, options: YamlNode, python: str) -> None:
    """What pip knows by options of the same meaning, and otherwise what is lost."""
    for key, value in options.pairs:
        known = {
            "index-url": "--index-url",
            "extra-index-urls": "--extra-index-url",
            "find-links": "--find-links",
        }
        for one in value.items or [value]:
            text = one.text if one.kind == "text" else text_of(one, "url") or text_of(one, "path")
            if option := known.get(key.text):
                take_pip_line(wish, f"{option} {text}", one.where, Beside(python))
        if key.text in ("no-build-isolation", "no-build", "no-binary", "index-strategy"):
            wish.note(key.where, f"{show(key.text)} is not taken over: images are made of wheels alone")
        elif key.text not in known:
            wish.leave(key.where, f"{show(key.text)} is not read", "write the versions that it forces")


def _features(wish: Wish, root: YamlNode, environment: str) -> list[str]:
    """The features of an environment. Raises RecipeError for one that is not there."""
    environments = _at(root, "environments")
    wanted = environment or "default"
    chosen = environments.get(wanted)
    if chosen is None and wanted != "default":
        names = " or ".join(environments.keys) or "leave it out"
        raise refused(root.where, f"has no environment {show(wanted)}", f"--environment {names}")
    if not environment and (others := [name for name in environments.keys if name != "default"]):
        takes = f"--environment {' or '.join(others)} takes another"
        wish.note(environments.where, f"the default environment was taken ({takes})")
    if chosen is None:
        return []
    return [item.text for item in (chosen.items or _at(chosen, "features").items)]


def _alone(root: YamlNode, environment: str) -> bool:
    return text_of(_at(root, "environments", environment or "default"), "no-default-feature") == "true"


def _conda_row(wish: Wish, key: YamlNode, value: YamlNode) -> None:
    if value.kind == "text":
        take_match_spec(wish, f"{key.text} {value.text}".removesuffix(" *"), key.where)
        return
    if any(name in value.keys for name in ("path", "git", "url")):
        wish.leave(
            key.where, f"{show(key.text)} is made from sources", "add it from a channel, if one has it"
        )
        return
    _unread(wish, key, value)
    version, build, channel = (text_of(value, name) for name in ("version", "build", "channel"))
    name = f"{channel.rstrip('/')}::{key.text}" if channel else key.text
    text = f"{name} {version or '*'} {build}" if build else f"{name} {version}".removesuffix(" *")
    take_match_spec(wish, text.strip(), key.where)


def _pypi_row(wish: Wish, key: YamlNode, value: YamlNode, python: str) -> None:
    if value.kind == "text":
        take_pip_line(wish, key.text + _bounds(value.text), key.where, Beside(python))
        return
    if index := text_of(value, "index"):
        take_pip_line(wish, f"--extra-index-url {index}", value.where, Beside(python))
    _unread(wish, key, value)
    if any(name in value.keys for name in ("path", "git", "url")):
        wish.leave(key.where, f"{show(key.text)} does not come from an index", "add it if an index has it")
        return
    extras = ",".join(item.text for item in _at(value, "extras").items)
    line = f"{key.text}{f'[{extras}]' if extras else ''}{_bounds(text_of(value, 'version'))}"
    take_pip_line(wish, line, key.where, Beside(python))


def _unread(wish: Wish, key: YamlNode, value: YamlNode) -> None:
    """What a package's row says that is not taken over, such as a build number."""
    if (more := {*value.keys} - _ROW) and not {"path", "git", "url"} & {*value.keys}:
        what = ", ".join(sorted(more))
        wish.leave(key.where, f"{show(key.text)}: {show(what)} is not read", "say it by a version or a build")


def _bounds(written: str) -> str:
    return "" if written in ("", "*") else written


def _at(node: YamlNode, *keys: str) -> YamlNode:
    """What lies below some keys; nothing where it does not."""
    for key in keys:
        node = node.get(key) or YamlNode(node.where, "map", made="nothing")
    return node
