"""The `task` section: network, data, metric. One class per data source, the same with and without network."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from asp_toolkit.recipe.section import Section

Size = Annotated[int, Field(gt=0)]
Shape = Annotated[tuple[Size, Size, Size], Strict(False)]  # not strict: YAML has lists only


class Callable_(Section):
    """A function or class by name, with its keyword arguments."""

    name: str = Field(description="package.module:name of a function or class")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments it is called with")


class ModelSpec(Section):
    """Which network, and where its first weights come from."""

    name: str = Field(
        description="torchvision.models name (image), local folder or hub id (text), or package.module:callable"
    )
    package: str | None = Field(
        default=None,
        description="installed package whose folder `name` is relative to (text tasks: a model shipped in a package)",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments for the model's function or config"
    )
    replace: dict[str, Callable_] = Field(
        default_factory=dict,
        description="submodules replaced after building, by dotted name, e.g. conv1: {name: torch.nn:Identity}",
    )
    weights: str | None = Field(
        default=None,
        description="a .safetensors or .pt file (tensors only), a torchvision weights name, or random; null: random "
        "for images, for text what the model comes with",
    )


class PackageData(Section):
    """Images in one csv file that an installed package ships: one row per image, label in one column."""

    source: Literal["package"] = Field(description="the kind of source")
    package: str = Field(description="name of the installed package")
    file: str = Field(description="path of the file inside the package, .csv or .csv.gz")
    label_column: int = Field(default=-1, description="column of the label; the others are pixels, 0..255")
    shape: Shape = Field(description="channels, height, width of one image")
    test_fraction: float = Field(default=0.2, gt=0, lt=1, description="share held out for testing, stratified by class")


class FolderData(Section):
    """Images on disk: PATH/train/CLASS/*.jpg and PATH/val (or PATH/test)/CLASS/*.jpg."""

    source: Literal["folder"] = Field(description="the kind of source")
    path: str = Field(description="folder that holds train/ and val/ or test/")


class TorchvisionData(Section):
    """A data set class of torchvision.datasets."""

    source: Literal["torchvision"] = Field(description="the kind of source")
    name: str = Field(description="class name in torchvision.datasets, e.g. FashionMNIST")
    root: str = Field(default="~/.cache/asp_toolkit/data", description="where torchvision keeps the data")
    local: str | None = Field(
        default=None,
        description="folder that may hold the raw files, gzipped or not: used where it exists, before any download",
    )
    hint: str | None = Field(default=None, description="command shown to the user when the data cannot be had")


class HubData(Section):
    """A data set of the `datasets` library: a hub id or a local folder."""

    source: Literal["huggingface"] = Field(description="the kind of source")
    name: str = Field(description="hub id or local folder")
    config: str | None = Field(default=None, description="configuration name of the data set")
    train_split: str = Field(default="train", description="split to train on")
    test_split: str = Field(default="test", description="split to test on")
    image: str = Field(default="image", description="column of the image (image tasks)")
    text: str = Field(default="text", description="column of the text (text tasks)")
    label: str = Field(default="label", description="column of the label")


class FilesData(Section):
    """Texts in csv, json (lines) or parquet files."""

    source: Literal["files"] = Field(description="the kind of source")
    train: str = Field(description="file to train on: .csv, .json, .jsonl or .parquet")
    test: str = Field(description="file to test on, same columns")
    text: str = Field(default="text", description="column of the text")
    label: str = Field(default="label", description="column of the label")


class CallableData(Section):
    """The user's own: a function that returns (train, test) map-style data sets."""

    source: Literal["callable"] = Field(description="the kind of source")
    name: str = Field(description="package.module:function returning (train, test)")
    options: dict[str, Any] = Field(default_factory=dict, description="its keyword arguments")


class SyntheticData(Section):
    """Random inputs with random labels, to try a recipe without its data."""

    source: Literal["synthetic"] = Field(description="the kind of source")
    size: int = Field(default=64, gt=0, description="training samples; as many again for testing")
    classes: int = Field(default=10, gt=1, description="number of classes")
    shape: Shape = Field(default=(3, 32, 32), description="channels, height, width (image tasks)")
    length: int = Field(default=16, gt=0, description="words per text (text tasks)")


ImageSource = Annotated[
    PackageData | FolderData | TorchvisionData | HubData | CallableData | SyntheticData, Field(discriminator="source")
]
TextSource = Annotated[FilesData | HubData | CallableData | SyntheticData, Field(discriminator="source")]


class Transform(Section):
    """Image preparation, in this order: resize, crop, shift, flip, normalise."""

    resize: int | None = Field(
        default=None, gt=0, description="shorter side after resizing; training as well, unless it crops at random size"
    )
    random_resized_crop: int | None = Field(
        default=None, gt=0, description="training: random area and aspect, to this side"
    )
    random_crop_padding: int | None = Field(
        default=None, gt=0, description="training: pad by this many pixels, crop back at random"
    )
    center_crop: int | None = Field(
        default=None, gt=0, description="side of the central crop; testing only where random_resized_crop is set"
    )
    flip: bool = Field(default=False, description="training: mirror left-right with probability 0.5")
    mean: list[float] | None = Field(default=None, description="per channel, on a 0..1 scale; null leaves that scale")
    std: list[float] | None = Field(default=None, description="per channel, on a 0..1 scale")


class _TaskSection(Section):
    kind: str = Field(description="the kind of task")
    model: ModelSpec = Field(description="the network")
    limit_train: int | None = Field(
        default=None, gt=0, description="use at most so many training samples, drawn by seed"
    )
    limit_test: int | None = Field(default=None, gt=0, description="use at most so many test samples, drawn by seed")
    workers: int = Field(default=0, ge=0, description="data loading processes; 0 loads in the training process")


class ImageTask(_TaskSection):
    """Image classification."""

    kind: Literal["image_classification"] = Field(description="the kind of task")
    data: ImageSource = Field(description="where the images come from")
    transform: Transform = Field(default_factory=Transform, description="image preparation")
    channels_last: bool = Field(
        default=True, description="keep images and weights channels-last while training; faster on most machines"
    )
    metric: Literal["accuracy", "top5"] = Field(
        default="accuracy", description="the figure that phases are compared by"
    )


class TextTask(_TaskSection):
    """Text classification with a transformers AutoModelForSequenceClassification."""

    kind: Literal["text_classification"] = Field(description="the kind of task")
    data: TextSource = Field(description="where the texts come from")
    classes: int = Field(gt=1, description="number of classes")
    max_length: int = Field(default=128, gt=0, description="tokens kept per text")
    padding: Literal["batch", "max_length"] = Field(
        default="batch",
        description="fill every batch up to its longest text (faster), or all to max_length (one shape)",
    )
    metric: Literal["accuracy"] = Field(default="accuracy", description="the figure that phases are compared by")


class QATask(_TaskSection):
    """Extractive question answering (SQuAD form) with a transformers AutoModelForQuestionAnswering."""

    kind: Literal["question_answering"] = Field(description="the kind of task")
    data: Annotated[HubData | CallableData | SyntheticData, Field(discriminator="source")] = Field(
        description="samples with question, context, answers {text, answer_start}"
    )
    max_length: int = Field(default=384, gt=0, description="tokens per window")
    stride: int = Field(default=128, gt=0, description="tokens by which neighbouring windows overlap")
    metric: Literal["f1", "exact"] = Field(default="f1", description="token-span figure per window, averaged")


TaskSection = Annotated[ImageTask | TextTask | QATask, Field(discriminator="kind")]
