"""Runs a script of this folder in two processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def both_are_fine(script: str, folder: Path) -> None:
    """Run `script RANK 2 STORE FOLDER` as two ranks; each must exit with 0 and say "fine" in its last line."""
    root = HERE.parents[1]
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    running = []
    for rank in range(2):
        command = [sys.executable, str(HERE / script), str(rank), "2", str(folder / "store"), str(folder)]
        running.append(
            subprocess.Popen(
                command, env={**os.environ, **ours}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
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
