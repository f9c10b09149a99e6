"""Tables that people know, dealt to sites: federated training beside pooled training.

    pip install scikit-learn statsmodels
    python benchmarks/known_tables.py          writes benchmarks/results/known_tables.json
    python benchmarks/known_tables.py --tiny   the same code on one small table

Each table comes from an installed package.  `undrift init` writes its experiment file, as for
anybody's table, and `undrift compare` trains three algorithms on three seeds; nothing is tuned.
docs/known-tables.md is written from the result by scripts/known_tables_page.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

from undrift.cli import main
from undrift.experiment.environment import commit

RESULT = Path(__file__).parent / "results" / "known_tables.json"
ALGORITHMS = "fedavg,scaffold,fedadam"
Rows = tuple[list[str], list[list[Any]]]


class Known(NamedTuple):
    """A table, its target, how it is dealt to sites, and the metric that ranks."""

    rows: Callable[[], Rows]
    target: str
    metric: str
    about: str
    settings: Sequence[str] = ()  # of init


def by_rank(values: Sequence[float], sites: int) -> list[str]:
    """Deal rows to sites of equal size by the rank of a value: every site sees other rows."""
    order = sorted(range(len(values)), key=lambda k: (values[k], k))
    places = {row: rank * sites // len(values) for rank, row in enumerate(order)}
    return [f"site {places[k] + 1}" for k in range(len(values))]


def breast_cancer() -> Rows:
    """569 tumours; sites see tumours of other texture."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    names = [name.replace(" ", "_") for name in data.feature_names]
    sites = by_rank(data.data[:, names.index("mean_texture")].tolist(), 6)
    targets = [data.target_names[k] for k in data.target]
    rows = zip(sites, data.data.tolist(), targets, strict=True)
    return ["site", *names, "diagnosis"], [[s, *x, y] for s, x, y in rows]


def diabetes() -> Rows:
    """442 patients; sites see patients of other ages."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    names = list(data.feature_names)
    sites = by_rank(data.data[:, names.index("age")].tolist(), 6)
    rows = zip(sites, data.data.tolist(), data.target.tolist(), strict=True)
    return ["site", *names, "progression"], [[s, *x, y] for s, x, y in rows]


def fair() -> Rows:
    """6,366 answers to a survey; the occupation of the asked stands for a site."""
    from statsmodels.datasets import fair as source

    frame = source.load_pandas().data
    kept = ["rate_marriage", "age", "yrs_married", "children", "religious", "educ"]
    rows = [
        [f"occupation {int(row.occupation)}", *(row[name] for name in kept),
         "yes" if row.affairs > 0 else "no"]
        for _, row in frame.iterrows()
    ]  # fmt: skip
    return ["site", *kept, "affair"], rows


def randhie() -> Rows:
    """20,190 person-years of the RAND experiment at its six sites; some cells are missing."""
    import statsmodels.datasets.randhie as source

    kept = ["plan", "coins", "year", "income", "xage", "female", "educdec", "num", "mhi", "disea"]
    kept += ["physlm", "child", "hlthg", "hlthf", "hlthp"]
    with (Path(source.__file__).parent / "src" / "randhie.csv").open() as file:
        rows = [
            [f"site {row['site']}", *(row[name] for name in kept), row["mdvis"]]
            for row in csv.DictReader(file)
        ]
    return ["site", *kept, "visits"], rows


TABLES = {
    "breast-cancer": Known(
        breast_cancer, "diagnosis", "test_auc",
        "scikit-learn's breast cancer (Wisconsin): 569 rows, 30 numbers; 6 sites by the rank of "
        "the mean texture",
    ),
    "diabetes": Known(
        diabetes, "progression", "test_r2",
        "scikit-learn's diabetes (Efron et al. 2004): 442 rows, 10 numbers; 6 sites by the rank "
        "of the age",
    ),
    "fair": Known(
        fair, "affair", "test_auc",
        "statsmodels' Fair (1978): 6,366 rows, whether there was an affair; 6 sites by occupation",
    ),
    "rand-hie": Known(
        randhie, "visits", "test_poisson_deviance",
        "statsmodels' RAND Health Insurance Experiment: 20,190 rows, visits to a doctor in a year; "
        "its own 6 sites",
        ("--kind", "visits=count", "--kind", "plan=category"),
    ),
}  # fmt: skip


def run(name: str, rounds: int, seeds: int) -> dict[str, Any]:
    """Write the table, then do what a user would; give what the comparison says."""
    known = TABLES[name]
    header, rows = known.rows()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        with open(f"{name}.csv", "w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
        init = ["init", f"{name}.csv", "--client", "site", "--target", known.target]
        made_by = ["compare", f"{name}.toml", "--algorithms", ALGORITHMS, "--seeds", str(seeds)]
        made_by += ["--metric", known.metric, f"rounds={rounds}", "sampler=everyone"]
        for command in ([*init, *known.settings], [*made_by, "--quiet"]):
            if main(command):
                raise SystemExit(f"undrift {' '.join(command)} failed")
        found = json.loads((Path("runs") / name / "comparison.json").read_text())
    return {
        "about": known.about,
        "rows": len(rows),
        "commands": [
            " ".join(["undrift", *init, *known.settings]),
            " ".join(["undrift", *made_by]),
        ],
        "comparison": found,
    }


def chosen() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="one small table, three rounds")
    parser.add_argument("--only", choices=TABLES, help="measure one table anew")
    return parser.parse_args()


if __name__ == "__main__":
    if chosen().tiny:
        print(json.dumps(run("breast-cancer", 3, 1), indent=1))
    else:
        only = chosen().only
        made = json.loads(RESULT.read_text())["tables"] if only else {}
        made |= {name: run(name, 50, 3) for name in ([only] if only else TABLES)}
        RESULT.write_text(json.dumps({"commit": commit(), "tables": made}, indent=1) + "\n")
