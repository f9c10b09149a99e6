"""Local work: how many steps a client takes in a round, and on which of its examples.

Letters: C clients of a cohort, K most steps among them, B slots of a batch, n_i examples of
client i, W slots of one epoch.

A plan depends on (seed, round, client id) and the client's size alone, so any subset of a cohort
in any order gets the same batches; only the padding follows the company a client keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from undrift.core.random import Word, fold, integers, permutation
from undrift.core.transfer import send
from undrift.core.tree import record, static
from undrift.data.checks import check_whole
from undrift.errors import ConfigError, unknown_name

AT_ONCE = 2**18  # positions that are shuffled at a time

Range = int | tuple[int, int]  # a number, or the ends of a uniform draw per client and round
Last = Literal["keep", "drop", "bootstrap", "full"]
LASTS = ["keep", "drop", "bootstrap", "full"]


class Plan(NamedTuple):
    """The batches of a cohort, as positions within each client's own examples."""

    order: Tensor  # [C, K, B] -1 pads
    steps: Tensor  # [C] on the CPU: steps of each client; its batches from there on are padding


class Room(NamedTuple):
    """What the batches of any cohort have room in."""

    steps: int
    batch: int
    epochs: int
    width: int  # slots of an epoch


class LocalWork(Protocol):
    """Any object with these two methods plans local work.

    Both must depend on a client's id and size, never on its place in `ids`.
    """

    def plan(
        self,
        seed: int,
        round: int,
        ids: Tensor,
        sizes: Tensor,
        device: torch.device | str | None = None,
    ) -> Plan:
        """Plan a round for clients `ids` [C] with `sizes` [C] usable examples, on `device`."""

    def steps_of(self, seed: int, round: int, ids: Tensor, sizes: Tensor) -> Tensor:
        """Count the steps of each client, [C] on the CPU, without making the plan."""


