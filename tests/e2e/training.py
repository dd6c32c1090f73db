"""A training inside a real image that sees a GPU which is not there: `emulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.services.factory import Factory

PROGRAM = """\
import copy, io, torch
from torch.nn import functional as F

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        assert type(torch.ones(2) + 1) is torch.Tensor  # a worker computes on the host
        return torch.randn(256, 64), index % 10

facts = {"name": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability(),
         "memory": torch.cuda.get_device_properties(0).total_memory, "count": torch.cuda.device_count()}
model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(64, 4, batch_first=True), torch.nn.Flatten(),
                            torch.nn.LayerNorm(256 * 64), torch.nn.Linear(256 * 64, 10))
optimizer = torch.optim.AdamW(model.parameters())       # before it moves: they must stay the same objects
model.to("cuda")
scaler = torch.cuda.amp.GradScaler()
loader = torch.utils.data.DataLoader(Rows(), 8, num_workers=2, pin_memory=True)
for epoch in range(2):
    for rows, labels in loader:
        assert rows.is_pinned()
        with torch.autocast("cuda"):
            out = model(rows.to("cuda", non_blocking=True))
            loss = F.cross_entropy(out, labels.cuda())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
facts["types"] = [str(out.dtype), str(loss.dtype), out.device.type, loss.item()]
assert all(one.is_cuda and one.grad.is_cuda for one in model.parameters())
with torch.inference_mode():
    device = model.eval()(torch.ones(1, 256, 64).to("cuda")).device
    facts["inference"] = [str(device), copy.deepcopy(model)[3].weight.is_cuda]
file = io.BytesIO()
torch.save(model.state_dict(), file)
facts["saved"] = len(file.getvalue())
for where in (None, "cpu", "cuda"):
    file.seek(0)
    facts[f"loaded {where}"] = torch.load(file, map_location=where)["3.weight"].device.type
refused = []
for wrong in (lambda: torch.ones(2, device="cuda") + torch.ones(2), lambda: torch.ones(2).cuda().numpy(),
              lambda: torch.empty(1 << 40, dtype=torch.uint8, device="cuda")):
    try:
        wrong()
    except Exception as error:
        refused.append([type(error).__name__, str(error)[:40]])
facts["refused"] = refused
left = torch.cuda.memory_allocated()
large = torch.empty(8192, 8192, device="cuda")
facts["bytes"] = torch.cuda.memory_allocated() - left
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
torch.cuda.synchronize()
begin.record()
large @ large
end.record()
torch.cuda.synchronize()
facts["milliseconds"] = begin.elapsed_time(end)
del large
facts["freed"] = torch.cuda.memory_allocated() == left
print(json.dumps(facts))
"""

TWO = """\
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
model = DistributedDataParallel(torch.nn.Linear(4096, 4096).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(8, 4096).cuda()).sum().backward()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    dist.all_reduce(model.module.weight.grad)
    end.record()
    end.synchronize()
    optimizer.step()
names = [None] * dist.get_world_size()
dist.all_gather_object(names, [str(model.module.weight.device), dist.get_backend(), begin.elapsed_time(end)])
if rank == 0:
    print(json.dumps(names))
dist.barrier()
dist.destroy_process_group()
"""


def assert_two(factory: Factory, target: str, folder: Path) -> None:
    """Two processes train together, each on a GPU of its own, and wait for what they exchange."""
    (folder / "two.py").write_text("import json\n" + TWO)
    summary = folder / "two.json"
    options = ("--gpus", "2", "--output", str(summary), "--mount", f"{folder}:/w", "T4")
    launch = ("python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "/w/two.py")
    done = factory.run("emulate", *options, target, "--", *launch)
    names = json.loads(done.stdout.splitlines()[-1])
    assert [name[:2] for name in names] == [["cuda:0", "nccl"], ["cuda:1", "nccl"]]
    sent = 4 * 4096 * 4096 / 16e9 * 1000  # milliseconds: half of the gradient there and back, by PCIe 3.0
    assert all(sent - 0.1 < took for _, _, took in names)
    assert json.loads(summary.read_text())["ranks"] == 2
    assert "--gpus 2 --gpu-memory 1GB --cpus 2" in done.stderr


def assert_emulated(factory: Factory, target: str, folder: Path) -> None:
    """That program runs in the image of `target`, sees what the data sheet says, and tells what it did."""
    (folder / "train.py").write_text("import json\n" + PROGRAM)
    summary = folder / "told.json"
    options = ("--output", str(summary), "--mount", f"{folder}:/w", "A100-SXM4-40GB")
    done = factory.run("emulate", *options, target, "--", "python", "/w/train.py")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert facts["name"] == "NVIDIA A100-SXM4-40GB"
    assert (facts["capability"], facts["count"]) == ([8, 0], 1)
    assert 39 << 30 < facts["memory"] < 40 << 30
    assert facts["types"] == ["torch.float16", "torch.float32", "cuda", 1.0]
    assert facts["inference"] == ["cuda:0", True]
    assert facts["saved"] > 4 * 10 * 256 * 64
    assert [facts[f"loaded {where}"] for where in (None, "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    assert [kind for kind, _ in facts["refused"]] == ["RuntimeError", "TypeError", "OutOfMemoryError"]
    assert facts["refused"][2][1].startswith("CUDA out of memory. Tried to allocate 1")
    assert (facts["bytes"], facts["freed"]) == (8192 * 8192 * 4, True)
    assert abs(facts["milliseconds"] - 2 * 8192**3 / 19.5e12 * 1000) < 0.5
    told = json.loads(summary.read_text())
    assert (told["steps"], told["memory"]["exceeded"], told["ended"]) == (16, True, True)
    loader = told["loader"]
    assert (loader["batches"], loader["workers"], loader["epochs"], loader["seen"]) == (8, 2, 2, 16)
    assert loader["fetch"] > 0
    assert "estimated from its data sheet" in done.stderr
    assert "it ran out of memory" in done.stderr
    plain = factory.run("run", target, "--", "python", "-c", "import torch; print(torch.cuda.is_available())")
    assert plain.stdout == "False\n"
