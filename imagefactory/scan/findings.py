"""Findings from file names, and from the small files in which frameworks state their build.

Packages are recognized by their records, CUDA's libraries by the versions in their names. Files are read as
data and never executed. fatbin.py finds the GPU code itself.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.errors import UsageError, os_problem
from imagefactory.gpu.capability import GpuCode
from imagefactory.gpu.forward import NOTE_LIMIT, parse_forward_note
from imagefactory.gpu.predict import COMPAT_DIRECTORY, DRIVER_FACT, OWN, SEARCH
from imagefactory.gpu.values import GpuLibrary, InstalledPackage, ModuleCount, ScanResult
from imagefactory.scan.fatbin import CodeReader, may_have_code

TEXT_LIMIT = 256 << 10  # bytes; the largest file that is read for a framework's facts

# Files with these names are not read, and replacing one in a layer does not remove GPU code.
_TEXT_SUFFIXES = """
py pyc pyi pyx pxd h hpp hh cuh inc inl c cc cpp cu txt md rst htm html css js map json yml yaml toml xml
cmake csv png svg gif jpg jpeg gz xz bz2 mo po pem crt list md5sums pm pl ttf pdf
"""
_TEXTS = frozenset(_TEXT_SUFFIXES.split())
_TOOLKIT = re.compile(
    r"lib(?:cudart|cublas|cublasLt|cudnn(?:_[a-z_]+)?|nccl|cufft|curand|cusolver|cusparse|cusparseLt|nvrtc"
    r"|nvJitLink|nvinfer|amdhip64|rocblas|hipblaslt|MIOpen|rccl)(?:-[0-9a-f]{8})?\.so\.[0-9.]{1,20}"
    r"|libcuda\.so\.[0-9]{3}\.[0-9.]{2,12}"  # of a driver: NVIDIA's packages for forward compatibility
)
# The driver's own libraries.
_DRIVERS = re.compile(r"(?:.*/)?(lib(?:cuda|nvidia-ml)\.so\.[0-9]{3}\.[0-9.]{2,12})")
_DIST_INFO = re.compile(
    r"(?:.*/)?(?:(?:site|dist)-packages/)?([A-Za-z0-9][\w.]*)-([0-9][\w.!+]*)\.dist-info/METADATA"
)
_CONDA_META = re.compile(r"(?:.*/)?conda-meta/([a-z0-9_.-]+)-([^-/]+)-([^-/]+)\.json")
# Files with frameworks' build facts: end of the path, framework, the names that count.
_FACTS = (
    ("torch/version.py", "torch", ("__version__", "cuda", "hip")),
    (
        "tensorflow/python/platform/build_info.py",
        "tensorflow",
        ("cuda_version", "cudnn_version", "cuda_compute_capabilities", "is_cuda_build", "is_rocm_build"),
    ),
    (
        "onnxruntime/capi/build_and_package_info.py",
        "onnxruntime",
        ("package_name", "__version__", "cuda_version", "cudnn_version", "rocm_version"),
    ),
)
_FACT_ENDS = tuple(end for end, _, _ in _FACTS)
_VALUE = r"(?:None|True|False|'[^'\n]{0,400}'|\"[^\"\n]{0,400}\"|\[[^\]]{0,2000}\])"
# `name = value`, `name: Optional[str] = value`, and `('name', value)` or `'name': value` within a table.
_ASSIGNED = re.compile(
    rf"^(?P<name>\w{{1,40}})[ \t]*(?::[^=\n]{{0,80}})?=[ \t]*(?P<value>{_VALUE})[ \t]*(?:#.*)?$"
    rf"|\(?['\"](?P<key>\w{{1,40}})['\"][,:][ \t]*(?P<given>{_VALUE})",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFinding:
    """The finding of one file; most files have none."""

    path: str
    library: GpuLibrary | None = None
    package: InstalledPackage | None = None
    facts: tuple[tuple[str, str, str], ...] = ()
    toolkit: str = ""

    def __bool__(self) -> bool:
        return bool(self.library or self.package or self.facts or self.toolkit)


def readable_path(path: str) -> str:
    """Return a path as one line of UTF-8.

    Invalid bytes, line ends and terminal control characters become U+FFFD.
    """
    if path.isprintable():
        return path
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def is_text(path: str) -> bool:
    """Return whether a file has no GPU code, judged by its name."""
    _, dot, suffix = path.rpartition(".")
    return bool(dot) and suffix.lower() in _TEXTS


def read_name(path: str) -> FileFinding | None:
    """Return the finding of a file's path: a package's record, a version of a CUDA library."""
    name = path.rpartition("/")[2]
    package, toolkit = None, ""
    facts: tuple[tuple[str, str, str], ...] = ()
    if name == "METADATA":
        package = _parse_dist_info(path)
    elif name.endswith(".json"):
        match = _CONDA_META.fullmatch(path)
        package = InstalledPackage(name=match[1], version=match[2], build=match[3]) if match else None
    elif name.startswith("lib"):
        if _DRIVERS.fullmatch(path) and not COMPAT_DIRECTORY.search(path):
            facts = ((DRIVER_FACT, name, OWN),)
        toolkit = name if _TOOLKIT.fullmatch(name) else ""
    if not (package or facts or toolkit):
        return None
    return FileFinding(path=path, package=package, facts=facts, toolkit=toolkit)


def may_hold_driver_note(path: str) -> bool:
    """Return whether a file may list its drivers: a libcuda for NVIDIA's forward compatibility."""
    return "libcuda" in path and bool(_DRIVERS.fullmatch(path)) and bool(COMPAT_DIRECTORY.search(path))


