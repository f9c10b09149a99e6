"""The layers of each network: plain sequences of torch's own, which engines run fastest.

The layer that feeds the last one is called "feature"; setups that name a feature mean it.
Images are [B, channels, pixels, pixels]; flat inputs may have any shape of the right size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from undrift.errors import ConfigError
from undrift.models.settings import whole


def sequence(**layers: nn.Module) -> nn.Sequential:
    """Put named layers in a row."""
    return nn.Sequential(OrderedDict(layers))


def mlp(inputs: int, hidden: int | Sequence[int] = 32, classes: int = 10) -> nn.Sequential:
    """Make a multi-layer perceptron with ReLU; `hidden=()` is softmax regression."""
    several = isinstance(hidden, Sequence) and not isinstance(hidden, str)
    widths: list[int] = [*hidden] if several else [hidden]  # type: ignore[misc, list-item]
    sizes = [whole("inputs", inputs), *(whole("hidden", width) for width in widths)]
    layers: dict[str, nn.Module] = {"feature" if not widths else "flatten": nn.Flatten()}
    for i, (a, b) in enumerate(pairwise(sizes), start=1):
        layers[f"fc{i}"] = nn.Linear(a, b)
        layers["feature" if i == len(widths) else f"relu{i}"] = nn.ReLU()
    return sequence(**layers, head=nn.Linear(sizes[-1], whole("classes", classes)))


def emnist_mlp(classes: int = 10) -> nn.Sequential:
    """Make FedDyn's network for EMNIST-L: 784-100-100-classes."""
    return mlp(784, (100, 100), classes)


def mnist_2nn(classes: int = 10) -> nn.Sequential:
    """Make the 2NN of McMahan et al. (2017): 784-200-200-classes."""
    return mlp(784, (200, 200), classes)


def mcmahan_cnn(pixels: int = 28, channels: int = 1, classes: int = 10) -> nn.Sequential:
    """Make the CNN of McMahan et al. (2017) for MNIST; 32 pixels and 3 channels for CIFAR."""
    if whole("pixels", pixels) % 4:
        raise ConfigError(
            f"pixels = {pixels} cannot be halved twice; 28 and 32 are usual: resize the images"
        )
    return sequence(
        conv1=nn.Conv2d(whole("channels", channels), 32, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 5, padding=2),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * (pixels // 4) ** 2, 512),
        feature=nn.ReLU(),
        head=nn.Linear(512, whole("classes", classes)),
    )


def rfedavg_cifar(classes: int = 10) -> nn.Sequential:
    """Make rFedAvg's network for CIFAR-10 images brought to 28 pixels."""
    return mcmahan_cnn(28, 3, classes)


def feddyn_cnn(classes: int = 10, hidden: int = 384) -> nn.Sequential:
    """Make FedDyn's network for CIFAR; its code has 384 hidden units, its text 394."""
    return sequence(
        conv1=nn.Conv2d(3, 64, 5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(64, 64, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(1600, whole("hidden", hidden)),
        relu3=nn.ReLU(),
        fc2=nn.Linear(hidden, 192),
        feature=nn.ReLU(),
        head=nn.Linear(192, whole("classes", classes)),
    )


def simple_cnn(classes: int = 10) -> nn.Sequential:
    """Make pfl-research's benchmark network for CIFAR-10, with dropout."""
    return sequence(
        conv1=nn.Conv2d(3, 32, 3),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 3),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        dropout1=nn.Dropout(0.25),
        flatten=nn.Flatten(),
        fc1=nn.Linear(12544, 128),
        feature=nn.ReLU(),
        dropout2=nn.Dropout(0.5),
        head=nn.Linear(128, whole("classes", classes)),
    )


def fedrl_mnist(classes: int = 10) -> nn.Sequential:
    """Make FedRL's network for MNIST; its convolutions have no ReLU."""
    return sequence(
        conv1=nn.Conv2d(1, 20, 5),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(20, 50, 5),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(800, 500),
        feature=nn.ReLU(),
        head=nn.Linear(500, whole("classes", classes)),
    )


def autoencoder(inputs: int = 784, hidden: int = 128) -> nn.Sequential:
    """Make FedRL's auto-encoder: outputs in (0, 1), flat; the code is its feature."""
    inputs, hidden = whole("inputs", inputs), whole("hidden", hidden)
    return sequence(
        flatten=nn.Flatten(),
        fc1=nn.Linear(inputs, hidden),
        relu1=nn.ReLU(),
        fc2=nn.Linear(hidden, hidden),
        feature=nn.ReLU(),
        fc3=nn.Linear(hidden, hidden),
        relu3=nn.ReLU(),
        fc4=nn.Linear(hidden, inputs),
        output=nn.Sigmoid(),
    )


def lenet(pixels: int = 32, channels: int = 3, classes: int = 10) -> nn.Sequential:
    """Make MOON's network: LeNet's layers, then a projection to 256, which is its feature."""
    if whole("pixels", pixels) % 4 or pixels < 16:
        raise ConfigError(
            f"pixels = {pixels} does not fit two 5x5 convolutions that are halved; 28 and 32 are "
            "usual: resize the images"
        )
    return sequence(
        conv1=nn.Conv2d(whole("channels", channels), 6, 5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(16 * (pixels // 4 - 3) ** 2, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        fc3=nn.Linear(84, 84),
        relu5=nn.ReLU(),
        fc4=nn.Linear(84, 256),
        feature=nn.Identity(),  # no ReLU: the projection may be negative
        head=nn.Linear(256, whole("classes", classes)),
    )
