"""Tables of the papers that are counted, not trained: what methods send and compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from undrift.core.rule import ClientInfo
from undrift.rules import rfedavg, rfedavg_plus
from undrift.rules.features import Means

FLOAT = 4  # bytes
PICKLED = 760  # bytes that pickling adds to one mean, by the paper's own numbers
WIDTHS = {"CNN": 512, "RNN": 256}  # of the feature layers
PRINTED = {  # rFedAvg, Table III: bytes of delta
    ("rFedAvg", "cross-silo"): {"CNN": 56160, "RNN": 35680},
    ("rFedAvg", "cross-device"): {"CNN": 280800, "RNN": 178400},
    ("rFedAvg+", "cross-silo"): {"CNN": 2808, "RNN": 1784},
    ("rFedAvg+", "cross-device"): {"CNN": 2808, "RNN": 1784},
}
CLIENTS = {"cross-silo": 20, "cross-device": 500}


def means_sent(method: str, clients: int) -> int:
    """Count the feature means that our rule sends a client."""
    (rule,) = (rfedavg if method == "rFedAvg" else rfedavg_plus)(lr=0.1).rules
    table = Means(torch.zeros(clients, 1), torch.ones(clients))
    nobody = ClientInfo(*(torch.tensor(0) for _ in ClientInfo._fields))
    return int(rule.personal(table, nobody).numel())


def delta_rows() -> list[list[str]]:
    """Set the bytes of delta that we send a client beside the paper's."""
    rows = []
    for (method, place), printed in PRINTED.items():
        count = means_sent(method, CLIENTS[place])
        for network, width in WIDTHS.items():
            theirs = printed[network] // (FLOAT * width + PICKLED)
            means = f"{count} / {theirs}"
            bytes_ = f"{count * FLOAT * width} / {printed[network]}"
            rows.append([method, place, network, means, bytes_])
    return rows


# --------------------------------------------------------------------------- AdaBest's counting
class Cost(NamedTuple):
    """Operations per parameter beyond gradients: `_k` for each of K local steps, `_1` once."""

    sums_k: int
    products_k: int
    sums_1: int
    products_1: int
    server_sums: int  # beyond one for each participant
    server_products: int


COSTS = {
    "FedAvg": Cost(1, 1, 0, 0, 0, 0),
    "SCAFFOLD/m": Cost(3, 1, 2, 2, 2, 2),
    "FedDyn": Cost(4, 2, 1, 1, 3, 1),
    "AdaBest": Cost(2, 1, 1, 1, 2, 1),
}
PARAMETERS, STEPS, COHORT = 797_962, 55, 10  # feddyn_cnn; 5 epochs of 454 examples, batches of 45


def client_operations(cost: Cost, parameters: int, steps: int) -> tuple[int, int]:
    """Count sums and products of a client in one round, gradients apart."""
    return (
        parameters * (steps * cost.sums_k + cost.sums_1),
        parameters * (steps * cost.products_k + cost.products_1),
    )


def server_operations(cost: Cost, parameters: int, cohort: int) -> tuple[int, int]:
    """Count sums and products of the server in one round."""
    return parameters * (cohort + cost.server_sums), parameters * cost.server_products


def client_rows() -> list[list[str]]:
    """Write AdaBest's Table 4: K steps, n parameters, g a gradient, s a sum, m a product."""
    rows = []
    for name, cost in COSTS.items():
        sums, products = client_operations(cost, PARAMETERS, STEPS)
        formula = f"K g + n ({_of('K', cost.sums_k, cost.sums_1)}) s"
        formula += f" + n ({_of('K', cost.products_k, cost.products_1)}) m"
        rows.append([name, formula, f"{sums / 1e6:.1f}", f"{products / 1e6:.1f}"])
    return rows


def server_rows() -> list[list[str]]:
    """Write AdaBest's Table 5: P participants."""
    rows = []
    for name, cost in COSTS.items():
        sums, products = server_operations(cost, PARAMETERS, COHORT)
        more = f" + {cost.server_sums}" if cost.server_sums else ""
        formula = f"n (P{more}) s" + (f" + {cost.server_products} n m" if products else "")
        rows.append([name, formula, f"{sums / 1e6:.1f}", f"{products / 1e6:.1f}"])
    return rows


def _of(letter: str, many: int, once: int) -> str:
    told = letter if many == 1 else f"{many} {letter}"
    return f"{told} + {once}" if once else told


# -------------------------------------------------------------------------------------- by name
class Counted(NamedTuple):
    """A table that needs no training."""

    of: str
    table: str
    about: str
    head: tuple[str, ...]
    rows: Callable[[], list[list[str]]]


_OPERATIONS = ("method", "operations in a round", "million sums", "million products")

COUNTED: Mapping[str, Counted] = {
    "rfedavg-table3": Counted(
        "rFedAvg",
        "Table III",
        "the size of delta, what one client is sent of feature means. Counted from our rules, 4 "
        "bytes a number. The paper's bytes are means of 512 or 256 numbers, each with 760 bytes "
        "that pickling adds; in the cross-device set-up it counts the means of the 100 that take "
        "part, where we send those of all 499 others.",
        ("method", "set-up", "network", "means: ours / paper", "bytes: ours / paper"),
        delta_rows,
    ),
    "adabest-table4": Counted(
        "AdaBest",
        "Table 4",
        "what a client computes in a round of K steps; n parameters, g a gradient, s a sum, m a "
        f"product, as the paper counts them. The numbers are for feddyn_cnn (n = {PARAMETERS:,}) "
        f"and K = {STEPS}, gradients apart.",
        _OPERATIONS,
        client_rows,
    ),
    "adabest-table5": Counted(
        "AdaBest",
        "Table 5",
        f"what the server computes in a round with P participants (here {COHORT}), as the paper "
        "counts it.",
        _OPERATIONS,
        server_rows,
    ),
}
