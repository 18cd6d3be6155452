"""fit and evaluate: one training loop for every phase and task, on accelerate's devices and processes."""

from __future__ import annotations

from asp_toolkit.loop.evaluate import evaluate
from asp_toolkit.loop.fit import Fitted, fit, steps_of
from asp_toolkit.loop.run import Feed, Run, accelerator_for, feed_of, placed

__all__ = ["Feed", "Fitted", "Run", "accelerator_for", "evaluate", "feed_of", "fit", "placed", "steps_of"]
