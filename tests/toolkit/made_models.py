"""Models that several test files prune."""

from __future__ import annotations

from torch import Tensor, nn


class LanguageModel(nn.Module):
    """A language model's shape: the head reads the embedding's tensor, the forward branches, a dict comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.body(self.table(tokens))
        if hidden.sum() > 0:  # a branch on data, which tracing could not follow
            hidden = -hidden
        return {"logits": self.head(hidden)}
