"""prune_trainer in four lines, as in a notebook: model and batches above them, result below.

    python examples/notebook_four_lines.py             # needs scikit-learn, for its handwritten digits
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
data = TensorDataset(torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target))
train, test = torch.utils.data.random_split(data, [1400, 397], torch.Generator().manual_seed(0))
train, test = DataLoader(train, 32, shuffle=True), DataLoader(test, 256)
torch.manual_seed(0)
model = nn.Sequential(  # (B, 1, 8, 8) -> (B, 10)
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip

from asp_toolkit import prune_trainer  # noqa: E402 - the four lines stand together

result = prune_trainer(model, train=train, evaluate=test, loss=F.cross_entropy, epochs=3, optimizer={"lr": 0.2})
print(result)
print(result.export("digits_dense"))
