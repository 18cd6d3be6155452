"""Statistics under DistributedDataParallel and FSDP2 are those of one process that sees every batch whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed

from tests.toolkit.made_processes import both_are_fine


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
def test_two_processes_gather_what_one_would(tmp_path: Path) -> None:
    both_are_fine("calibrated_across_processes.py", tmp_path)
