"""A rule as a stranger writes it: a file of its own, public names only."""

import torch

from undrift import Rule, number, record


@record
class ClientMomentum(Rule):
    """FedCM (Xu et al. 2021): mix every local gradient with the server's last direction.

    alpha = 1: FedAvg.
    """

    alpha: float = number(default=0.1, low=0, high=1, ends="(]")

    def init_server(self, w, sizes):
        return torch.zeros_like(w)  # the direction per local step

    def broadcast(self, state):
        return state

    def direction(self, g, view):
        return self.alpha * g + (1 - self.alpha) * view.broadcast

    def finish(self, delta, view):
        return delta, view.mine, delta / (view.steps * view.lr)

    def server(self, update, state, view):
        return update, view.upload / view.count


@record
class HeadFirst(Rule):
    """Train the last layer alone in the first round; it tells parameters apart by name."""

    def direction(self, g, view):
        names = view.task.named(g)
        last = names.keys() - [n for n in names if n.startswith("0.")]
        kept = torch.cat([v.reshape(-1) * float(n in last) for n, v in names.items()])
        return torch.where(view.round == 0, kept, g)


@record
class CappedPull(Rule):
    """Pull towards the own last model, by a force of at most `cap`; keeps one vector per client."""

    strength: float = number(default=0.1, low=0)
    cap: float = number(default=0.05, low=0)

    def init_client(self, w, sizes):
        return {"last": torch.zeros_like(w), "met": w.new_zeros(())}

    def direction(self, g, view):
        pull = self.strength * view.mine["met"] * (view.w - view.mine["last"])
        return g + pull * (self.cap / pull.norm().clamp(min=1e-12)).clamp(max=1.0)

    def finish(self, delta, view):
        return delta, {"last": view.w, "met": torch.ones_like(view.mine["met"])}, ()
