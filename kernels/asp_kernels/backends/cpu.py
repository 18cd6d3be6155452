"""The C++ kernels: loaded when first needed, chosen by what the processor can do, and why not where they cannot serve.

ASP_KERNELS_CPU = generic | avx2 | avx512 | off forces the instruction set (read once, at the first use).
Products accumulate in fp32. Each output depends on its own row of x alone, and NaN or infinities reach it only through
kept entries. bf16 on AVX-512 takes subnormal inputs as zero, as the processor's bf16 instruction does.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

LEVELS = ("generic", "avx2", "avx512")
DTYPES = (torch.float32, torch.bfloat16)
MASK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SMALL = 1 << 20  # products or scores below which a second thread costs more than it brings
_MASKS = ((4,), (4, 8), (2, 4, 8, 16))  # by level: group sizes whose kernel is faster than ranks in torch
_FOLDER = Path(__file__).parent.parent


@dataclass(frozen=True)
class Library:
    """The loaded library and the level (0, 1, 2: see LEVELS) it runs at, or why there is none."""

    handle: ctypes.CDLL | None
    level: int
    refusal: str | None


@cache
def library() -> Library:
    """The library of this process."""
    forced = os.environ.get("ASP_KERNELS_CPU", "").strip().lower()
    if forced == "off":
        return Library(None, 0, "switched off by ASP_KERNELS_CPU=off")
    if forced and forced not in LEVELS:
        return Library(None, 0, f"ASP_KERNELS_CPU={forced}: expected {', '.join(LEVELS)} or off")
    found = sorted(_FOLDER.glob("_cpu.*so")) + sorted(_FOLDER.glob("_cpu.*pyd"))
    if not found:
        note = _FOLDER / "_cpu_build.txt"
        why = note.read_text(encoding="utf-8").strip() if note.is_file() else "they were not compiled at install"
        return Library(None, 0, f"the C++ kernels are not built ({why}); with a C++ compiler at hand, reinstall")
    try:
        handle = ctypes.CDLL(str(found[0]))
        _declare(handle)
        _join_torchs_threads(handle)
    except (OSError, AttributeError) as error:
        return Library(None, 0, f"the C++ kernels cannot be loaded ({error}); reinstall")
    best = int(handle.asp_level())
    level = LEVELS.index(forced) if forced else best
    if level > best:
        return Library(None, 0, f"ASP_KERNELS_CPU={forced}: this processor has {LEVELS[best]} at most")
    return Library(handle, level, None)


def _declare(handle: ctypes.CDLL) -> None:
    size, number, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
    handle.asp_level.argtypes = []
    handle.asp_tile_bytes.argtypes = [size, size, number]
    handle.asp_tile_bytes.restype = size
    handle.asp_tiles_24.argtypes = [pointer, pointer, size, size, number, pointer]
    handle.asp_linear_24.argtypes = [
        *(number, number, pointer, pointer, size, size, size, size, pointer, pointer, number, number)
    ]
    handle.asp_nm_mask.argtypes = [number, number, pointer, pointer, size, number, number, number]
    handle.asp_nm_mask.restype = None
    handle.asp_parallel.argtypes = [pointer]
    handle.asp_parallel.restype = None


def _join_torchs_threads(handle: ctypes.CDLL) -> None:
    """Let the kernels run on the threads of torch's own OpenMP library, where it is found among what is loaded."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return
    found = set(re.findall(r"/.*/lib(?:gomp|iomp5|omp)[-.][^/]*$", maps.read_text(encoding="utf-8"), re.MULTILINE))
    for path in sorted(found, key=lambda path: ("/torch" not in path, path))[:1]:
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            handle.asp_parallel(ctypes.cast(function, ctypes.c_void_p))


def about() -> str:
    """The instruction set in use, or why there is none."""
    return library().refusal or LEVELS[library().level]


# ---- masks


def why_not_mask(scores: Tensor, n: int, m: int) -> str | None:
    """Why `nm_mask` does not take these scores, or None."""
    if scores.device.type != "cpu" or scores.layout != torch.strided:
        return f"scores are {scores.layout} on {scores.device}"
    if scores.dtype not in MASK_DTYPES:
        return f"scores are {scores.dtype}"
    if torch.compiler.is_compiling() or _traced(scores):
        return "scores are traced or transformed, not a plain tensor"
    if not 1 <= n < m <= 64 or scores.ndim == 0 or scores.shape[-1] % m:
        return f"{n}:{m} does not fit scores of shape {tuple(scores.shape)}"
    lib = library()
    if lib.refusal is None and m not in _MASKS[lib.level]:
        return f"groups of {m} have no fast kernel on {LEVELS[lib.level]}"
    return lib.refusal


