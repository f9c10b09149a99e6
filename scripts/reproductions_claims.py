"""What the papers claim, decided from the records: holds, does not hold, not yet recorded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from undrift.papers.counted import CLIENTS, means_sent
from undrift.papers.records import read_records
from undrift.papers.scores import far, number

Entry = dict[str, Any]
HALF = (0.35, 0.65)  # what counts as about half
SAME = 1.0  # points of accuracy that count as the same
EXPLODED = 3.0  # times AdaBest's norm
CLIENT_PARTS = {"nova": "fednova", "prox": "fedprox", "scaf": "scaffold"}
SERVER_PARTS = {"adam": "fedadam", "adagrad": "fedadagrad", "yogi": "fedyogi"}


class NotRecorded(Exception):
    """A cell that a claim is about has no full record."""


class Records:
    """Full records by setting and method."""

    def __init__(self, folder: Path) -> None:
        self.cells: dict[tuple[str, str], Entry] = {
            (e["setting"], e["method"]): e
            for path in sorted(folder.glob("*.json"))
            for e in read_records(path)["cells"]
        }

    def cell(self, setting: str, method: str) -> Entry:
        """Give a record; refuse if there is none."""
        try:
            return self.cells[setting, method]
        except KeyError:
            raise NotRecorded(f"{setting} {method}") from None

    def value(self, setting: str, method: str) -> float:
        """Give the accuracy of a cell; a run that diverged has none."""
        return worth(self.cell(setting, method)["ours"]["value"])

    def curve(self, setting: str, method: str, metric: str) -> list[float]:
        """Give a further curve that a record keeps."""
        found = self.cell(setting, method).get("curves", {})
        if metric not in found:
            raise NotRecorded(f"{metric} of {setting} {method}")
        return [worth(v) for v in found[metric]["mean"]]


class Finding(NamedTuple):
    """What the records say of a claim."""

    holds: bool
    numbers: str


class Claim(NamedTuple):
    """A sentence of a paper, and how it is read."""

    paper: str
    says: str
    read: str
    decide: Callable[[Records], Finding]


def worth(value: float | None) -> float:
    """Read a number; less than all others where there is none."""
    return -math.inf if value is None else value


def clearly_below(low: Entry, high: Entry) -> bool:
    """Whether one record is below another by more than their deviations would explain."""
    gap = worth(high["value"]) - worth(low["value"])
    return gap > 0 and (math.isinf(gap) or far(gap, low["std"], high["std"]) is not False)


def told(values: Sequence[float]) -> str:
    """Write accuracies one after the other."""
    return ", ".join("diverged" if math.isinf(v) else f"{v:.2f}" for v in values)


# ----------------------------------------------------------------------------------- the claims
def combinations_help(records: Records) -> Finding:
    columns = {
        label: [worth(c["value"]) for c in records.cell("comfed-table4", label)["ours"]["columns"]]
        for label in ("fedavg", *_comfed_labels())
    }
    cases = good = 0
    for at, plain in enumerate(columns["fedavg"]):
        for client, alone in CLIENT_PARTS.items():
            for server, other in SERVER_PARTS.items():
                if min(columns[alone][at], columns[other][at]) > plain:
                    cases += 1
                    good += columns[client + server][at] > plain
    return Finding(bool(cases) and good == cases, f"{good} of {cases} cases")


def _comfed_labels() -> Iterator[str]:
    yield from CLIENT_PARTS.values()
    yield from SERVER_PARTS.values()
    yield from (c + s for c in CLIENT_PARTS for s in SERVER_PARTS)


def larger_d_is_faster(records: Records) -> Finding:
    found = [records.cell("fedvra-fig2-d", f"d={d}") for d in (1, 2, 5, 10, 20)]
    rounds = [e["ours"]["rounds_to"][0]["on_mean"] or e["rounds"] + 1 for e in found]
    gains = [a - b for a, b in itertools.pairwise(rounds)]
    holds = gains[0] > 0 and gains[-1] < gains[0]
    return Finding(holds, f"rounds to 50 %: {', '.join(map(str, rounds))}")


def larger_a_is_better(records: Records) -> Finding:
    cells = [records.cell("fedvra-fig2-a", f"a={a}")["ours"] for a in (1, 3, 5, 7, 9)]
    falls = any(clearly_below(b, a) for a, b in itertools.pairwise(cells))
    return Finding(clearly_below(cells[0], cells[-1]) and not falls,
                   ", ".join(number(one) for one in cells))  # fmt: skip


def scaffold_suffers(records: Records) -> Finding:
    names = ("scaffold", "fedavg")
    found = [records.cell("fedvra-table3-noniid-hlu", name)["ours"] for name in names]
    return Finding(clearly_below(*found), ", ".join(number(one) for one in found))


def beta_moves(records: Records) -> Finding:
    betas = (0.2, 0.4, 0.6, 0.8, 0.9, 0.96, 0.98)
    best = []
    for clients in (5, 20, 100):
        found = [(records.value(f"adabest-fig7-m{clients}", f"beta={b}"), b) for b in betas]
        best.append(max(found)[1])
    holds = best == sorted(best) and best[-1] > best[0]
    return Finding(holds, f"best beta {', '.join(map(str, best))}")


def mu_matters_little(records: Records) -> Finding:
    mus, setting = (0.02, 0.04, 0.08, 0.16), "adabest-fig6-emnist-10pc-iid"
    found = [records.value(setting, f"adabest mu={mu}") for mu in mus]
    return Finding(max(found) - min(found) <= SAME, told(found))


def feddyn_explodes(records: Records) -> Finding:
    entry = records.cell("adabest-fig1", "feddyn")
    norms = [
        records.curve("adabest-fig1", name, "norm_model")[-1] for name in ("feddyn", "adabest")
    ]
    lost = bool(entry["ours"].get("diverged")) or math.isinf(norms[0])
    return Finding(lost or norms[0] > EXPLODED * norms[1], f"norm {told(norms)}")


def noise_is_harmless(records: Records) -> Finding:
    holds, said = True, []
    for data in ("mnist", "cifar10"):
        setting = f"rfedavg-fig12-{data}-s0"
        plain = records.cell(setting, "rfedavg_plus")["ours"]
        for sigma in (1, 2, 5):
            ours = records.cell(setting, f"sigma2={sigma}")["ours"]
            gap = worth(ours["value"]) - worth(plain["value"])
            clear = gap < -SAME and far(gap, ours["std"], plain["std"]) is not False
            holds = holds and not clear
            said.append(f"{gap:+.2f}")
    return Finding(holds, f"points lost or won: {', '.join(said)}")


def worst_clients_gain(records: Records) -> Finding:
    holds, said = True, []
    for data in ("mnist", "cifar10"):
        found = [
            records.curve(f"rfedavg-fig11-{data}-s0", name, "client_accuracy_worst10")[-1]
            for name in ("fedavg", "rfedavg", "rfedavg_plus")
        ]
        holds = holds and min(found[1:]) > found[0]
        said.append(told(found))
    return Finding(holds, "; ".join(said))


def participation_saturates(records: Records) -> Finding:
    place = "rfedavg-fig9-cifar10-s0"
    names = [f"{place}-sr0.02", f"{place}-sr0.05", f"{place}-sr0.1", "rfedavg-table2-cifar10-s0",
             f"{place}-sr0.5"]  # fmt: skip
    found = [records.value(name, "rfedavg_plus") for name in names]
    return Finding(found[-1] - found[-2] < (found[1] - found[0]) / 2, told(found))


def plus_takes_half(records: Records) -> Finding:
    place = "rfedavg-fig10-cifar10-s0"
    plus, first = (
        records.cell(f"{place}-{name}", name)["seconds"] for name in ("rfedavg_plus", "rfedavg")
    )
    if not plus or not first:
        raise NotRecorded("seconds")
    return Finding(HALF[0] <= plus / first <= HALF[1], f"{plus / first:.2f} of the time")


def delta_is_smaller(records: Records) -> Finding:
    ratios = [means_sent("rFedAvg", n) // means_sent("rFedAvg+", n) for n in CLIENTS.values()]
    said = ", ".join(f"{r} times for {n} clients" for r, n in zip(ratios, CLIENTS.values(),
                                                                strict=True))  # fmt: skip
    holds = all(r >= n - 1 for r, n in zip(ratios, CLIENTS.values(), strict=True))
    return Finding(holds, f"{said}, counted")


CLAIMS = (
    Claim("ComFed", "A combination helps when both of its parts alone beat FedAvg.",
          "in every column of Table IV where both parts do, the combination beats FedAvg",
          combinations_help),
    Claim("FedVRA", "A larger d is faster, until it no longer is.",
          "Fig. 2: rounds to 50 % on the mean curve at d 1, 2, 5, 10, 20 fall first, and by less "
          "at the end", larger_d_is_faster),
    Claim("FedVRA", "A larger a is better on non-IID data.",
          "Fig. 2: the last accuracy is clearly higher at a = 9 than at 1, and falls nowhere "
          "between", larger_a_is_better),
    Claim("FedVRA", "SCAFFOLD is below FedAvg under unequal local work on CIFAR-10.",
          "Table 3: SCAFFOLD, FedAvg; by more than three deviations", scaffold_suffers),
    Claim("AdaBest", "The best beta moves to 1 as participation grows.",
          "Fig. 7: the best beta with 5, 20 and 100 of 1000 clients", beta_moves),
    Claim("AdaBest", "It is insensitive to mu.",
          f"Fig. 6: AdaBest at mu 0.02, 0.04, 0.08, 0.16 stays within {SAME:g} point",
          mu_matters_little),
    Claim("AdaBest", "FedDyn explodes at low participation.",
          f"Fig. 1: FedDyn diverges, or its norm ends above {EXPLODED:g} times AdaBest's",
          feddyn_explodes),
    Claim("rFedAvg", "Noise up to sigma2 = 5 does no harm.",
          f"Fig. 12: with sigma2 1, 2, 5 at most {SAME:g} point, or no clear difference, is lost "
          "(MNIST, then CIFAR-10)", noise_is_harmless),
    Claim("rFedAvg", "The worst clients fare better.",
          "Fig. 11: worst tenth of the clients, FedAvg, rFedAvg, rFedAvg+; MNIST, then CIFAR-10",
          worst_clients_gain),
    Claim("rFedAvg", "Accuracy saturates once enough clients take part.",
          "Fig. 9: rFedAvg+ at sampling rates 0.02, 0.05, 0.1, 0.2, 0.5: the last step brings less "
          "than half of the first", participation_saturates),
    Claim("rFedAvg", "rFedAvg+ takes about half the time of rFedAvg.",
          f"Fig. 10: between {HALF[0]} and {HALF[1]} of the seconds", plus_takes_half),
    Claim("rFedAvg", "The means that rFedAvg+ sends are N times smaller.",
          "Table III, N - 1 means against one", delta_is_smaller),
)  # fmt: skip


def claim_rows(folder: Path) -> list[list[str]]:
    """Decide every claim."""
    records, rows = Records(folder), []
    for claim in CLAIMS:
        try:
            found = claim.decide(records)
            verdict = ["holds" if found.holds else "**does not hold**", found.numbers]
        except NotRecorded:
            verdict = ["not yet recorded", ""]
        rows.append([claim.paper, claim.says, claim.read, *verdict])
    return rows
