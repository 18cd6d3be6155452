"""Sparse matrices, the operations on them, and the layers that use them. Needs torch and numpy alone.

packed = Packed24.from_dense(weight)        # weight: (out, in), 2 of every 4 entries kept; checked, never pruned
y = linear_24(x, packed, bias)
print(explain(x, packed))                   # what runs, and why
"""

from asp_kernels.backends.cpu import nm_mask, why_not_mask
from asp_kernels.formats import CSR, Packed24, PackedNM
from asp_kernels.layers import SparseConv2d, SparseLinear
from asp_kernels.ops import conv_24, explain, linear_24, sddmm, sparse_softmax, spmm
from asp_kernels.swap import layer_backends, swap_, unswap_

__all__ = [
    "CSR",
    "Packed24",
    "PackedNM",
    "SparseConv2d",
    "SparseLinear",
    "conv_24",
    "explain",
    "layer_backends",
    "linear_24",
    "nm_mask",
    "sddmm",
    "sparse_softmax",
    "spmm",
    "swap_",
    "unswap_",
    "why_not_mask",
]
