"""Which layers of which network 2:4 reaches: every network of torchvision, and families of transformers.

    python benchmarks/coverage.py              all of them, about two minutes; writes benchmarks/results/coverage.csv
    python benchmarks/coverage.py resnet50     those that are named; prints their rows and writes nothing

torchvision's networks have their real sizes, transformers' are tiny (width 64, two layers) with a task head. All are
pruned with the defaults, `prune(model)`. A row counts

    parameters, entries         tensors of the network, and numbers in them
    eligible                    parameters that are a matrix whose contraction divides by 4, with no reason against it
    pruned                      parameters that got a mask
    modules, pruned_modules     Linear and convolutions, the packed projection of attention as one more
    skipped                     why the other parameters stay dense: reason -> how many

Values are drawn cheaply, since counts do not depend on them, and are bfloat16 in the larger networks.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchvision.models import get_model, list_models
from transformers.pytorch_utils import Conv1D

from asp_toolkit import MaskSet, prune
from asp_toolkit.views import View, place_of, views

RESULTS = Path(__file__).parent / "results" / "coverage.csv"
HALF_FROM = 50_000_000  # entries: from here on bfloat16, which halves memory and time
PIECE = 1 << 20

MULTIPLYING = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, Conv1D),
)

SYMBOLS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SYMBOLS, **SIZE, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
DEBERTA = {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
GPT2 = {**SYMBOLS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
ENCODER = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128}
DECODER = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128, "decoder_start_token_id": 1}
IMAGE = {**SIZE, "image_size": 32, "patch_size": 8}
SHIFTED = {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
MEL = {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32}
WAVE = {"conv_dim": [32, 32], "conv_kernel": [10, 3], "conv_stride": [5, 2]}
SPREAD = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": GROUPED,
    "LlamaForSequenceClassification": GROUPED,
    "MistralForCausalLM": GROUPED,
    "MixtralForCausalLM": LOCAL,
    "Llama4ForCausalLM": {**LOCAL, "head_dim": 16, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2},
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 16, "tie_word_embeddings": True},
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "Qwen3MoeForCausalLM": {**EXPERTS, "head_dim": 16},
    "GptOssForCausalLM": {**LOCAL, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "GPT2LMHeadModel": GPT2,
    "GPT2ForSequenceClassification": GPT2,
    "OPTForCausalLM": {**TEXT, "ffn_dim": 128, "word_embed_proj_dim": 32},
    "BertForSequenceClassification": TEXT,
    "BertForMaskedLM": TEXT,
    "BertForQuestionAnswering": TEXT,
    "RobertaForSequenceClassification": TEXT,
    "RobertaForMaskedLM": TEXT,
    "DebertaForSequenceClassification": DEBERTA,
    "DebertaForMaskedLM": DEBERTA,
    "DebertaV2ForSequenceClassification": {**DEBERTA, "conv_kernel_size": 3, "position_buckets": 8},
    "DebertaV2ForMaskedLM": TEXT,
    "AlbertForMaskedLM": {**TEXT, "embedding_size": 32},
    "DistilBertForSequenceClassification": {**SYMBOLS, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
    "T5ForConditionalGeneration": {**SYMBOLS, **T5},
    "BartForConditionalGeneration": {**SYMBOLS, **ENCODER, **DECODER, "max_position_embeddings": 64},
    "ViTForImageClassification": IMAGE,
    "SwinForImageClassification": SHIFTED,
    "Swinv2ForImageClassification": SHIFTED,
    "CLIPModel": {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 64},
    "SiglipModel": {"text_config": {**TEXT, "projection_size": 64}, "vision_config": IMAGE},
    "WhisperForConditionalGeneration": {**SYMBOLS, **ENCODER, **DECODER, **MEL},
    "Wav2Vec2ForCTC": {**SYMBOLS, **SIZE, **WAVE, **SPREAD},
}
"""Class of transformers -> its configuration, every width a multiple of 16."""


class _WithoutValues(TorchFunctionMode):
    """What is to be initialised has no storage yet: layers allocate with torch.empty, and init is slow."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def torchvision_network(name: str) -> nn.Module:
    """A network as torchvision builds it, its parameters on the meta device but for small ones; see `filled`."""
    options: dict[str, Any] = {"weights": None}
    if any(part in name for part in ("rcnn", "ssd", "retinanet", "fcos", "deeplab", "fcn_", "lraspp")):
        options["weights_backbone"] = None
    if "googlenet" in name or "inception" in name:
        options["init_weights"] = False  # it warns otherwise, and takes minutes
    runs_while_built = name.startswith("ssdlite")
    with torch.random.fork_rng(devices=[]), nullcontext() if runs_while_built else _WithoutValues():
        torch.manual_seed(0)
        model: nn.Module = get_model(name, **options)
    return model


