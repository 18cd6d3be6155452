"""Your own training loop, with pruning: train, prune, train again with the masks held, export.

    python examples/own_training_loop.py [FOLDER]      # needs scikit-learn, for its 1,797 handwritten digits

Writes the packed checkpoint that examples/serve_packed.py serves (default: digits_packed).
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from asp_toolkit import export, prune, verify

EPOCHS, BATCH = 8, 32


def network() -> nn.Module:
    """Every width but the last is a multiple of 4, as 2:4 needs along the inputs of a layer."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """(1797, 64) pixels in [0, 1], and their digits."""
    digits = load_digits()
    return torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An ordinary loop that knows nothing of pruning."""
    x, y = (part[:1400] for part in data())
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


def accuracy(model: nn.Module) -> float:
    x, y = (part[1400:] for part in data())
    with torch.inference_mode():
        return (model(x).argmax(1) == y).float().mean().item()


def main(folder: str) -> None:
    torch.manual_seed(0)
    model = network()
    train(model, make_optimizer(model))
    print(f"dense      {accuracy(model):.3f}")

    masks = prune(model, "2:4")
    print(f"pruned     {accuracy(model):.3f}")

    optimizer = make_optimizer(model)  # a fresh one: the rule is to repeat the training
    with masks.held(model, optimizer):  # or call masks.apply_(model) yourself after each optimizer.step()
        train(model, optimizer)
    print(f"retrained  {accuracy(model):.3f}")

    checked = verify(export(model, masks, folder, "packed"))
    print(f"{folder}: {'verified' if checked.ok else checked.problems}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "digits_packed")