def parse_note(path: str, data: bytes | mmap.mmap) -> tuple[tuple[str, str, str], ...]:
    """Return the drivers that a libcuda for forward compatibility serves, empty without its note."""
    note = parse_forward_note(data)
    if note is None:
        return ()
    drivers = ",".join(map(str, note.drivers)) or "none"
    return ((DRIVER_FACT, path.rpartition("/")[2], f"CUDA {note.cuda} for drivers {drivers}"),)


def _parse_dist_info(path: str) -> InstalledPackage | None:
    """Return a package of the environment itself, not one bundled inside setuptools and others."""
    match = _DIST_INFO.fullmatch(path)
    above = path.split("/")[:-2]
    if not match or (above and above[-1] not in ("site-packages", "dist-packages")):
        return None
    return InstalledPackage(name=re.sub(r"[-_.]+", "-", match[1]).lower(), version=match[2])


def parse_facts(path: str, text: str) -> tuple[tuple[str, str, str], ...]:
    """Return (framework, key, value) that a framework states about its build. None becomes empty.

    `path` is that of a file that `tells_facts`. Lists are joined with commas, `__version__` is `version`.
    """
    for end, framework, value_name in _FACTS:
        if _ends(path, end):
            facts: dict[str, str] = {}
            for match in _ASSIGNED.finditer(text):
                key = match["name"] or match["key"]
                if key in value_name:
                    facts[key.strip("_")] = _plain(match["value"] or match["given"])
            return tuple((framework, key, value) for key, value in sorted(facts.items()))
    return ()


def _plain(literal: str) -> str:
    if literal == "None":
        return ""
    if literal[0] == "[":
        return readable_path(",".join(re.findall(r"['\"]([^'\"]*)['\"]", literal)))
    return readable_path(literal.strip("'\""))


def may_hold_facts(path: str, size: int) -> bool:
    return path.endswith(_FACT_ENDS) and size <= TEXT_LIMIT and any(_ends(path, end) for end in _FACT_ENDS)


def _ends(path: str, end: str) -> bool:
    return path == end or path.endswith("/" + end)


def group_loose(libraries: Iterable[GpuLibrary]) -> tuple[GpuLibrary, ...]:
    """Return libraries by path, with the code files of a directory (`.cubin`, `.fatbin`) as one.

    A program chooses among such files: flashinfer-cubin has 15,970 in four directories.
    """
    groups: dict[str, list[GpuLibrary]] = {}
    for library in libraries:
        directory, slash, name = library.path.rpartition("/")
        loose = name.rpartition(".")[2] if name.endswith((".cubin", ".fatbin")) else ""
        groups.setdefault(f"{directory}{slash}*.{loose}" if loose else library.path, []).append(library)
    grouped = (some[0] if len(some) == 1 else _merge_findings(some, path) for path, some in groups.items())
    return tuple(sorted(grouped, key=lambda library: library.path))


def _merge_findings(some: Sequence[GpuLibrary], path: str) -> GpuLibrary:
    counts: Counter[tuple[GpuCode, ...]] = Counter()
    for library in some:
        for modules in library.modules:
            counts[modules.codes] += modules.count
    damaged = next((finding for finding in some if finding.damage), None)
    return GpuLibrary(
        path=path,
        size=sum(finding.size for finding in some),
        modules=tuple(ModuleCount(codes=codes, count=count) for codes, count in sorted(counts.items())),
        compressions=tuple(sorted({word for finding in some for word in finding.compressions})),
        damage=f"{damaged.path}: {damaged.damage}" if damaged else "",
        unread="; ".join(sorted({finding.unread for finding in some if finding.unread})[:3]),
    )


