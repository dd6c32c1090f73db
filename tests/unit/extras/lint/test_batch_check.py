"""What is wrong with a batch script: each rule, the reach, and that what is written stands its own check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.extras.lint.batch_check import check_batch
from imagefactory.extras.lint.batch_job import capability_of, parse_features, read_batch_request
from imagefactory.extras.lint.batch_reader import parse_batch
from imagefactory.extras.lint.findings import (
    CheckContext,
    Severity,
    SubmitCheckResult,
    check_json,
    format_check,
)
from imagefactory.gpu.values import Compatibility
from imagefactory.jobs.slurm import write_slurm
from imagefactory.model import Outcome
from imagefactory.schedulers.pool import ImageKind, Inventory
from imagefactory.schedulers.sites import find_site
from imagefactory.schedulers.slurm.nodes import parse_nodes
from imagefactory.settings.choices import CONTAINERS
from imagefactory.trust.catalog import CatalogImage, ImageOffer
from tests.made.offers import (
    IMAGE,
    NOW,
    REFERENCE,
    SIF,
    catalog_of,
    failed,
    job_spec,
    offer,
    prediction,
    verdict,
)

SLURM = find_site("slurm")
HEAD = "#!/bin/bash\n#SBATCH --mem=16G --time=12:00:00\n"
GPU = f"{HEAD}#SBATCH --gres=gpu:a100:1\n"
START = f"apptainer exec --nv --env PYTHONNOUSERSITE=1 docker://{REFERENCE} python a.py\n"
VERIFIED = offer(verdict("8.0"), verdict("9.0"))
A, H, V, OLD = "a1 gpu:a100:4 a100,new", "h1 gpu:h100:2 h100,new", "v1 gpu:v100:1 v100", "o1 gpu:old:2"


def cluster(*nodes: str) -> Inventory:
    """Nodes as `name gres features`."""
    lines = []
    for text in nodes:
        name, gres, features = (*text.split(), "")[:3]
        told = f"Arch=x86_64 ActiveFeatures={features} Gres={gres} State=IDLE RealMemory=64000 CPUTot=32"
        lines.append(f"NodeName={name} {told}")
    return parse_nodes("\n".join(lines), NOW)


CLUSTER = cluster(A, H, V, OLD)


def check(
    text: str,
    *,
    offered: ImageOffer | None = VERIFIED,
    inventory: Inventory | None = CLUSTER,
    digest: str = "",
    edfs: Mapping[str, str] | None = None,
) -> SubmitCheckResult:
    def judge(image: CatalogImage) -> ImageOffer:
        assert offered is not None
        return offered

    around = CheckContext(
        site=SLURM,
        inventory=inventory,
        catalog=catalog_of(offered.image) if offered else None,
        offer=judge,
        digest=lambda _: digest,
        edf=(edfs or {}).get,
    )
    return check_batch(parse_batch(text, "a.sbatch"), around)


def rules(checked: SubmitCheckResult, severity: Severity | None = None) -> list[tuple[str, int, int]]:
    found = [one for one in checked.all_findings if severity in (None, one.severity)]
    return [(one.rule, one.line, one.column) for one in found]


def told(checked: SubmitCheckResult, rule: str) -> str:
    (found,) = [one for one in checked.all_findings if one.rule == rule]
    return f"{found.message} -> {found.hint}"


# --- what is written -----------------------------------------------------------------------------


SWEEP = {"columns": ("run", "lr"), "rows": (("0.1",), ("0.2",)), "arguments": ("--lr", "$(lr)")}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("nodes", "kind", "changes"),
    [
        ((A, H, V, OLD), ImageKind.DOCKER, {}),
        ((A, H, V, OLD), ImageKind.SIF, {"time": timedelta(hours=3), "gpus": 2}),
        ((A, V), ImageKind.ORAS, {}),
        (("a1 gpu:a100:4 x", "h1 gpu:h100:2 x", "v1 gpu:v100:1 x"), ImageKind.DOCKER, {}),
        ((A, H), ImageKind.DOCKER, SWEEP),
    ],
)
def test_what_is_written_stands_its_own_check(
    nodes: Sequence[str], kind: ImageKind, changes: dict[str, Any], known: bool
) -> None:
    """Where the cluster was asked, and where any GPU is asked for and the script looks at what it got."""
    offered = offer(verdict("8.0"), verdict("9.0"), of_sif=(verdict("8.0"), verdict("9.0")))
    inventory = cluster(*nodes) if known else None
    job = job_spec(site="slurm", offered=offered, kind=kind, inventory=inventory, **changes)
    (script,) = write_slurm(job).values()
    for inventory in (cluster(*nodes), None):
        checked = check(script, offered=offered, inventory=inventory)
        assert checked.all_findings == (), format_check(checked)
    assert checked.jobs[0].count == (len(job.rows) or 1)
    assert checked.jobs[0].target == IMAGE.target


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_is_written_for_each_container_program_stands_it_too(container: str) -> None:
    site = replace(find_site("slurm"), container=container)
    offered = offer(verdict("8.0"))
    job = replace(job_spec(site="slurm", kind=ImageKind.DOCKER, offered=offered), site=site, directory="jobs")
    script, *edf = write_slurm(job).values()
    checked = check(script, offered=offered, edfs={f"./jobs/{job.name}.toml": text for text in edf})
    assert checked.all_findings == (), format_check(checked)
    assert checked.jobs[0].target == IMAGE.target


def test_what_is_written_for_cpus_stands_it_too() -> None:
    offered = offer(cuda="none")
    (script,) = write_slurm(job_spec(site="slurm", offered=offered, gpus=0)).values()
    assert check(script, offered=offered).all_findings == ()


PINNED = f'image = "{REFERENCE.replace("/", "#", 1)}"\n'


@pytest.mark.parametrize(
    ("edf", "found", "said"),
    [
        (PINNED, [], ""),
        ('base_environment = "torch"\n', ["unread"], ""),
        ('image = "${SCRATCH}/a.sqsh"\n', ["unread"], ""),
        (PINNED.replace("#", "/"), ["pyxis"], "Docker Hub"),
        ('image = "registry.example.org#gpu/pytorch:2.3.1-cu121"\n', ["tag"], f"-> write {PINNED[9:-2]}"),
        ("image = a\n", ["edf"], "it is not TOML"),
        ("mounts = []\n", ["edf"], "names no image"),
        ("image = 1\n", ["edf"], "names no image"),
        (f"{PINNED}mount = []\n", ["edf"], "-> write mounts"),
        (f'{PINNED}mounts = ["/a", "/a:/a", "/a:/a:ro"]\n', ["edf"], "'/a' is not a mount"),
        (f"{PINNED}[env]\nA = 1\n", ["edf"], 'write A = "1"'),
        ("a = " + "[" * 5000, ["edf"], "it is not TOML"),
    ],
)
def test_the_image_of_an_edf(edf: str, found: list[str], said: str) -> None:
    text = f"{GPU}srun --environment=./a.toml python\n"
    offered = offer(verdict("8.0"))
    checked = check(text, offered=offered, edfs={"./a.toml": edf}, digest=REFERENCE.partition("@")[2])
    assert rules(checked) == [(rule, 4, 20) for rule in found], format_check(checked)
    assert not found or said in told(checked, found[0])
    text = text.replace("environment=./", "edf=$SLURM_SUBMIT_DIR/")
    other = check(text, offered=offered, edfs={"./a.toml": edf})
    assert [rule for rule, *_ in rules(other)] == found


def test_an_edf_for_a_whole_script_is_discouraged() -> None:
    text = f"{GPU}#SBATCH --environment=./a.toml\npython\n"
    checked = check(text, offered=offer(verdict("8.0")), edfs={"./a.toml": PINNED})
    assert rules(checked) == [("edf", 4, 9)]


# --- GPUs ------------------------------------------------------------------------------------------


def test_the_reach_of_a_good_script() -> None:
    checked = check(GPU.replace("a100", "h100") + START)
    (jobs,) = checked.jobs
    assert [(one.capability, one.gpus, one.image) for one in jobs.reached] == [("9.0", 2, "verified")]
    assert (jobs.total, dict(jobs.causes)) == (9, {"its type is not requested": 7})
    assert rules(checked) == [("narrow", 3, 9)]
    assert "4 GPUs (8.0)" in told(checked, "narrow")
    assert "the script: 1 job of pytorch-2.3-cu121, each matches 2 of 9 GPUs" in format_check(checked)
    assert check_json(checked, "slurm", "", [])["findings"][0]["column"] == 9  # type: ignore[index]


@pytest.mark.parametrize(
    ("option", "reached", "found"),
    [
        ("--gres=gpu:v100:1", {"7.0": 1}, ["unverified", "narrow"]),
        ("--gres=gpu:1", {"": 2, "7.0": 1, "8.0": 4, "9.0": 2}, ["unverified"]),
        ("--gres=gpu:old", {"": 2}, ["unverified", "narrow"]),
        ("--gpus=a100:2", {"8.0": 4}, ["narrow"]),
        ("-G 4", {"8.0": 4}, []),
        ("--gpus-per-node=h100:2", {"9.0": 2}, ["narrow"]),
        ("--gres=gpu:1 --constraint=new", {"8.0": 4, "9.0": 2}, []),
        ("--gres=gpu:1 -C a100|h100", {"8.0": 4, "9.0": 2}, []),
        ("--gres=gpu:1 -C (a100|v100)&new", {"8.0": 4}, ["narrow"]),
        ("--gres=gpu:1 --exclude=v1,o[1-3]", {"8.0": 4, "9.0": 2}, []),
        ("--gres=gpu:1 -w h1", {"9.0": 2}, ["narrow"]),
        ("--gres=gpu:a100:1 --cpus-per-task=64", {}, ["no-match"]),
        ("--gres=gpu:a100:8", {}, ["no-match", "narrow"]),
        ("--gres=gpu:b200:1", {}, ["no-match", "narrow"]),
        ("--gres=shard:1 -w a1", {"8.0": 4}, ["unverified"]),
    ],
)  # fmt: skip
def test_where_jobs_get(option: str, reached: dict[str, int], found: list[str]) -> None:
    checked = check(f"{HEAD}#SBATCH {option}\n{START}")
    assert {one.capability: one.gpus for one in checked.jobs[0].reached} == reached
    assert sorted(rule for rule, *_ in rules(checked)) == sorted(found), format_check(checked)


def test_a_type_that_the_cluster_has_not() -> None:
    text = told(check(f"{HEAD}#SBATCH --gres=gpu:A100:1\n{START}"), "no-match")
    assert "type A100, only a100, h100, old, v100 ->" in text


@pytest.mark.parametrize(
    ("option", "rule", "said"),
    [
        ("--gres=gpu:v100:1", "unverified", "v100 (7.0), which --gres"),
        ("--gres=gpu:1 -C V100", "unverified", "V100 (7.0), which -C"),
        ("--gres=gpu:1 -C GPU_SKU:RTX_2080Ti", "unverified", "(7.5)"),
        ("--gres=gpu:p100:1", "refused", "fails on p100 (6.0)"),
        ("--gres=gpu:l40s:1", "unverified", "predicted: "),
        ("--gres=gpu:big:1", "type", "'big'"),
        ("--gres=gpu:1", "any-gpu", "pytorch-2.3-cu121 is verified only on 8.0"),
    ],
)  # fmt: skip
def test_without_a_cluster_names_tell_which_gpus_are_asked_for(option: str, rule: str, said: str) -> None:
    offered = offer(
        verdict("8.0"), failed("6.0", Outcome.NO_KERNEL), predicted=(("8.9", prediction(Compatibility.YES)),)
    )
    checked = check(f"{HEAD}#SBATCH {option}\n{START}", offered=offered, inventory=None)
    assert [one for one, *_ in rules(checked)] == [rule]
    assert said in told(checked, rule)


def test_an_image_that_is_verified_nowhere() -> None:
    checked = check(GPU + START, offered=offer(), inventory=None)
    assert rules(checked) == [("unverified", 3, 9)]


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("a100", "8.0"), ("GPU_SKU:A100_SXM4", "8.0"), ("sm80", "8.0"), ("gpu_cc:8.6", "8.6"), ("new", ""),
        ("big2", ""),
    ],
)  # fmt: skip
def test_names_that_tell_a_capability(name: str, capability: str) -> None:
    assert capability_of(name) == capability


@pytest.mark.parametrize(
    ("text", "good", "names"),
    [
        ("a", ["a"], ("a",)),
        ("a|b", ["a", "b"], ("a", "b")),
        ("a&b", ["a b"], ()),
        ("a,b", ["a b"], ()),
        ("[a|b]", ["a", "b"], ("a", "b")),
        ("(a|c)&b", ["a b", "b c"], ()),
        ("a*2", ["a"], ("a",)),
    ],
)
def test_features(text: str, good: list[str], names: tuple[str, ...]) -> None:
    judge, alternatives = parse_features(text)
    every = ["", "a", "b", "c", "a b", "b c"]
    fitting = {one for one in every if judge(one.split())}
    assert {*good} <= fitting
    assert ("" in fitting, alternatives) == (False, names)


@pytest.mark.parametrize("text", ["", "a|", "(a", "a)", "a&&b", "!a"])
def test_features_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the message is the text itself
        parse_features(text)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("--mem=16G -c 2", {"memory": 16 << 30, "cpus": 2}),
        ("--mem-per-cpu=2G -c 4", {"memory": 8 << 30}),
        ("--gres=gpu:2 --mem-per-gpu=3G", {"memory": 6 << 30}),
        ("--mem=0", {"memory": 0}),
        ("--time=90", {"time": timedelta(minutes=90)}),
        ("--time=2:30", {"time": timedelta(minutes=2, seconds=30)}),
        ("--time=1:02:03", {"time": timedelta(hours=1, minutes=2, seconds=3)}),
        ("--time=2-3", {"time": timedelta(days=2, hours=3)}),
        ("--time=UNLIMITED", {"time": None}),
        ("--array=1-10%2", {"jobs": 10}),
        ("--array=0,2,4-8:2", {"jobs": 5}),
        ("--array=$N", {"jobs": None}),
        ("--gpus=8 -N 2", {"gpus": 4}),
        ("--gpus-per-task=1 -n 8 -N 2", {"gpus": 4}),
        ("--gpus-per-task=a100:2 --ntasks-per-node=3", {"gpus": 6, "kinds": ("a100",)}),
        ("--gres=gpu:0", {"gpus": 0, "at": None}),
        ("--gres=gpu:a100:1,lustre,gpu:v100:1", {"gpus": 2, "kinds": ("a100", "v100")}),
    ],
)
def test_what_is_asked_for(options: str, wanted: dict[str, Any]) -> None:
    asked = read_batch_request(parse_batch(f"#!/bin/sh\n#SBATCH {options}\n", "a.sbatch"))
    assert {name: getattr(asked, name) for name in wanted} == wanted
    assert not asked.faults


# --- the other rules -------------------------------------------------------------------------------

NV = START.replace("--nv ", "")
SITE = " --env PYTHONNOUSERSITE=1"
TAG = "docker://registry.example.org/gpu/pytorch:2.3.1-cu121"
STORED = f"docker://{REFERENCE}"


@pytest.mark.parametrize(
    ("text", "found", "said"),
    [
        (GPU + NV, ("nv", 4, 1), "write apptainer exec --nv"),
        (GPU + "srun singularity run -B /a:/b x.sif\n", ("nv", 4, 6), "singularity run --nv"),
        (HEAD + START, ("no-gpu", 3, 1), "pytorch-2.3-cu121 is for GPUs"),
        (GPU + START.replace(STORED, TAG), ("tag", 4, 46), f"write {STORED}"),
        (GPU + f"docker run --gpus all -v a:b {TAG[9:]} python\n", ("tag", 4, 30), f"-> write {REFERENCE}"),
        (GPU + "srun --container-image=registry.example.org#gpu/pytorch:2.3.1-cu121 python\n", ("tag", 4, 24),
         f"-> write {REFERENCE.replace('/', '#', 1)}"),
        (GPU + "srun --container-image=cont.sqsh python\n", ("pyxis", 4, 24), "-> write ./cont.sqsh"),
        (GPU + "srun --container-image=a/b.sqsh python\n", ("pyxis", 4, 24), "-> write ./a/b.sqsh"),
        (GPU + "srun --container-image=~/b.sqsh python\n", ("pyxis", 4, 24), "-> write $HOME/b.sqsh"),
        (GPU + "srun --container-image=./my.sif python\n", ("pyxis", 4, 24), "write ./my.sqsh"),
        (GPU + "srun --container-image nvcr.io/nvidia/p:24.05-py3 python\n", ("pyxis", 4, 24),
         "-> write nvcr.io#nvidia/p:24.05-py3"),
        (GPU + "srun --container-image=docker://nvcr.io/nvidia/p:1 python\n", ("pyxis", 4, 24),
         "nvcr.io#nvidia/p:1"),
        (GPU + f"srun --container-image={REFERENCE} python\n", ("pyxis", 4, 24),
         f"-> write {REFERENCE.replace('/', '#', 1)}"),
        (GPU + "srun --container-image=oras://a/b:1 python\n", ("pyxis", 4, 24), "write HOST#NAME:TAG"),
        (GPU + "srun --container-image=dockerd://mlperf:minigo python\n", ("reference", 4, 24),
         "'dockerd://mlperf:minigo'"),
        (GPU + "srun --container-image=../x.sqsh python\n", ("pyxis", 4, 24), "-> write $PWD/../x.sqsh"),
        (GPU + "srun --container-image=docker://master:5000#custom:latest python\n", ("tag", 4, 24),
         "master:5000#custom@"),
        (GPU + "srun --container-image=./cont.sqsh python\n", ("sandbox", 4, 24), "a .sqsh with digits"),
        (GPU + "srun --container-image=nvcr.io#nvidia/p:24.05-py3 python\n", ("tag", 4, 24),
         "nvcr.io#nvidia/p@sha256"),
        (GPU + START.replace("sha256:aaaa", "sha256:ffff"), ("unknown-image", 4, 46), "--site slurm"),
        (GPU + "docker run --rm img python\n", ("nv", 4, 1), "write docker run --gpus all"),
        (GPU + "podman run --rm img python\n", ("nv", 4, 1), "--container podman"),
        (GPU + f"podman run --device nvidia.com/gpu=all {REFERENCE} python\n", ("all-gpus", 4, 1),
         "other jobs"),
        (GPU + f"export PYXIS_CONTAINER_IMAGE={REFERENCE}\nsrun python\n", ("pyxis", 4, 8), "Docker Hub"),
        (GPU + "srun --environment=none python\n", ("unread", 4, 20), "'none' is not here"),
        (GPU + "srun --environment ./$1.toml python\n", ("unread", 4, 20), "is not here"),
        (GPU + "singularity exec --nv a/torch.sif python\n", ("name", 4, 23), "12 digits of its sha256"),
        (GPU + "apptainer exec --nv docker://A B\n", ("reference", 4, 21), "'docker://A'"),
        (GPU + "apptainer exec --nv library://a/b:1 B\n", ("reference", 4, 21), "write docker:// or oras://"),
        (GPU + "apptainer exec --nv sandbox/ B\n", ("sandbox", 4, 21), "'sandbox/'"),
        (GPU + "module load cuda/12.1 x\n" + START, ("module", 4, 13), "cuda/12.1"),
        (GPU + "ml cuDNN\n" + START, ("module", 4, 4), "cuDNN"),
        (GPU + "export LD_LIBRARY_PATH=/a\n" + START, ("libraries", 4, 8), "is for the machine"),
        (GPU + "export APPTAINERENV_LD_LIBRARY_PATH=/a\n" + START, ("libraries", 4, 8), "before those of"),
        (GPU + START.replace("--nv", "--nv --env LD_LIBRARY_PATH=/a"), ("libraries", 4, 1), "before those"),
        (GPU + "conda activate torch\n" + START, ("environment", 4, 1), "its own Python"),
        (GPU + "source venv/bin/activate\n" + START, ("environment", 4, 1), "its own Python"),
        (GPU + START.replace(SITE, ""), ("user-site", 4, 1), "exec --env PYTHONNOUSERSITE=1"),
        (GPU + "python train.py\n", ("no-image", 1, 0), "job write TARGET --site slurm"),
        (GPU + "run() {\n  $APPTAINER exec apptainer.sif\n}\n", ("unread", 5, 0), "exec --nv IMAGE"),
        (GPU + "for i in a b; do\n" + START.replace(STORED, "$i") + "done\n", ("unread", 5, 46), "set the"),
        (GPU.replace("16G", "16") + START, ("unit", 2, 9), "--mem=16G"),
        (GPU.replace("12:00:00", "24") + START, ("unit", 2, 19), "--time=24 is 24 minutes"),
        (GPU.replace("12:00:00", "1h") + START, ("unreadable", 2, 19), "--time=1h"),
        (GPU.replace("16G", "lots") + START, ("unreadable", 2, 9), "--mem=lots"),
        (GPU.replace("--mem=16G ", "") + START, ("missing", 2, 0), "#SBATCH --mem="),
        (GPU.replace("--time=12:00:00", "") + START, ("missing", 2, 0), "#SBATCH --time="),
        (GPU.replace("--mem=16G", "--mem=16G --mem-per-cpu=2G") + START, ("exclusive", 2, 19), "exclude"),
        (GPU + "#SBATCH --gres=gpu:h100:1\n" + START, ("overwritten", 4, 9), "overrides gpu:a100:1"),
        (GPU.replace("gpu:a100:1", "gpus:1") + START, ("unreadable", 3, 9), "--gres=gpus:1"),
        (GPU.replace("#!/bin/bash", "#!/usr/bin/python3") + "import os\n", ("unread", 1, 0), "no shell"),
    ],
)  # fmt: skip
def test_rules(text: str, found: tuple[str, int, int], said: str) -> None:
    checked = check(text)
    assert found in rules(checked), format_check(checked)
    (finding,) = [one for one in checked.all_findings if (one.rule, one.line, one.column) == found]
    assert said in f"{finding.message} -> {finding.hint}"
    assert finding.hint or finding.rule == "unread"


@pytest.mark.parametrize(
    "line",
    [
        "export APPTAINER_NV=1\napptainer exec --env=PYTHONNOUSERSITE=1",
        "export PYTHONNOUSERSITE=1\nsrun -n 4 apptainer -q exec --nv",
        f"I={STORED}\nexec /usr/bin/singularity exec --nv --containall -B a:b \\\n",
        "SINGULARITY_NV=1 singularity run --cleanenv",
    ],
)
def test_starts_with_nothing_wrong(line: str) -> None:
    image = "$I" if line.startswith("I=") else STORED
    assert rules(check(f"{GPU}{line} {image} python a.py\n"), Severity.WRONG) == []
    assert check(f"{GPU}{line} {image} python a.py\n").jobs[0].target == IMAGE.target


def test_a_tag_of_no_catalog_gets_the_digest_of_its_registry() -> None:
    checked = check(GPU + START.replace(STORED, "docker://nvcr.io/x/y:1"), digest="sha256:" + "e" * 64)
    assert f"write docker://nvcr.io/x/y@sha256:{'e' * 64}" in told(checked, "tag")


def test_a_file_is_found_by_the_digits_in_its_name() -> None:
    offered = offer(of_sif=(verdict("8.0"), verdict("9.0")))
    name = f"torch-{SIF.sha256.removeprefix('sha256:')[:12]}.sif"
    checked = check(GPU + START.replace(STORED, name), offered=offered)
    assert checked.jobs[0].target == IMAGE.target
    assert rules(checked) == [("narrow", 3, 9)]


def test_an_image_for_amd_takes_rocm() -> None:
    offered = offer(verdict("8.0"), verdict("9.0"), cuda="rocm7")
    assert "write apptainer exec --rocm" in told(check(GPU + NV, offered=offered), "nv")
    assert "write --rocm" in told(check(GPU + START, offered=offered), "nv")


def test_an_image_for_cpus_takes_no_gpu() -> None:
    checked = check(GPU + NV, offered=offer(cuda="none"))
    assert rules(checked, Severity.WRONG) == [("no-use", 3, 9)]


def test_that_partitions_are_not_told_apart_is_said() -> None:
    checked = check(GPU.replace("--gres", "-p fast --gres") + START)
    assert "the script, in any partition: 1 job" in format_check(checked)


def test_without_a_catalog_all_else_is_judged() -> None:
    checked = check(GPU + START, offered=None)
    assert rules(checked) == [("no-catalog", 4, 46)]
    assert [one.image for one in checked.jobs[0].reached] == [""]


PARTS = (
    "#SBATCH ", "--gres=", "gpu:", "a100", ":1", "--mem", "=", "16", "-C ", "a|b", "&", "(", "--time ", "\n",
    " ", "'", '"', "$", "apptainer exec ", "--nv ", "docker run ", "srun --container-image=", "#", "\\",
    "<<E", "module load cuda", "docker://", "a/b:c", "@sha256:", "{", "}", "`", ";", "--array=", "1-9", "%",
    ",", "\r\n", "-w ", "n[1-", "]",
)  # fmt: skip


@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join))
def test_any_script_is_judged_and_told(text: str) -> None:
    for script in (text, f"#!/bin/sh\n{text}", f"{GPU}{text}"):
        checked = check(script)
        lines = script.count("\n") + 1
        assert all(1 <= one.line <= lines for one in checked.all_findings)
        assert format_check(checked)
        assert check_json(checked, "slurm", "", [])
