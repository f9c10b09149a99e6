"""Write docs/algorithms (a page per algorithm), docs/all-digits.md and links of docs/papers.md.

    python scripts/algorithm_pages.py              # text, from facts, code and records
    python scripts/algorithm_pages.py --pictures   # and the pictures
    python scripts/algorithm_pages.py --measure    # and docs/algorithms/measured.json (minutes)
    python scripts/algorithm_pages.py --keep RUNS  # first, the records of `undrift compare`

Formulas and sources are written by hand in docs/algorithms/facts; lines of code, sentences,
defaults and costs are taken from the package; curves and tables from docs/records/all-digits.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from algorithm_costs import ROUNDS, Ended, cost_of, exchanges, measure, told
from algorithm_facts import (
    FACTS,
    ROOT,
    Facts,
    build,
    check_facts,
    entries,
    facts_of,
    lines_of,
    relinked,
    sentence,
    settings_of,
    shown,
    test_link,
)
from algorithm_records import EXPERIMENTS, choices, comparison, home_of, keep, line
from digits_page import digits_page

from undrift.rules import compat
from undrift.rules.named import COMFED_CLIENTS, COMFED_SERVERS, comfed_name
from undrift.verify.block_cases import BLOCK_CASES
from undrift.verify.cases import CASES
from undrift.verify.identities import IDENTITIES
from undrift.verify.table import NEEDS_EVERYBODY, PROMISES

PAGES = ROOT / "docs/algorithms"
MEASURED = PAGES / "measured.json"
NEEDS = {
    "everybody": "Everybody takes part in every round; a sampled cohort is refused.",
    "features": 'A feature layer: `Task(..., feature="name")`, or `[task] feature` in a file.',
    "one step": 'One local step on all own data: `Work(steps=1, batch=None)`, or `batch = "all"`.',
}


def pages() -> dict[Path, str]:
    """Write every page; complain about facts that do not fit the code."""
    for name in entries():
        check_facts(name)
    made = {PAGES / f"{name}.md": algorithm_page(name) for name in entries()}
    made[PAGES / "index.md"] = index_page()
    made[PAGES / "compat.md"] = compat_page()
    made[ROOT / "docs/all-digits.md"] = digits_page()
    papers = ROOT / "docs/papers.md"  # written by hand, but for the places of tests
    made[papers] = relinked(papers.read_text("utf-8"))
    return made


# ------------------------------------------------------------------------------ one algorithm
def algorithm_page(name: str) -> str:
    """Write the page of one algorithm."""
    facts = facts_of(name)
    parts = [
        f"# {facts['title']}\n\n{facts['what']}\n\n{cited(facts)}",
        picture(name),
        "## Formulas and our lines\n\nLetters are those of the [index](index.md#letters).",
        *(step(s) for s in facts["step"]),
        facts.get("notes", ""),
        grid() if name == "comfed" else composed(name),
        settings(name),
        holds(name, facts),
        costs(name, facts),
        needs(name),
    ]
    return "\n\n".join(p.strip("\n") for p in parts if p) + "\n"


# the sections of docs/papers.md, by words of a paper's title or by an algorithm's
PAPERS = {
    "ComFed": "comfed",
    "Distribution-Regularized": "rfedavg",
    "Beyond ADMM": "fedvra",
    "AdaBest": "adabest",
    "FedRL": "fedrl",
}


def cited(facts: Facts) -> str:
    """Cite the paper."""
    authors = f"{facts['authors']}: " if facts["authors"] else ""
    own = f"{authors}*{facts['paper']}*, {facts['where']}."
    found = next((p for p in PAPERS if p in facts["paper"] or p == facts["title"]), None)
    if found is None:
        return own
    return f"{own} What it prints, and what we do: [papers](../papers.md#{PAPERS[found]})."


def picture(name: str) -> str:
    """Show the recorded runs, and say what they came to."""
    alt = f"{facts_of(name)['title']} and FedAvg on the digits"
    image = f"![{alt}](../pictures/algorithms/{name}.png)"
    return f"{image}\n\n{grid_result() if name == 'comfed' else result(name)}"


def result(name: str) -> str:
    """Say what an algorithm came to on the digits."""
    home = home_of(name)
    compared, found = comparison(home), line(home, name)
    at = dict(zip(compared.header(), compared.cells(found), strict=True))
    chosen = choices(home)[name]
    text = f"Test accuracy after 100 rounds: **{at['last']} %** over 3 seeds"
    if name != "fedavg":
        text += f"; FedAvg {compared.cells(line(home, 'fedavg'))[1]} %"
    if found.difference is not None and at["95 % interval"]:
        interval = at["95 % interval"].removesuffix(" *")
        text += f"; difference {at['vs fedavg']} points (95 % interval {interval})"
    settings = f" with {chosen.settings}" if chosen.settings else ""
    return (
        f"{text}. Run{settings} ({chosen.why}): [all algorithms on the digits](../all-digits.md)."
    )


def step(facts: Facts) -> str:
    """Write one step: the formula, and our lines below it."""
    formula = f"### {facts['title']}\n\n```text\n{facts['formula'].strip()}\n```"
    return f"{formula}\n\n```python\n{lines_of(facts['code'])}\n```" if facts["code"] else formula


def composed(name: str) -> str:
    """Show the sentence that the name stands for."""
    said = sentence(entries()[name].build())
    return f"## The sentence\n\n`undrift.{name}()` is\n\n```text\n{said}\n```"


def settings(name: str) -> str:
    """List settings, defaults and where they come from."""
    rows = [[f"`{s.name}`", default(s.default), s.source] for s in settings_of(name)]
    return "## Settings\n\n" + table(
        ["setting", "default", "what it is, and why this default"], rows
    )


def default(value: Any) -> str:
    return "required" if value is inspect.Parameter.empty else f"`{shown(value)}`"


def holds(name: str, facts: Facts) -> str:
    """List what the algorithm reduces to, and what else is proven of it."""
    verify = f"`undrift verify {name}`"
    loops = sum(case.of == name for case in (*CASES, *BLOCK_CASES))
    rows = [[f"an independent loop in numpy, {loops} settings", "1e-12", verify]] if loops else []
    rows += [[i.says, f"{i.limit:g}", verify] for i in IDENTITIES if i.of == name]
    if name in PROMISES:
        who = "everybody" if name in NEEDS_EVERYBODY else "everybody, and with half of the clients"
        rows.append([f"the optimum of heterogeneous quadratics, with {who}", "1e-8", verify])
    for one in facts.get("shown", []):
        rows.append([one["says"], "", test_link(*one["test"].split("::"), "../../")])
    head = (
        "## What it equals, and what holds\n\nDifferences are over all parameters and rounds.\n\n"
    )
    return head + table(["what", "at most", "shown by"], rows)


def costs(name: str, facts: Facts) -> str:
    """Write what was counted."""
    said = ["sent down, per client and round", "sent up", "kept by every client",
            "kept by the server"]  # fmt: skip
    made = {s: build("comfed", server=s) for s in COMFED_SERVERS}
    made |= {c: build("comfed", client=c) for c in COMFED_CLIENTS[1:]}
    cells = made if name == "comfed" else {"floats": build(name, lr=0.05)}
    counted = [cost_of(name, algorithm) for algorithm in cells.values()]
    rows = [[said[k], *(cost[k] for cost in counted)] for k in range(4)]
    more = [f"{said[0].upper()}{said[1:]}." for said in exchanges(build(name))]
    notes = " ".join([*more, *filter(None, [told(facts)])])
    head = "## Cost\n\nFloats, counted while it runs: n parameters, d features, N clients, "
    head += "e examples of the largest client, C classes.\n\n"
    columns = [f"{n} · sgd" if n in COMFED_CLIENTS[1:] else f"sgd · {n}" for n in cells]
    columns = columns if name == "comfed" else list(cells)
    return head + table(["", *columns], rows) + (f"\n\n{notes}" if notes else "")


def needs(name: str) -> str:
    """Say what an algorithm asks for, and whether it finds the optimum."""
    algorithm = build(name)
    said = [NEEDS[entries()[name].needs]] if entries()[name].needs else []
    if algorithm.needs_path:
        said.append("A local optimizer that is linear in the gradients: Sgd, HeavyBall, Nesterov.")
    if any(p.exact_path for p in (*algorithm.parts, algorithm.server)):
        said.append("No clipping, which would make the weights of its gradients unknown.")
    said += facts_of(name).get("needs", [])
    said = said or ["Nothing: any cohort, any local optimizer, any model."]
    found = ended(name)
    if name != "comfed":
        said.append(_optimum(found))
    return "## Needs, and where it ends\n\n" + "\n".join(f"- {s}" for s in said)


def _optimum(found: Ended | None) -> str:
    if found is None:
        return "On the quadratics it is not measured: they have no features, and no second block."
    return (
        f"Six quadratics that pull elsewhere, everybody, 5 full steps a round, {ROUNDS} rounds "
        f"({found.setting}): optimum {found.said}."
    )


@cache
def ended(name: str) -> Ended | None:
    """Read where an algorithm ended on the quadratics."""
    found = json.loads(MEASURED.read_text("utf-8")).get(name)
    return None if found is None else Ended(found["setting"], float(found["distance"]))


# -------------------------------------------------------------------------------------- ComFed
def grid() -> str:
    """Show ComFed's cells: names, and what they came to."""
    rows = []
    for client in COMFED_CLIENTS:
        rows.append([f"**{client}**", *(cell(client, server) for server in COMFED_SERVERS)])
    head = "## The grid\n\nRows are `client`, columns `server`; accuracy as above.\n\n"
    return head + table(["", *COMFED_SERVERS], rows)


