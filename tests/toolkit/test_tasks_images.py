"""Image tasks: preparation, splits, networks, and everything that must fail before training."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.schema import ImageTask, Transform
from asp_toolkit.tasks import build_task
from asp_toolkit.tasks.data.sets import Images, limited, stratified
from asp_toolkit.tasks.images import collate, normaliser, prepare, random_resized_crop
from asp_toolkit.tasks.models import small_cnn
from asp_toolkit.tasks.task import Task

SMALL = "asp_toolkit.tasks.models:small_cnn"
NOISE = {"source": "synthetic", "shape": [1, 28, 28], "size": 12}


def section(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **rest: Any) -> ImageTask:
    given = {"kind": "image_classification", "model": model or {"name": SMALL}, "data": data or NOISE, **rest}
    return ImageTask.model_validate(given)


def task_of(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **rest: Any) -> Task:
    return build_task(section(model, data, **rest), 0)


def test_build_draws_from_the_global_generator_and_the_door_check_does_not() -> None:
    state = torch.get_rng_state()
    task = task_of()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    first = task.build()
    torch.manual_seed(3)
    second = task.build()
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in pairs)
    assert not torch.equal(next(iter(task.build().parameters())), pairs[0][0])


def test_small_cnn_suits_two_of_four() -> None:
    model = small_cnn()
    contractions = [m.in_channels for m in model if isinstance(m, nn.Conv2d)][1:]
    contractions += [m.in_features for m in model if isinstance(m, nn.Linear)]
    assert all(length % 16 == 0 for length in contractions)
    assert 400_000 < sum(p.numel() for p in model.parameters()) < 900_000
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(ValueError, match="multiple of 4"):
        small_cnn(image_size=30)


def test_loss_and_measure_agree_with_by_hand() -> None:
    task = task_of()
    model = task.build().eval()
    batch = task.collate([task.test[i] for i in range(12)])
    logits = task.forward(model, batch)
    assert isinstance(logits, Tensor)
    by_hand = -torch.log_softmax(logits.double(), 1)[torch.arange(12), batch[1]]
    values = task.measure(model, batch)
    torch.testing.assert_close(values["loss"].double(), by_hand, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(task.loss(model, batch, 0.0).double(), by_hand.mean(), rtol=1e-5, atol=1e-6)
    assert values["accuracy"].tolist() == [float(row.argmax() == c) for row, c in zip(logits, batch[1], strict=True)]
    assert task.loss(model, batch, 0.5) != task.loss(model, batch, 0.0)


def test_top5_counts_the_five_greatest() -> None:
    task = task_of(metric="top5")
    assert task.metric == "top5"
    batch = (torch.zeros(2, 1), torch.tensor([0, 9]))
    values = task.measure(lambda images: torch.arange(10.0).expand(2, 10), batch)  # type: ignore[arg-type]
    assert values["top5"].tolist() == [0.0, 1.0]
    model = {"name": SMALL, "options": {"num_classes": 4}}
    with pytest.raises(AspError, match="top5 says nothing of 4 classes"):
        task_of(model, {**NOISE, "classes": 4}, metric="top5")


# Preparation


def test_normalising_a_batch_is_the_textbook_formula() -> None:
    images = torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
    transform = Transform(mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7])
    batch, labels = collate([(image, 1) for image in images], normaliser(transform, 3))
    mean, std = (torch.tensor(v).double().view(3, 1, 1) for v in (transform.mean, transform.std))
    torch.testing.assert_close(batch.double(), (images.double() / 255 - mean) / std, rtol=1e-5, atol=1e-6)
    assert batch.dtype == torch.float32
    assert labels.tolist() == [1] * 5


def test_float_images_keep_their_scale_and_stay_as_they_are() -> None:
    image = torch.rand(1, 4, 4)
    before = image.clone()
    batch, _ = collate([(image, 0)], normaliser(Transform(), 1))
    assert torch.equal(batch[0], image)
    collate([(image, 0)], normaliser(Transform(mean=[0.5], std=[0.5]), 1))
    assert torch.equal(image, before)


def test_flip_and_shift_happen_in_training_only() -> None:
    transform = Transform(flip=True, random_crop_padding=2)
    assert prepare(transform, training=False) is None
    change = prepare(transform, training=True)
    assert change is not None
    image = torch.arange(1, 65, dtype=torch.uint8).reshape(1, 8, 8)
    torch.manual_seed(0)
    seen = {tuple(change(image).flatten().tolist()) for _ in range(60)}
    assert len(seen) > 20
    padded = torch.zeros(1, 12, 12, dtype=torch.uint8)
    padded[:, 2:10, 2:10] = image
    crops = [padded[:, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
    assert seen <= {tuple(crop.flatten().tolist()) for c in crops for crop in (c, c.flip(-1))}


def test_testing_resizes_and_crops_the_middle_where_training_crops_at_random() -> None:
    transform = Transform(random_resized_crop=8, resize=12, center_crop=8)
    image = torch.zeros(3, 24, 48, dtype=torch.uint8)
    image[:, :, 16:32] = 200
    test = prepare(transform, training=False)
    assert test is not None
    assert test(image).shape == (3, 8, 8)
    assert (test(image)[..., 1:-1] == 200).all()  # the outermost columns blend with what lies beside
    train = prepare(transform, training=True)
    assert train is not None
    torch.manual_seed(0)
    areas = {int((train(image) == 200).sum()) for _ in range(20)}
    assert len(areas) > 3
    assert random_resized_crop(torch.zeros(1, 2, 90, dtype=torch.uint8), 4).shape == (1, 4, 4)  # no crop fits: a square


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ({"mean": [0.5]}, "both mean and std"),
        ({"mean": [0.5, 0.5], "std": [1.0]}, "expected 1 numbers, one per channel, got 2"),
        ({"mean": [0.5], "std": [0.0]}, "above 0"),
    ],
)
def test_impossible_normalising_is_refused(transform: dict[str, Any], message: str) -> None:
    with pytest.raises(AspError, match=message):
        task_of(transform=transform)


def test_everything_a_loading_process_needs_can_be_pickled() -> None:
    transform = {"random_resized_crop": 28, "resize": 30, "center_crop": 28, "random_crop_padding": 2, "flip": True}
    task = task_of(transform={**transform, "mean": [0.5], "std": [0.5]})
    train, test, batching = pickle.loads(pickle.dumps((task.train, task.test, task.collate)))
    assert torch.equal(batching([test[0]])[0], task.collate([task.test[0]])[0])
    assert train[0][0].shape == (1, 28, 28)


# Splits


def test_splits_are_stratified_and_follow_the_seed_alone() -> None:
    labels = torch.tensor([0] * 10 + [1] * 30)
    train, test = stratified(labels, 0.2, 7)
    assert labels[test].tolist() == [0] * 2 + [1] * 6
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(40))
    torch.rand(5)
    again = stratified(labels, 0.2, 7)
    assert torch.equal(test, again[1])
    assert not torch.equal(test, stratified(labels, 0.2, 8)[1])


def test_a_limit_draws_from_everywhere() -> None:
    data = Images(torch.zeros(100, 1, 1, 1, dtype=torch.uint8), [i // 50 for i in range(100)])
    few = limited(data, 20, 0)
    assert len(few) == 20
    assert {few[i][1] for i in range(20)} == {0, 1}
    assert limited(data, 200, 0) is data


# Networks


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "resnet81"}, "did you mean 'resnet18'"),
        ({"name": "resnet18", "options": {"num_clases": 10}}, "num_clases"),
        ({"name": "resnet18", "options": {"num_classes": 10}}, "takes 3 channels, the images have 1"),
        ({"name": SMALL, "options": {"num_classes": 7}}, "7 outputs, the data has 10 classes"),
        ({"name": SMALL, "options": {"image_size": 32}}, r"cannot take images of shape \(1, 28, 28\)"),
        ({"name": SMALL, "replace": {"42": {"name": "torch.nn:Identity"}}}, "no such submodule"),
        (
            {"name": SMALL, "replace": {"1": {"name": "torch:zeros", "options": {"size": [1]}}}},
            "expected a torch.nn.Module",
        ),
        ({"name": "resnet18", "options": {"pretrained": True}}, "task.model.weights"),
        ({"name": "resnet18", "weights": "IMAGENET1K_V9"}, "did you mean 'IMAGENET1K_V1'"),
        ({"name": SMALL, "weights": "nowhere.pt"}, "no file nowhere.pt"),
    ],
)
def test_models_that_do_not_fit_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(AspError, match=message):
        task_of(model)


def test_replaced_submodules_are_independent_and_used() -> None:
    stem = {
        "name": "torch.nn:Conv2d",
        "options": {"in_channels": 1, "out_channels": 64, "kernel_size": 3, "bias": False},
    }
    task = task_of({"name": "resnet18", "options": {"num_classes": 10}, "replace": {"conv1": stem}})
    model = task.build()
    assert tuple(model.conv1.weight.shape) == (64, 1, 3, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_come_from_a_file_whole_or_not_at_all(tmp_path: Path, suffix: str) -> None:
    state = small_cnn().state_dict()
    file = tmp_path / f"weights{suffix}"

    def write(tensors: dict[str, Tensor]) -> None:
        if suffix == ".pt":
            torch.save({"model": tensors, "epoch": 3}, file)
        else:
            save_file(tensors, file)

    write(state)
    model = task_of({"name": SMALL, "weights": str(file)}).build()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    write({key: value for key, value in state.items() if key != "12.bias"})
    with pytest.raises(AspError, match=r"missing 12\.bias"):
        task_of({"name": SMALL, "weights": str(file)})
    write({**state, "extra": torch.zeros(1)})
    with pytest.raises(AspError, match="unexpected extra"):
        task_of({"name": SMALL, "weights": str(file)})
    write({**state, "14.bias": torch.zeros(9)})
    with pytest.raises(AspError, match=r"14\.bias: expected \(10,\), got \(9,\)"):
        task_of({"name": SMALL, "weights": str(file)})
    file.write_bytes(b"damaged")
    with pytest.raises(AspError, match="cannot be read"):
        task_of({"name": SMALL, "weights": str(file)})
