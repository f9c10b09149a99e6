"""One file for a model: safetensors with weights, and texts that say all the rest.

The texts in its header: `undrift-model` the format, `about` JSON (blueprint, preparation, origin),
`card` Markdown, `sha256` of everything.  Nothing in it is code, and nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from undrift.errors import DataError
from undrift.experiment.blueprint import Blueprint
from undrift.guarded.limits import Unreadable
from undrift.guarded.tensors import parse_tensors
from undrift.guarded.text import check_json, parse_json, read_bytes
from undrift.tabular import Preparation
from undrift.using.package import Package

MARK, FORMAT = "undrift-model", "1"
SUFFIX = ".safetensors"


def description(package: Package) -> str:
    """Write what is no weight as JSON."""
    preparation = package.preparation
    told = {
        "blueprint": package.blueprint.to_json(),
        "preparation": None if preparation is None else preparation.to_json(),
        "origin": dict(package.about),
    }
    text = json.dumps(told, sort_keys=True, default=str)
    check_json(text)  # what could not be read back is not written
    return text


def encode(package: Package, card: str) -> bytes:
    """Write a package as the bytes of its file."""
    tensors = {n: t.detach().cpu().contiguous().clone() for n, t in package.tensors.items()}
    about = description(package)
    texts = {"format": "pt", MARK: FORMAT, "about": about, "card": card}
    return save(tensors, {**texts, "sha256": digest(tensors, about, card)})


def read_exported(path: Path) -> Package:
    """Read an exported file."""
    try:
        data = read_bytes(path, "weights_bytes")
    except Unreadable as error:
        raise DataError(f"{path}: {error}") from error
    return decode(data, str(path))


def decode(data: bytes, place: str) -> Package:
    """Read the bytes of an exported file; DataError for everything that is wrong with them."""
    try:
        texts, tensors = parse_tensors(data)
    except Unreadable as error:
        raise DataError(f"{place}: {error}: copy it again") from error
    if MARK not in texts:
        raise DataError(
            f"{place} was not written by `undrift export`: it holds weights, and does not say of "
            "which network. Give the run's folder, or export it"
        )
    if texts[MARK] != FORMAT:
        raise DataError(
            f"{place} has format {texts[MARK]!r}, this version of undrift reads {FORMAT!r}: use "
            "the version that wrote it"
        )
    about, card = texts.get("about", ""), texts.get("card", "")
    if digest(tensors, about, card) != texts.get("sha256"):
        raise DataError(f"{place} is not as it was written, its SHA-256 differs: copy it again")
    return described(about, tensors, place)


def described(about: str, tensors: Mapping[str, Tensor], place: str) -> Package:
    """Make a package of its description and its weights."""
    try:
        told: Any = parse_json(about)
        blueprint = Blueprint.from_json(told["blueprint"], place)
        given, origin = told["preparation"], told["origin"]
        if not isinstance(origin, dict):
            raise TypeError("origin is no table")
    except (Unreadable, KeyError, TypeError) as error:
        raise DataError(
            f"{place} does not describe its model ({error}): export it again"
        ) from error
    preparation = None if given is None else Preparation.from_json(given)
    return Package(blueprint, preparation, tensors, origin, place)


def digest(tensors: Mapping[str, Tensor], *texts: str) -> str:
    """Give the SHA-256 of tensors, by name, and of texts."""
    made = hashlib.sha256()
    for text in texts:
        made.update(f"{len(text)} {text}\n".encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        made.update(f"{name} {value.dtype} {list(value.shape)}\n".encode("utf-8", "surrogatepass"))
        flat = value.reshape(-1)
        made.update(flat.view(torch.uint8).numpy().data if len(flat) else b"")
    return made.hexdigest()
