"""The reader that takes values out of a YAML tree, each with its place, and gathers faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from imagefactory.errors import Diagnostic, RecipeError
from imagefactory.model import Where
from imagefactory.recipes.values import RULES, what_to_write, without_secrets
from imagefactory.recipes.yaml_tree import YamlNode, show
from imagefactory.versions import nearest

MAX_FAULTS = 50


class Reader:
    """Takes typed values out of nodes and gathers the faults. A faulty value reads as empty."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.faults: set[tuple[int, int, Diagnostic]] = set()

    def fault(self, where: Where, code: str, what: str, write: str) -> None:
        self.faults.add((where.line, where.column, Diagnostic(code, str(where), what, write)))

    def finish(self) -> None:
        """Raises RecipeError with all faults in the order of the file."""
        if self.faults:
            in_order = sorted(self.faults, key=lambda fault: (*fault[:2], str(fault[2])))
            faults = [diagnostic for *_, diagnostic in in_order]
            if (rest := len(faults) - MAX_FAULTS) > 0:
                faults[MAX_FAULTS:] = [Diagnostic("more-problems", self.file, f"and {rest} more problems")]
            raise RecipeError(faults)

    def mapping(
        self, node: YamlNode, known: Sequence[str], required: Mapping[str, str]
    ) -> dict[str, YamlNode]:
        """Key -> value; unknown, repeated and missing keys are faults."""
        if node.kind != "map":
            self.fault(
                node.where,
                "not-a-mapping",
                f"expected keys and values, found {node.called}",
                f"write {_example(required, known)}",
            )
            return {}
        values: dict[str, YamlNode] = {}
        for name, key, value in self.pairs(node, "keys"):
            if name in known:
                values[name] = value
                continue
            near = nearest(name, known)
            hint = f"did you mean '{near}'?" if near else f"the keys here are {', '.join(known)}"
            self.fault(key.where, "unknown-key", f"unknown key {show(name)}", hint)
        for name, example in required.items():
            if name not in values:
                self.fault(node.where, "missing-key", f"'{name}' is missing", f"write {example}")
        return values

    def pairs(self, node: YamlNode | None, key: str) -> Iterator[tuple[str, YamlNode, YamlNode]]:
        """Name, key node, value node of a map; repeated names are faults and come once."""
        if node is None:
            return
        if node.kind != "map":
            self.fault(
                node.where,
                "not-a-mapping",
                f"'{key}' must have names and values, not {node.called}",
                'write NAME: "value"',
            )
            return
        seen: dict[str, Where] = {}
        for name, value in node.pairs:
            if name.kind != "text":
                self.fault(name.where, "key-not-text", f"a key cannot be {name.called}", "write a word")
            elif name.text in seen:
                self.fault(
                    name.where,
                    "duplicate-key",
                    f"{show(name.text)} is already set at {seen[name.text]}",
                    "remove one of them",
                )
            elif name.text == "<<":
                self.fault(
                    name.where,
                    "yaml-unsupported",
                    "merge keys (<<) are not supported",
                    "write the values out",
                )
            else:
                seen[name.text] = name.where
                yield name.text, name, value

    def items(self, node: YamlNode | None, key: str, write: str) -> list[YamlNode]:
        """The items of a list that must not be empty."""
        if node is None:
            return []
        if node.kind != "list":
            self.fault(
                node.where, "not-a-list", f"'{key}' must be a list, not {node.called}", f"write {write}"
            )
        elif not node.items:
            self.fault(node.where, "empty-list", f"'{key}' is empty", f"write {write}")
        return node.items

    def text(self, node: YamlNode | None, key: str, rule: str) -> str:
        """The text that RULES[rule] allows; empty when the key is missing (which is told elsewhere)."""
        if node is None:
            return ""
        allowed = RULES[rule]
        if node.kind != "text" or node.made == "nothing":
            self.fault(
                node.where, "not-text", f"'{key}' must be text, not {node.called}", f"write {allowed.write}"
            )
        elif node.made:
            quoted = f'"{node.text}"' if allowed.allows(node.text) else allowed.write
            self.fault(
                node.where,
                "quotes-missing",
                f"'{key}' must be text, but YAML reads {show(node.text)} as {node.made}",
                f"write it in quotes: {quoted}",
            )
        elif not allowed.allows(node.text):
            named = rule in ("check", "waived")
            near = nearest(node.text, allowed.pattern.replace("\\", "").split("|")) if named else ""
            write = f"did you mean '{near}'?" if near else what_to_write(node.text, rule)
            size = len(node.text)
            long = f" of {size} characters (limit {allowed.limit})" if size > max(allowed.limit, 20) else ""
            self.fault(
                node.where,
                "value-invalid",
                f"'{key}' has the invalid value {show(without_secrets(node.text))}{long}",
                write,
            )
        else:
            return node.text
        return ""

    def image(self, node: YamlNode | None, key: str) -> str:
        """A reference to an image by digest; docker's short names and floating tags are faults."""
        if node is None or node.kind != "text" or node.made or RULES["image"].allows(node.text):
            return self.text(node, key, "image")
        full, shown = _written_out(node.text), show(node.text, limit=160)
        digest = node.text.partition("@")[2]
        if not full or full == node.text:
            return self.text(node, key, "image")
        if digest:
            self.fault(
                node.where,
                "image-short-name",
                f"'{key}' {shown} is a short name without a registry",
                f"write {full}",
            )
        else:
            self.fault(
                node.where,
                "image-not-pinned",
                f"'{key}' {shown} has no digest, so it can change",
                f"write {full}; `skopeo inspect docker://{full.partition('@')[0]}` prints the digest",
            )
        return ""

    def texts(self, node: YamlNode | None, key: str, rule: str, *, empty: bool = True) -> tuple[str, ...]:
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
                    item.where,
                    "duplicate-value",
                    f"duplicate {show(text)} in '{key}', first at {first}",
                    "remove one",
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