def transformers_network(name: str) -> nn.Module:
    """A tiny network of transformers, with the values it is initialised with."""
    kind = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = kind(kind.config_class(**FAMILIES[name]))
    return model


def _values(parameter: Tensor, source: Tensor) -> Tensor:
    values = torch.empty(parameter.shape, dtype=source.dtype)
    for piece in torch.split(values.view(-1), PIECE):
        piece.copy_(source[: len(piece)])
    return values


def filled(model: nn.Module) -> nn.Module:
    """`model` with normal values in the parameters that have none; large models become bfloat16."""
    entries = sum(parameter.numel() for parameter in model.parameters())
    dtype = torch.bfloat16 if entries > HALF_FROM else torch.float32
    normal = torch.randn(PIECE, generator=torch.Generator().manual_seed(0))
    normal = torch.where(normal == 0, 1.0, normal).to(dtype)
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied stays tied
    for module in model.modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = nn.Parameter(_values(parameter, normal)) if parameter.is_meta else parameter
            setattr(module, own, made[parameter])
    return model.eval()


def networks() -> dict[str, Callable[[], nn.Module]]:
    """Name -> how it is built: first torchvision's, then transformers'."""
    return {
        **{name: partial(torchvision_network, name) for name in list_models()},
        **{name: partial(transformers_network, name) for name in FAMILIES},
    }


def reason_class(reason: str) -> str:
    """A reason without what is special to one parameter: names of tied ones, lengths."""
    reason = re.sub(r"^tied with [^:]*", "tied", reason)
    reason = re.sub(r"contraction length \d+", "contraction length", reason)
    reason = re.sub(r"^no matrix view for parameter '(\w+)' of layer type (\w+).*", r"no matrix view: \2.\1", reason)
    return re.sub(r" of shape \([\d, ]+\)$", "", reason)


def multiplying(model: nn.Module) -> list[tuple[int, str]]:
    """What `modules` counts, as (id of the module, its own name of the weight); modules may share a weight."""
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention) and m.in_proj_weight is not None]
    return [
        *((id(module), "weight") for module in model.modules() if isinstance(module, MULTIPLYING)),
        *((id(module), "in_proj_weight") for module in attentions),
    ]


def row(name: str, model: nn.Module, masks: MaskSet) -> dict[str, str]:
    """What the table says about a network: `model` was pruned with `masks`."""
    parameters = dict(model.named_parameters())
    masked = {id(parameters[one]) for one in masks.masks}
    slots = model.named_parameters(remove_duplicate=False)  # a mask has one name, its weight may serve several modules
    places = [place_of(model, slot) for slot, parameter in slots if id(parameter) in masked]
    pruned = {(id(place.layer), place.weight) for place in places}
    seen = [view for _, _, view in views(model) if isinstance(view, View)]
    modules = multiplying(model)
    counts = {
        "parameters": len(parameters),
        "entries": sum(parameter.numel() for parameter in parameters.values()),
        "eligible": sum(view.reason is None and view.run % 4 == 0 and view.run > 0 for view in seen),
        "pruned": len(masks.masks),
        "modules": len(modules),
        "pruned_modules": sum(module in pruned for module in modules),
    }
    skipped = Counter(reason_class(reason) for reason in masks.skipped.values())
    library = "transformers" if name in FAMILIES else "torchvision"
    return {
        "network": name,
        **{key: str(count) for key, count in counts.items()},
        "skipped": json.dumps(dict(sorted(skipped.items()))),
        "library": f"{library} {version(library).partition('+')[0]}",
    }


def main() -> None:
    """Prune every network that is named on the command line, or all; without names, write the table."""
    rows = []
    builders = networks()
    for name in sys.argv[1:] or builders:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's constructors
            model = filled(builders[name]())
        rows.append(row(name, model, prune(model)))
        print(*rows[-1].values(), flush=True)
        del model  # before the next is built: some are large
    if not sys.argv[1:]:
        with RESULTS.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
