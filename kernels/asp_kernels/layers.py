"""SparseLinear and SparseConv2d: drop-in layers that hold their weight packed, for inference.

Their state dict has `weight.values`, `weight.codes` and `bias`, as a packed checkpoint has them. `layer.weight` gives
the dense weight to code that reads it. Where the chosen backend computes densely, the unpacked weight is kept beside
the packed one; it is rebuilt when values or codes change, and neither copied, pickled nor saved. The layer then is the
dense layer to the bit, in 0 * inf = NaN too; the operations of `asp_kernels.ops` read kept entries alone. So does a
SparseLinear where the CPU kernels serve, without gradients; they sum in another order, and keep tiles in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asp_kernels import library
from asp_kernels.backends import cpu, reference
from asp_kernels.dispatch import form_24
from asp_kernels.formats import PackedNM
from asp_kernels.packed_layer import PackedLayer, refuse_swap

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class SparseLinear(PackedLayer):
    """`nn.Linear` with an N:M weight, held packed. (..., in_features) -> (..., out_features).

    Where the dense product serves, finite inputs give the bits of the dense layer. Gradients reach the input and the
    bias; the weight is fixed. A new layer is all zeros: fill it by `load_state_dict`, or make one by `from_dense` or
    `from_packed`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        n: int = 2,
        m: int = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, in_features, bias, n, m, device, dtype)
        self.in_features, self.out_features = in_features, out_features

    @classmethod
    def from_packed(cls, packed: PackedNM, bias: nn.Parameter | None = None) -> Self:
        """Around a packed (out, in) weight and a bias of shape (out,); both are shared, not copied."""
        made = cls(
            packed.shape[1], packed.shape[0], False, packed.n, packed.m, packed.values.device, packed.values.dtype
        )
        return made.adopt_(packed, bias)

    @classmethod
    def from_dense(cls, module: nn.Linear, mask: Tensor | None = None, n: int = 2, m: int = 4) -> Self:
        """From a linear layer whose weight is N:M; `mask` has the weight's shape. The bias parameter is shared.

        Raises:
            ValueError: the weight is not N:M (see `PackedNM.from_dense`), or the layer cannot be swapped.
        """
        refuse_swap(module, nn.Linear)
        made = cls.from_packed(PackedNM.from_dense(module.weight, n, m, mask), module.bias)
        return made.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"SparseLinear: expected input (..., {self.in_features}), got {tuple(x.shape)}")
        if torch.compiler.is_compiling():
            return library.linear(x, self.values, self.codes, self.bias, self.n, self.m)
        if not torch.is_autocast_enabled(x.device.type):
            form, _ = form_24(x, self.values, self.n, self.m)
            fixed = self.bias is None or not (torch.is_grad_enabled() and self.bias.requires_grad)
            if form is not None and fixed:
                return cpu.linear_24(x, self.values, self.codes, self.bias, form == "batch")
        return F.linear(x, self.weight, self.bias)

    def to_dense(self) -> nn.Linear:
        """The ordinary layer with the same bits; the bias parameter is shared."""
        made = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device="meta", dtype=self.values.dtype
        )
        made.weight, made.bias = nn.Parameter(self.unpack()), cast(nn.Parameter, self.bias)
        return made.train(self.training)

    def extra_repr(self) -> str:
        about = f"bias={self.bias is not None}, pattern={self.n}:{self.m}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {about}"


