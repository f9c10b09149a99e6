"""What would go wrong if a module were trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from undrift.core.ops import Pass, running
from undrift.errors import TaskError

# Floating numbers that a task widens to its own precision without losing anything.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Whole numbers and flags stay as they are: frozen parameters and buffers may hold them.
WHOLE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)


def check_tensors(module: nn.Module) -> None:
    """Refuse parameters and buffers whose numbers training would lose, all of them at once."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    strange = {name: why for name, t in tensors if (why := _strange(t))}
    if strange:
        told = "; ".join(f"{name!r} {why}" for name, why in list(strange.items())[:6])
        more = f"; and {len(strange) - 6} more" if len(strange) > 6 else ""
        raise TaskError(
            f"tensors of the module that cannot be trained with: {told}{more}.  Parameters and "
            "buffers hold real numbers of 16 to 64 bits, dense, on a device (a complex number is "
            "two real ones: torch.view_as_real)"
        )


def check_values_there(module: nn.Module) -> None:
    """Refuse to begin at parameters and buffers without values, all of them at once.

    A task may be made of them, to count parameters; training cannot begin there.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    if empty := [name for name, t in named if t.is_meta]:
        told = ", ".join(map(repr, empty[:6])) + (", ..." if len(empty) > 6 else "")
        raise TaskError(
            f"{len(empty)} tensors of the module have no values (meta device): {told}. "
            "Load some first (module.to_empty, load_state_dict)"
        )


def _strange(t: Tensor) -> str:
    if is_lazy(t):
        return ""  # `prepare` says what to do
    if t.dtype not in FLOATS and (t.dtype not in WHOLE or t.requires_grad):
        return f"is {str(t.dtype).removeprefix('torch.')}"
    dense = t.layout is torch.strided and not t.is_nested
    if not dense and isinstance(t, nn.Parameter):
        return f"is stored as {str(t.layout).removeprefix('torch.')}"
    return ""


def find_trouble(module: nn.Module, example_input: Any, *extra: Any) -> list[str]:
    """Run a prepared module once and say, a sentence each, what would go wrong in training.

    Found: random operations other than ours, and buffers that the forward pass changes.
    Not found: randomness that does not come from torch (Python's `random`, numpy).
    """
    twin = copy.deepcopy(module)
    if not twin.training:
        twin.train()
    before = {name: (value, value._version) for name, value in twin.named_buffers()}
    with _RandomOps(twin) as seen, _own_generators(example_input), torch.enable_grad():
        try:
            with running(_trial_pass(example_input)):
                twin(example_input, *extra)
        except TaskError as error:
            return [*dict.fromkeys(seen.sentences), str(error)]
    after = dict(twin.named_buffers())
    changed = [n for n, (old, version) in before.items() if _touched(after.get(n), old, version)]
    return [*dict.fromkeys(seen.sentences), *map(_changed_sentence, changed)]


def _trial_pass(example: Any) -> Pass:
    device = example.device if isinstance(example, Tensor) else None
    rows = len(example) if isinstance(example, Tensor) else None
    mask = None if rows is None else torch.ones(rows, dtype=torch.bool, device=device)
    return Pass(mask, torch.zeros((), dtype=torch.int64, device=device), True)


@contextmanager
def _own_generators(example: Any) -> Iterator[None]:
    """Put torch's generators back as they were."""
    on_card = isinstance(example, Tensor) and example.device.type == "cuda"
    with torch.random.fork_rng(devices=[example.device] if on_card else []):
        yield


def _touched(now: Tensor | None, old: Tensor, version: int) -> bool:
    # The version also counts a write that happened to leave the value as it was.
    return now is not old or now._version != version


def _changed_sentence(name: str) -> str:
    return (
        f"the forward pass changes the buffer {name!r}, which clients trained together would "
        "share: return the value as an output, or use BatchNorm, whose buffers are kept per client"
    )


class _RandomOps(TorchDispatchMode):
    """Watch for operations that draw from a generator, and for the submodule that calls them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sentences: list[str] = []
        self.inside: list[str] = []
        for name, part in module.named_modules():
            place = f"{name!r} ({type(part).__name__})" if name else type(part).__name__
            part.register_forward_pre_hook(lambda *_, place=place: self.inside.append(place))
            part.register_forward_hook(lambda *_: self._leave())

    def _leave(self) -> None:
        self.inside.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args):
            self.sentences.append(_random_sentence(self.inside, func.overloadpacket.__name__))
        return func(*args, **(kwargs or {}))


def _without_dropout(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell an attention kernel that could draw, but has nothing to drop."""
    names = [a.name for a in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    given = dict(zip(names, args, strict=False))
    return bool(given.get("dropout_p", 0.0) == 0.0)


def _random_sentence(inside: list[str], op: str) -> str:
    place = inside[-1] if inside else "the module"
    what = f"{op} (F.dropout calls it)" if op in ("bernoulli_", "native_dropout") else op
    return (
        f"{place} draws random numbers with {what}, which would depend on the order of clients: "
        "use nn.Dropout as a submodule, or draw with undrift.core.random from current_pass().key"
    )
