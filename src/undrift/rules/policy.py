"""A trained agent as a small file: the actor's weights, what it steers, and a digest of both.

The file is safetensors; its metadata holds a description as JSON and the SHA-256 of everything.
It is read without the packages that trained it, and nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import stat
import struct
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from torch import Tensor

from undrift.core.tree import record, static
from undrift.errors import PolicyError, unknown_name
from undrift.guarded.text import parse_json

FORMAT = "1"
SUFFIX = ".safetensors"
KEPT = "policy-"  # how the names of copies begin
MOST_BYTES = 16_000_000  # a policy is small; anything larger is something else


# what a table of names and settings that makes no sense raises when it is taken apart
_SENSELESS = (LookupError, TypeError, AttributeError, ValueError, RuntimeError, struct.error)

_copies: dict[str, Path] = {}  # by digest: policies that runs have kept beside their numbers


class Knob(NamedTuple):
    """What a policy may turn: between which values, and how far in one round."""

    low: float
    high: float
    reach: float  # an action of 1 adds this much


KNOBS = {
    "alpha1": Knob(0.0, 0.999, 0.1),
    "alpha2": Knob(0.0, 0.9999, 0.1),
    "server_lr": Knob(-1.0, 1.0, 0.1),  # in decades: the learning rate is server_lr * 10^knob
}
SEEN = ("pca", "knobs")
SCALES = ("run", "fit")
ACTIONS = ("change", "offset", "value")


@record
class Steering:
    """What an agent sees and what it turns.

    It sees `pca`, the state of the paper, and perhaps where its `knobs` stand.  `scale` makes the
    former a plain number: "run" standardises it by mean and deviation of the rounds so far, "fit"
    divides it by the deviation of what the direction was fitted on.  `action` "change" turns a knob
    from where it stands, "offset" from where it started, each by at most `reach`; one number is
    for all knobs.  "value" is the knob itself: -1 and 1 are the ends of its range.
    """

    knobs: tuple[str, ...] = static(default=("alpha1", "alpha2"))
    reach: tuple[float, ...] | float | None = static(default=None)
    sees: tuple[str, ...] = static(default=("pca",))
    scale: str = static(default="run", choices=SCALES)
    action: str = static(default="change", choices=ACTIONS)

    def __post_init__(self) -> None:
        if self.action == "value" and self.reach is not None:
            raise PolicyError(
                f"Steering.reach = {self.reach!r} with action 'value': an action is the knob "
                "itself, from one end of its range to the other; leave reach out"
            )
        for name, known in (("knobs", tuple(KNOBS)), ("sees", SEEN)):
            given = _names(name, getattr(self, name), known)
            object.__setattr__(self, name, given)
        reach = self.reach
        far = [KNOBS[k].reach for k in self.knobs] if reach is None else _each(reach, self.knobs)
        plain = all(type(v) in (int, float) and 0 < v <= 1 for v in far)
        if len(far) != len(self.knobs) or not plain:
            raise PolicyError(
                f"Steering.reach = {reach!r}: give one number in (0, 1] for each of the knobs "
                f"{', '.join(self.knobs)}"
            )
        if self.action != "value":
            object.__setattr__(self, "reach", tuple(float(v) for v in far))

    @property
    def limits(self) -> tuple[Knob, ...]:
        """Give the range and the reach of every knob, in order."""
        known = [KNOBS[name] for name in self.knobs]
        if not isinstance(self.reach, tuple):
            return tuple(known)
        return tuple(k._replace(reach=far) for k, far in zip(known, self.reach, strict=True))

    @property
    def inputs(self) -> int:
        """Count the numbers that an agent sees."""
        return sum(1 if name == "pca" else len(self.knobs) for name in self.sees)


def _each(reach: Any, knobs: tuple[str, ...]) -> list[Any]:
    return list(reach) if isinstance(reach, tuple | list) else [reach] * len(knobs)


def _names(field: str, given: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(given, str | tuple | list):
        raise PolicyError(f"Steering.{field} = {given!r}: give names, among {', '.join(known)}")
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if name not in known:
            raise unknown_name(field, name, list(known), "Steering")
    if not names or len(set(names)) < len(names):
        raise PolicyError(f"Steering.{field} = {names!r}: name at least one, and each once")
    return names


class Agent(NamedTuple):
    """What a policy file holds."""

    layers: tuple[tuple[Tensor, Tensor], ...]  # (weight, bias), float32, the last one linear
    steering: Steering
    about: dict[str, Any]  # how it was trained
    digest: str


@record
class Policy:
    """A policy by its file, or by the name of one that comes with the package.

    `digest` is the SHA-256 that the file must have; a run remembers the one that it began with.
    """

    source: str = static()
    digest: str = static(default="")

    def __post_init__(self) -> None:
        found = self._kept() or read_policy(self.source)
        if self.digest and self.digest != found.digest:
            raise PolicyError(
                f"policy {self.source!r} has the digest {found.digest[:12]}..., but "
                f"{str(self.digest)[:12]}... is asked for: it is another policy of that name"
            )
        object.__setattr__(self, "digest", found.digest)

    @property
    def agent(self) -> Agent:
        """Read what the file holds; it may have been written again since it was named."""
        found = self._kept() or read_policy(self.source)
        if found.digest != self.digest:
            raise PolicyError(
                f"policy {self.source!r} has changed: it had the digest {self.digest[:12]}... "
                f"and has {found.digest[:12]}... now; build the algorithm again to use it"
            )
        return found

    def _kept(self) -> Agent | None:
        """Read the copy that a run has kept, if there is one of this digest."""
        copy = _copies.get(self.digest)
        try:
            found = None if copy is None else read_policy(copy)
        except PolicyError:  # damaged, or gone: the file itself may be there
            return None
        return found if found is not None and found.digest == self.digest else None


def shipped_policies() -> dict[str, Path]:
    """List the policies in the package by name."""
    folder = Path(str(files("undrift") / "policies"))
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def policy_named(source: str | Path) -> Policy:
    """Take a shipped policy by its name, any other by its whole path: runs resume anywhere."""
    name = str(source) if isinstance(source, Path) else source
    if not isinstance(name, str) or name in shipped_policies():
        return Policy(name)
    is_path = name.endswith(SUFFIX) or _is_file(name)
    return Policy(str(Path(name).absolute()) if is_path else name)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # no name that a file can have
        return False


def _place_of(source: str | Path) -> Path:
    return shipped_policies().get(str(source), Path(source))


def copy_of_policy(source: str) -> tuple[str, bytes]:
    """Give a policy as a file for the folder of a run, which then needs no other one."""
    path = _place_of(source)
    data = path.read_bytes()
    return f"{KEPT}{decode_policy(data, str(path)).digest[:12]}{SUFFIX}", data


def is_kept_policy(name: str) -> bool:
    """Whether a file of this name is such a copy."""
    return name.startswith(KEPT) and name.endswith(SUFFIX)


def use_kept_policies(folder: Path) -> None:
    """Let policies be read from the copies in a run's folder, whatever became of their files."""
    for copy in folder.glob(f"{KEPT}*{SUFFIX}"):
        try:
            _copies[read_policy(copy).digest] = copy.absolute()
        except PolicyError:
            continue  # said when it is needed and nowhere else


