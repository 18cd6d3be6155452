"""Stored: the tensors of an export folder, whichever way they are stored, each checked when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from asp_kernels import PackedNM
from asp_toolkit.errors import AspError
from asp_toolkit.exporters.manifest import Manifest


@dataclass(frozen=True)
class Stored:
    """The tensors of an export folder: name -> the open file that has it."""

    manifest: Manifest
    files: Mapping[str, Any]

    def is_packed(self, name: str) -> bool:
        """Whether a parameter stands in the files as values and codes."""
        entry = self.manifest.parameters.get(name)
        return self.manifest.format == "packed" and entry is not None and entry.nm is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an ordinary tensor, from the header alone; of a packed one, as the manifest says."""
        if self.is_packed(name):
            return tuple(self.manifest.parameters[name].shape)
        return tuple(self.files[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """An ordinary tensor, read now."""
        return self.files[name].get_tensor(name)  # type: ignore[no-any-return]

    def packed(self, name: str) -> PackedNM:
        """The packed matrix of a pruned parameter, wholly checked.

        Raises:
            AspError: it is missing or not what the manifest says.
        """
        entry = self.manifest.parameters[name]
        nm = entry.nm
        assert nm is not None
        for part in ("values", "codes"):
            if f"{name}.{part}" not in self.files:
                raise AspError(f"'{name}': {part} missing from the weights file")
        values = self.tensor(f"{name}.values")
        if str(values.dtype) != f"torch.{entry.dtype}":
            raise AspError(f"'{name}': expected {entry.dtype}, got {values.dtype}")
        try:
            return PackedNM(values, self.tensor(f"{name}.codes"), (entry.rows, entry.cols), nm.n, nm.m)
        except ValueError as error:
            raise AspError(f"'{name}': {error}") from error

    def pruned(self, name: str) -> Tensor:
        """A pruned parameter in its own shape, as the manifest describes it.

        Raises:
            AspError: it is missing or not what the manifest says.
        """
        entry = self.manifest.parameters[name]
        if self.is_packed(name):
            return entry.unmatrix(self.packed(name).to_dense())
        if name not in self.files:
            raise AspError(f"'{name}': missing from the weights files")
        tensor = self.tensor(name)
        if list(tensor.shape) != entry.shape or str(tensor.dtype) != f"torch.{entry.dtype}":
            told = f"{entry.dtype} {entry.shape}, got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise AspError(f"'{name}': expected {told}")
        return tensor

    def parameters(self) -> set[str]:
        """Names of the tensors as a model has them: P for P.values and P.codes."""
        packed = {name for name in self.manifest.parameters if self.is_packed(name)}
        return (set(self.files) - {f"{name}.{part}" for name in packed for part in ("values", "codes")}) | packed


@contextmanager
def opened(folder: Path, manifest: Manifest) -> Iterator[Stored]:
    """The weights files of `folder`, open.

    Raises:
        AspError: a file is damaged, or a tensor stands in two files.
    """
    files: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in manifest.weights:
            try:
                handle = stack.enter_context(safe_open(folder / file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise AspError(f"{folder / file}: damaged: {error}; export again or fetch the folder anew") from error
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in files:
                    raise AspError(f"{folder}: '{name}' stands in two weights files")
                files[name] = handle
        yield Stored(manifest, files)
