"""Draw quadratics.png: who reaches the optimum of the sum when every client pulls elsewhere.

    python docs/pictures/quadratics.py

Six clients, f_i(w) = (w - b_i)' A_i (w - b_i) / 2 with different A_i and b_i, 5 local steps of
lr 0.05, float64.  The distance is to the minimum of the mean of the f_i, known in closed form.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

import undrift as fl

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CLIENTS, DIM, STEPS, LR = 6, 5, 5, 0.05
INK = {"FedAvg": "#b5651d", "SCAFFOLD": "#1f6f8b", "SCAFFOLD/m": "#6a994e"}


class Point(nn.Module):
    """A model that is nothing but its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(DIM, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), DIM)


def quadratic(output: Tensor, target: Tensor) -> Tensor:
    """f_i per example: the target is (b_i, A_i) flattened."""
    b, a = target[:, :DIM], target[:, DIM:].reshape(-1, DIM, DIM)
    gap = output - b
    return 0.5 * (gap[:, None] @ a @ gap[:, :, None]).reshape(-1)


def world() -> tuple[fl.Federation, Tensor]:
    maker = torch.Generator().manual_seed(3)
    root = torch.randn(CLIENTS, DIM, DIM, generator=maker, dtype=torch.float64)
    a = root @ root.transpose(1, 2) / DIM + 0.5 * torch.eye(DIM, dtype=torch.float64)
    b = torch.randn(CLIENTS, DIM, generator=maker, dtype=torch.float64)
    optimum = torch.linalg.solve(a.sum(0), (a @ b[:, :, None]).sum(0)).reshape(-1)
    rows = torch.cat([b, a.flatten(1)], 1)
    return fl.Federation.of([(torch.zeros(1, 1), row[None]) for row in rows]), optimum


def distances(algorithm: fl.Algorithm, cohort: int, rounds: int) -> list[float]:
    federation, optimum = world()
    trainer = fl.Trainer(
        fl.Task(Point(), quadratic, dtype=torch.float64),
        federation,
        algorithm,
        work=fl.Work(steps=STEPS, batch=None),
        sampler=fl.Uniform(count=cohort),
    )
    found = [float((trainer.server.w - optimum).norm())]
    for _ in range(rounds):
        trainer.round()
        found.append(float((trainer.server.w - optimum).norm()))
    return found


def main() -> None:
    settings = {"all 6 clients a round": (6, 200), "3 of 6 clients a round": (3, 200)}
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for panel, (title, (cohort, rounds)) in zip(panels, settings.items(), strict=True):
        methods = {"FedAvg": fl.fedavg(LR, by_size=False), "SCAFFOLD": fl.scaffold(LR),
                   "SCAFFOLD/m": fl.scaffold_m(LR)}  # fmt: skip
        for name, algorithm in methods.items():
            line = distances(algorithm, cohort, rounds)
            style = (0, (4, 3)) if name == "SCAFFOLD/m" else "-"
            panel.semilogy(line, label=name, color=INK[name], linestyle=style, linewidth=1.8)
            print(f"{title}, {name}: {line[-1]:.1e} after {rounds} rounds")
        panel.set(title=title, xlabel="round")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("distance to the true optimum")
    panels[0].legend(frameon=False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=160)


if __name__ == "__main__":
    main()
