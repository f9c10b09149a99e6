"""Draw the features of three clients, as rFedAvg's Fig. 1 does: IID beside non-IID.

undrift reproduce rfedavg-fig1
python scripts/feature_picture.py RUN [RUN ...] [--to FILE] [--examples N]

RUN is the folder of a finished run with a feature layer.  Three clients train its model once more,
each on its own examples; what its feature layer then makes of them is laid out by t-SNE.

Letters: n points, d features.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import nn

from undrift.experiment.folder import open_run
from undrift.experiment.spec import experiment_from
from undrift.experiment.world import World, build

Floats = NDArray[np.float64]
CLIENTS = 3
PERPLEXITY, STEPS, EARLY = 30.0, 750, 150
FACTOR = 12.0  # by which attraction is exaggerated in the early steps
TINY = 1e-12


# ----------------------------------------------------------------------------------------- t-SNE
def tsne(x: Floats, perplexity: float = PERPLEXITY, steps: int = STEPS, seed: int = 0) -> Floats:
    """Lay points out in the plane so that neighbours stay neighbours: [n, d] -> [n, 2].

    Van der Maaten and Hinton (2008), with the exact gradient: fit for some hundred points.
    """
    p = neighbours(x, min(perplexity, (len(x) - 1) / 3))
    y = np.random.default_rng(seed).normal(0, 1e-4, (len(x), 2))
    speed, gain = np.zeros_like(y), np.ones_like(y)
    rate = max(len(x) / FACTOR / 4, 50.0)
    for step in range(steps):
        early = step < EARLY
        slope = _slope(FACTOR * p if early else p, y)
        gain = np.where(slope * speed < 0, gain + 0.2, gain * 0.8).clip(0.01)
        speed = (0.5 if early else 0.8) * speed - rate * gain * slope
        y = y + speed
        y -= y.mean(0)
    return y


def neighbours(x: Floats, perplexity: float) -> Floats:
    """Give how much two points are neighbours, symmetric, in all 1; each has `perplexity` many."""
    gaps = distances(x)
    shares = np.zeros_like(gaps)
    for i, row in enumerate(gaps):
        others = np.delete(row, i)
        shares[i, np.arange(len(row)) != i] = _row(others, np.log(perplexity))
    both = shares + shares.T
    made: Floats = np.maximum(both / both.sum(), TINY)
    return made


def distances(x: Floats) -> Floats:
    """Give squared distances, [n, n]."""
    square = (x**2).sum(1)
    made: Floats = np.maximum(square[:, None] + square - 2 * x @ x.T, 0.0)
    return made


def _row(gaps: Floats, entropy: float) -> Floats:
    """Find the width at which a point's shares have the entropy that is asked for."""
    low, high, narrow = 0.0, np.inf, 1.0 / max(float(np.median(gaps)), TINY)
    shares = np.zeros_like(gaps)
    for _ in range(60):
        raw = np.exp(-(gaps - gaps.min()) * narrow)
        shares = raw / raw.sum()
        found = -(shares * np.log(np.maximum(shares, TINY))).sum()
        if abs(found - entropy) < 1e-5:
            break
        if found > entropy:
            low, narrow = narrow, narrow * 2 if np.isinf(high) else (narrow + high) / 2
        else:
            high, narrow = narrow, (narrow + low) / 2
    return shares


def _slope(p: Floats, y: Floats) -> Floats:
    near = 1.0 / (1.0 + distances(y))
    np.fill_diagonal(near, 0.0)
    q = np.maximum(near / near.sum(), TINY)
    pull = (p - q) * near
    made: Floats = 4 * (pull.sum(1)[:, None] * y - pull @ y)
    return made


# -------------------------------------------------------------------------------------- features
def features_of(run: Path, examples: int) -> tuple[Floats, NDArray[np.int64]]:
    """Give the features of three clients' examples, [n, d], and whose each is."""
    folder = open_run(run)
    table = folder.table()
    assert table is not None
    world = build(experiment_from({**table, "engine": {"device": "cpu"}}))
    model = world.trainer.model()
    model.load_state_dict(load_file(folder.path / "model.safetensors"))
    found = [_of_client(world, model, i, examples) for i in spread_out(len(world.dealt.parts))]
    owners = np.repeat(np.arange(len(found)), [len(f) for f in found])
    return np.concatenate(found), owners


def spread_out(clients: int) -> list[int]:
    """Choose three clients far apart, which hold different classes where labels are sorted.

    >>> spread_out(20)
    [0, 10, 19]
    """
    return sorted({0, clients // 2, clients - 1})


def _of_client(world: World, model: nn.Module, client: int, examples: int) -> Floats:
    rows = torch.from_numpy(np.asarray(world.dealt.parts[client]))
    x, y = world.dealt.examples.train_x[rows], world.dealt.examples.train_y[rows]
    own = _trained(copy.deepcopy(model), x, y, world, client)
    seen: list[Any] = []
    layer = own.get_submodule(world.experiment.task.feature or "feature")
    layer.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    with torch.no_grad():
        own(x[:examples])
    made: Floats = seen[0].flatten(1).double().numpy()
    return made


def _trained(model: nn.Module, x: Any, y: Any, world: World, client: int) -> nn.Module:
    """Let a client train once more as FedAvg's clients do."""
    work, local = world.experiment.work, world.experiment.algorithm.local
    epochs = work.epochs[1] if isinstance(work.epochs, tuple) else work.epochs
    generator = torch.Generator().manual_seed(client)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(local.lr))
    for _ in range(int(epochs or 1)):
        for rows in torch.randperm(len(x), generator=generator).split(work.batch or len(x)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model


# --------------------------------------------------------------------------------------- picture
def draw(runs: Sequence[Path], to: Path, examples: int) -> None:
    """Draw one panel for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from undrift.report.curves import line_style

    figure, axes = plt.subplots(1, len(runs), figsize=(4.2 * len(runs), 4), squeeze=False)
    for run, place in zip(runs, axes[0], strict=True):
        x, owners = features_of(run, examples)
        points = tsne(x)
        for client in np.unique(owners):
            mine = points[owners == client]
            place.scatter(*mine.T, s=8, color=line_style(int(client)).light,
                          label=f"client {client + 1}")  # fmt: skip
        place.set(title=run.resolve().parent.parent.name, xticks=[], yticks=[])
        place.legend(fontsize=7)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=110, bbox_inches="tight")
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--to", type=Path, default=Path("docs/pictures/reproductions/features.png"))
    parser.add_argument("--examples", type=int, default=200, help="of each client")
    chosen = parser.parse_args(arguments)
    draw(chosen.runs, chosen.to, chosen.examples)
    print(chosen.to)


if __name__ == "__main__":
    main()
