"""Statistics under DistributedDataParallel and FSDP2 are those of one process that sees every batch whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

SCRIPT = Path(__file__).parent / "calibrated_across_processes.py"


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
def test_two_processes_gather_what_one_would(tmp_path: Path) -> None:
    root = SCRIPT.parents[2]
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    running = []
    for rank in range(2):
        command = [sys.executable, str(SCRIPT), str(rank), "2", str(tmp_path / "store")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running.append(subprocess.Popen(command, env={**os.environ, **ours}, text=True, **pipes))
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
