"""A run small enough to be repeated hundreds of times: client state, dropout, few of many."""

from __future__ import annotations

import contextlib
import hashlib

import torch
from torch import nn

from rules.needs import built, world_for
from undrift.core.task import Task
from undrift.core.tree import named_leaves
from undrift.data import Federation, Uniform, Work
from undrift.rules.named import catalogue
from undrift.trainer import Trainer

CLIENTS, SAMPLED = 20, 3
NAMES = list(catalogue())


def examples(clients=CLIENTS, salt=0):
    chance = torch.Generator().manual_seed(100 + salt)
    sizes = [5 + i % 4 for i in range(clients)]
    return [
        (torch.randn(n, 4, generator=chance), torch.randint(0, 3, (n,), generator=chance))
        for n in sizes
    ]


def network(width=8):
    """Make the same MLP every time; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 3))


def trainer(algorithm="scaffold", *, dtype=torch.float32, clients=CLIENTS, **settings):
    """Build a trainer; `algorithm` is a name of the catalogue or an Algorithm."""
    made = built(algorithm) if isinstance(algorithm, str) else algorithm
    task = settings.pop("task", None) or Task(network(), dtype=dtype, feature="1")
    federation = settings.pop("federation", None) or Federation.of(examples(clients))
    sampler = settings.pop("sampler", Uniform(count=SAMPLED))
    work = settings.pop("work", Work(epochs=1, batch=4))
    chosen = world_for(algorithm, sampler, work) if isinstance(algorithm, str) else {}
    return Trainer(
        task, federation, made, **{"sampler": sampler, "work": work, **chosen}, **settings
    )


def stored(store, place):
    """Give the settings that put client states into memory, or into a file below `place`."""
    return {"state": "file", "state_path": place / "rows"} if store == "file" else {}


def train(run, folder, rounds, every=1):
    """Go on from the newest checkpoint, if there is one, up to `rounds`."""
    run.load(folder)
    while run.rounds_done < rounds:
        run.round()
        if run.rounds_done % every == 0:
            run.save(folder)
    return run


def everything(run):
    """Give every tensor of the server and of every client, by name."""
    found = {f"server.{n}": v for n, v in named_leaves(run.server).items()}
    for i in range(run.federation.num_clients):
        found |= {f"client {i}.{n}": v for n, v in run.client_state(i).items()}
    found["rounds done"] = torch.tensor(run.rounds_done)
    return {n: v.clone() for n, v in found.items()}


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert raw(a[name]) == raw(b[name]), name


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a if a[n].numel())


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def fingerprint(run):
    """Digest `everything`: what two processes compare."""
    made = hashlib.sha256()
    for name, tensor in everything(run).items():
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + raw(tensor))
    return made.hexdigest()


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
