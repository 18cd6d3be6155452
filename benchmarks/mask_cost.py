"""What holding masks costs in a training step: time in `zero_grads_` and `apply_` over the time of the rest.

    python benchmarks/mask_cost.py

`share_loop` is what recipes and prune_trainer pay with SGD and Adam: `zero_grads_` alone, since those optimizers leave
an entry at +0.0 whose gradient is always zero. `share_both` is a loop of one's own that calls both.
`share_straight_through` is the schedule of that name, which chooses every mask anew after every step.
All are measured inside the same steps, so a busy machine slows them alike; figures are medians over the steps.
Rows go to benchmarks/results/mask_cost.csv.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

from asp_toolkit import MaskSet, prune
from asp_toolkit.pruning import Rule
from asp_toolkit.recipe.schema import StraightThrough
from asp_toolkit.report import environment
from asp_toolkit.schedules import dense_weights, keeper_for
from asp_toolkit.tasks.models import small_cnn

RESULTS = Path(__file__).parent / "results" / "mask_cost.csv"
ROUNDS = 31


def resnet18_28() -> nn.Module:
    """The network of recipes/fashion_mnist_resnet18.yaml."""
    model = torchvision.models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, 3, 2, 1, bias=False)
    return model


def encoder() -> nn.Module:
    """A Transformer encoder of MiniLM's size: 6 layers, width 384."""
    layer = nn.TransformerEncoderLayer(384, 12, 1536, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Flatten(), nn.Linear(48 * 384, 10)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small_cnn": (small_cnn, (128, 1, 28, 28)),
    "resnet18 (28x28)": (resnet18_28, (128, 1, 28, 28)),
    "encoder 6x384": (encoder, (32, 48, 384)),
}


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, masks: MaskSet
) -> tuple[float, float, float]:
    """Seconds of the step without masks, of zero_grads_, of apply_."""
    marks = [time.perf_counter()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs).float(), targets)
    loss.backward()
    marks.append(time.perf_counter())
    masks.zero_grads_(model)
    marks.append(time.perf_counter())
    optimizer.step()
    marks.append(time.perf_counter())
    masks.apply_(model)
    marks.append(time.perf_counter())
    optimizer.zero_grad()
    marks.append(time.perf_counter())
    spans = [after - before for before, after in itertools.pairwise(marks)]
    return spans[0] + spans[2] + spans[4], spans[1], spans[3]


def straight_through_share(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Time in the keeper over the time of the rest, median over the steps."""
    rules = [Rule()]
    dense = dense_weights(model, rules)
    keeper = keeper_for(StraightThrough(name="straight_through"), model, rules, prune(model, rules=rules), dense, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    shares = []
    for number in range(ROUNDS + 2):
        marks = [time.perf_counter()]
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs).float(), targets)
        loss.backward()
        marks.append(time.perf_counter())
        keeper.before_step(model, optimizer, number)
        marks.append(time.perf_counter())
        optimizer.step()
        marks.append(time.perf_counter())
        keeper.after_step(model, optimizer, number)
        marks.append(time.perf_counter())
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        spans = [after - before for before, after in itertools.pairwise(marks)]
        shares.append((spans[1] + spans[3]) / (spans[0] + spans[2] + spans[4]))
    return statistics.median(shares[2:])


def main() -> None:
    rows = []
    for name, (build, shape) in CASES.items():
        torch.manual_seed(0)
        model, inputs = build(), torch.randn(shape)
        if len(shape) == 4:
            model, inputs = (thing.to(memory_format=torch.channels_last) for thing in (model, inputs))
        targets = torch.randint(0, 10, (shape[0],))
        masks = prune(model).placed_like(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        spans = [step(model, optimizer, inputs, targets, masks) for _ in range(ROUNDS + 2)][2:]
        masked = sum(mask.numel() for mask in masks.masks.values())
        held_bytes = sum(mask.numel() * mask.element_size() for mask in masks.masks.values())
        machine = environment()
        rows.append(
            {
                "model": name,
                "batch": shape[0],
                "precision": "bf16 autocast",
                "masked_weights": masked,
                "bytes_per_masked_weight": held_bytes / masked,
                "step_ms": round(1000 * statistics.median(rest for rest, _, _ in spans), 2),
                "zero_grads_ms": round(1000 * statistics.median(grads for _, grads, _ in spans), 3),
                "apply_ms": round(1000 * statistics.median(apply for _, _, apply in spans), 3),
                "share_loop": round(statistics.median(grads / rest for rest, grads, _ in spans), 4),
                "share_both": round(statistics.median((grads + apply) / rest for rest, grads, apply in spans), 4),
                "share_straight_through": round(straight_through_share(model, inputs, targets), 4),
                "steps": ROUNDS,
                "threads": torch.get_num_threads(),
                "cpu": machine["cpu"],
                "torch": machine["torch"],
                "date": datetime.date.today().isoformat(),
            }
        )
        print(rows[-1])
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
