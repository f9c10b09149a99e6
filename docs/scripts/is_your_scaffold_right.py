"""Is your SCAFFOLD right?  Two or three quadratics tell.

Write `train` for your code (or import this file and call `judge(train)`).  It must do full-batch
local steps on f_i(w) = a_i / 2 * (w - b_i)^2, whose gradient is a_i * (w - b_i), uniform weights,
server learning rate 1, option II, all control variates zero at first:

    train(a, b, cohorts, steps, lr) -> the server's w after every round

    a, b      one number per client      cohorts   client ids of every round      w starts at 0

Run this file to see it judge the right algorithm and nine wrong ones.  It needs nothing but Python.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

Train = Callable[
    [Sequence[float], Sequence[float], Sequence[Sequence[int]], int, float], list[float]
]


# ------------------------------------------------------------------ the algorithm, and its bugs
def scaffold(
    a: Sequence[float],
    b: Sequence[float],
    cohorts: Sequence[Sequence[int]],
    steps: int,
    lr: float,
    *,
    bug: str = "",
) -> list[float]:
    """Karimireddy et al. 2020, algorithm 1, option II; `bug` plants one."""
    first = 0.7 if bug == "c and c_i do not start at zero" else 0.0
    x, c, own, path = 0.0, first, [first] * len(a), []
    for cohort in cohorts:
        moves, changes = [], []
        for i in cohort:
            y = x
            for _ in range(steps):
                g = a[i] * (y - b[i])
                correction = 0.0 if bug == "correction never applied" else c - own[i]
                y -= lr * (g + correction)
            scale = {"divides by epochs instead of steps * lr": 1.0}.get(bug, steps * lr)
            sign = -1.0 if bug == "sign of the control variates flipped" else 1.0
            new = own[i] - c + sign * (x - y) / scale
            changes.append(new - own[i])
            if bug != "client state is not kept":
                own[i] = new
            moves.append(y - x)
        population = len(cohort) if bug == "c divided by the cohort, not the population" else len(a)
        if bug == "only the last client's update counts":
            moves, changes = moves[-1:], changes[-1:]
        x += sum(moves) / len(moves)
        if bug == "c replaced by the cohort's mean":
            c = sum(own[i] for i in cohort) / len(cohort)
        elif bug == "c never updated":
            pass
        else:
            c += sum(changes) / population
        path.append(x)
    return path


BUGS = (
    "correction never applied",  # it is FedAvg
    "sign of the control variates flipped",
    "divides by epochs instead of steps * lr",
    "client state is not kept",
    "c divided by the cohort, not the population",
    "only the last client's update counts",
    "c replaced by the cohort's mean",
    "c never updated",
    "c and c_i do not start at zero",  # harmless only when everybody always takes part
)


# ---------------------------------------------------------------------------------- the judgement
A, B, STEPS, LR = (1.0, 3.0, 0.5, 2.0), (4.0, -1.0, 10.0, 0.5), 5, 0.05
OPTIMUM = sum(a * b for a, b in zip(A, B)) / sum(A)  # noqa: B905


def everybody(rounds: int) -> list[list[int]]:
    """Full participation."""
    return [list(range(len(A)))] * rounds


def half(rounds: int) -> list[list[int]]:
    """Two of four clients, in an order that looks random and is always the same."""
    pairs = list(itertools.combinations(range(len(A)), 2))
    draw = random.Random(0)
    return [list(draw.choice(pairs)) for _ in range(rounds)]


def judge(train: Train) -> list[str]:
    """Say what is wrong with an implementation; an empty list means nothing was found."""
    found = []
    for name, cohorts in (("full", everybody(300)), ("partial", half(1500))):
        path = train(A, B, cohorts, STEPS, LR)
        right = scaffold(A, B, cohorts, STEPS, LR)
        gap = max(map(abs, (u - v for u, v in zip(path[:20], right))), default=math.inf)  # noqa: B905
        if not gap < 1e-6 * max(1.0, *map(abs, right[:20])):
            found.append(f"{name} participation: leaves the right path (by {gap:.3g} in 20 rounds)")
        if not abs(path[-1] - OPTIMUM) < 1e-6:
            away = abs(path[-1] - OPTIMUM)
            found.append(
                f"{name} participation: ends {away:.3g} away from the optimum {OPTIMUM:.4g}"
            )
    return [*found, *_suspects(train)] if found else []


def _suspects(train: Train) -> list[str]:
    """Name the known bug whose path is the same."""
    cohorts = half(12)
    path = train(A, B, cohorts, STEPS, LR)
    for bug in BUGS:
        wrong = scaffold(A, B, cohorts, STEPS, LR, bug=bug)
        size = max(1.0, *map(abs, wrong))
        if all(abs(u - v) < 1e-6 * size for u, v in zip(path, wrong)):  # noqa: B905
            return [f"its path is that of a known bug: {bug}"]
    return ["its path is that of no bug that this script knows"]


def main() -> None:
    """Judge the right one and the wrong ones."""
    print("right:", judge(scaffold) or "nothing found")
    for bug in BUGS:
        wrong = lambda *given, bug=bug: scaffold(*given, bug=bug)  # noqa: E731
        print(f"\nplanted: {bug}")
        for line in judge(wrong):
            print(f"  {line}")


if __name__ == "__main__":
    main()
