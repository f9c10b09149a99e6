"""ONNX: the network with the meaning of its outputs, for programs that know nothing of undrift.

Input "x" [n, ...], prepared features in float32 (or the whole numbers of a text); output
"probabilities" [n, C] or "values" [n, ...] in their own units.  The texts of the safetensors file
are in its metadata.  Shapes: n rows, C classes.
"""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from undrift.core.random import fold, normal
from undrift.errors import ConfigError, DataError, MissingExtra
from undrift.experiment.blueprint import Blueprint
from undrift.guarded.limits import Unreadable
from undrift.guarded.text import read_bytes
from undrift.using.exported import FORMAT, MARK, described, description
from undrift.using.package import Package

SUFFIX = ".onnx"
MOST_BYTES = 2**31 - 1  # of one ONNX file, by its format
TRIED = 7  # rows on which the file is compared with the model
NEAR = 1e-5

Run = Callable[[Tensor], NDArray[np.float64]]


class Meaning(nn.Module):
    """A network followed by what makes probabilities or values of its outputs."""

    def __init__(self, module: nn.Module, blueprint: Blueprint) -> None:
        super().__init__()
        self.module, self.blueprint = module, blueprint
        self.dtype = next(module.parameters()).dtype

    def forward(self, x: Tensor) -> Tensor:
        """Give what is predicted, [n, ...] float32."""
        given = x if self.blueprint.whole else x.to(self.dtype)
        return self.blueprint.meaning(self.module(given)).float()


def encode(package: Package, card: str, trust: bool = False) -> bytes:
    """Write a package as the bytes of an ONNX file, compared with the model on a few rows."""
    need("onnx"), need("onnxscript"), need("onnxruntime")
    onnx = need("onnx")
    network = Meaning(package.module(trust), package.blueprint).eval()
    x = some_rows(package.blueprint, TRIED)
    proto = _exported(network, x, package)
    texts = {MARK: FORMAT, "about": description(package), "card": card}
    onnx.helper.set_model_props(proto, texts)
    if proto.ByteSize() > MOST_BYTES:
        raise ConfigError(
            f"{package.place}: {proto.ByteSize()} bytes are more than an ONNX file can have: "
            "export to .safetensors"
        )
    data: bytes = proto.SerializeToString()
    _compare(network, data, package)
    return data


def _exported(network: Meaning, x: Tensor, package: Package) -> Any:
    probable = package.blueprint.gives == "probabilities"
    rows = torch.export.Dim("n", min=1)
    try:
        with torch.no_grad(), _quiet():
            program = torch.onnx.export(
                network,
                (x,),
                input_names=["x"],
                output_names=["probabilities" if probable else "values"],
                dynamic_shapes=({0: rows},),
                dynamo=True,
                verbose=False,
            )
    except Exception as error:
        told = str(error).strip().split("\n")[0][:200]
        raise ConfigError(
            f"{package.place}: the network {package.blueprint.use!r} cannot be written as ONNX "
            f"({type(error).__name__}: {told}): export to .safetensors"
        ) from error
    assert program is not None, "a program is given where no file is named"
    return program.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to ourselves what the exporter says about itself; an error still comes out."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    unheard = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(unheard), redirect_stderr(unheard):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _compare(network: Meaning, data: bytes, package: Package) -> None:
    """Refuse a file that does not say what the model says, for another number of rows, too."""
    run = opened(data, package.place)[0]
    for count in (TRIED + 4, 1):
        x = some_rows(package.blueprint, count)
        with torch.no_grad():
            wanted = network(x).double().numpy()
        apart = np.abs(run(x) - wanted) / np.maximum(1.0, np.abs(wanted))
        if not apart.max() <= NEAR:
            raise ConfigError(
                f"{package.place}: as ONNX it predicts otherwise, by {apart.max():.2g} on one of "
                f"{count} rows: export to .safetensors"
            )


def some_rows(blueprint: Blueprint, count: int) -> Tensor:
    """Make rows of the kind that a model reads."""
    shape = (count, *blueprint.shape)
    size = int(np.prod(shape))
    if blueprint.whole:  # the first numbers are words of every vocabulary
        return (torch.arange(size) % 2).view(shape)
    return normal(fold(0, "rows to try"), torch.arange(size)).float().view(shape)


# -------------------------------------------------------------------------------------- reading
def read_onnx(path: Path) -> tuple[Package, Run]:
    """Read an exported ONNX file: its description, and what runs it."""
    need("onnxruntime")
    try:
        data = read_bytes(path, "weights_bytes")
    except Unreadable as error:
        raise DataError(f"{path}: {error}") from error
    run, texts = opened(data, str(path))
    if MARK not in texts:
        raise DataError(
            f"{path} was not written by `undrift export`: it does not say what its inputs mean. "
            "Run it with onnxruntime, or export the run"
        )
    if texts[MARK] != FORMAT:
        raise DataError(
            f"{path} has format {texts[MARK]!r}, this version of undrift reads {FORMAT!r}: use the "
            "version that wrote it"
        )
    return described(texts.get("about", ""), {}, str(path)), run


def opened(data: bytes, place: str) -> tuple[Run, dict[str, str]]:
    """Open the bytes of an ONNX file: what runs it, and its texts.

    Bytes, not a path: a model that refers to other files on the disk does not get them.
    """
    runtime = need("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what is wrong is said once, by us
    try:
        session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        texts = dict(session.get_modelmeta().custom_metadata_map)
        [name] = [one.name for one in session.get_inputs()]
    except Exception as error:  # of classes that onnxruntime makes as it needs them
        told = str(error).strip().split("\n")[0][:200]
        raise DataError(f"{place} cannot be read as ONNX ({told}): copy it again") from error

    def run(x: Tensor) -> NDArray[np.float64]:
        found: NDArray[np.float64] = session.run(None, {name: x.numpy()})[0].astype(np.float64)
        return found

    return run, texts


def need(package: str) -> Any:
    """Import a package of the extra."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtra(
            f"ONNX needs {package}, which is not installed: pip install 'undrift[onnx]'"
        ) from error
