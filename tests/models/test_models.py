import math

import pytest
import torch
from torch import nn

from undrift.core.task import Task
from undrift.engines.plain import is_sequence
from undrift.errors import ConfigError
from undrift.models import MODELS, build, feature_of

COUNTS = [
    ("mlp", {"inputs": 64, "hidden": 32, "classes": 10}, 2_410),
    ("mlp", {"inputs": 60, "hidden": (), "classes": 10}, 610),
    ("emnist_mlp", {}, 89_610),
    ("emnist_mlp", {"classes": 26}, 91_226),
    ("mnist_2nn", {}, 199_210),
    ("mcmahan_cnn", {}, 1_663_370),
    ("mcmahan_cnn", {"classes": 62}, 1_690_046),
    ("mcmahan_cnn", {"pixels": 32, "channels": 3}, 2_156_490),
    ("rfedavg_cifar", {}, 1_664_970),
    ("feddyn_cnn", {}, 797_962),
    ("feddyn_cnn", {"classes": 100}, 815_332),
    ("feddyn_cnn", {"hidden": 394}, 815_892),
    ("simple_cnn", {}, 1_626_442),
    ("fedrl_mnist", {}, 431_080),
    ("fedrl_vgg", {}, 6_916_810),
    ("autoencoder", {}, 234_640),
    ("vgg11", {}, 9_750_922),
    ("vgg11", {"batch_norm": True}, 9_756_426),
    ("vgg11", {"classes": 100}, 9_797_092),
    ("lenet", {}, 92_626),
    ("lenet", {"classes": 100}, 115_756),
    ("lenet", {"pixels": 28, "channels": 1}, 75_046),
    ("sent140_lstm", {}, 1_098_242),
    ("shakespeare_lstm", {}, 819_920),
    ("shakespeare_lstm", {"classes": 90, "vocabulary": 91}, 822_578),
    ("logistic", {"inputs": 20, "classes": 3}, 63),
    ("tabular_mlp", {"inputs": 20, "blocks": (1, 1, 6, 2, 10)}, 3_046),
    ("tabular_mlp", {"inputs": 20, "blocks": (1, 1, 6, 2, 10), "embedding": 2}, 2_754),
    ("tabular_mlp", {"inputs": 20, "hidden": [5]}, 117),
    ("tabular_resnet", {"inputs": 20, "blocks": (1, 1, 6, 2, 10)}, 18_054),
    ("tabular_resnet", {"inputs": 20, "width": 8, "depth": 1}, 362),
]
# input of one example, output, width of the feature layer
SHAPES = {
    "mlp": ((1, 8, 8), 10, 32),
    "emnist_mlp": ((1, 28, 28), 10, 100),
    "mnist_2nn": ((784,), 10, 200),
    "mcmahan_cnn": ((1, 28, 28), 10, 512),
    "rfedavg_cifar": ((3, 28, 28), 10, 512),
    "feddyn_cnn": ((3, 32, 32), 10, 192),
    "simple_cnn": ((3, 32, 32), 10, 128),
    "fedrl_mnist": ((1, 28, 28), 10, 500),
    "fedrl_vgg": ((3, 32, 32), 10, 1024),
    "autoencoder": ((1, 28, 28), 784, 128),
    "vgg11": ((3, 32, 32), 10, 512),
    "lenet": ((3, 32, 32), 10, 256),
    "sent140_lstm": ((25,), 2, 256),
    "shakespeare_lstm": ((80,), 80, 256),
    "logistic": ((20,), 3, 20),
    "tabular_mlp": ((20,), 2, 32),
    "tabular_resnet": ((20,), 2, 64),
}
# an LSTM, a map of columns and a residual block are no plain layers
READERS = {"sent140_lstm", "shakespeare_lstm", "tabular_mlp", "tabular_resnet"}
FIRST = [-0.0847901, 0.1088415, 0.1224031]
NEEDED = {
    "mlp": {"inputs": 64, "hidden": 32, "classes": 10},
    "logistic": {"inputs": 20, "classes": 3},
    "tabular_mlp": {"inputs": 20, "blocks": (1, 1, 6, 2, 10)},
    "tabular_resnet": {"inputs": 20, "blocks": (1, 1, 6, 2, 10)},
}


def make(name, seed=0):
    return build(name, seed, **NEEDED.get(name, {}))


def on_meta(name, **settings):
    """Layers without weights: VGG's ten million take a second to draw."""
    with torch.device("meta"):
        return MODELS[name](**settings)


@pytest.mark.parametrize(("name", "settings", "count"), COUNTS)
def test_parameter_counts(name, settings, count):
    assert Task(on_meta(name, **settings)).size == count


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_the_feature_layer(name):
    given, out, width = SHAPES[name]
    net, seen = make(name), []
    net.get_submodule(feature_of(name)).register_forward_hook(lambda m, i, o: seen.append(o.shape))
    assert net(torch.zeros(2, *given)).shape == (2, out)
    assert seen == [(2, width)]


