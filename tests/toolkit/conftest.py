"""What several test files build."""

from __future__ import annotations

from pathlib import Path

import pytest

VOCABULARY = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "of", "and", "to", "in", "a", "is", "that", "for", "it"),
    *("red", "blue", "green", "sky", "sea", "?", ".", ",", "answer", "who", "what"),
)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random BERT of 2 layers and its tokenizer, as a hub model has them."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("tiny_bert")
    words = [*VOCABULARY, *"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
    tokenizer = transformers.BertTokenizerFast(vocab={word: number for number, word in enumerate(dict.fromkeys(words))})
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=160,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
