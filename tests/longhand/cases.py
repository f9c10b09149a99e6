"""Settings and comparisons shared by the long-hand tests. `pytest -s` prints what they measure."""

import dataclasses

import numpy as np

from undrift.verify.longhand.local import Local
from undrift.verify.longhand.worlds import (
    mlp_world,
    quadratic_world,
    regression_world,
    sample_participants,
    softmax_world,
)

SIZES = [7, 12, 20, 9, 15, 11]  # 6 clients; with batches of 4 and 2 epochs K_i = 4 .. 10
ALL = [list(range(6))] * 6
SOME = sample_participants(seed=5, clients=6, per_round=3, rounds=6)
SGD = Local(lr=0.1, lr_decay=0.97, weight_decay=1e-3)
HEAVY = Local(lr=0.05, optimizer="heavy_ball", rho=0.9, weight_decay=1e-3)
NESTEROV = dataclasses.replace(HEAVY, optimizer="nesterov")
LINEAR = [SGD, HEAVY, NESTEROV]
RMSPROP = Local(lr=0.02, optimizer="rmsprop", weight_decay=1e-3)
ADAMW = Local(lr=0.02, optimizer="adamw", weight_decay=1e-2)
CLIPPED = dataclasses.replace(SGD, clip=0.3)
WORLDS = {
    "softmax": lambda: softmax_world(1, SIZES, features=5, classes=3),
    "mlp": lambda: mlp_world(2, SIZES, features=4, hidden=6, classes=3),
    "regression": lambda: regression_world(3, SIZES, features=5),
    "quadratic": lambda: quadratic_world(4, clients=5, dim=4),
}
KINDS = ("softmax", "mlp", "regression")  # those whose examples come in batches


def gap(a, b) -> float:
    """Largest difference between two trajectories over all rounds and parameters."""
    assert len(a.x) == len(b.x) > 0
    return max(float(np.max(np.abs(p - q))) for p, q in zip(a.x, b.x, strict=True))


def below(label: str, value: float, limit: float) -> None:
    print(f"{label}: {value:.1e}")
    assert value <= limit, label


def above(label: str, value: float, limit: float) -> None:
    print(f"{label}: {value:.1e} (must differ)")
    assert value > limit, label
