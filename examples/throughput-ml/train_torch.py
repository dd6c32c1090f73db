#!/usr/bin/env python3
"""Train the same network with PyTorch. Each process of torchrun takes a part of every batch.

They communicate with gloo on CPUs and with NCCL on GPUs. The same number of steps gives the same network, for
any number of processes. The first process writes checkpoint.pt every --save steps, and result.json at the
end. With --leave all processes exit after a checkpoint; leave.sh makes that exit code 85.
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
from run import BATCH, EVALUATE, TESTS, parse_options, write_result

CHECKPOINT = Path("checkpoint.pt")


def new_network(seed: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in ((1, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
    side = pictures.SIZE // 8
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(side * side * 2 * width, 2))


@torch.no_grad()
def predict(network: nn.Module, images: torch.Tensor) -> np.ndarray:
    """Return the probability that each picture shows a dog."""
    return network(images).softmax(1)[:, 1].cpu().numpy()


def main() -> int:
    options = parse_options(__doc__)
    rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if BATCH % ranks:
        print(f"the batch size {BATCH} is not a multiple of {ranks} processes", file=sys.stderr)
        return 2
    on_gpu = options.device == "gpu"
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)  # fails without a GPU: no fallback to the CPU
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    network = new_network(options.seed, options.width).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=options.lr)
    step, curve, starts = 0, [], []
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        step, curve, starts = json.loads(saved["progress"])
    starts.append([step, ranks])
    if rank == 0:
        name = torch.cuda.get_device_name() if on_gpu else "the CPU"
        print(f"from step {step} on {name}, {ranks} processes by {dist.get_backend()}", flush=True)
    model = DistributedDataParallel(network, device_ids=[local] if on_gpu else None)
    images, test_labels = pictures.draw(0, 0, TESTS)
    tests = torch.from_numpy(images).permute(0, 3, 1, 2).to(device)
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    while step < options.steps:
        step += 1
        images, labels = pictures.draw(options.seed, step, BATCH)
        images, labels = images[share].transpose(0, 3, 1, 2), labels[share]
        logits = model(torch.from_numpy(images).to(device))
        optimizer.zero_grad()
        error = nn.functional.cross_entropy(logits, torch.from_numpy(labels).long().to(device))
        error.backward()  # averages the gradients of all processes
        optimizer.step()
        if step % EVALUATE == 0 or step == options.steps:
            dist.all_reduce(error.detach())
            accuracy = ((predict(network, tests) > 0.5) == test_labels).mean().item()
            curve.append([step, error.item() / ranks, accuracy])
            if rank == 0:
                print(f"step {step}: loss {curve[-1][1]:.3f}, accuracy {accuracy:.1%}", flush=True)
        if step == options.steps or step % options.save:
            continue
        if rank == 0:
            new = CHECKPOINT.with_suffix(".new")
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "progress": json.dumps([step, curve, starts])}, new)
            new.replace(CHECKPOINT)
        dist.barrier()  # no process exits before the checkpoint is written
        if options.leave:
            break
    if rank == 0 and step == options.steps:
        write_result(options, curve, starts, predict(network, tests), test_labels)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