def format_contents(
    source: str, findings: Iterable[FileFinding], environment: Iterable[tuple[str, str]] = ()
) -> ScanResult:
    """Return the findings of single files as one value. `environment` has the variables of an image."""
    every = sorted(findings, key=lambda finding: finding.path)
    packages = {finding.package for finding in every if finding.package}
    search = {
        (DRIVER_FACT, SEARCH, readable_path(value))
        for name, value in environment
        if name == SEARCH and COMPAT_DIRECTORY.search(value)
    }
    return ScanResult(
        source=source,
        libraries=group_loose(finding.library for finding in every if finding.library),
        packages=tuple(sorted(packages, key=lambda package: (package.name, package.version, package.build))),
        facts=tuple(sorted({fact for finding in every for fact in finding.facts} | search)),
        toolkit=tuple(sorted({finding.toolkit for finding in every if finding.toolkit})),
    )


# --- Shared by all scans: which files may have GPU code, and the scan of one file of a stream
# GPU code is searched in files that begin as ELF, as an archive of objects, or as a container of GPU code;
# findings.py handles other files.


HEAD = 24  # first bytes of a file, enough for its type
SMALLEST = 64  # bytes; no container of GPU code is smaller
WHOLE = 1 << 18  # bytes; smaller files are searched at once, since most have no GPU code
CHUNK = 1 << 17  # small: bytes that one call cannot process are copied


_STARTS = (b"\x7fELF", b"!<arch>\n", b"!<thin>\n", b"\x50\xed\x55\xba", b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB")


def is_candidate(head: bytes) -> bool:
    """Return whether a file may have GPU code. `head` is its first `HEAD` bytes."""
    return head.startswith(_STARTS)


def only_name_counts(path: str, size: int) -> bool:
    """Return whether the bytes of a file would add nothing to the finding of its name."""
    return size < SMALLEST or (is_text(path) and not may_hold_facts(path, size))


class FileScan:
    """The scan of one file of a stream. Feed it the bytes in any portions, then close it."""

    def __init__(self, path: str, size: int) -> None:
        self._path, self._size = path, size
        self._facts = may_hold_facts(path, size)
        self._head = b""
        self._reader: CodeReader | None = None
        self._note: bytearray | None = bytearray() if may_hold_driver_note(path) else None
        self._told: tuple[tuple[str, str, str], ...] = ()
        self._idle = only_name_counts(path, size)

    @property
    def idle(self) -> bool:
        """Return whether further bytes would add nothing."""
        return self._idle

    def _seek_note(self, data: bytes | memoryview) -> None:
        if self._note is not None:
            self._note += data
            self._told = parse_note(self._path, bytes(self._note))
            self._note = None if self._told else self._note[-NOTE_LIMIT:]

    def feed(self, data: bytes | memoryview) -> None:
        self._seek_note(data)
        if self._reader is not None:
            self._reader.feed(data)
        elif not self._idle:
            if self._head or self._facts or is_candidate(bytes(data[:HEAD])) or len(data) < HEAD:
                self._head += data
                if not self._facts and len(self._head) >= HEAD:
                    self._decide()
            else:
                self._idle = True  # most files, whose bytes are not copied

    def _decide(self) -> None:
        size = len(self._head)
        if size < self._size <= WHOLE and is_candidate(self._head):
            return  # until the file is complete
        if is_candidate(self._head) and (size != self._size or may_have_code(self._head)):
            self._reader = CodeReader(self._path, self._size)
            self._reader.feed(self._head)
        self._head = b""
        self._idle = self._reader is None

    def close(self) -> FileFinding | None:
        named = read_name(self._path)
        facts, library = self._told, None
        if self._facts:
            facts = (*parse_facts(self._path, self._head.decode("utf-8", "replace")), *facts)
        elif is_candidate(self._head):  # the file has fewer bytes than expected
            self._reader = CodeReader(self._path, self._size)
            self._reader.feed(self._head)
        if self._reader is not None:
            library = self._reader.close()
        if not (library or facts):
            return named
        named = named or FileFinding(path=self._path)
        return replace(named, library=library, facts=(*named.facts, *facts))


@contextmanager
def readable(path: Path | str) -> Iterator[None]:
    """Raise UsageError if the operating system cannot read `path`."""
    try:
        yield
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="choose a file that you can read") from error


@contextmanager
def stopping_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Yield threads whose queued work is dropped when one fails or the user interrupts."""
    pool = ThreadPoolExecutor(max_workers=max(1, workers))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