def read_policy(source: str | Path) -> Agent:
    """Read a policy and check all of it: bytes, shapes, numbers."""
    if not isinstance(source, str | Path) or not str(source) or "\0" in str(source):
        raise PolicyError(f"policy = {source!r}: give the name of a policy, or the path of a file")
    path = _place_of(source)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a device or a pipe may have no end
            raise PolicyError(f"{path} is no file: give the path of a policy")
        return _read(path, found.st_mtime_ns, found.st_size)
    except (FileNotFoundError, NotADirectoryError):
        if path.suffix != SUFFIX:
            raise unknown_name("policy", str(source), list(shipped_policies())) from None
        raise PolicyError(f"no policy file {path}: train one with `undrift train-agent`") from None
    except OSError as error:
        raise PolicyError(f"cannot read the policy file {path}: {error.strerror}") from error


@lru_cache(maxsize=16)
def _read(path: Path, stamp: int, size: int) -> Agent:
    if size > MOST_BYTES:
        raise PolicyError(f"{path} has {size} bytes: a policy is smaller, this is something else")
    return decode_policy(path.read_bytes(), str(path))


def encode_policy(
    layers: tuple[tuple[Tensor, Tensor], ...], steering: Steering, about: dict[str, Any]
) -> bytes:
    """Write a policy as the bytes of its file."""
    tensors = {
        f"{i}.{part}": value.detach().to("cpu", torch.float32).contiguous()
        for i, layer in enumerate(layers)
        for part, value in zip(("weight", "bias"), layer, strict=True)
    }
    told = {
        "knobs": list(steering.knobs),
        "reach": [knob.reach for knob in steering.limits],
        "sees": list(steering.sees),
        "scale": steering.scale,
        "trained": about,
    }
    if steering.action != "change":  # files of before do not say it
        told["action"] = steering.action
    text = json.dumps(told, sort_keys=True, allow_nan=False)
    digest = _digest(tensors, text)
    data = _in_order(
        write_tensors(tensors, {"undrift-policy": FORMAT, "about": text, "sha256": digest})
    )
    decode_policy(data, "this policy")  # what could not be read is not written
    return data


