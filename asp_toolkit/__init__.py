"""Train, prune to N:M sparsity, retrain, verify, export: the workflow of arXiv 2104.08378 for PyTorch models.

Every name is imported when it is first used, so that `import asp_toolkit` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asp_toolkit.calibration import calibrate
    from asp_toolkit.errors import AspError
    from asp_toolkit.exporters import export, load_dense, load_packed
    from asp_toolkit.inspection import inspect
    from asp_toolkit.masks import MaskSet
    from asp_toolkit.pruning import prune
    from asp_toolkit.trainer import prune_trainer
    from asp_toolkit.verification import verify
    from asp_toolkit.workflow import run_recipe

__version__ = "0.1.0"

__all__ = [
    "AspError",
    "MaskSet",
    "calibrate",
    "export",
    "inspect",
    "load_dense",
    "load_packed",
    "prune",
    "prune_trainer",
    "run_recipe",
    "verify",
]

_HOMES = {
    "AspError": "asp_toolkit.errors",
    "MaskSet": "asp_toolkit.masks",
    "calibrate": "asp_toolkit.calibration",
    "export": "asp_toolkit.exporters",
    "inspect": "asp_toolkit.inspection",
    "load_dense": "asp_toolkit.exporters",
    "load_packed": "asp_toolkit.exporters",
    "prune": "asp_toolkit.pruning",
    "prune_trainer": "asp_toolkit.trainer",
    "run_recipe": "asp_toolkit.workflow",
    "verify": "asp_toolkit.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'asp_toolkit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
