"""Small pages for the tests."""

from __future__ import annotations

from typing import Any

from undrift.report.page_data import Group, Page, Partition, RunCurves, Table, TableRow, groups_from

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'`${x}"


def record(number: int, accuracy: float | None, up: int = 100) -> dict[str, object]:
    line = {"round": number, "test_loss": 2.0 / number, "bytes_up": up, "bytes_down": 50}
    line |= {"seconds": 0.5, "clients": [0, 1], "drift": -0.25}
    return line if accuracy is None else line | {"test_accuracy": accuracy}


def run(level: float, up: int = 100, rounds: int = 20) -> list[dict[str, object]]:
    return [record(r, level * r / (r + 2), up) for r in range(1, rounds + 1)]


def two_groups() -> tuple[Group, ...]:
    """Fedavg and scaffold, three seeds each; scaffold sends twice as much."""
    runs = [("fedavg", seed, run(0.6 + 0.01 * seed)) for seed in range(3)]
    return groups_from([*runs, *(("scaffold", s, run(0.7 + 0.02 * s, 250)) for s in range(3))])


def table() -> Table:
    rows = [
        TableRow(("fedavg", "61.0", "never"), ("fedavg", 61.0, None)),
        TableRow(("scaffold", "9.5", "12"), ("scaffold", 9.5, 12.0)),
        TableRow(("extra", "72.0", "7"), ("extra", 72.0, 7.0)),
    ]
    return Table(("algorithm", "accuracy", "rounds to 50 %"), tuple(rows), "Means over 3 seeds.")


def partition(clients: int = 6, classes: int = 4) -> Partition:
    counts = [[(7 * i + 3 * c * i) % 11 for c in range(classes)] for i in range(clients)]
    names = tuple(f"kind {c}" for c in range(classes))
    return Partition(counts, names, f"{clients} clients, {classes} classes")


def page(**changes: object) -> Page:
    parts: dict[str, object] = {
        "title": "Digits, two ways",
        "command": "undrift run digits.toml --seeds 0,1,2",
        "facts": (("rounds", "20"), ("device", "cpu")),
        "groups": two_groups(),
        "table": table(),
        "verdict": ("scaffold is better than fedavg: +9.5 points",),
        "partition": partition(),
        "experiment": 'name = "digits"\nrounds = 20\n',
        "metrics": ("test_accuracy", "test_loss", "drift"),
        "targets": {"test_accuracy": 0.5},
    }
    return Page(**{**parts, **changes})  # type: ignore[arg-type]


def many_groups(count: int = 16, rounds: int = 100) -> tuple[Group, ...]:
    return tuple(
        Group(
            f"algorithm {g}",
            tuple(
                RunCurves(
                    seed,
                    tuple(range(1, rounds + 1)),
                    {"test_loss": tuple((g + 1) / (r + seed) for r in range(1, rounds + 1))},
                )
                for seed in range(3)
            ),
        )
        for g in range(count)
    )


def evaluation() -> dict[str, Any]:
    """Say what evaluation.json says of a model of two classes at three sites."""
    sites = [("Bonn", 6, 0.5, 0.6, 0.1), ("Aachen", 60, 0.7, 0.8, 0.3), ("Dachau", 34, 0.9, None,
                                                                         0.2)]  # fmt: skip
    return {
        "model": "cloud",
        "round": 20,
        "examples_of": "test",
        "examples": 100,
        "kind": "classes",
        "metrics": {"accuracy": 0.75, "auc": 0.8, "ece": 0.05},
        "classes": ["well", "ill"],
        "confusion": [[60, 20], [5, 15]],
        "calibration": {
            "examples": [50, 30, 20],
            "said": [0.1, 0.4, 0.8],
            "found": [0.05, 0.5, 0.9],
        },
        "roc": [
            {"class": "ill", "x": [0, 0.25, 1], "y": [0, 0.75, 1], "thresholds": [None, 0.5, 0]}
        ],
        "precision_recall": [
            {"class": "ill", "x": [0, 0.75, 1], "y": [1, 0.43, 0.2], "thresholds": [None, 0.5, 0]}
        ],
        "sites_of": "test",
        "sites": [
            {"site": s, "client": i, "examples": n, "accuracy": a, "auc": b, "ece": c}
            for i, (s, n, a, b, c) in enumerate(sites)
        ],
    }
