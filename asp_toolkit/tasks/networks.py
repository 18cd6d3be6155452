"""A network from a recipe's `model` section: built by name, submodules replaced, first weights loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor, nn

from asp_toolkit.errors import AspError, closest
from asp_toolkit.recipe.task_sections import Callable_, ModelSpec
from asp_toolkit.tasks.names import call, call_named, import_named

WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin")


def image_network(spec: ModelSpec) -> Callable[[], nn.Module]:
    """A function that builds the network anew at each call, on the CPU in fp32, in this order: by name, torchvision's
    weights, replaced submodules, weights from a file. Replaced submodules thus start at random after torchvision's
    weights, and are loaded from a file of the whole network.

    Raises:
        AspError: (here or when called) unknown names or options, a weights file that does not fit.
    """
    if spec.package is not None:
        raise AspError(
            "task.model.package: only text tasks find models in a package; write name: package.module:callable"
        )
    make = _maker(spec)
    from_file = spec.weights is not None and spec.weights.endswith(WEIGHT_FILES)
    pretrained = _torchvision_weights(spec) if spec.weights not in (None, "random") and not from_file else None

    def build() -> nn.Module:
        model = make()
        if not isinstance(model, nn.Module):
            raise AspError(
                f"task.model.name: {spec.name!r} returned a {type(model).__name__}, expected a torch.nn.Module"
            )
        if pretrained is not None:
            load_weights(model, pretrained(), f"torchvision's {spec.weights}")
        replace_(model, spec.replace)
        if from_file and spec.weights is not None:
            load_weights(model, read_weights(Path(spec.weights).expanduser()), spec.weights)
        return model.float()

    return build


def _maker(spec: ModelSpec) -> Callable[[], Any]:
    key = "task.model.options"
    if ":" in spec.name:
        import_named(spec.name, "task.model.name")
        return lambda: call_named(spec.name, spec.options, key)
    import torchvision

    for name in ("weights", "pretrained"):
        if name in spec.options:
            raise AspError(f"{key}.{name}: first weights are named under task.model.weights")
    try:
        function = torchvision.models.get_model_builder(spec.name)
    except ValueError:
        hint = closest(spec.name, torchvision.models.list_models(module=torchvision.models))
        raise AspError(f"task.model.name: torchvision.models has no {spec.name!r}; {hint}") from None
    return lambda: call(function, spec.options, key)


def _torchvision_weights(spec: ModelSpec) -> Callable[[], Mapping[str, Tensor]]:
    import torchvision

    wanted = str(spec.weights)
    if ":" in spec.name:
        raise AspError(
            f"task.model.weights: expected a file ({', '.join(WEIGHT_FILES)}) for {spec.name!r}, got {wanted!r}"
        )
    known = torchvision.models.get_model_weights(spec.name)
    name = wanted.rpartition(".")[2]
    if name not in known.__members__:
        hint = closest(name, known.__members__)
        raise AspError(
            f"task.model.weights: {wanted!r} is neither a file ({', '.join(WEIGHT_FILES)}) "
            f"nor weights of {spec.name}; {hint}"
        )

    def fetch() -> Mapping[str, Tensor]:
        try:
            state: Mapping[str, Tensor] = known[name].get_state_dict(progress=False, check_hash=True)
        except (URLError, OSError, RuntimeError) as error:
            raise AspError(
                f"task.model.weights: {wanted} could not be downloaded ({error}); "
                f"fetch {known[name].url} elsewhere and name the file here"
            ) from error
        return state

    return fetch


def replace_(model: nn.Module, parts: Mapping[str, Callable_]) -> None:
    """Put a newly built module in the place of each named submodule.

    Raises:
        AspError: no submodule of that name, or what was built is not a module.
    """
    for name, part in parts.items():
        key = f"task.model.replace.{name}"
        known = [n for n, _ in model.named_modules() if n]
        if name not in known:
            raise AspError(f"{key}: the network has no such submodule; {closest(name, known)}")
        new = call_named(part.name, part.options, key)
        if not isinstance(new, nn.Module):
            raise AspError(f"{key}: {part.name!r} returned a {type(new).__name__}, expected a torch.nn.Module")
        model.set_submodule(name, new)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a .safetensors file or a torch file (read with weights_only=True: no code runs).

    A torch file may hold them under "model" or "state_dict", as training scripts save them.

    Raises:
        AspError: no such file, or it holds something else.
    """
    if not path.is_file():
        raise AspError(f"task.model.weights: there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise AspError(
            f"task.model.weights: {path} cannot be read ({type(error).__name__}: {error}); "
            f"is the file whole, and tensors only?"
        ) from error
    for outer in ("model", "state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(outer), dict):
            loaded = loaded[outer]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise AspError(f"task.model.weights: {path} holds a {type(loaded).__name__}, expected tensors by name")
    return dict(loaded)


def load_weights(model: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    """Copy `state` into `model`; every key must be there on both sides and of the same shape.

    A tied parameter may be stored once, under any of its names.

    Raises:
        AspError: missing or unexpected keys, other shapes; the model is then as it was.
    """
    own = model.state_dict()
    stored = {_place(own[key]) for key in state if key in own}
    missing = [key for key in own if key not in state and _place(own[key]) not in stored]
    unexpected = [key for key in state if key not in own]
    shapes = [
        f"{key}: expected {tuple(own[key].shape)}, got {tuple(value.shape)}"
        for key, value in state.items()
        if key in own and own[key].shape != value.shape
    ]
    problems = [f"missing {_few(missing)}"] * bool(missing) + [f"unexpected {_few(unexpected)}"] * bool(unexpected)
    problems += [f"shapes {_few(shapes)}"] * bool(shapes)
    if problems:
        raise AspError(
            f"task.model.weights: {origin} does not fit the network: {'; '.join(problems)}; "
            f"give the options it was saved with"
        )
    model.load_state_dict(state, strict=False)


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    # Tensors without elements all share address 0: they are told apart by object.
    return tensor.data_ptr() if tensor.numel() else id(tensor), tuple(tensor.shape)


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
