"""Where a run happened: versions, processor, threads. What a figure needs beside it to mean anything."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import torch

_PACKAGES = ("torch", "asp-toolkit", "numpy", "accelerate", "safetensors", "transformers", "datasets", "torchvision")


def cpu_name() -> str:
    """The processor's own name, e.g. "AMD EPYC 9B14": from /proc/cpuinfo, else from `platform`, else "unknown"."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, found, value = line.partition(":")
        if found and value.strip():
            fields.setdefault(key.strip(), value.strip())
    for key in ("model name", "Hardware", "cpu model"):  # x86; 32-bit Arm; MIPS
        if key in fields:
            return fields[key]
    return platform.processor() or platform.machine() or "unknown"


def device_name(device: torch.device | str) -> str:
    """The hardware that a device stands for: the processor's name, or the accelerator's."""
    kind = torch.device(device)
    if kind.type == "cuda":
        return torch.cuda.get_device_name(kind)
    return cpu_name() if kind.type == "cpu" else f"{kind.type} on {cpu_name()}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(device: torch.device | str = "cpu") -> dict[str, str | int]:
    """Versions and hardware, ready for JSON: python, platform, cpu, threads, device, and each package installed.

    Packages are read from their metadata, not imported. `threads` is what torch uses at the time of the call.
    """
    found = {package.replace("-", "_"): _version(package) for package in _PACKAGES}
    found["torch"] = torch.__version__  # the metadata lacks the build, "+cu130"
    return {
        "python": platform.python_version(),
        **{name: version for name, version in found.items() if version is not None},
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "device_name": device_name(device),
        "platform": platform.platform(),
    }
