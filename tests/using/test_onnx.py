"""ONNX files say what the model says, for any number of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import undrift as fl
from undrift.errors import ConfigError, DataError, MissingExtra
from undrift.experiment.blueprint import Blueprint
from undrift.models import build
from undrift.using import Package, Predictor, onnx_file
from undrift.using.card import card_of
from undrift.using.export import export

from .making import COLUMNS, packaged, spread, trained


def needs_onnx() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="the extra onnx is not installed")


@pytest.mark.parametrize("target", ["classes", "number", "count"])
def test_a_table_predicts_by_onnx_what_it_predicts_by_torch(target: str, tmp_path: Path) -> None:
    needs_onnx()
    package = spread(packaged(target))
    (tmp_path / "a.onnx").write_bytes(onnx_file.encode(package, card_of(package)))
    model = fl.load_model(tmp_path / "a.onnx")
    assert model.package.preparation == package.preparation
    wanted, found = Predictor(package)(COLUMNS), model(COLUMNS)
    assert np.allclose(found.outputs, wanted.outputs, rtol=1e-5, atol=1e-5)
    x = torch.randn(1500, package.blueprint.shape[0])
    assert np.allclose(model(x).outputs, Predictor(package)(x).outputs, rtol=1e-5, atol=1e-5)


def test_onnxruntime_alone_reads_names_shapes_and_texts(tmp_path: Path) -> None:
    needs_onnx()
    import onnxruntime

    place, package = export(trained(tmp_path / "a"), tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(str(place))
    [x], [out] = session.get_inputs(), session.get_outputs()
    assert (x.name, x.type, x.shape[1:]) == ("x", "tensor(float)", [5])
    assert (out.name, out.shape[1:]) == ("probabilities", [3])
    assert isinstance(x.shape[0], str), "n is any number"
    rows = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    (found,) = session.run(None, {"x": rows})
    wanted = package.module()(torch.from_numpy(rows)).softmax(1).detach().numpy()
    assert np.abs(found - wanted).max() < 1e-5
    texts = session.get_modelmeta().custom_metadata_map
    assert texts["card"].startswith("# Model card: tiny") and '"blueprint"' in texts["about"]


@pytest.mark.parametrize(
    ("name", "settings", "shape"),
    [
        ("logistic", {"inputs": 4, "classes": 3}, (4,)),
        ("tabular_resnet", {"inputs": 9, "blocks": [1, 5, 3], "width": 6}, (9,)),
        ("lenet", {"pixels": 16, "channels": 1}, (1, 16, 16)),
    ],
)
def test_networks_of_the_catalogue_can_be_written(
    name: str, settings: dict[str, object], shape: tuple[int, ...]
) -> None:
    needs_onnx()
    net = build(name, 0, **settings)
    blueprint = Blueprint(name, settings, shape, False, "probabilities")
    data = onnx_file.encode(Package(blueprint, None, net.state_dict(), {}, "here"), "")
    run, _ = onnx_file.opened(data, "here")
    x = torch.randn(5, *shape)
    assert np.abs(run(x) - net.eval()(x).softmax(1).detach().numpy()).max() < 1e-5


def test_a_file_that_says_something_else_is_not_written() -> None:
    needs_onnx()
    package = packaged()
    good = onnx_file.encode(package, "")
    other = onnx_file.Meaning(spread(package).module(), package.blueprint).eval()
    with pytest.raises(ConfigError, match="as ONNX it predicts otherwise"):
        onnx_file._compare(other, good, package)


def test_a_network_that_onnx_cannot_say_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_onnx()

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w if float(x.sum()) > 0 else x  # a decision by numbers

    package = packaged()
    monkeypatch.setattr(Package, "module", lambda self, trust=False: Strange())
    with pytest.raises(ConfigError, match="cannot be written as ONNX") as told:
        onnx_file.encode(package, "")
    assert len(str(told.value).splitlines()) == 1


def test_without_the_extra_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(onnx_file.importlib, "import_module", missing)
    with pytest.raises(MissingExtra, match=r"pip install 'undrift\[onnx\]'"):
        onnx_file.encode(packaged(), "")
    (tmp_path / "a.onnx").write_bytes(b"")
    with pytest.raises(MissingExtra, match=r"pip install 'undrift\[onnx\]'"):
        fl.load_model(tmp_path / "a.onnx")


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    needs_onnx()
    import onnx

    data = onnx_file.encode(packaged(), "")
    proto = onnx.load_from_string(data)
    del proto.metadata_props[:]
    for bad, message in (
        (data[: len(data) // 2], "cannot be read as ONNX"),
        (b"", "cannot be read as ONNX"),
        (proto.SerializeToString(), "was not written by `undrift export`"),
    ):
        (tmp_path / "a.onnx").write_bytes(bad)
        with pytest.raises(DataError, match=message):
            fl.load_model(tmp_path / "a.onnx")
