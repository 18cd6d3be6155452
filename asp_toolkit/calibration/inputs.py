"""Statistics of what weights are multiplied with, gathered by hooks while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asp_toolkit.calibration.layer_inputs import Squares, attended, layer_inputs
from asp_toolkit.errors import AspError
from asp_toolkit.masks import bare
from asp_toolkit.pruning import Chosen
from asp_toolkit.scores import Stats, needs_of, wide
from asp_toolkit.views import place_of

INPUT_STATISTICS = ("input_norm",)


@dataclass(frozen=True)
class _Source:
    """A layer whose calls tell what parameter `name` is multiplied with."""

    name: str
    layer_name: str
    layer: nn.Module
    squares: Squares


class InputStats:
    """input_norm of every parameter of `chosen` whose score needs it.

    All calls of a layer count, and all layers that share a tensor; lookups of a tied embedding multiply nothing.
    Tokens that are padded or masked count as they come. Squares are summed in float64, so that many batches lose no
    digits. Memory: 8 bytes a column; 8 bytes a weight for grouped convolutions and packed projections.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[str, Chosen]) -> None:
        """Finds the layers to listen to.

        Raises:
            AspError: what a parameter is multiplied with cannot be known from calls of its layer.
        """
        self._chosen = {name: one for name, one in chosen.items() if "input_norm" in needs_of(one.score)}
        self._sources = [source for name in self._chosen for source in _sources(bare(model), name)]
        self._sums: dict[str, Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters whose inputs are needed."""
        return tuple(self._chosen)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Calls of the layers are counted inside. Outside, e.g. while a checkpointed model computes again, not."""
        fast = torch.backends.mha.get_fastpath_enabled()
        with ExitStack() as undo:
            undo.callback(torch.backends.mha.set_fastpath_enabled, fast)
            torch.backends.mha.set_fastpath_enabled(False)  # it goes around the layers inside
            for source in self._sources:
                handle = source.layer.register_forward_hook(self._count(source), with_kwargs=True)
                undo.callback(handle.remove)
            yield

    def _count(self, source: _Source) -> Callable[..., None]:
        @torch.no_grad()
        def count(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            if any(hasattr(one, "to_local") for one in (*args, *kwargs.values())):
                raise AspError(
                    f"the inputs of '{source.layer_name}' are spread over processes; calibrate before spreading, or "
                    "use another score"
                )
            squares = source.squares(args, kwargs, output)
            before = self._sums.get(source.name)
            self._sums[source.name] = squares if before is None else before + squares.to(before.device)

        return count

    @torch.no_grad()
    def stats(self, add_up: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, Stats]:
        """Parameter name -> {"input_norm"}: (cols,), or (rows, cols) where rows have different inputs.

        add_up: adds the sums of all processes that hold the model together

        Raises:
            AspError: a layer was never called, or its inputs were NaN or infinite.
        """
        found: dict[str, Stats] = {}
        for name, one in self._chosen.items():
            if name not in self._sums:
                layers = ", ".join(f"'{source.layer_name}'" for source in self._sources if source.name == name)
                raise AspError(
                    f"'{name}': its layer {layers} was never called by the loss, so what it is multiplied with is not "
                    "known; give other batches, exclude it, or give it a rule with the score magnitude"
                )
            sums = add_up(self._sums[name])
            if not torch.isfinite(sums).all():
                raise AspError(f"'{name}': its layer had NaN or infinite inputs; leave those batches out")
            parameter = one.parameter
            norms = sums.sqrt().to(parameter.device, wide(parameter.dtype))
            matrix = one.view.matrix(norms.expand(one.view.shape))  # (rows, cols)
            found[name] = {"input_norm": matrix[0].clone() if (matrix == matrix[:1]).all() else matrix}
        return found


def _sources(model: nn.Module, name: str) -> Iterator[_Source]:
    """All layers that multiply with the parameter called `name`, under whatever name they have it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    projections = {
        id(module.out_proj): module
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward
    }
    tied = [other for other, parameter in parameters.items() if parameter is parameters[name]]
    places = {(id(place.layer), place.weight): place for place in (place_of(model, other) for other in tied)}
    multiply = [one for one in places.values() if not isinstance(one.layer, nn.Embedding | nn.EmbeddingBag)]
    for place in multiply or places.values():
        attention = projections.get(id(place.layer))
        if attention is not None and place.weight == "weight":
            yield _Source(name, place.prefix.rpartition(".")[0], attention, _of_attention(attention))
            continue
        squares = layer_inputs(place.layer, place.weight)
        if isinstance(squares, str):
            layer = f"{place.prefix}.{place.weight}".lstrip(".")
            also = "" if len(tied) == 1 else f" (tied: {layer})"
            raise AspError(
                f"'{name}'{also}: its score needs input_norm, but {squares}; exclude it, or give it a rule with the "
                "score magnitude"
            )
        yield _Source(name, place.prefix, place.layer, squares)


def _of_attention(attention: nn.MultiheadAttention) -> Squares:
    return lambda args, kwargs, _: attended(attention, args, kwargs)