@pytest.mark.parametrize("name", [name for name in MODELS if name not in READERS])
def test_engines_can_run_it_as_a_plain_sequence(name):
    assert is_sequence(Task(on_meta(name, **NEEDED.get(name, {}))).module)


def test_weights_are_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    one = make("mnist_2nn", 5).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two, other = make("mnist_2nn", 5).state_dict(), make("mnist_2nn", 6).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[n], two[n]) and not torch.equal(one[n], other[n]) for n in one)


def test_first_weights_do_not_change_between_releases():
    weights = make("mlp", 3)[1].weight.flatten()[:3].tolist()
    assert weights == pytest.approx(FIRST, abs=1e-7)


def test_weights_have_torchs_default_distribution():
    layer = make("feddyn_cnn").fc1
    twin = nn.Linear(1600, 384)
    for ours, theirs in ((layer.weight, twin.weight), (layer.bias, twin.bias)):
        assert ours.abs().max() <= 1 / math.sqrt(1600)
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.15)
        assert abs(ours.mean().item()) < 5 * ours.std().item() / math.sqrt(ours.numel())


def test_simple_cnn_has_xavier_weights():
    net = make("simple_cnn")
    for layer, fans in ((net.conv2, 9 * (32 + 64)), (net.fc1, 12544 + 128)):
        bound = math.sqrt(6 / fans)
        assert 0.99 * bound < layer.weight.abs().max() <= bound


def test_vgg11_has_hes_weights_in_its_convolutions():
    net = make("vgg11")
    for layer, outputs in ((net.conv1_1, 9 * 64), (net.conv5_2, 9 * 512)):
        assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / outputs), rel=0.05)
        assert not layer.bias.any()
    assert 0.99 < net.fc1.weight.abs().max() * math.sqrt(512) <= 1


def spread_and_form(values):
    """Tell how wide values lie, and a ratio that is 0.80 of normal and 0.87 of uniform ones."""
    spread = values.std().item()
    return spread, values.abs().mean().item() / spread


@pytest.mark.parametrize("name", ["shakespeare_lstm", "fedrl_vgg"])
def test_every_parameter_and_buffer_starts_as_torch_starts_it(name):
    torch.manual_seed(0)
    ours, theirs = make(name).state_dict(), MODELS[name]().state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if value.numel() < 2 or not value.std():
            assert torch.equal(ours[key], value), key
        elif value.numel() > 500:
            found, wanted = spread_and_form(ours[key]), spread_and_form(value)
            assert found == pytest.approx(wanted, rel=0.15), key
            assert found[1] == pytest.approx(wanted[1], rel=0.04), key


def test_the_autoencoder_answers_between_0_and_1():
    out = make("autoencoder")(torch.full((3, 784), 9.0))
    assert out.min() > 0 and out.max() < 1


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mcmahan_cn", {}, "models: no model named 'mcmahan_cn'. Did you mean 'mcmahan_cnn'"),
        ("feddyn_cnn", {"clases": 10}, "models.feddyn_cnn: .*'clases'. Did you mean 'classes'"),
        ("mlp", {"classes": 2}, "models.mlp: needs the setting 'inputs'"),
        ("mlp", {"inputs": 3, "hidden": 0, "classes": 2}, "hidden must be at least 1, got 0"),
        ("mlp", {"inputs": "3", "hidden": 4, "classes": 2}, "inputs must be a whole number"),
        ("mcmahan_cnn", {"classes": True}, "classes must be a whole number"),
        ("mcmahan_cnn", {"pixels": 30}, "pixels = 30 cannot be halved twice"),
        ("lenet", {"pixels": 30}, "pixels = 30 does not fit"),
        ("vgg11", {"batch_norm": 1}, "batch_norm is true or false, got 1"),
        ("sent140_lstm", {"hidden": 0}, "hidden must be at least 1"),
        ("shakespeare_lstm", {"vocabulary": 0}, "vocabulary must be at least 1"),
        (
            "tabular_mlp",
            {"inputs": 5, "blocks": [2, 4]},
            r"blocks = \[2, 4\] are 6 inputs, but .* 5",
        ),
        ("tabular_mlp", {"inputs": 5, "hidden": []}, r"hidden = \[\]: give a list of widths"),
        ("tabular_mlp", {"inputs": 5, "embedding": "wide"}, "embedding must be a whole number"),
        ("tabular_resnet", {"inputs": 5, "dropout": 1.0}, r"dropout must be a number in \[0, 1\)"),
    ],
)
def test_mistakes_are_named(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(name, 0, **settings)


def test_feature_of_an_unknown_model_is_refused():
    with pytest.raises(ConfigError, match="no model named 'resnet'"):
        feature_of("resnet")
