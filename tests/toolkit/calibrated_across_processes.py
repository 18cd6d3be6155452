"""Run by test_calibration_distributed.py, once per process: RANK PROCESSES STORE. Prints "fine" when all is right."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from asp_toolkit.calibration import calibrate
from asp_toolkit.errors import AspError
from asp_toolkit.masks import whole
from asp_toolkit.pruning import Rule, prune

RULES = [Rule(["0"], score="activation_norm"), Rule(["2"], score="fisher")]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))  # 5 rows do not divide among 2 processes


def share(batch: int, rank: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * batch + rank))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    assert isinstance(loss, Tensor)
    return loss


def main(rank: int, processes: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    everybody = [torch.cat([share(batch, other) for other in range(processes)]) for batch in range(3)]
    mine = [share(batch, rank) for batch in range(3)]
    alone = network()
    right = calibrate(alone, RULES, everybody, loss)
    masks = prune(alone, rules=RULES, stats=right).masks

    sharded = network()
    fully_shard(sharded[2])
    fully_shard(sharded, mesh=init_device_mesh("cpu", (processes,)))
    for model in (DistributedDataParallel(network()), sharded):
        for rules in (RULES, RULES[:1], RULES[1:]):
            found = calibrate(model, rules, mine, loss)
            assert all(isinstance(parameter, DTensor) == (model is sharded) for parameter in model.parameters())
            assert found.keys() == {f"{rule.include[0]}.weight" for rule in rules}
            for name, stats in found.items():
                for need, one in stats.items():
                    assert not isinstance(one, DTensor)
                    torch.testing.assert_close(one, right[name][need], msg=f"{type(model).__name__} {name} {need}")
                    first = one.clone()
                    dist.broadcast(first, 0)
                    assert torch.equal(first, one), "processes disagree"
        assert all(parameter.grad is None for parameter in model.parameters())
        pruned = prune(model, rules=RULES, stats=calibrate(model, RULES, mine, loss))
        assert all(torch.equal(whole(pruned.masks[name]), masks[name]) for name in masks)

    viewing = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    for x in mine:  # buckets are built anew after the first
        loss(viewing, x).backward()
    before = [(parameter.grad, parameter.grad.clone()) for parameter in viewing.parameters()]
    calibrate(viewing, RULES, mine, loss)
    for parameter, (grad, content) in zip(viewing.parameters(), before, strict=True):
        assert parameter.grad is grad
        assert torch.equal(grad, content), "a bucket was written into"

    frozen = network()
    frozen[2].weight.requires_grad_(False)
    try:
        calibrate(DistributedDataParallel(frozen), RULES, mine, loss)
    except AspError as error:
        assert "'2.weight' is frozen, so DistributedDataParallel does not average its gradient" in str(error)  # noqa: PT017
    else:
        raise AssertionError("not refused")
    dist.destroy_process_group()
    print("fine")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
