"""What torchvision's and transformers' networks hold beside their layers is named for what it is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from asp_toolkit.views import LAYER_VIEWS, View, views

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {**TEXT, "num_key_value_heads": 2}
MIXTURE = {"moe_intermediate_size": 16, "num_experts": 4}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
WINDOWS = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "use_absolute_embeddings": True}
WHISPER = {f"{end}_{what}": 1 for end in ("encoder", "decoder") for what in ("layers", "attention_heads")}

TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {**GROUPED, **MIXTURE, "shared_expert_intermediate_size": 16}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**GROUPED, **MIXTURE}),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "GptOssForCausalLM": ("GptOssConfig", {**GROUPED, "num_local_experts": 4, "head_dim": 8}),
    "Llama4ForCausalLM": ("Llama4TextConfig", {**GROUPED, "num_local_experts": 4, "head_dim": 8}),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}),
    "OPTForCausalLM": ("OPTConfig", {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16}),
    "BertForPreTraining": ("BertConfig", TEXT),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", {**TEXT, **RELATIVE, "conv_kernel_size": 3}),
    "DebertaForMaskedLM": ("DebertaConfig", {**TEXT, **RELATIVE}),
    "T5ForConditionalGeneration": ("T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}),
    "ViTForMaskedImageModeling": ("ViTConfig", SMALL),
    "SwinForMaskedImageModeling": ("SwinConfig", WINDOWS),
    "Swinv2ForMaskedImageModeling": ("Swinv2Config", WINDOWS),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {**WHISPER, "d_model": 32, "vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        | {"decoder_start_token_id": 1, "begin_suppress_tokens": None, "suppress_tokens": None},
    ),
}


def of_transformers(name: str) -> nn.Module:
    import transformers

    config, options = TRANSFORMERS[name]
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
    model.tie_weights()
    return model


def of_torchvision(name: str) -> nn.Module:
    import torchvision

    options = {"weights_backbone": None} if "ssd" in name or "rcnn" in name else {}
    with torch.device("meta"):
        model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return model


TORCHVISION = ["vit_b_32", "swin_t", "swin_v2_t", "maxvit_t", "convnext_tiny", "mvit_v2_s", "swin3d_t", "ssd300_vgg16"]
NETWORKS: dict[str, Callable[[str], nn.Module]] = {
    **dict.fromkeys(TRANSFORMERS, of_transformers),
    **dict.fromkeys(TORCHVISION, of_torchvision),
}
KNOWN = ("vector", "embedding", "a table", "a learned token", "a scale", "vectors of", "tied with")


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_that_is_no_matrix_is_known_for_what_it_is(name: str) -> None:
    model = NETWORKS[name](name)
    found = {parameter: view for parameter, _, view in views(model)}
    assert found.keys() == dict(model.named_parameters()).keys()
    texts = {parameter: view for parameter, view in found.items() if isinstance(view, str)}
    assert not {parameter: text for parameter, text in texts.items() if not text.startswith(KNOWN)}
    for parameter, module in model.named_modules():  # whatever is a Linear or convolution has a view
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            if f"{parameter}.weight" in found:
                assert isinstance(found[f"{parameter}.weight"], View)
            else:
                assert any(f"{parameter}.weight" in str(view) for view in found.values())  # tied with another


def reasons(name: str) -> set[str]:
    return {view.reason for _, _, view in views(NETWORKS[name](name)) if isinstance(view, View) and view.reason}


@pytest.mark.parametrize(
    "name", ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM"]
)
def test_raw_routers_are_seen_and_left_dense(name: str) -> None:
    assert "router of experts: small, and it decides everything" in reasons(name)


def test_a_router_that_is_a_linear_layer_is_left_dense_too() -> None:
    (router,) = [view for name, _, view in views(of_transformers("Llama4ForCausalLM")) if "router" in name]
    assert isinstance(router, View)
    assert router.kinds == ("Llama4Router", "Linear")
    assert "router of experts" in str(router.reason)


def test_a_linear_layer_inside_a_router_is_left_dense_too() -> None:
    from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxRouter

    config = DbrxFFNConfig(moe_num_experts=4)
    config.hidden_size = 8
    for model, name in [(DbrxRouter(config), "layer.weight"), (nn.Sequential(DbrxRouter(config)), "0.layer.weight")]:
        found = {parameter: view for parameter, _, view in views(model)}[name]
        assert "router of experts" in str(found.reason)


def test_a_router_of_somebody_else_is_a_layer_like_any_other() -> None:
    class MyRouter(nn.Linear):
        pass

    ((_, _, found),) = views(nn.Sequential(MyRouter(8, 4, bias=False)))
    assert isinstance(found, View)
    assert found.reason is None


def test_standardized_convolutions_are_skipped() -> None:
    from transformers.models.bit.modeling_bit import WeightStandardizedConv2d

    layer = WeightStandardizedConv2d(8, 4, 3)
    ((_, _, found),) = views(layer)
    assert found == "weight standardization: subtracting the mean does not keep zeros"
    with torch.no_grad():
        layer.weight[:, ::2] = 0
    features = torch.zeros(1, 8, 3, 3)
    features[:, ::2] = torch.rand(1, 4, 3, 3)
    assert layer(features).abs().max() > 1e-3  # the dropped weights do multiply


def test_every_class_that_is_registered_by_name_exists() -> None:
    keys = [key for key in LAYER_VIEWS if isinstance(key, str)]
    assert "transformers.pytorch_utils.Conv1D" in keys
    for key in keys:
        module, _, kind = key.rpartition(".")
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:  # a library that is not installed, a model that this version does not have
            assert module.startswith(("timm.", "transformers.models."))
        else:
            assert issubclass(getattr(found, kind), nn.Module)
