"""prune_trainer(trainer): a transformers Trainer, its data, its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asp_toolkit import AspError, load_dense, load_packed, prune_trainer
from asp_toolkit.trainer import PruneResult

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(3)
    return transformers.BertForSequenceClassification(config)


def rows(count: int = 32) -> list[dict[str, Any]]:
    """Token lists; the class is whether the first token is of the upper half."""
    tokens = torch.randint(0, 40, (count, 6), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": line.tolist(), "labels": int(line[0] >= 20)} for line in tokens]


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def trainer_of(folder: Path, kind: Any = None, **keys: Any) -> Any:
    """A Trainer on few rows; keys of its own go to the Trainer, the rest to its arguments."""
    own = ("model", "model_init", "callbacks", "optimizers", "optimizer_cls_and_kwargs", "compute_metrics")
    given = {"model": None if "model_init" in keys else bert(), "eval_dataset": rows(16), "compute_metrics": accuracy}
    given |= {key: value for key, value in keys.items() if key in own}
    arguments = {
        "output_dir": str(folder), "num_train_epochs": 1, "per_device_train_batch_size": 8, "learning_rate": 0.01,
        "weight_decay": 0.1, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "logging_strategy": "no", "lr_scheduler_type": "constant",
        **{key: value for key, value in keys.items() if key not in own},
    }  # fmt: skip
    of = kind or transformers.Trainer
    return of(args=transformers.TrainingArguments(**arguments), train_dataset=rows(), **given)


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """Zeros of one weight at the beginning and after every step of each training, and the optimizer that made it."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []
        self.optimizers: list[Any] = []
        self.rates: list[list[float]] = []
        self.folders: list[str] = []

    @staticmethod
    def weight(model: Any) -> Tensor:
        found: Tensor = model.bert.encoder.layer[0].intermediate.dense.weight
        return found

    def on_train_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        steps = [one["step"] for one in of["optimizer"].state_dict()["state"].values() if "step" in one]
        assert not any(steps)
        self.runs.append([int((self.weight(of["model"]) == 0).sum())])
        self.optimizers.append(of["optimizer"])
        self.rates.append([])
        self.folders.append(args.output_dir)

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        self.runs[-1].append(int((self.weight(of["model"]) == 0).sum()))
        self.rates[-1].append(of["optimizer"].param_groups[0]["lr"])


HALF = 16 * 32 // 2


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"bf16": True},
        {"optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "cosine"},
        {"lr_scheduler_type": "linear"},
    ],
)
def test_masks_hold_after_every_step_of_a_fresh_training(arguments: dict[str, Any], tmp_path: Path) -> None:
    watch = Watch()
    trainer = trainer_of(tmp_path, callbacks=[watch], **arguments)
    model, args = trainer.model, trainer.args
    result = prune_trainer(trainer, quiet=True)
    steps = 4 // arguments.get("gradient_accumulation_steps", 1)
    assert watch.runs == [[0] * (steps + 1), [HALF] * (steps + 1)]
    assert watch.optimizers[0] is not watch.optimizers[1]
    assert watch.rates[0] == watch.rates[1]
    assert len(set(watch.rates[0])) == (1 if "lr_scheduler_type" not in arguments else steps)
    assert result.model is model is trainer.model
    assert result.masks.violations(model) == {}
    assert trainer.args is args
    assert list(result.metrics) == ["dense", "pruned", "retrained"]
    assert {"eval_loss", "eval_accuracy", "eval_runtime"} <= set(result.metrics["retrained"])
    assert result.skipped["bert.embeddings.word_embeddings.weight"].startswith("embedding")


def test_print_leaves_out_what_only_counts_and_times(tmp_path: Path) -> None:
    shown = str(prune_trainer(trainer_of(tmp_path), quiet=True)).splitlines()
    for line, phase in zip(shown, ("dense", "pruned", "retrained"), strict=False):
        assert line.split()[::2] == [phase, line.split()[2], line.split()[4]]
        assert line.split()[1::2] == ["eval_loss", "eval_accuracy"]


