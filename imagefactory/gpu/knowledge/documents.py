"""What projects document: the GPU code that a build is made of, and which CUDA came with which version.

`documented.toml` and `releases.toml` hold what a page or a build script of the project says. Whether it is
so, a scan says (scans.py), and in the end a run on such a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from imagefactory.gpu.capability import Capability, Code, CodeKind, parse_capability, parse_code
from imagefactory.gpu.knowledge.tables import covers, numbers, read_table
from imagefactory.gpu.knowledge.toolkits import targets_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """For which code a framework's build for one CUDA is documented to be made.

    `version` is a prefix by whole components. `codes` are machine code and PTX as the project names them,
    sorted; PTX without the version of its instruction set, which no project documents. `minimum` is the
    lowest capability that the project names in words, None where it names none. `cudnn` is a version as far
    as it is named, often empty. `made_there` says that the code is made where it runs, by that CUDA, whose
    targets `codes` are then.
    """

    framework: str
    version: str
    cuda: str
    codes: tuple[Code, ...]
    minimum: Capability | None
    cudnn: str
    made_there: bool
    source: str

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        """The capabilities with machine code of their own, plain or `a`, and those of PTX, sorted."""
        return tuple(sorted({code.architecture for code in self.codes if code.architecture}))

    @property
    def ptx(self) -> bool:
        """Whether PTX is documented, so that newer GPUs than those listed may be reached."""
        return any(code.kind is CodeKind.PTX for code in self.codes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One CUDA for which a framework version was released.

    `version` is a prefix by whole components. `pythons` are the minor versions (`3.11`), empty where no
    source says. `experimental` is the project's own word for builds beside the stable ones. `any_minor` says
    that it takes CUDA's libraries from the machine, so that other minor versions of that major may do.
    """

    framework: str
    version: str
    cuda: str
    cudnn: str
    pythons: tuple[str, ...]
    experimental: bool
    any_minor: bool
    source: str


@cache
def all_documented() -> tuple[Documented, ...]:
    """All rows of documented.toml, one for each version and CUDA."""
    return tuple(
        Documented(
            framework=row["framework"],
            version=version,
            cuda=cuda,
            codes=tuple(sorted(map(_code, row["codes"].split()))) if "codes" in row else targets_of(cuda),
            minimum=parse_capability(row["minimum"]) if "minimum" in row else None,
            cudnn=row.get("cudnn", ""),
            made_there="codes" not in row,
            source=row["source"],
        )
        for row in read_table("documented")["build"]
        for version in row["versions"]
        for cuda in row["cuda"]
    )


def documented(framework: str, version: str, cuda: str) -> Documented | None:
    """What is documented of a framework's build, None where no row says.

    `framework` is the distribution (`torch`), `version` `2.3` or `2.3.1`, `cuda` `12.1`, or `12` where the
    framework binds only the major. The longest version that covers `version` speaks.
    """
    rows = [
        row
        for row in all_documented()
        if row.framework == framework
        and covers(row.version, version)
        and (covers(row.cuda, cuda) or covers(cuda, row.cuda))
    ]
    return max(
        rows, key=lambda row: (row.version.count("."), row.cuda.count("."), numbers(row.cuda)), default=None
    )


@cache
def releases(framework: str) -> tuple[Release, ...]:
    """All releases of a framework, the newest version and CUDA first; empty for an unknown one."""
    rows = [
        Release(
            framework=framework,
            version=row["version"],
            cuda=cuda,
            cudnn=row.get("cudnn", {}).get(cuda, ""),
            pythons=_pythons(row.get("python", "")),
            experimental=cuda in row.get("experimental", ()),
            any_minor=row.get("any-minor", False),
            source=row["source"],
        )
        for row in read_table("releases")["release"]
        if row["framework"] == framework
        for cuda in [*row["cuda"], *row.get("experimental", ())]
    ]
    return tuple(sorted(rows, key=lambda row: (numbers(row.version), numbers(row.cuda)), reverse=True))


def _code(word: str) -> Code:
    """`80` -> sm_80, `90a` -> sm_90a, `120+PTX` stands as `120 compute_120`."""
    return parse_code(word if word.startswith("compute_") else f"sm_{word}")


def _pythons(text: str) -> tuple[str, ...]:
    """`3.8-3.11` -> every minor version between."""
    if not text:
        return ()
    (major, first), (_, last) = (numbers(end) for end in text.split("-"))
    return tuple(f"{major}.{minor}" for minor in range(first, last + 1))
