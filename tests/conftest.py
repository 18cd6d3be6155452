"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

_OTHERS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # pytest's own; torch's, when its first optimizer is made


def _threads() -> int:
    return sum(type(thread).__name__ != "TMonitor" for thread in threading.enumerate())  # that one is tqdm's


def _state() -> dict[str, object]:
    return {
        "threads": _threads(),
        "working directory": Path.cwd(),
        "optimizer pre hooks": len(torch_optimizer._global_optimizer_pre_hooks),
        "optimizer post hooks": len(torch_optimizer._global_optimizer_post_hooks),
        "forward hooks": len(torch_module._global_forward_hooks) + len(torch_module._global_forward_pre_hooks),
        "default dtype": torch.get_default_dtype(),
        "gradients enabled": torch.is_grad_enabled(),
        "threads of torch": torch.get_num_threads(),
        **{f"environment {name}": value for name, value in os.environ.items() if name not in _OTHERS},
    }


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """The test fails when it leaves a thread, a global hook, an environment variable or a setting behind."""
    before = _state()
    yield
    if _threads() != before["threads"]:
        gc.collect()  # data loaders stop their threads when they are collected
    after = _state()
    assert {name: value for name, value in after.items() if before.get(name) != value} == {}
    assert before.keys() == after.keys()
