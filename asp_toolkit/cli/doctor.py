"""`asp doctor`: what this machine has, and what is missing for what."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import typer

from asp_toolkit.cli.output import Json, Quiet, print_json, print_table

Verdict = Literal["ok", "missing", "optional"]

_NEEDED = ("torch", "torchvision", "transformers", "datasets", "accelerate", "safetensors", "pydantic")
_EXTRAS = {"mlxtend": "recipe quickstart: pip install mlxtend", "onnx": "ONNX: pip install 'asp-toolkit[onnx]'"}


@dataclass(frozen=True)
class Finding:
    """One line of the check-up."""

    what: str
    found: str
    verdict: Verdict
    hint: str = ""


def doctor(quiet: Quiet = False, json: Json = False) -> None:
    """Check the installation; exit 1 where something needed is missing."""
    findings = [*_python(), *_packages(), *_hardware(), *_ours()]
    if json:
        print_json(findings)
    elif not quiet:
        print_table(("", "what", "found", "hint"), [(row.verdict, row.what, row.found, row.hint) for row in findings])
    if any(row.verdict == "missing" for row in findings):
        raise typer.Exit(1)


def _python() -> list[Finding]:
    return [Finding("python", f"{platform.python_version()} on {platform.platform()}", "ok")]


def _packages() -> list[Finding]:
    found = [_package(name, "missing", f"pip install {name}") for name in _NEEDED]
    return found + [_package(name, "optional", hint) for name, hint in _EXTRAS.items()]


def _package(name: str, otherwise: Verdict, hint: str) -> Finding:
    try:
        return Finding(name, version(name), "ok")
    except PackageNotFoundError:
        return Finding(name, "not installed", otherwise, hint)


def _hardware() -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        return [Finding("torch", f"cannot be imported: {error}", "missing", "reinstall torch")]
    from asp_kernels.backends import cpu

    found = [Finding("cpu threads", f"{torch.get_num_threads()} used by torch", "ok")]
    refusal = cpu.library().refusal
    if refusal is None:
        found.append(Finding("cpu kernels", cpu.about(), "ok"))
    else:
        found.append(Finding("cpu kernels", refusal, "optional", "2:4 models run densely; masks take longer"))
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return [*found, Finding("gpu", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}", "ok")]
    return [*found, Finding("gpu", "none that torch can use", "optional", "everything runs on the CPU")]


def _ours() -> list[Finding]:
    from asp_toolkit import __version__
    from asp_toolkit.recipe import bundled

    names = ", ".join(bundled())
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    return [
        Finding("asp_toolkit", __version__, "ok"),
        Finding("recipes", names or "none", "ok" if names else "missing", "" if names else "reinstall asp-toolkit"),
        Finding(
            "free disk here", f"{free:.1f} GiB", "ok" if free > 1 else "missing", "" if free > 1 else "free some space"
        ),
    ]