def nm_mask(scores: Tensor, n: int, m: int) -> Tensor:
    """(..., a multiple of m) scores -> bool, of every m consecutive the n highest; ties go to the lower index.

    Scores count in the order of their bits: -NaN < -inf < ... < -0.0 = +0.0 < ... < inf < NaN.

    Raises:
        ValueError: `why_not_mask` has a reason.
    """
    reason = why_not_mask(scores, n, m)
    if reason is not None:
        raise ValueError(f"nm_mask: {reason}")
    return _nm_mask(scores, n, m)


def _nm_mask(scores: Tensor, n: int, m: int) -> Tensor:
    """As `nm_mask`, for every group size there is, fast or not."""
    flat, lib = scores.detach().contiguous(), library()
    out = torch.empty(flat.shape, dtype=torch.bool)
    assert lib.handle is not None
    lib.handle.asp_nm_mask(
        *(lib.level, flat.element_size(), flat.data_ptr(), out.data_ptr(), flat.numel() // m, n, m),
        _threads(flat.numel()),
    )
    return out


def _threads(work: int) -> int:
    return torch.get_num_threads() if work >= _SMALL else 1


# ---- 2:4 products


@dataclass(frozen=True, eq=False)
class _Tiles:
    """A 2:4 weight in the kernels' layout, and the state of the tensors it was made from."""

    data: Tensor
    stamp: tuple[object, ...]
    codes: Tensor


_tiles: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # values -> _Tiles; goes with the values
_lock = threading.Lock()


def stamp(tensor: Tensor) -> tuple[object, ...]:
    """Changes when the tensor is written to, moved or given other memory."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr(), tensor.dtype, tensor.device


def tiles_of(values: Tensor, codes: Tensor) -> Tensor:
    """The tiles of a 2:4 weight, made once and again when values or codes change.

    Raises:
        ValueError: the codes of a group do not ascend.
    """
    state = (*stamp(values), *stamp(codes))
    held: _Tiles | None = _tiles.get(values)  # type: ignore[no-untyped-call]
    if held is not None and held.stamp == state:
        return held.data
    with _lock, torch.inference_mode(False), torch.no_grad():
        rows, cols, bf16 = values.shape[0], values.shape[1] * 2, values.dtype == torch.bfloat16
        handle = library().handle
        assert handle is not None
        flat, places = values.detach().contiguous(), codes.detach().contiguous()
        size = int(handle.asp_tile_bytes(rows, cols, bf16))
        room = torch.empty(size + 64, dtype=torch.uint8)
        data = room[-room.data_ptr() % 64 :][:size]
        if handle.asp_tiles_24(flat.data_ptr(), places.data_ptr(), rows, cols, bf16, data.data_ptr()):
            raise ValueError("2:4 codes: the places of a group do not ascend")
        _tiles[values] = _Tiles(data, state, codes.detach())
    return data


def why_not_24(x: Tensor, values: Tensor, n: int, m: int) -> str | None:
    """Why `linear_24` cannot multiply x by this weight, or None; whether it should is `dispatch`'s to say."""
    if (n, m) != (2, 4):
        return f"its kernels are for 2:4, not {n}:{m}"
    if values.device.type != "cpu" or x.device.type != "cpu":
        return f"x is on {x.device}, the weight on {values.device}"
    if values.dtype not in DTYPES or x.dtype != values.dtype:
        return f"its kernels take float32 or bfloat16, not {x.dtype} times {values.dtype}"
    if x.layout != torch.strided:
        return f"x is {x.layout}"
    if _traced(x) or _traced(values):
        return "the operands are traced or transformed, not plain tensors"
    return library().refusal


def _traced(tensor: Tensor) -> bool:
    """Whether something watches torch's operations on the tensor, which would miss what happens here."""
    return (
        type(tensor) not in (Tensor, torch.nn.Parameter)
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def linear_24(x: Tensor, values: Tensor, codes: Tensor, bias: Tensor | None, batched: bool = False) -> Tensor:
    """x (..., cols) times a 2:4 weight's transpose, plus bias (rows,), without gradients. -> (..., rows).

    `why_not_24` has no reason against it; shapes were checked. batched: the form for many rows of x.
    """
    lib, tiles = library(), tiles_of(values, codes)
    assert lib.handle is not None
    cols, rows = x.shape[-1], values.shape[0]
    count = math.prod(x.shape[:-1])
    flat = x.detach().reshape(count, cols)
    if flat.stride(1) != 1 or not 0 <= flat.stride(0) < 1 << 26 or flat.is_neg():
        flat = flat.resolve_neg().contiguous()
    offset = None if bias is None else bias.detach().contiguous()
    out = torch.empty(*x.shape[:-1], rows, dtype=x.dtype)
    if lib.handle.asp_linear_24(
        *(lib.level, x.dtype == torch.bfloat16, tiles.data_ptr(), flat.data_ptr(), count, rows, cols, flat.stride(0)),
        *(None if offset is None else offset.data_ptr(), out.data_ptr(), batched, _threads(count * rows * cols)),
    ):
        raise MemoryError(f"linear_24: no memory for {count} rows of {cols}")
    return out
