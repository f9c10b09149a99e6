"""Rules that break one promise each."""

from dataclasses import dataclass

import torch

from undrift import Rule, number, record, static
from undrift.core.tree import EMPTY

calls = []


@dataclass(frozen=True)
class OnlyDataclass(Rule):
    mu: float = 0.1


class NotDecorated(Rule):
    pass


@record
class HasText(Rule):
    kind: str = "adam"


@record
class WritesOnItself(Rule):
    def direction(self, g, view):
        object.__setattr__(self, "last", g)
        return g


@record
class FillsOwnList(Rule):
    seen: list = static(default=None)

    def __post_init__(self):
        object.__setattr__(self, "seen", [])

    def finish(self, delta, view):
        self.seen.append(1)
        return delta, view.mine, EMPTY


@record
class ChangesGradient(Rule):
    def direction(self, g, view):
        return g.mul_(0.5)


@record
class ChangesServerState(Rule):
    def init_server(self, w, sizes):
        return {"m": torch.zeros_like(w)}

    def server(self, update, state, view):
        state["m"].add_(update)
        return state["m"], {"m": state["m"].clone()}


@record
class Random(Rule):
    def direction(self, g, view):
        return g + torch.randn_like(g)


@record
class CountsCalls(Rule):
    def direction(self, g, view):
        calls.append(1)
        return g * len(calls)


@record
class BranchesOnValue(Rule):
    def direction(self, g, view):
        return g if g.norm() < 0.1 else g / g.norm()


@record
class LoopsOnValue(Rule):
    def finish(self, delta, view):
        for _ in range(int(view.steps)):
            delta = delta * 0.9
        return delta, view.mine, EMPTY


@record
class BranchesOnNumber(Rule):
    mu: float = number(default=0.1, low=0)

    def direction(self, g, view):
        return g + self.mu * view.w if self.mu > 0 else g


@record
class StateGrows(Rule):
    def init_client(self, w, sizes):
        return w.new_zeros(1)

    def finish(self, delta, view):
        return delta, torch.cat([view.mine, view.mine]), EMPTY


@record
class ServerStateGrows(Rule):
    def init_server(self, w, sizes):
        return w.new_zeros(1)

    def server(self, update, state, view):
        return update, torch.cat([state, state])


@record
class DoublePrecision(Rule):
    def direction(self, g, view):
        return g * torch.ones(1, dtype=torch.float64)


@record
class RowVaries(Rule):
    def row(self, delta, view):
        return delta[: 1 + int(view.client.id) % 2]


@record
class VectorPenalty(Rule):
    def penalty(self, out, view):
        return out.value.square().sum(0)


@record
class ForgetsUpload(Rule):
    def finish(self, delta, view):
        return delta, view.mine


@record
class DividesByZero(Rule):
    def direction(self, g, view):
        return g / (view.w - view.w0).norm()


@record
class CountsPadding(Rule):
    def review(self, view):
        return view.output_at(view.w).value.mean()

    def finish(self, delta, view):
        return delta, view.mine, view.review

    def server(self, update, state, view):
        return update * view.upload / view.count, state


@record
class DividesByCohort(Rule):
    shares_probe = True

    def probe(self, view):
        return view.grad_at(view.w0)

    def direction(self, g, view):
        return g / view.cohort.norm()


@record
class DependsOnOrder(Rule):
    def row(self, delta, view):
        return delta

    def server(self, update, state, view):
        return view.rows[0], state


@record
class MasksInServer(Rule):
    """Index by a mask where experiments are mapped: fine alone, not in a fleet."""

    def row(self, delta, view):
        return delta.norm()

    def server(self, update, state, view):
        return update / view.rows[view.accepted].mean().clamp(min=1.0), state


@record
class BranchesInServer(Rule):
    def server(self, update, state, view):
        return (update if update.norm() < 1e-3 else 0.5 * update), state


@record
class LoopsInServer(Rule):
    def init_server(self, w, sizes):
        return w.new_zeros(())

    def server(self, update, state, view):
        for _ in range(int(state)):
            update = 0.9 * update
        return update, state + 1


@record
class TakesInWhatWasLeftOut(Rule):
    """Average rows without looking at who was accepted."""

    def row(self, delta, view):
        return delta.norm()

    def server(self, update, state, view):
        return update / (1 + view.rows.mean()), state


@record
class MultipliesMasks(Rule):
    """Multiply by a mask: 0 * NaN is NaN."""

    def init_server(self, w, sizes):
        return w.new_zeros(())

    def row(self, delta, view):
        return delta.norm()

    def server(self, update, state, view):
        return update, state + (view.rows * view.accepted).sum()


@record
class TooSmallForSingle(Rule):
    """Divide by what is there in float64 alone."""

    def direction(self, g, view):
        return g / ((1.0 + g.norm() * 1e-9 + 1e-12) - 1.0)
