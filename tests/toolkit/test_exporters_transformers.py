"""Exports of transformers models: plain `from_pretrained` loads the dense one and refuses the packed one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asp_toolkit.exporters import export, load_dense, load_packed, read_manifest
from asp_toolkit.inspection import inspect
from asp_toolkit.pruning import prune
from asp_toolkit.verification import same_outputs, verify

transformers = pytest.importorskip("transformers", reason="pip install transformers")

IDS = torch.arange(12).reshape(2, 6) % 32


def bert(dtype: torch.dtype = torch.float32) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    return transformers.BertForSequenceClassification._from_config(config, dtype=dtype).eval()  # type: ignore[no-any-return]


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, dtype=dtype).eval()  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    """Its Conv1D layers have weights of shape (in, out)."""
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()  # type: ignore[no-any-return]


def mixtral() -> nn.Module:
    """Its experts are fused in memory, (E, out, in); save_pretrained would take them apart."""
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval()  # type: ignore[no-any-return]


def wav2vec2() -> nn.Module:
    """Its positional convolution is weight-normed; save_pretrained would rename that parametrization."""
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
        conv_stride=(2, 2), conv_kernel=(3, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    return transformers.Wav2Vec2Model(config).eval()  # type: ignore[no-any-return]


def config_of(model: Any) -> dict[str, Any]:
    return copy.deepcopy(vars(model.config))


@pytest.mark.parametrize("build", [bert, llama])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense(tmp_path: Path, build: Any, dtype: torch.dtype) -> None:
    model = build(dtype)
    masks = prune(model, "2:4")
    before, config = copy.deepcopy(model.state_dict()), config_of(model)

    def tokenizer(folder: Path, model: nn.Module) -> None:
        (folder / "vocab.txt").write_text("a\nb\n")

    folder = export(model, masks, tmp_path / "d", save_with=tokenizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert config_of(model) == config
    written = json.loads((folder / "config.json").read_text())
    assert not [key for key in written if any(word in key for word in ("spars", "quant", "compress", "asp"))]
    assert {"config.json", "model.safetensors", "asp_manifest.json", "vocab.txt"} <= {p.name for p in folder.iterdir()}
    loaded, about = type(model).from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same_outputs(model, loaded, IDS)
    same_outputs(model, load_dense(folder, build()), IDS)
    assert next(loaded.parameters()).dtype == dtype
    assert verify(folder).checked == len(masks.masks) > 5
    assert verify(folder).ok
    held = {row.name for row in inspect(folder) if row.pattern}
    assert held == set(masks.masks)


@pytest.mark.parametrize("build", [bert, llama])
def test_packed(tmp_path: Path, build: Any) -> None:
    model = build(torch.bfloat16)
    masks = prune(model, "2:4")
    config = config_of(model)
    folder = export(model, masks, tmp_path / "p", "packed")
    assert config_of(model) == config
    with pytest.raises(OSError, match=r"model\.safetensors"):  # never random layers
        type(model).from_pretrained(folder)
    fresh = type(model)(transformers.AutoConfig.from_pretrained(folder)).eval()
    loaded = load_packed(folder, fresh)
    same_outputs(model, loaded, IDS)
    assert sum(type(module).__name__ == "SparseLinear" for module in loaded.modules()) == len(masks.masks)
    same_outputs(model, load_packed(folder, build(), layers="dense"), IDS)
    if build is llama:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert set(read_manifest(folder).tied) == {"lm_head.weight"}
        assert loaded.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 8)


def test_negative_zeros_of_another_tool_become_positive(tmp_path: Path) -> None:
    model = llama()
    masks = prune(model, "2:4")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in masks.masks:
                parameter.copy_((parameter + 1e-3) * masks.masks[name])
                parameter[~masks.masks[name]] = -0.0
    folder = export(model, masks, tmp_path / "d")
    assert verify(folder).ok
    loaded = type(model).from_pretrained(folder)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert masks.violations(loaded) == {}


@pytest.mark.parametrize(
    ("build", "inputs", "held"),
    [
        (gpt2, IDS, "transformer.h.0.attn.c_attn.weight"),
        (mixtral, IDS, "model.layers.0.mlp.experts.gate_up_proj"),
        (wav2vec2, torch.linspace(-1, 1, 400)[None], "encoder.pos_conv_embed.conv.parametrizations.weight.original1"),
    ],
)
def test_names_and_axes_of_the_model_in_memory(tmp_path: Path, build: Any, inputs: torch.Tensor, held: str) -> None:
    model = build()
    masks = prune(model, "2:4")
    assert held in masks.masks
    for format, load in (("dense", load_dense), ("packed", load_packed)):
        folder = export(model, masks, tmp_path / format, format)
        assert set(read_manifest(folder).parameters) == set(masks.masks)
        assert verify(folder, masks).problems == []
        assert {row.name for row in inspect(folder) if row.pattern == "2:4"} == set(masks.masks)
        same_outputs(model, load(folder, build()), inputs)
    loaded, about = type(model).from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same_outputs(model, loaded, inputs)
