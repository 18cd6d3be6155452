"""A model that is only looked at: whatever running it changes is put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from asp_toolkit.checkpoint import random_state, set_random_state


@contextmanager
def as_before(model: nn.Module, trainable: Sequence[nn.Parameter]) -> Iterator[None]:
    """Eval mode, nothing compiled, no gradients yet, `trainable` trainable. Afterwards all is as it was.

    That is: gradients (the tensors themselves), modes of every module, requires_grad, buffers, and the random state of
    torch, numpy and Python. Gradients are enabled where there is something trainable.
    """
    with ExitStack() as undo:
        undo.callback(set_random_state, random_state())
        undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.set_grad_enabled(bool(trainable)))
        if "torch._dynamo" in sys.modules:  # code compiled before does not call hooks that came later
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    undo.callback(_put_back, module, name, buffer, buffer.detach().clone())
            if hasattr(module, "unshard") and callable(reshard := getattr(module, "reshard", None)):
                undo.callback(reshard)  # FSDP leaves its root whole where no backward follows
        model.eval()
        in_buckets = getattr(model, "gradient_as_bucket_view", False)  # DistributedDataParallel writes into those again
        for parameter in model.parameters():
            if in_buckets and parameter.grad is not None:
                undo.callback(_copy, parameter.grad, parameter.grad.detach().clone())
            undo.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        for parameter in trainable:
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(True)
        yield


@torch.no_grad()
def _copy(tensor: Tensor, content: Tensor) -> None:
    tensor.copy_(content)


def _put_back(module: nn.Module, name: str, buffer: Tensor, content: Tensor) -> None:
    if not buffer.is_meta and not torch.equal(buffer, content):
        _copy(buffer, content)
    module._buffers[name] = buffer
