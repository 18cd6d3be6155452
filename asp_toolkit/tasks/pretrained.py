"""transformers models and tokenizers from a local folder, a package's folder or the hub."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from asp_toolkit.errors import AspError, closest
from asp_toolkit.recipe.task_sections import ModelSpec
from asp_toolkit.tasks.names import package_folder
from asp_toolkit.tasks.networks import WEIGHT_FILES, load_weights, read_weights, replace_


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' progress bars and its notes about a fresh head, which is what a task wants."""
    log: Any = transformers.utils.logging
    verbosity, shown = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.ERROR)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if shown:
            log.enable_progress_bar()


def place(spec: ModelSpec) -> str:
    """The folder that holds the model, or its hub id.

    Raises:
        AspError: a package or folder that is not there.
    """
    if spec.package is not None:
        folder = package_folder(spec.package, "task.model.package") / spec.name
        if not folder.is_dir():
            raise AspError(
                f"task.model.name: the package {spec.package!r} has no folder {spec.name!r} (looked for {folder})"
            )
        return str(folder)
    folder = Path(spec.name).expanduser()
    if folder.is_dir():
        return str(folder)
    if spec.name.startswith(("/", "./", "../", "~")) or spec.name.count("/") > 1:
        raise AspError(f"task.model.name: there is no folder {folder}")
    if ":" in spec.name:
        raise AspError(f"task.model.name: expected a local folder or hub id of a transformers model, got {spec.name!r}")
    return spec.name


def tokenizer_of(spec: ModelSpec) -> Any:
    """The model's fast tokenizer, padding on the right.

    Raises:
        AspError: it cannot be had, is a slow one, or knows no token to pad with.
    """
    where = place(spec)
    with quietly(), _told(where):
        tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    if not tokenizer.is_fast:
        raise AspError(f"task.model: {where} has no tokenizer.json, and its tokenizer cannot be made a fast one")
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise AspError(f"task.model: the tokenizer of {where} has neither a padding nor an end token")
        tokenizer.pad_token = tokenizer.eos_token  # as GPT-2 is used: padding is masked out anyway
    return tokenizer


def builder(spec: ModelSpec, auto: Any, tokenizer: Any, **config_changes: Any) -> Callable[[], nn.Module]:
    """A function that builds the model anew at each call, on the CPU in fp32.

    First weights are those that the model comes with; a fresh head is random. `spec.weights` names a file to take
    instead, or is "random". `spec.options` change the configuration.

    Args:
        auto: transformers' AutoModelFor… class.
        config_changes: set by the task, not by the user.

    Raises:
        AspError: (here or when called) the model cannot be had, options it does not know, weights that do not fit.
    """
    where = place(spec)
    for key in config_changes.keys() & spec.options.keys() | {"id2label", "label2id"} & spec.options.keys():
        raise AspError(f"task.model.options.{key}: follows from the data; leave it out")
    with quietly(), _told(where):
        config = transformers.AutoConfig.from_pretrained(where)
    known = config.to_dict()
    for key in spec.options:
        if key not in known:
            raise AspError(
                f"task.model.options.{key}: the configuration of {where} has no such key; {closest(key, known)}"
            )
    with _told(where):
        config.update({**spec.options, **config_changes})
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id
    if spec.weights not in (None, "random") and not str(spec.weights).endswith(WEIGHT_FILES):
        raise AspError(
            f"task.model.weights: expected a file ({', '.join(WEIGHT_FILES)}), random or null, got {spec.weights!r}"
        )

    def build() -> nn.Module:
        own = copy.deepcopy(config)  # a model writes into its configuration
        with quietly(), _told(where):
            if spec.weights is None:
                model, info = auto.from_pretrained(where, config=own, dtype=torch.float32, output_loading_info=True)
                _loaded(model, info, where)
            else:
                model = auto.from_config(own)
        replace_(model, spec.replace)
        if spec.weights not in (None, "random"):
            load_weights(model, read_weights(Path(str(spec.weights)).expanduser()), str(spec.weights))
        network: nn.Module = model.float()
        return network

    return build


def _loaded(model: Any, info: dict[str, Any], where: str) -> None:
    """Only the head may be new, and only another head left over."""
    parts = {name for name, _ in model.base_model.named_children()} - {"pooler"}  # which goes with the head

    def of_the_body(key: str) -> bool:  # a body that was saved without a head has no prefix
        first, *rest = key.removeprefix(f"{model.base_model_prefix}.").split(".")
        return first in parts and "position_ids" not in rest  # a buffer that old versions stored

    missing = sorted(key for key in info["missing_keys"] if of_the_body(key))
    left_over = sorted(key for key in info["unexpected_keys"] if of_the_body(key))
    for name, keys in (("lack", missing), ("have besides", left_over)):
        if keys:
            raise AspError(
                f"task.model: the weights in {where} {name} {', '.join(keys[:5])}; "
                f"are its config and options the ones it was saved with?"
            )


@contextlib.contextmanager
def _told(where: str) -> Iterator[None]:
    try:
        yield
    except AspError:
        raise
    except Exception as error:
        raise AspError(
            f"task.model: {where!r} cannot be loaded ({type(error).__name__}: {error}); "
            f"expected a folder with config.json, tokenizer files and weights, or the id of a model on the hub"
        ) from error


def check_length(model: nn.Module, max_length: int) -> None:
    """Raises: AspError if the model has no position for every token of `max_length`."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and max_length > positions:
        raise AspError(
            f"task.max_length: expected at most {positions}, the positions that the model has, got {max_length}"
        )
