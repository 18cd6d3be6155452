"""Networks of torchvision and transformers, as benchmarks/coverage.py builds them, and what of them is a matrix.

The second half knows layers by their class and says nothing that asp_toolkit.views says: it is what that is tested by.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

ROOT = Path(__file__).resolve().parents[2]


def _coverage() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage_of_networks", ROOT / "benchmarks" / "coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COVERAGE = _coverage()


@dataclass(frozen=True)
class Matrix:
    """A weight that is multiplied: `length` inputs, along dimension `axis`, are summed into one output.

    counted: a Linear, a convolution or the packed projection of attention
    """

    weight: Tensor
    axis: int
    length: int
    counted: bool = True

    def along(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape with the summed inputs last."""
        return tensor.movedim(self.axis, -1).contiguous()


def weight_of(module: nn.Module) -> Tensor:
    """The parameter that zeros are put into; the direction of a weight_norm's."""
    if parametrize.is_parametrized(module, "weight"):
        return module.parametrizations.weight.original1  # type: ignore[union-attr, return-value]
    return module.weight  # type: ignore[return-value]


def matrices(model: nn.Module) -> Iterator[Matrix]:
    """Every weight of a multiplying layer, once per layer."""
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("Router"):
            continue
        if isinstance(module, nn.Linear):
            yield Matrix(weight_of(module), 1, module.in_features)
        elif isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            yield Matrix(weight_of(module), 0, module.in_channels // module.groups)
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            yield Matrix(weight_of(module), 1, module.in_channels // module.groups)
        elif isinstance(module, Conv1D):
            yield Matrix(module.weight, 0, module.nx)
        elif isinstance(module, nn.MultiheadAttention):
            assert module.in_proj_weight is not None
            yield Matrix(module.in_proj_weight, 1, module.embed_dim)
        elif name.endswith("Experts"):
            axis = 1 if name in ("Llama4TextExperts", "GptOssExperts") else 2  # bmm(x, W); the others x W^T
            for weight in (module.gate_up_proj, module.down_proj):
                assert isinstance(weight, Tensor)
                yield Matrix(weight, axis, weight.shape[axis], counted=False)


def looked_up(model: nn.Module) -> set[int]:
    """Ids of the tables of embeddings, which stay dense also where an output layer multiplies with them."""
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def to_be_pruned(model: nn.Module) -> dict[str, Matrix]:
    """Parameter name -> matrix, for all whose contraction divides by 4."""
    by_id = {id(one.weight): one for one in matrices(model) if one.length % 4 == 0}
    dense = looked_up(model)
    return {
        name: by_id[id(parameter)]
        for name, parameter in model.named_parameters()
        if id(parameter) in by_id and id(parameter) not in dense
    }