def _in_order(data: bytes) -> bytes:
    """Sort what safetensors writes in any order: the same policy gives the same bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)  # numbers begin at a multiple of 8
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def decode_policy(data: bytes, place: str) -> Agent:
    """Read the bytes of a policy file."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        about = parse_json(data[8 : 8 + length])["__metadata__"]
        text, digest, form = about["about"], about["sha256"], about["undrift-policy"]
        tensors = read_tensors(data)
        told, found = parse_json(text), _digest(tensors, text)
    except (SafetensorError, *_SENSELESS) as error:
        raise PolicyError(
            f"{place} is no policy file, or it was cut off ({type(error).__name__}): copy it again"
        ) from error
    if form != FORMAT:
        raise PolicyError(f"{place} has format {form!r}; this version of undrift reads {FORMAT!r}")
    if found != digest:
        raise PolicyError(f"{place} is not as it was written, its digest differs: copy it again")
    steering = _steering(told, place)
    return Agent(_layers(tensors, steering, place), steering, told.get("trained", {}), digest)


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    made = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        made.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        flat = value.reshape(-1)
        made.update(flat.view(torch.uint8).numpy().tobytes() if len(flat) else b"")
    return made.hexdigest()


def _steering(told: dict[str, Any], place: str) -> Steering:
    try:
        given = {name: tuple(told[name]) for name in ("knobs", "reach", "sees")}
        action = told.get("action", "change")
        if action == "value":
            del given["reach"]
        return Steering(**given, scale=told["scale"], action=action)
    except _SENSELESS as error:
        raise PolicyError(f"{place} does not say what it steers: {error}") from error


def _layers(
    tensors: dict[str, Tensor], steering: Steering, place: str
) -> tuple[tuple[Tensor, Tensor], ...]:
    names = [f"{i}.{part}" for i in range(len(tensors) // 2) for part in ("weight", "bias")]
    if not names or sorted(names) != sorted(tensors):
        raise PolicyError(f"{place} has the tensors {sorted(tensors)}: layers were left out")
    layers = tuple((tensors[w], tensors[b]) for w, b in zip(names[::2], names[1::2], strict=True))
    width = steering.inputs
    for i, (weight, bias) in enumerate(layers):
        _check_layer(i, weight, bias, width, place)
        width = len(weight)
    if width != len(steering.knobs):
        raise PolicyError(
            f"{place} gives {width} numbers for {len(steering.knobs)} knobs "
            f"({', '.join(steering.knobs)}): it was trained for something else"
        )
    return layers


def _check_layer(i: int, weight: Tensor, bias: Tensor, width: int, place: str) -> None:
    if weight.dim() != 2 or weight.shape[1] != width or bias.shape != weight.shape[:1]:
        what = f"weight {list(weight.shape)} and bias {list(bias.shape)}"
        raise PolicyError(f"{place}: layer {i} has {what}, but {width} inputs come to it")
    if any(v.dtype != torch.float32 for v in (weight, bias)):
        kinds = f"{weight.dtype} and {bias.dtype}"
        raise PolicyError(f"{place}: layer {i} has {kinds}: policies are written as float32")
    if not all(bool(torch.isfinite(v).all()) for v in (weight, bias)):
        raise PolicyError(f"{place}: layer {i} holds NaN or infinity")
