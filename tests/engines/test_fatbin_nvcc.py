"""The reader against what NVIDIA's compiler writes: targets, kinds and compressions, exact in both modes."""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imagefactory.gpu.values import GpuLibrary
from imagefactory.scan.fatbin import CodeReader, scan_bytes, scan_file
from imagefactory.suite.gpu import kernels
from tests.services.nvcc import Nvcc, install_nvcc
from tests.services.processes import ServiceError

KERNELS = """
__global__ void {name}(float *x) {{
    #pragma unroll 16
    for (int i = 0; i < 64; i++) x[threadIdx.x + i] = x[threadIdx.x + i] * 2.5f + {number}.0f;
}}
void call_{name}(float *x) {{ {name}<<<1, 32>>>(x); }}
"""
ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "103", "110", "120", "121")
WITH_FAMILY = ("100", "103", "110", "120", "121")
MODES = ("none", "default", "size", "speed", "balance")
# What the modes may leave in a file; small payloads are left as they are.
COMPRESSIONS = {
    "none": {"none"},
    "speed": {"lz4", "none"},
    "default": {"none", "zstd"},
    "size": {"none", "zstd"},
    "balance": {"none", "zstd"},
}
ISA = "9.5"  # of the PTX that nvcc 13.5 writes
SEED = 20261121


@pytest.fixture(scope="module")
def nvcc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nvcc]:
    folder = tmp_path_factory.mktemp("nvcc")
    yield install_nvcc(folder / "toolkit")
    shutil.rmtree(folder)


def write_source(folder: Path, name: str = "kernel") -> Path:
    path = folder / f"{name}.cu"
    path.write_text(KERNELS.format(name=name, number=len(name)))
    return path


def read_every_way(path: Path) -> GpuLibrary:
    """The file by jumps, in memory and as a stream in odd pieces: all must be the same."""
    found = scan_file(path, path.name)
    data = path.read_bytes()
    assert scan_bytes(data, path.name) == found
    for chunk in (97, 4096, 1 << 20):
        reader = CodeReader(path.name, len(data))
        for at in range(0, len(data), chunk):
            reader.feed(memoryview(data)[at : at + chunk])
        assert reader.close() == found, chunk
    assert found is not None, path
    assert found.damage == ""
    return found


def codes(path: Path) -> list[set[str]]:
    """The targets of each module of a file."""
    return [set(map(str, one.codes)) for one in read_every_way(path).modules for _ in range(one.count)]


def agrees_with_cuobjdump(nvcc: Nvcc, path: Path) -> bool:
    """Whether NVIDIA's own reader lists the same pieces as often. It leaves the `f` off machine code."""
    printed = nvcc.run("-lelf", "-lptx", path, tool="cuobjdump", cwd=path.parent)
    listed = Counter(re.findall(r"\.(sm_[0-9a-z]+)\.(cubin|ptx)$", printed, re.MULTILINE))
    ours: Counter[tuple[str, str]] = Counter()
    for one in read_every_way(path).modules:
        for code in one.codes:
            name = str(code).partition("/")[0].partition("_")[2]
            piece = (f"sm_{name}", "ptx") if code.isa else (f"sm_{name.rstrip('f')}", "cubin")
            ours[piece] += one.count
    return listed == ours


def random_targets(rng: random.Random) -> tuple[list[str], set[str]]:
    """`-gencode` options and the codes that they must give."""
    options, expected = [], set()
    for number in rng.sample(ARCHITECTURES, rng.randint(1, 5)):
        allowed = ["", "a", "f"] if number in WITH_FAMILY else ["", "a"] if number == "90" else [""]
        architecture = number + rng.choice(allowed)
        kinds = rng.choice((["sm"], ["compute"], ["sm", "compute"]))
        names = ",".join(f"{kind}_{architecture}" for kind in kinds)
        options += ["-gencode", f"arch=compute_{architecture},code=[{names}]"]
        expected |= {f"{kind}_{architecture}{f'/{ISA}' if kind == 'compute' else ''}" for kind in kinds}
    return options, expected


@pytest.mark.parametrize("number", range(15))
def test_random_targets_are_read_exactly(number: int, nvcc: Nvcc, tmp_path: Path) -> None:
    rng = random.Random(SEED + number)
    options, expected = random_targets(rng)
    mode = MODES[number % len(MODES)]
    forms = [["-c"], ["-c", "-rdc=true"], ["-fatbin"]]
    if mode != "none":  # nvcc refuses
        forms += [["-c", "--concat"], ["-fatbin", "--concat"], ["-c", "-rdc=true", "--concat"]]
    extra = rng.choice(forms)
    source = write_source(tmp_path)
    nvcc.run(*extra, *options, f"-compress-mode={mode}", source, "-o", tmp_path / "made", cwd=tmp_path)
    made = (tmp_path / "made").rename(tmp_path / f"made.{'fatbin' if '-fatbin' in extra else 'o'}")
    assert codes(made) == [expected], (options, extra, mode)
    assert agrees_with_cuobjdump(nvcc, made)
    assert set(read_every_way(made).compressions) <= COMPRESSIONS[mode]


