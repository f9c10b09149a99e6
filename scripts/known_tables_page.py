"""Write docs/known-tables.md from benchmarks/results/known_tables.json.

python scripts/known_tables_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "known_tables.json"
PAGE = ROOT / "docs" / "known-tables.md"
INTRO = """\
# Tables that people know

Four tables that installed packages bring, dealt to sites, trained with the file that `undrift init`
writes. Nothing is tuned: learning rate 0.1 (0.01 for counts), two epochs of batches of 16, 50
rounds, all sites in every round, 3 seeds. Each table stands beside
[baselines](experiments.md#baselines): always the same answer, each site alone, all data pooled, and
gradient boosting on the pooled table, which no federation has.

`python benchmarks/known_tables.py` makes the numbers (it needs scikit-learn and statsmodels), and
`python scripts/known_tables_page.py` makes this page. Commit of the record: `{commit}`
(a plus sign marks changes since).

Pooled training is not tuned either. It takes the same 50 rounds of two epochs, so it is no upper
bound. Why it is below a federation on `diabetes`, and why sites alone are ahead on `rand-hie`, was
not looked into.
"""
DIGITS = 3


def page(told: dict[str, Any]) -> str:
    """Write the page."""
    parts = [INTRO.format(commit=told["commit"])]
    parts += [section(name, one) for name, one in told["tables"].items()]
    return "\n".join(parts)


def section(name: str, one: dict[str, Any]) -> str:
    """Write what one table is, how it was trained, and what came out."""
    found = one["comparison"]
    metric = found["metric"].removeprefix("test_").replace("_", " ")
    rows = [[line["label"], spread(line["last"])] for line in found["variants"]]
    rows += [
        [line["label"], spread(line["metrics"][found["metric"]])] for line in found["baselines"]
    ]
    table = [["", f"test {metric}"], ["---", "--:"], *rows]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
    commands = "\n".join(f"    {command}" for command in one["commands"])
    said = " ".join(found["verdict"])
    return f"## {name}\n\n{one['about']}.\n\n{commands}\n\n{lines}\n\n{said}\n"


def spread(value: dict[str, float | None]) -> str:
    """Write a mean and a standard deviation."""
    mean, std = value["mean"], value["std"]
    if mean is None:
        return "-"
    return f"{mean:.{DIGITS}f}" + ("" if std is None else f" ± {std:.{DIGITS}f}")


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULT.read_text())))
    print(PAGE.relative_to(ROOT))
