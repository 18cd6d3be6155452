"""Run by test_distributed.py, once per process: RANK PROCESSES STORE FOLDER. Prints "fine" when every check passed."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from asp_toolkit.masks import whole
from asp_toolkit.pruning import Rule, prune
from asp_toolkit.recipe.schema import Gradual, RigL, StraightThrough
from asp_toolkit.schedules import dense_weights, keeper_for

SECTIONS = (
    Gradual(name="gradual", every=3),
    StraightThrough(name="straight_through", until=0.8, hysteresis=0.1, every=2),
    RigL(name="rigl", every=4),
)
STEPS = 12


def trained(section: Gradual | StraightThrough | RigL, mesh: object = None) -> tuple[Tensor, Tensor]:
    """A weight and its mask after training by the schedule, sharded over `mesh` or in one piece."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, 5))  # 5 rows do not divide among 2 processes
    inputs, targets = torch.randn(32, 16), torch.randint(0, 5, (32,))
    if mesh is not None:
        fully_shard(model, mesh=mesh)  # type: ignore[arg-type]
    rules = [Rule(pattern="1:4", include=["0"]), Rule(pattern="unstructured 0.4", include=["2"])]
    dense = dense_weights(model, rules)
    keeper = keeper_for(section, model, rules, prune(model, rules=rules), dense, STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        F.cross_entropy(model(inputs), targets).backward()
        keeper.before_step(model, optimizer, step)
        optimizer.step()
        keeper.after_step(model, optimizer, step)
        optimizer.zero_grad()
        assert not keeper.masks.violations(model)
    return whole(model.get_parameter("2.weight").detach()), whole(keeper.masks.masks["2.weight"])


def main(rank: int, processes: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    mesh = init_device_mesh("cpu", (processes,))
    for section in SECTIONS:
        weight, mask = trained(section)
        sharded, same = trained(section, mesh)
        assert torch.equal(mask, same), section.name
        torch.testing.assert_close(weight, sharded, msg=section.name)
    dist.destroy_process_group()
    print("fine")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
