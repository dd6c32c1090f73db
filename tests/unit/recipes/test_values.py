"""Match specs: which are taken, the one spelling of each, and that the solver reads the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rattler import MatchSpec

from imagefactory.recipes import values
from imagefactory.recipes.values import CondaSpec, channel_address, channel_name, parse_spec

SPELLINGS = [
    ("numpy", "numpy"),
    ("NumPy", "numpy"),
    ("numpy *", "numpy"),
    ("numpy=*", "numpy"),
    ("jaxlib * *", "jaxlib"),
    ("numpy<2", "numpy <2"),
    ("numpy >= 1, <2", "numpy <2,>=1"),
    ("numpy=1.26", "numpy 1.26.*"),
    ("numpy =1.26", "numpy 1.26.*"),
    ("numpy=1.26.*", "numpy 1.26.*"),
    ("numpy 1.26*", "numpy 1.26.*"),
    ("numpy=1.26,!=1.26.2", "numpy !=1.26.2,1.26.*"),
    ("numpy 1.26.*,>=1.26.2 py*", "numpy 1.26.*,>=1.26.2 py*"),
    ("numpy 1.26.4", "numpy ==1.26.4"),
    ("numpy==1.26.4", "numpy ==1.26.4"),
    ("numpy=1.26.4=py311_0", "numpy ==1.26.4 py311_0"),
    ("numpy==1.26.4=py311_0", "numpy ==1.26.4 py311_0"),
    ("numpy ==1.26.4 py311_0", "numpy ==1.26.4 py311_0"),
    ("numpy=1.26.*=py311*", "numpy 1.26.* py311*"),
    ("jaxlib=*=*cuda12*", "jaxlib * *cuda12*"),
    ("cuda-version 12.6.*", "cuda-version 12.6.*"),
    ("pytorch-cuda=12.1", "pytorch-cuda 12.1.*"),
    ("a ~=1.2", "a ~=1.2"),
    ("a !=1.26.*", "a !=1.26.*"),
    ("tzdata 2024A", "tzdata ==2024a"),
    ("openssl=1.1.1w", "openssl 1.1.1w.*"),
    ("a 1!2.0", "a ==1!2.0"),
    ("a 1.0_1", "a ==1.0_1"),
    ("a ==1.0+cu.121", "a ==1.0+cu.121"),
    ("_libgcc_mutex 0.1 conda_forge", "_libgcc_mutex ==0.1 conda_forge"),
    ("conda-forge::numpy<2", "conda-forge::numpy <2"),
    ("https://conda.anaconda.org/conda-forge::numpy", "conda-forge::numpy"),
    ("nvidia/label/cuda-12.1.0::cuda-nvcc", "nvidia/label/cuda-12.1.0::cuda-nvcc"),
    ("https://conda.example.org:8080/lab::a=1", "https://conda.example.org:8080/lab::a 1.*"),
    ("file:///srv/lab::a", "file:///srv/lab::a"),
]

REFUSED = [
    "",
    " ",
    "numpy ",
    " numpy",
    "numpy  <2",
    "numpy\n",
    "a b c d",
    "__cuda",
    "-a",
    "a|b",
    "a >=1|<2",
    "a[build=x]",
    "a >=1.*",
    "a ==1.*",
    "a ~=1.2.*",
    "a 1..2",
    "a 1.",
    "a =",
    "a==",
    "a=1=",
    "a=1.2=^py.*$",
    "a=*=cuda**",
    "a ^1.*$",
    "a >",
    "a (>=1)",
    "a >=1,,<2",
    "a <2,",
    "defaults::a",
    "local::a",
    "::a",
    "../x::a",
    "http://x/y::a",
    "https://10.0.0.1/x::a",
    "https://x:443/y::a",
    "https://u:p@x/y::a",
    "https://x/t/abc/y::a",
    "conda-forge/linux-64::a",
    "file://srv::a",
    "a; b",
    "a @ https://x",
    "$(id)",
    "a\u0661",
]


@pytest.mark.parametrize(("written", "kept"), SPELLINGS)
def test_one_spelling_that_the_solver_reads_as_what_was_written(written: str, kept: str) -> None:
    assert str(parse_spec(written)) == kept
    assert str(parse_spec(kept)) == kept
    ours, theirs = MatchSpec(kept), MatchSpec(written)
    assert ours.name
    assert theirs.name
    assert (ours.name.normalized, str(ours.channel)) == (theirs.name.normalized, str(theirs.channel))
    assert {*str(ours.version or "*").split(",")} == {*str(theirs.version or "*").split(",")}
    assert (ours.build or "*") == (theirs.build or "*")


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no match spec that recipes know"):
        parse_spec(text)


def test_taken_apart() -> None:
    assert parse_spec("nvidia/label/cuda-12.1.0::Cuda-NVCC >=12,<13 h*_0") == CondaSpec(
        name="cuda-nvcc",
        version="<13,>=12",
        build="h*_0",
        channel="https://conda.anaconda.org/nvidia/label/cuda-12.1.0",
    )


def test_channels() -> None:
    assert channel_address("conda-forge") == "https://conda.anaconda.org/conda-forge"
    assert channel_address("https://conda.example.org/lab/") == "https://conda.example.org/lab"
    assert channel_address("file:///srv/lab/") == "file:///srv/lab"
    assert channel_name("https://conda.anaconda.org/nvidia/label/x") == "nvidia/label/x"
    assert channel_name("https://conda.example.org/lab") == "https://conda.example.org/lab"


@given(text=st.from_regex(values.SPEC, fullmatch=True))
def test_whatever_the_rule_allows_the_solver_reads(text: str) -> None:
    kept = str(parse_spec(text))
    assert str(parse_spec(kept)) == kept
    spec, read = parse_spec(kept), MatchSpec(kept)
    assert read.name
    assert read.name.normalized == spec.name
    assert (read.build or "") == spec.build
    assert (read.channel.base_url.rstrip("/") if read.channel else "") == spec.channel