def cell(client: str, server: str) -> str:
    label = comfed_name(client, server)
    name = f"[{facts_of(label)['title']}]({label}.md)" if label in entries() else f"`{label}`"
    compared = comparison(EXPERIMENTS[0])
    return f"{name} {compared.cells(line(EXPERIMENTS[0], label))[1]}"


def grid_result() -> str:
    return (
        "Every cell beside FedAvg (grey), 3 seeds; seven are algorithms with names of their own: "
        "[all algorithms on the digits](../all-digits.md)."
    )


# ------------------------------------------------------------------------------- the other pages
def index_page() -> str:
    """Write the table of all algorithms."""
    text = facts_of("index")
    rows = []
    for name in (n for n in entries() if n != "comfed"):
        facts, cost, found = facts_of(name), cost_of(name, build(name, lr=0.05)), ended(name)
        home = home_of(name)
        star = "" if home == EXPERIMENTS[0] else " ¹"
        rows.append([
            f"[{facts['title']}]({name}.md)", facts["what"], cost.down, cost.up, cost.client,
            entries()[name].needs, "" if found is None else found.said,
            comparison(home).cells(line(home, name))[1] + star,
        ])  # fmt: skip
    heads = ["algorithm", "what it is", "down", "up", "client keeps", "needs", "optimum", "digits"]
    return "\n\n".join([text["before"].strip(), table(heads, rows), text["after"].strip()]) + "\n"


def compat_page() -> str:
    """List other people's behaviours."""
    text = facts_of("index")["compat"].strip()
    parts = [f"## `{name}`\n\n{inspect.getdoc(getattr(compat, name))}" for name in compat.__all__]
    return "\n\n".join([text, *parts]) + "\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Write a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in r)} |" for r in lines)


def main() -> int:
    """Write everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pictures", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--keep", metavar="RUNS", type=Path)
    parser.add_argument("--seconds", metavar="JSON", type=Path, help="how long each compare took")
    chosen = parser.parse_args()
    if chosen.keep is not None:
        keep(chosen.keep, json.loads(chosen.seconds.read_text("utf-8")))
    if chosen.measure:
        MEASURED.write_text(json.dumps(measure(), indent=1) + "\n", "utf-8")
    made = pages()
    for path, text in made.items():
        path.write_text(text, "utf-8")
    print(f"{len(made)} pages, facts from {FACTS.relative_to(ROOT)}")
    if chosen.pictures:
        from algorithm_pictures import draw_all

        print(f"{len(draw_all())} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