@pytest.mark.parametrize("strategy", ["epoch", "steps", "no"])
def test_checkpoints_of_the_dense_training_stay(strategy: str, tmp_path: Path) -> None:
    more = {"save_steps": 2} if strategy == "steps" else {}
    prune_trainer(trainer_of(tmp_path / "out", save_strategy=strategy, **more), quiet=True)
    from safetensors.torch import load_file

    names = ["checkpoint-2", "checkpoint-4"] if strategy == "steps" else ["checkpoint-4"]
    if strategy == "no":
        assert not list((tmp_path / "out").glob("**/checkpoint-*"))
        return
    for folder, zeros in ((tmp_path / "out", 0), (tmp_path / "out" / "retrained", HALF)):
        assert sorted(path.name for path in folder.glob("checkpoint-*")) == names
        for name in names:
            weights = load_file(folder / name / "model.safetensors")
            assert int((weights["bert.encoder.layer.0.intermediate.dense.weight"] == 0).sum()) == zeros


def test_the_best_model_of_the_retraining_is_loaded_at_its_end(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, load_best_model_at_end=True, save_strategy="epoch", eval_strategy="epoch", save_total_limit=1,
        metric_for_best_model="accuracy", num_train_epochs=2,
    )  # fmt: skip
    result = prune_trainer(trainer, quiet=True)
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path / "retrained"
    assert result.masks.violations(result.model) == {}
    assert result.metrics["retrained"]["eval_accuracy"] == pytest.approx(trainer.state.best_metric)
    assert len(list(tmp_path.glob("checkpoint-*"))) >= 1


def test_early_stopping_counts_anew(tmp_path: Path) -> None:
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    watch = Watch()

    def worse(found: Any, seen: list[int] = []) -> dict[str, float]:  # noqa: B006 - counts the calls
        seen.append(1)
        return {"score": -float(len(seen))}

    trainer = trainer_of(
        tmp_path, callbacks=[stopping, watch], compute_metrics=worse, load_best_model_at_end=True, num_train_epochs=9,
        save_strategy="epoch", eval_strategy="epoch", metric_for_best_model="score", greater_is_better=True,
    )  # fmt: skip
    prune_trainer(trainer, quiet=True)
    assert [len(run) - 1 for run in watch.runs] == [12, 12]  # three epochs of four steps each


def test_a_model_made_by_the_trainer_keeps_its_pruned_weights(tmp_path: Path) -> None:
    watch = Watch()
    trainer = trainer_of(tmp_path, model_init=bert, callbacks=[watch])
    init = trainer.model_init
    result = prune_trainer(trainer, quiet=True)
    assert watch.runs == [[0] * 5, [HALF] * 5]
    assert result.model is trainer.model
    assert trainer.model_init is init


def test_a_class_derived_from_trainer_with_its_own_loss_and_optimizer(tmp_path: Path) -> None:
    made: list[torch.optim.Optimizer] = []

    class Own(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            found = model(**inputs)
            return (2 * found.loss, found) if return_outputs else 2 * found.loss

        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            if self.optimizer is None:
                self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3)
                made.append(self.optimizer)
            return self.optimizer

    trainer = trainer_of(tmp_path, Own)
    result = prune_trainer(trainer, quiet=True)
    assert len(made) == 2
    assert result.masks.violations(trainer.model) == {}
    assert set(prune_trainer(trainer, trained=True, quiet=True).metrics) == {"dense", "pruned", "retrained"}
    assert len(made) == 3


def test_a_trainer_that_has_trained(tmp_path: Path) -> None:
    watch = Watch()
    trainer = trainer_of(tmp_path, callbacks=[watch])
    trainer.train()
    with pytest.raises(AspError, match="trained already; say trained=True"):
        prune_trainer(trainer)
    before = trainer.evaluate()["eval_loss"]
    result = prune_trainer(trainer, trained=True, quiet=True)
    assert watch.runs == [[0] * 5, [HALF] * 5]
    assert watch.folders == [str(tmp_path), str(tmp_path / "retrained")]
    assert result.metrics["dense"]["eval_loss"] == pytest.approx(before)


