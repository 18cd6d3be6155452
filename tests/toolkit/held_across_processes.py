"""Run by test_distributed.py, once per process: RANK PROCESSES STORE FOLDER. Prints "fine" when every check passed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from asp_toolkit.masks import MaskSet, whole
from asp_toolkit.pruning import prune


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))  # 5 rows do not divide among 2 processes


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return model(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))).square().mean()


def norm_of(model: nn.Module) -> float:
    return float(whole(nn.utils.clip_grad_norm_(model.parameters(), 1e9)).detach())


def train(model: nn.Module, masks: MaskSet, rank: int, processes: int, *, whole_batch: bool) -> list[float]:
    """Three held steps; the gradient norms that clipping saw. `whole_batch`: this process sees every share itself."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    norms = []
    with masks.held(model, optimizer):
        for step in range(3):
            seeds = [step * processes + share for share in (range(processes) if whole_batch else [rank])]
            for seed in seeds:
                (loss_of(model, seed) / len(seeds)).backward()
            norms.append(norm_of(model))
            masks.zero_grads_(model)
            assert norm_of(model) == norms[-1], "clipping saw gradients of dropped entries"
            optimizer.step()
            optimizer.zero_grad()
            assert not masks.violations(model), masks.violations(model)
    return norms


def same(model: nn.Module, expected: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.detach()), other.detach(), msg=name)


def main(rank: int, processes: int, store: str, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    mesh = init_device_mesh("cpu", (processes,))
    expected = network()
    masks = prune(expected)
    norms = train(expected, masks, rank, processes, whole_batch=True)

    replicated = network()
    prune(replicated)
    found = train(DistributedDataParallel(replicated), masks, rank, processes, whole_batch=False)
    torch.testing.assert_close(found, norms)
    same(replicated, expected)

    sharded = network()
    prune(sharded)
    fully_shard(sharded, mesh=mesh)
    placed = masks.placed_like(sharded)
    assert isinstance(placed.masks["0.weight"], DTensor)
    assert placed.masks["0.weight"].to_local().shape[0] == 12 // processes
    assert placed.density() == masks.density() == {"0.weight": 0.5, "2.weight": 0.5}
    torch.testing.assert_close(train(sharded, masks, rank, processes, whole_batch=False), norms)
    same(sharded, expected)

    late = network()
    fully_shard(late, mesh=mesh)
    again = prune(late)  # of a model that is sharded already
    assert again.density() == {"0.weight": 0.5, "2.weight": 0.5}
    assert all(torch.equal(whole(again.masks[name]), mask) for name, mask in masks.masks.items())
    assert not again.violations(late)
    path = folder / f"masks-{rank}.safetensors"
    again.save(path)
    assert all(torch.equal(mask, masks.masks[name]) for name, mask in MaskSet.load(path).masks.items())
    dist.destroy_process_group()
    print("fine")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