class SparseConv2d(PackedLayer):
    """`nn.Conv2d` with a weight that is N:M along the input channels, held packed as (K, R * S * C/groups).

    (B, C, H, W) or (C, H, W) -> as the dense layer, bit for bit for finite inputs. Gradients reach the input and the
    bias; the weight is fixed. Arguments as of `nn.Conv2d`, with n and m.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        n: int = 2,
        m: int = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        like = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            False,
            padding_mode,
            device="meta",
        )
        window = like.kernel_size
        super().__init__(out_channels, window[0] * window[1] * (in_channels // groups), bias, n, m, device, dtype)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, (window[0], window[1])
        self.stride, self.padding, self.dilation = like.stride, like.padding, like.dilation
        self.groups, self.padding_mode = groups, padding_mode
        self._around: list[int] = list(like._reversed_padding_repeated_twice)  # left, right, top, bottom

    def unpack(self) -> Tensor:
        """The contiguous (K, C/g, R, S) weight, made anew."""
        channels = self.in_channels // self.groups
        return reference.conv_weight(self.values, self.codes, self.kernel_size, channels, self.n, self.m)

    @classmethod
    def from_packed(cls, packed: PackedNM, like: nn.Conv2d) -> Self:
        """Around a packed (K, R * S * C/g) weight, with the geometry and the bias parameter of `like`."""
        made = cls(
            like.in_channels,
            like.out_channels,
            cast(tuple[int, int], like.kernel_size),
            cast(tuple[int, int], like.stride),
            cast(tuple[int, int], like.padding),
            cast(tuple[int, int], like.dilation),
            like.groups,
            False,
            like.padding_mode,
            packed.n,
            packed.m,
            packed.values.device,
            packed.values.dtype,
        )
        if packed.shape != made.shape:
            raise ValueError(f"SparseConv2d: expected a packed matrix of shape {made.shape}, got {packed.shape}")
        return made.adopt_(packed, cast(nn.Parameter | None, like.bias)).train(like.training)

    @classmethod
    def from_dense(cls, module: nn.Conv2d, mask: Tensor | None = None, n: int = 2, m: int = 4) -> Self:
        """From a convolution whose weight is N:M along C; `mask` has the weight's shape. The bias parameter is shared.

        Raises:
            ValueError: the weight is not N:M (see `PackedNM.from_dense`), or the layer cannot be swapped.
        """
        refuse_swap(module, nn.Conv2d)
        if module.weight.shape[1] % m:
            channels = module.weight.shape[1]
            raise ValueError(f"SparseConv2d: {n}:{m} needs a multiple of {m} input channels per group, got {channels}")
        matrix = module.weight.permute(0, 2, 3, 1).flatten(1)  # (K, C/g, R, S) -> (K, R S C/g)
        keep = None if mask is None else mask.permute(0, 2, 3, 1).flatten(1)
        return cls.from_packed(PackedNM.from_dense(matrix, n, m, keep), module)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in (3, 4) or x.shape[-3] != self.in_channels:
            wanted = f"(B, {self.in_channels}, H, W) or ({self.in_channels}, H, W)"
            raise ValueError(f"SparseConv2d: expected input {wanted}, got {tuple(x.shape)}")
        padding: Sequence[int] = self._around[2::-2]  # top, left
        if self.padding_mode != "zeros" or self._around[::2] != self._around[1::2]:
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x, padding = F.pad(x, self._around, mode=mode), (0, 0)
        if torch.compiler.is_compiling():
            geometry = (self.stride, padding, self.dilation, self.groups, self.kernel_size)
            return library.conv(x, self.values, self.codes, self.bias, *geometry, self.n, self.m)
        return F.conv2d(x, self.weight, self.bias, self.stride, tuple(padding), self.dilation, self.groups)

    def to_dense(self) -> nn.Conv2d:
        """The ordinary layer with the same bits; the bias parameter is shared."""
        made = nn.Conv2d(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            cast(tuple[int, int], self.stride),
            cast(tuple[int, int], self.padding),
            cast(tuple[int, int], self.dilation),
            self.groups,
            self.bias is not None,
            self.padding_mode,
            device="meta",
            dtype=self.values.dtype,
        )
        made.weight, made.bias = nn.Parameter(self.unpack()), self.bias
        return made.train(self.training)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride},"
            f" padding={self.padding}, dilation={self.dilation}, groups={self.groups},"
            f" bias={self.bias is not None}, pattern={self.n}:{self.m}"
        )