def test_every_mode_of_compression(nvcc: Nvcc, tmp_path: Path) -> None:
    source, seen = write_source(tmp_path), {}
    for mode in MODES:
        made = tmp_path / f"{mode}.fatbin"
        options = ("-gencode", "arch=compute_80,code=[sm_80,compute_80]", "-Xfatbin", "-compress-all")
        nvcc.run("-fatbin", *options, f"-compress-mode={mode}", source, "-o", made, cwd=tmp_path)
        assert codes(made) == [{"sm_80", f"compute_80/{ISA}"}]
        seen[mode] = read_every_way(made).compressions
    assert seen["none"] == ("none",)
    assert seen["speed"] == ("lz4",)
    assert seen["default"] == seen["size"] == seen["balance"] == ("zstd",)


def test_a_concatenation_is_taken_apart(nvcc: Nvcc, tmp_path: Path) -> None:
    made, numbers = tmp_path / "made.o", ("75", "80", "86", "90a")
    options = [option for n in numbers for option in ("-gencode", f"arch=compute_{n},code=sm_{n}")]
    nvcc.run("-c", *options, "--concat", write_source(tmp_path), "-o", made, cwd=tmp_path)
    kinds = {struct.unpack_from("<H", made.read_bytes(), found.end() + 8)[0] for found in magics(made)}
    assert kinds == {256}
    assert codes(made) == [{f"sm_{number}" for number in numbers}]


def magics(path: Path) -> list[re.Match[bytes]]:
    return list(re.finditer(rb"\x50\xed\x55\xba\x01\x00\x10\x00", path.read_bytes()))


def test_code_for_linkers(nvcc: Nvcc, tmp_path: Path) -> None:
    made = tmp_path / "made.o"
    options = ("-gencode", "arch=compute_80,code=lto_80", "-gencode", "arch=compute_90,code=[sm_90,lto_90]")
    nvcc.run("-c", "-rdc=true", *options, write_source(tmp_path), "-o", made, cwd=tmp_path)
    assert codes(made) == [{"lto_80", "lto_90", "sm_90"}]
    nvcc.run("-c", "-dlto", "-arch=sm_89", write_source(tmp_path), "-o", made, cwd=tmp_path)
    assert codes(made) == [{"lto_89", f"compute_89/{ISA}"}]


def test_ptx_alone(nvcc: Nvcc, tmp_path: Path) -> None:
    made = tmp_path / "made.o"
    for architecture in ("75", "90a", "100f"):
        target = f"arch=compute_{architecture},code=compute_{architecture}"
        nvcc.run("-c", "-gencode", target, write_source(tmp_path), "-o", made, cwd=tmp_path)
        assert codes(made) == [{f"compute_{architecture}/{ISA}"}]


@pytest.mark.parametrize("architecture", ["75", "80", "90", "90a", "100", "100a", "100f", "120", "121f"])
def test_cubins(architecture: str, nvcc: Nvcc, tmp_path: Path) -> None:
    made = tmp_path / "made.cubin"
    nvcc.run("-cubin", f"-arch=sm_{architecture}", write_source(tmp_path), "-o", made, cwd=tmp_path)
    assert codes(made) == [{f"sm_{architecture}"}]


def test_the_ptx_of_the_gpu_suite_compiles_for_every_gpu(nvcc: Nvcc, tmp_path: Path) -> None:
    """What T0 gives to a driver, by the compiler that drivers have inside; what is broken does not."""
    for name in ("add", "subtract", "broken"):
        (tmp_path / f"{name}.ptx").write_text(getattr(kernels.PTX, name))
    for architecture in ARCHITECTURES:
        for name in ("add", "subtract"):
            arguments = (f"-arch=sm_{architecture}", f"{name}.ptx", "-o", f"{name}.cubin")
            nvcc.run(*arguments, cwd=tmp_path, tool="ptxas")
        assert (tmp_path / "add.cubin").read_bytes() != (tmp_path / "subtract.cubin").read_bytes()
    with pytest.raises(ServiceError, match="imagine"):
        nvcc.run("-arch=sm_80", "broken.ptx", "-o", "broken.cubin", cwd=tmp_path, tool="ptxas")


