"""Masks hold under DistributedDataParallel and FSDP2, also where they change: as in one process, right density."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed

from tests.toolkit.made_processes import both_are_fine


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
@pytest.mark.parametrize("script", ["held_across_processes.py", "scheduled_across_processes.py"])
def test_masks_hold_across_two_processes(script: str, tmp_path: Path) -> None:
    both_are_fine(script, tmp_path)
