#!/usr/bin/env python3
"""The same network on PyTorch, by all processes that torchrun starts: each takes its part of every batch.

gloo carries what they tell each other on CPUs, NCCL on GPUs. As many steps come to the same network, however
many processes there are. The first one writes checkpoint.pt each --save steps and result.json at the end;
with --leave all end after a save, which leave.sh says by exit code 85.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pictures
from run import BATCH, LOOK, TESTS, options, write_result

CHECKPOINT = Path("checkpoint.pt")


def new_network(seed: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in ((1, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
    side = pictures.SIZE // 8
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(side * side * 2 * width, 2))


@torch.no_grad()
def dogs(network: nn.Module, images: torch.Tensor) -> np.ndarray:
    """How sure it is that each shows a dog."""
    return network(images).softmax(1)[:, 1].cpu().numpy()


def main() -> int:
    asked = options(__doc__)
    rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if BATCH % ranks:
        print(f"{ranks} processes cannot share a batch of {BATCH} evenly", file=sys.stderr)
        return 2
    on_gpu = asked.device == "gpu"
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)  # fails where there is none: nothing falls back to the CPU
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    network = new_network(asked.seed, asked.width).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=asked.lr)
    step, curve, starts = 0, [], []
    if CHECKPOINT.exists():
        kept = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        network.load_state_dict(kept["network"])
        optimizer.load_state_dict(kept["optimizer"])
        step, curve, starts = json.loads(kept["told"])
    starts.append([step, ranks])
    if rank == 0:
        name = torch.cuda.get_device_name() if on_gpu else "the CPU"
        print(f"from step {step} on {name}, {ranks} processes by {dist.get_backend()}", flush=True)
    shared = DistributedDataParallel(network, device_ids=[local] if on_gpu else None)
    drawn, answers = pictures.draw(0, 0, TESTS)
    tests = torch.from_numpy(drawn).permute(0, 3, 1, 2).to(device)
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    while step < asked.steps:
        step += 1
        images, labels = pictures.draw(asked.seed, step, BATCH)
        images, labels = images[share].transpose(0, 3, 1, 2), labels[share]
        said = shared(torch.from_numpy(images).to(device))
        optimizer.zero_grad()
        error = nn.functional.cross_entropy(said, torch.from_numpy(labels).long().to(device))
        error.backward()  # the processes take the mean of their slopes here
        optimizer.step()
        if step % LOOK == 0 or step == asked.steps:
            dist.all_reduce(error.detach())
            right = ((dogs(network, tests) > 0.5) == answers).mean().item()
            curve.append([step, error.item() / ranks, right])
            if rank == 0:
                print(f"step {step}: loss {curve[-1][1]:.3f}, {right:.1%} right", flush=True)
        if step == asked.steps or step % asked.save:
            continue
        if rank == 0:
            beside = CHECKPOINT.with_suffix(".new")
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "told": json.dumps([step, curve, starts])}, beside)
            beside.replace(CHECKPOINT)
        dist.barrier()  # nobody leaves before it is saved
        if asked.leave:
            break
    if rank == 0 and step == asked.steps:
        write_result(asked, curve, starts, dogs(network, tests), answers)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