def test_cubins_inside_agree_with_their_entries(nvcc: Nvcc, tmp_path: Path) -> None:
    """Every piece of machine code in a container says itself what it is for."""
    made, numbers = tmp_path / "made.fatbin", ("75", "80", "90a", "100f", "121")
    options = [option for n in numbers for option in ("-gencode", f"arch=compute_{n},code=sm_{n}")]
    source = write_source(tmp_path)
    nvcc.run("-fatbin", *options, "-compress-mode=none", source, "-o", made, cwd=tmp_path)
    data, own = made.read_bytes(), set()
    starts = [found.start() for found in re.finditer(rb"\x7fELF\x02\x01", data)]
    for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
        found = scan_bytes(data[start:end], "inner")
        assert found is not None
        own |= {str(code) for one in found.modules for code in one.codes}
    assert own == {f"sm_{number}" for number in numbers}
    assert codes(made) == [own]


def test_libraries_and_archives(nvcc: Nvcc, tmp_path: Path) -> None:
    """Linked with several modules, as PyTorch is, relocatable code and an archive among them."""
    first, second, third = (write_source(tmp_path, name) for name in ("first", "second", "third"))
    plain = ("-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=[sm_90,compute_90]")
    nvcc.run("-c", *plain, "-Xcompiler=-fPIC", first, "-o", "first.o", cwd=tmp_path)
    nvcc.run("-c", *plain, "-Xcompiler=-fPIC", second, "-o", "second.o", cwd=tmp_path)
    alone = ("-gencode", "arch=compute_120a,code=sm_120a")
    nvcc.run("-c", *alone, "-Xcompiler=-fPIC", third, "-o", "third.o", cwd=tmp_path)
    objects = ["first.o", "second.o", "third.o"]
    subprocess.run(["ar", "rcs", "lib.a", *objects], cwd=tmp_path, check=True)
    subprocess.run(["g++", "-shared", *objects, "-o", "lib.so"], cwd=tmp_path, check=True)
    expected = Counter({frozenset({"sm_80", "sm_90", f"compute_90/{ISA}"}): 2, frozenset({"sm_120a"}): 1})
    for name in ("lib.a", "lib.so"):
        assert Counter(map(frozenset, codes(tmp_path / name))) == expected, name
        assert agrees_with_cuobjdump(nvcc, tmp_path / name), name
    subprocess.run(["strip", "--strip-all", "lib.so"], cwd=tmp_path, check=True)
    assert Counter(map(frozenset, codes(tmp_path / "lib.so"))) == expected
    rdc = ("-rdc=true", "-gencode", "arch=compute_86,code=sm_86", "-Xcompiler=-fPIC")
    nvcc.run("-c", *rdc, first, "-o", "relocatable.o", cwd=tmp_path)
    sections = subprocess.run(
        ["readelf", "-SW", "relocatable.o"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "__nv_relfatbin" in sections.stdout
    assert codes(tmp_path / "relocatable.o") == [{"sm_86"}]


def test_tile_code_is_told(nvcc: Nvcc, tmp_path: Path) -> None:
    source = tmp_path / "tile.cu"
    source.write_text("#include <cuda_tile.h>\n__tile_global__ void kernel(float *x) {}\n")
    options = ("-std=c++20", "-enable-tile", "-arch=sm_100")
    nvcc.run("-c", *options, source, "-o", "tile.o", cwd=tmp_path)
    found = read_every_way(tmp_path / "tile.o")
    assert re.fullmatch(r"1 of CUDA Tile IR \(type 128\), the first at 0x[0-9a-f]+", found.unread)


def test_nvidias_own_tools_hold_no_code(nvcc: Nvcc) -> None:
    """They have the first bytes of a container in their machine code, to write it."""
    for name in ("fatbinary", "nvlink"):
        data = (nvcc.bin / name).read_bytes()
        assert b"\x50\xed\x55\xba" in data
        assert scan_file(nvcc.bin / name, name) is None
        assert scan_bytes(data, name) is None


def test_cut_and_bent_files_end_with_an_answer(nvcc: Nvcc, tmp_path: Path) -> None:
    made = tmp_path / "made.o"
    options = (
        "-gencode",
        "arch=compute_80,code=[sm_80,compute_80]",
        "-gencode",
        "arch=compute_90a,code=sm_90a",
    )
    nvcc.run("-c", *options, write_source(tmp_path), "-o", made, cwd=tmp_path)
    whole, rng = made.read_bytes(), random.Random(SEED)
    (container,) = magics(made)
    end = container.start() + 16 + struct.unpack_from("<Q", whole, container.end())[0]
    for cut in sorted(rng.sample(range(container.start() + 24, end), 60)):
        found = scan_bytes(whole[:cut], "cut")
        assert found is not None
        assert found.damage.startswith(f"at {container.start():#x}: "), cut
        assert found.modules == ()

    def bend(number: int) -> None:
        chance = random.Random(SEED + number)
        raw = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            raw[chance.randrange(container.start() + 8, container.start() + 100)] = chance.randrange(256)
        found = scan_bytes(bytes(raw), "bent")
        if found and found.damage:
            assert re.match(r"at 0x[0-9a-f]+: .", found.damage)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(bend, range(400)))