@record
class Work:
    """Local epochs or steps over mini-batches, shuffled anew every epoch.

    A pair (low, high) draws a whole number per client and round, both ends included.  `last` says
    what becomes of an epoch's short last batch: "keep" it, "drop" it (a client with less than one
    batch then rests), "bootstrap" it up to `batch` with own examples drawn with replacement
    (AdaBest).  `last="full"` or `batch=None` takes all examples in every step.  Neither epochs
    nor steps means one epoch.

    >>> Work(epochs=(1, 5), batch=45, last="bootstrap").epochs
    (1, 5)
    >>> Work(steps=10).plan(0, 0, torch.arange(3), torch.tensor([50, 9, 70])).order.shape
    torch.Size([3, 10, 32])
    """

    epochs: Range | None = static(default=None)
    steps: Range | None = static(default=None)
    batch: int | None = static(default=32)
    last: Last = static(default="keep")

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(
                f"Work has epochs = {self.epochs} and steps = {self.steps}: give one of them, "
                "and None for the other"
            )
        if str(self.last) == "drop_last":  # torch's name for it
            object.__setattr__(self, "last", "drop")
        if self.last not in LASTS:
            raise unknown_name("way to end an epoch", self.last, LASTS, "Work.last")
        if self.batch is not None:
            check_whole("Work.batch", self.batch)
            if self.batch >= 2**31:
                raise ConfigError(
                    f"Work.batch = {self.batch}: for all examples in one batch say None"
                )
        name = "epochs" if self.steps is None else "steps"
        low, high = _ends(name, self.amount)
        object.__setattr__(self, name, low if low == high else (low, high))

    @property
    def amount(self) -> Range:
        """Tell how much is done: a number of epochs, or of steps."""
        if self.steps is not None:
            return self.steps
        return 1 if self.epochs is None else self.epochs

    @property
    def slots(self) -> int | None:
        """Tell how many examples a step takes; None for all of them."""
        return None if self.last == "full" else self.batch

    def per_epoch(self, sizes: Tensor) -> Tensor:
        """Count the batches that one epoch gives to clients of these sizes."""
        batch = self.slots
        if batch is None:
            return (sizes > 0).long()
        return (sizes if self.last == "drop" else sizes + batch - 1) // batch

    def steps_of(self, seed: int, round: int, ids: Tensor, sizes: Tensor) -> Tensor:
        low, high = _ends("amount", self.amount)
        ids, per_epoch = ids.cpu(), self.per_epoch(sizes.cpu())  # sync, if they are on a device
        amount: int | Tensor = low
        if low < high:
            amount = integers(fold(seed, "work", round, ids), 0, low, high + 1)
        return amount * per_epoch if self.steps is None else torch.where(per_epoch > 0, amount, 0)

    def most_steps(self, sizes: Tensor) -> Tensor:
        """Tell the most steps that clients of these sizes take in any round."""
        _, high = _ends("amount", self.amount)
        per_epoch = self.per_epoch(sizes)
        return high * per_epoch if self.steps is None else torch.where(per_epoch > 0, high, 0)

    def slots_each(self, sizes: Tensor, steps: Tensor) -> Tensor:
        """Count the positions that a plan holds, or shuffles at a time, for each client."""
        sizes, steps = sizes.cpu(), steps.cpu()
        return torch.maximum(sizes, steps * (sizes if self.slots is None else self.slots))

    def plan(
        self,
        seed: int,
        round: int,
        ids: Tensor,
        sizes: Tensor,
        device: torch.device | str | None = None,
    ) -> Plan:
        device = ids.device if device is None else torch.device(device)
        # Counts stay on the host, for they decide shapes; only the order is made on the device.
        ids, sizes = ids.cpu(), sizes.cpu()  # sync, if they are on a device
        steps, per_epoch = self.steps_of(seed, round, ids, sizes), self.per_epoch(sizes)
        if self.slots is None:
            return _full(sizes, steps, device)
        num_steps = _most(steps)
        # One step more than needed: where the unused batches of every epoch are written to.
        order = torch.full((len(ids), num_steps + 1, self.slots), -1, device=device)
        for epochs, who in _active(steps, per_epoch):
            width = -(-_most(sizes[who]) // self.slots) * self.slots
            for some in epochs.split(max(1, AT_ONCE // (len(who) * width))):
                key = (round, send(ids[who, None], device), send(some, device))
                count = torch.arange(width, device=device)
                slots = self._epoch(seed, key, send(sizes[who, None], device), count)
                batches = slots.view(len(who), -1, self.slots)
                place = _places(some, steps[who], per_epoch[who], width // self.slots, num_steps)
                order[send(who, device)[:, None], send(place, device)] = batches
        return Plan(order[:, :num_steps].contiguous(), steps)

    def room(self, sizes: Tensor) -> Room:
        """Tell what `order` needs for any cohort of clients of these sizes."""
        steps, per_epoch = self.most_steps(sizes), self.per_epoch(sizes)
        longest, most = _most(sizes), _most(steps)
        if self.slots is None:
            return Room(most, longest, 1, longest)
        epochs = _most(-(-steps // per_epoch.clamp(min=1)))
        return Room(most, self.slots, epochs, -(-longest // self.slots) * self.slots)

    def order(
        self,
        seed: int | Tensor,
        round: Word,
        ids: Tensor,
        sizes: Tensor,
        steps: Tensor,
        room: Room,
        count: Tensor | None = None,
    ) -> Tensor:
        """Make the order of `plan` [C, K, B] where the tensors are, without asking the host.

        `count` may bring the numbers from 0 on, as many as the room needs.
        """
        if count is None:
            most = max(room.steps, room.batch, room.width, room.epochs)
            count = torch.arange(most, device=ids.device)
        k, slot = count[: room.steps], count[: room.batch]
        taken = (k < steps[:, None])[..., None]
        if self.slots is None:
            inside = (slot < sizes[:, None])[:, None]
            return torch.where(inside & taken, slot, -1)
        slots, epochs = count[: room.width], count[: room.epochs]
        # all epochs at once: written one by one, a compiler would take seconds for each
        dealt = self._epoch(seed, (round, ids[:, None], epochs), sizes[:, None], slots)
        per_epoch = self.per_epoch(sizes).clamp(min=1)[:, None]
        start = k // per_epoch * room.width + k % per_epoch * room.batch
        # beyond a client's last step anything will do: it is masked
        place = (start[..., None] + slot).clamp(max=room.epochs * room.width - 1)
        picked = dealt.flatten(1).gather(1, place.flatten(1)).view_as(place)
        return torch.where(taken, picked, -1)

    def _epoch(
        self, seed: int | Tensor, key: tuple[Word, ...], sizes: Tensor, slots: Tensor
    ) -> Tensor:
        """Shuffle each client's examples into the slots of an epoch: [..., W]."""
        order = permutation(fold(seed, "batches", *key), sizes, len(slots), slots)
        if self.last != "bootstrap":
            return order
        again = integers(fold(seed, "bootstrap", *key)[..., None], slots, 0, sizes[..., None])
        return torch.where(order < 0, again, order)


def _ends(name: str, amount: Range) -> tuple[int, int]:
    # A configuration file has lists where Python has tuples.
    ends = tuple(amount) if isinstance(amount, (tuple, list)) else (amount, amount)
    if len(ends) != 2:
        raise ConfigError(f"Work.{name} = {amount}: give a number or a pair (low, high)")
    low, high = ends
    check_whole(f"Work.{name}", low)
    check_whole(f"Work.{name}", high)
    if low > high:
        raise ConfigError(f"Work.{name} = ({low}, {high}): the low end exceeds the high end")
    return low, high


def _most(counts: Tensor) -> int:
    return int(counts.max()) if len(counts) else 0


def _active(steps: Tensor, per_epoch: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """List epochs in which the same clients still have steps to take, and their places."""
    epochs, first = -(-steps // per_epoch.clamp(min=1)), 0
    for last in epochs[epochs > 0].unique().tolist():
        yield torch.arange(first, last), (epochs > first).nonzero().flatten()
        first = last


def _places(epochs: Tensor, steps: Tensor, per_epoch: Tensor, batches: int, spare: int) -> Tensor:
    """Tell at which step [C, E * batches] each batch of some epochs is taken.

    Unused ones go to `spare`.
    """
    slot, per_epoch = torch.arange(batches), per_epoch[:, None, None]
    place = epochs[:, None] * per_epoch + slot
    used = (slot < per_epoch) & (place < steps[:, None, None])
    return torch.where(used, place, spare).flatten(1)


def _full(sizes: Tensor, steps: Tensor, device: torch.device) -> Plan:
    # In the client's own order: shuffling a full batch would only change how sums are rounded.
    slot, step = torch.arange(_most(sizes), device=device), torch.arange(_most(steps))
    sizes, taken = send(sizes, device), send(step < steps[:, None], device)
    used = (slot < sizes[:, None])[:, None] & taken[..., None]
    return Plan(torch.where(used, slot, -1), steps)


Batches = Sequence[Sequence[int]]  # one list of positions per step


@dataclass(frozen=True)
class ExplicitWork:
    """Replay batches that somebody else drew: the positions of each step by (round, client).

    >>> work = ExplicitWork({(0, 7): [[2, 0], [1]]})
    >>> work.plan(0, 0, torch.tensor([7]), torch.tensor([3])).order.tolist()
    [[[2, 0], [1, -1]]]
    """

    orders: Mapping[tuple[int, int], Batches]

    def __post_init__(self) -> None:
        for (round, client), batches in self.orders.items():
            for step, batch in enumerate(batches):
                if not len(batch):
                    raise ConfigError(
                        f"round {round}, client {client}: step {step} has an empty batch; leave "
                        "it out or name a position"
                    )

    def _batches(self, round: int, client: int) -> Batches:
        if (round, client) not in self.orders:
            raise ConfigError(f"no batches for client {client} in round {round}; add them")
        return self.orders[round, client]

    def steps_of(self, seed: int, round: int, ids: Tensor, sizes: Tensor) -> Tensor:
        return torch.tensor([len(self._batches(round, i)) for i in ids.tolist()], dtype=torch.int64)

    def plan(
        self,
        seed: int,
        round: int,
        ids: Tensor,
        sizes: Tensor,
        device: torch.device | str | None = None,
    ) -> Plan:
        device = ids.device if device is None else torch.device(device)
        steps = self.steps_of(seed, round, ids, sizes)
        lists = [self._batches(round, i) for i in ids.tolist()]
        for client, batches, size in zip(ids.tolist(), lists, sizes.tolist(), strict=True):
            _check_positions(round, client, batches, size)
        width = max((len(b) for batches in lists for b in batches), default=0)
        order = torch.full((len(ids), _most(steps), width), -1)
        for row, batches in zip(order, lists, strict=True):
            for slots, batch in zip(row, batches, strict=False):  # the rest of `row` is padding
                slots[: len(batch)] = torch.as_tensor(batch)
        return Plan(send(order, device), steps)


def _check_positions(round: int, client: int, batches: Batches, size: int) -> None:
    for step, batch in enumerate(batches):
        outside = [int(p) for p in batch if not 0 <= p < size]
        if outside:
            raise ConfigError(
                f"round {round}, client {client}, step {step}: position {outside[0]} is outside "
                f"the client's {size} examples; positions count from 0 within its own data"
            )