@pytest.mark.parametrize("has_trained", [False, True])
def test_an_optimizer_that_was_given_is_refused(has_trained: bool, tmp_path: Path) -> None:
    model = bert()
    trainer = trainer_of(tmp_path, model=model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.5), None))
    if has_trained:
        trainer.train()
    before = Watch.weight(model).clone()
    with pytest.raises(AspError, match=r"given its optimizer or scheduler.*TrainingArguments"):
        prune_trainer(trainer, trained=has_trained)
    assert torch.equal(Watch.weight(model), before)


def test_an_optimizer_class_is_made_again(tmp_path: Path) -> None:
    watch = Watch()
    trainer = trainer_of(tmp_path, optimizer_cls_and_kwargs=(torch.optim.Adagrad, {"lr": 0.01}), callbacks=[watch])
    trainer.train()
    prune_trainer(trainer, trained=True, quiet=True)
    assert [type(optimizer.optimizer) for optimizer in watch.optimizers] == [torch.optim.Adagrad] * 2


def test_nothing_is_left_behind_by_a_training_that_fails(tmp_path: Path) -> None:
    class Fails(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            if args.output_dir.endswith("retrained") and state.global_step == 2:
                raise RuntimeError("power cut")

    trainer = trainer_of(tmp_path, callbacks=[Fails()], model_init=bert)
    args, init = trainer.args, trainer.model_init
    with pytest.raises(RuntimeError, match="power cut"):
        prune_trainer(trainer, quiet=True)
    assert (trainer.args, trainer.model_init) == (args, init)
    assert args.output_dir == str(tmp_path)
    assert all(not p._post_accumulate_grad_hooks for p in trainer.model.parameters())


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"train": [1]}, "the Trainer has its own data and loss"),
        ({"evaluate": lambda model: 1.0}, "the Trainer has its own data and loss"),
        ({"loss": nn.CrossEntropyLoss()}, "the Trainer has its own data and loss"),
        ({"epochs": 3}, "epochs: would have no effect here"),
        ({"recipe": {"seed": 3}}, "seed: would have no effect here"),
        ({"exclude": ["encode"]}, "'encode' matches no layer"),
    ],
)
def test_what_would_be_ignored_is_refused(keys: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(AspError, match=match):
        prune_trainer(trainer_of(tmp_path), **keys)


@pytest.mark.parametrize("missing", ["train_dataset", "eval_dataset"])
def test_missing_data_is_found_before_the_training(missing: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    setattr(trainer, missing, None)
    with pytest.raises(AspError, match=f"the Trainer has no {missing}"):
        prune_trainer(trainer)
    assert trainer.state.global_step == 0


def pruned(folder: Path) -> PruneResult:
    return prune_trainer(trainer_of(folder), exclude=["classifier", "*pooler*"], quiet=True)


def test_a_dense_export_loads_with_plain_transformers(tmp_path: Path) -> None:
    result = pruned(tmp_path / "out")
    folder = result.export(tmp_path / "dense")
    again = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokens = torch.tensor([row["input_ids"] for row in rows(8)])
    with torch.inference_mode():
        assert torch.equal(again(tokens).logits, result.model.eval()(tokens).logits)
    assert not [key for key in json.loads((folder / "config.json").read_text()) if "spars" in key or "quant" in key]


@pytest.mark.parametrize(("format", "load"), [("dense", load_dense), ("packed", load_packed)])
def test_exports_load_into_the_architecture(format: str, load: Callable[..., Any], tmp_path: Path) -> None:
    result = pruned(tmp_path / "out")
    other = load(result.export(tmp_path / format, format), bert()).eval()
    tokens = torch.tensor([row["input_ids"] for row in rows(8)])
    with torch.inference_mode():
        assert torch.equal(other(tokens).logits, result.model.eval()(tokens).logits)


def test_batches_in_our_loop_after_a_trainer_in_bf16(tmp_path: Path) -> None:
    prune_trainer(trainer_of(tmp_path, bf16=True), quiet=True)
    batch = {key: torch.tensor([row[key] for row in rows()]) for key in ("input_ids", "labels")}
    result = prune_trainer(bert(), train=[batch] * 3, evaluate=[batch], quiet=True, optimizer={"lr": 0.01})
    assert set(result.metrics["retrained"]) == {"loss", "accuracy", "samples"}
