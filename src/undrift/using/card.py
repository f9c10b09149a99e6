"""A model card: one page of Markdown about a model, from what its package tells.

It says nothing of single rows, and of single sites only their names and the worst one's metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from undrift.experiment.blueprint import Blueprint
from undrift.experiment.tables import parse_table
from undrift.rules.named import catalogue
from undrift.tabular import Preparation
from undrift.using.package import Package

MOST_NAMES = 12  # of sites, levels or classes in one line
MOST_COLUMNS = 200
NEWLINES = str.maketrans({"\n": " ", "\r": " ", "|": "\\|", "`": "'", "<": "&lt;"})


def card_of(package: Package) -> str:
    """Write the card."""
    parts = (_task, _data, _columns, _training, _results, _limits, _use, _origin)
    head = [f"# Model card: {_plain(package.about.get('name') or 'a model')}", ""]
    written = [list(part(package)) for part in parts]
    lines = [line for part in written if part for line in (*part, "")]
    return "\n".join([*head, *lines]).rstrip("\n") + "\n"


def _plain(value: Any) -> str:
    """Write a text of a file so that it stays in its place on the page."""
    text = str(value).translate(NEWLINES)
    return "".join(c for c in text if c.isprintable())[:300]


def _listed(names: Sequence[Any]) -> str:
    shown = ", ".join(_plain(name) for name in names[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


# -------------------------------------------------------------------------------------- sections
def _task(package: Package) -> Iterator[str]:
    blueprint, preparation = package.blueprint, package.preparation
    target = "" if preparation is None else f"`{_plain(preparation.schema.target)}`: "
    yield "## Task"
    yield ""
    yield f"Predicts {target}{_predicted(blueprint)}."
    if preparation is None:
        shape = ", ".join(map(str, ("n", *blueprint.shape)))
        kind = "whole numbers" if blueprint.whole else "numbers"
        yield f"It reads tensors [{shape}] of {kind}."


def _predicted(blueprint: Blueprint) -> str:
    if blueprint.class_names:
        count = len(blueprint.class_names)
        return f"the probabilities of {count} classes ({_listed(blueprint.class_names)})"
    return {
        "rates": "a count, by its expected value",
        "values": "a number in its own units",
    }.get(blueprint.gives, "numbers as the network gives them")


def _data(package: Package) -> Iterator[str]:
    blueprint = package.blueprint
    yield "## Training data"
    yield ""
    sites = f"{blueprint.clients} sites" if blueprint.clients != 1 else "1 site"
    named = f": {_listed(blueprint.client_names)}" if blueprint.client_names else ""
    yield f"{blueprint.examples} rows of {sites}{named}."


def _columns(package: Package) -> Iterator[str]:
    preparation = package.preparation
    if preparation is None:
        return
    features = preparation.schema.features
    yield "## Columns"
    yield ""
    yield f"{len(features)} columns become {preparation.inputs} inputs. Means, deviations and"
    yield "levels were computed from the training rows of all sites together."
    yield ""
    yield "| column | kind | missing cells |"
    yield "|---|---|---|"
    for name, kind in features[:MOST_COLUMNS]:
        yield f"| {_plain(name)} | {_kind(preparation, name, kind)} | {_missing(kind)} |"
    if len(features) > MOST_COLUMNS:
        yield ""
        yield f"... and {len(features) - MOST_COLUMNS} more columns."


def _kind(preparation: Preparation, name: str, kind: Any) -> str:
    if kind.kind == "category":
        levels = next(part.levels for part in preparation.parts if part.name == name)
        return f'category: {_listed(levels)}; any other level counts as "other"'
    if kind.kind == "date":
        return f"date: {_listed(kind.parts)}"
    return str(kind.kind)


def _missing(kind: Any) -> str:
    fill = "a level of its own" if kind.fill == "missing" else f"filled by {_plain(kind.fill)}"
    return f"{fill}, and marked" if getattr(kind, "indicator", False) else fill


def _training(package: Package) -> Iterator[str]:
    about = package.about
    yield "## Training"
    yield ""
    yield _sentence(about)
    state = "" if about.get("complete") else f" of {about.get('planned')}: not complete"
    yield f"Rounds: {about.get('rounds')}{state}. Network: `{_plain(package.blueprint.use)}`."


def _sentence(about: Mapping[str, Any]) -> str:
    """Name the algorithm, its paper and its settings."""
    label = _plain(about.get("label") or "its algorithm")
    table = parse_table(str(about.get("algorithm", "")), "algorithm").get("algorithm", {})
    entry = catalogue().get(str(about.get("label")))
    paper = f" ({_plain(entry.paper)})" if entry is not None and entry.paper else ""
    parts = ", ".join(_parts(table))
    return f"Trained by federated learning with {label}{paper}" + (f": {parts}." if parts else ".")


def _parts(table: Mapping[str, Any]) -> Iterator[str]:
    """Name rules and optimizers with their rates; `show` has the rest."""
    rules = table.get("rules")
    for part in [*(rules if isinstance(rules, list) else []), table.get("local"),
                 table.get("aggregate"), table.get("server")]:  # fmt: skip
        if isinstance(part, Mapping) and part.get("use") not in (None, "Rule"):
            rate = f" (lr {_plain(part['lr'])})" if isinstance(part.get("lr"), float) else ""
            yield f"{_plain(part['use'])}{rate}"


def _results(package: Package) -> Iterator[str]:
    yield "## Results"
    yield ""
    told = package.about.get("evaluation")
    if isinstance(told, Mapping) and isinstance(told.get("metrics"), Mapping):
        yield from _evaluated(told)
        return
    summary = package.about.get("summary")
    if not isinstance(summary, Mapping):
        yield "The run is not complete: it has no result yet."
        return
    metric = _plain(summary.get("metric"))
    yield f"{metric}: {_number(summary.get('last'))} after the last round."


def _evaluated(told: Mapping[str, Any]) -> Iterator[str]:
    yield f"On {told.get('examples')} rows that were not trained on:"
    yield ""
    worst = told.get("worst_site")
    worst = worst if isinstance(worst, Mapping) else None
    count = told.get("judged_sites")
    named = "" if worst is None else f" worst of {count} sites ({_plain(worst.get('site'))}) |"
    yield f"| metric | all sites |{named}"
    yield "|---|---:|" + ("---:|" if worst is not None else "")
    for name, value in told["metrics"].items():
        more = "" if worst is None else f" {_number(worst.get(name))} |"
        yield f"| {_plain(name)} | {_number(value)} |{more}"


def _number(value: Any) -> str:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.4g}" if real and math.isfinite(value) else "-"


def _limits(package: Package) -> Iterator[str]:
    yield "## Known limits"
    yield ""
    yield "- It was judged on rows like those it was trained on; other sites may differ."
    if package.blueprint.class_names:
        yield "- A probability is the model's own; check its calibration before you rely on it."
    if package.preparation is not None:
        yield '- Levels that training did not know count as "other", without a warning.'
        yield "- Numbers far outside of the training rows are taken as they are."
    if package.note:
        yield "- The run was not complete when this was written."


def _use(package: Package) -> Iterator[str]:
    yield "## Use"
    yield ""
    yield "```python"
    yield "import undrift"
    yield ""
    yield 'model = undrift.load_model("model.safetensors")'
    if package.preparation is None:
        yield "predictions = model(x)  # a tensor"
    else:
        yield 'predictions = model("new.csv")  # or a pandas DataFrame'
    yield "```"
    if package.preparation is not None:
        yield ""
        yield "On the command line: `undrift predict model.safetensors new.csv`."


def _origin(package: Package) -> Iterator[str]:
    about = package.about
    lines = {
        "run": f"{about.get('name')}, {about.get('label')}",
        "seed": about.get("seed"),
        "begun": about.get("started"),
        "undrift": about.get("undrift"),
        "commit": about.get("commit"),
        "torch": about.get("torch"),
        "exported": about.get("exported"),
    }
    yield "## Origin"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in lines.items():
        if value is not None:
            yield f"| {name} | {_plain(value)} |"
