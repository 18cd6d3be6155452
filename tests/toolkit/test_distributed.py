"""Masks hold under DistributedDataParallel and FSDP2, also where they change: as in one process, right density."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

HERE = Path(__file__).parent


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
@pytest.mark.parametrize("script", ["held_across_processes.py", "scheduled_across_processes.py"])
def test_masks_hold_across_two_processes(script: str, tmp_path: Path) -> None:
    root = HERE.parents[1]
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment = {**os.environ, **ours}
    running = []
    for rank in range(2):
        command = [sys.executable, str(HERE / script), str(rank), "2", str(tmp_path / "store"), str(tmp_path)]
        running.append(
            subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    try:
        for process in running:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err[-3000:]
            assert out.splitlines()[-1] == "fine"
    finally:
        for process in running:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
