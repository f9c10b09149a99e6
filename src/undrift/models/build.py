"""A network by name, with first weights that depend on a seed alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from undrift.errors import unknown_name
from undrift.models import layers, tabular, text, vgg
from undrift.models.settings import check_settings, whole
from undrift.models.weights import Way, draw_weights, hes_way, torchs_way, xaviers_way

# The functions give the layers; `build` draws the weights.
MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "mlp": layers.mlp,
    "emnist_mlp": layers.emnist_mlp,
    "mnist_2nn": layers.mnist_2nn,
    "mcmahan_cnn": layers.mcmahan_cnn,
    "rfedavg_cifar": layers.rfedavg_cifar,
    "feddyn_cnn": layers.feddyn_cnn,
    "simple_cnn": layers.simple_cnn,
    "fedrl_mnist": layers.fedrl_mnist,
    "fedrl_vgg": vgg.fedrl_vgg,
    "autoencoder": layers.autoencoder,
    "vgg11": vgg.vgg11,
    "lenet": layers.lenet,
    "sent140_lstm": text.sent140_lstm,
    "shakespeare_lstm": text.shakespeare_lstm,
    "logistic": tabular.logistic,
    "tabular_mlp": tabular.tabular_mlp,
    "tabular_resnet": tabular.tabular_resnet,
}
WAYS: Mapping[str, Way] = {"simple_cnn": xaviers_way, "vgg11": hes_way}


def build(name: str, seed: int, **settings: Any) -> nn.Module:
    """Make the network `name`; torch's generators are neither read nor moved.

    >>> net = build("mlp", seed=0, inputs=64, hidden=32, classes=10)
    >>> sum(p.numel() for p in net.parameters())
    2410
    """
    function = MODELS[_known(name)]
    check_settings(function, settings, f"models.{name}")
    # On the meta device a layer's own initialisation draws nothing.
    with torch.device("meta"):
        module = function(**settings)
    for part in module.modules():  # word vectors that were given lie on the CPU already
        if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
            part.to_empty(device="cpu", recurse=False)
    draw_weights(module, whole("seed", seed, 0), WAYS.get(name, torchs_way))
    return module


def feature_of(name: str) -> str:
    """Name the feature layer of a network, as `Task(feature=...)` takes it.

    >>> feature_of("mcmahan_cnn")
    'feature'
    """
    _known(name)
    return "feature"


def _known(name: str) -> str:
    if name not in MODELS:
        raise unknown_name("model", name, list(MODELS), "models")
    return name
