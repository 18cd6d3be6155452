"""Parameters that are known to be no matrix: tables that are looked up or added, scales of norms."""

from __future__ import annotations

from torch import nn

EMBEDDING = "embedding: a table that is looked up, not multiplied"

_POSITIONS = "a table of positions: added to the sequence, not multiplied"
_TOKEN = "a learned token: one more entry of the sequence, not multiplied"
_RELATIVE = "a table of relative positions, looked up by distance"
_SCALE = "a scale: multiplied entry by entry, not as a matrix"

_KNOWN = {
    "pos_embedding": _POSITIONS,
    "position_embedding": _POSITIONS,
    "position_embeddings": _POSITIONS,
    "positional_embedding_vlm": _POSITIONS,
    "spatial_pos": _POSITIONS,
    "temporal_pos": _POSITIONS,
    "class_pos": _POSITIONS,
    "cls_token": _TOKEN,
    "class_token": _TOKEN,
    "class_embedding": _TOKEN,
    "mask_token": _TOKEN,
    "distillation_token": _TOKEN,
    "relative_position_bias_table": _RELATIVE,
    "rel_pos_h": _RELATIVE,
    "rel_pos_w": _RELATIVE,
    "rel_pos_t": _RELATIVE,
    "layer_scale": _SCALE,
    "logit_scale": _SCALE,
}


def embedding(module: nn.Module, own: str) -> str:
    """Rows of the table are looked up."""
    return EMBEDDING


def norm(module: nn.Module, own: str) -> str:
    """LayerNorm over several dimensions has a scale of as many."""
    return _SCALE


def standardized(module: nn.Module, own: str) -> str:
    """Weight standardization subtracts each row's mean before the product (arXiv 1903.10520)."""
    return "weight standardization: subtracting the mean does not keep zeros"


def known(module: nn.Module, own: str) -> str | None:
    """Why a raw parameter of torchvision's or transformers' networks is no matrix, where its name tells."""
    if type(module).__module__.partition(".")[0] not in ("torchvision", "transformers"):
        return None
    return _KNOWN.get(own)


NOT_MULTIPLIED = frozenset({EMBEDDING, _POSITIONS, _TOKEN})
"""Texts of owners that certainly do not multiply: what is tied with them has the axes of its other owners."""
