"""A replay against a loop in plain torch, written down here."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import undrift as fl
from undrift.errors import ConfigError
from undrift.replay import Moment, replay

SIZES = (4, 7, 5)
COHORTS = [[0, 2], [1, 2], [0, 1, 2], [1]]
LR, MOMENTUM, DECAY, CLIP = 0.3, 0.9, 1e-2, 0.5


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(n, 3, generator=draw).double(), torch.randint(0, 2, (n,), generator=draw))
        for n in SIZES
    ]


def batches() -> dict[tuple[int, int], list[list[int]]]:
    return {
        (r, i): [[(r + k + j) % SIZES[i] for j in range(2 + k % 2)] for k in range(3 + i)]
        for r, ids in enumerate(COHORTS)
        for i in ids
    }


def local(w: Tensor, x: Tensor, y: Tensor, order: list[list[int]], c: Tensor) -> Tensor:
    """Momentum SGD with clipping of the corrected gradient and weight decay after it."""
    w, buffer = w.clone(), torch.zeros_like(w)
    for batch in order:
        v = w.clone().requires_grad_()
        out = x[batch] @ v[:6].view(2, 3).T + v[6:]
        (g,) = torch.autograd.grad(F.cross_entropy(out, y[batch]), v)
        g = g + c
        g = g * min(1.0, CLIP / (float(g.norm()) + 1e-6)) + DECAY * w
        buffer = MOMENTUM * buffer + g
        w = w - LR * buffer
    return w


def path(steps: int) -> float:
    """||a||_1 of heavy ball."""
    total, count = 0.0, 0.0
    for _ in range(steps):
        count = MOMENTUM * count + 1
        total += count
    return total


def by_hand() -> list[dict[str, Tensor]]:
    x, c, own = torch.zeros(8).double(), torch.zeros(8).double(), {}
    rounds = []
    for r, ids in enumerate(COHORTS):
        models, changes = {}, []
        for i in ids:
            c_i = own.get(i, torch.zeros(8).double())
            order = batches()[r, i]
            models[i] = local(x, *data()[i], order, c - c_i)
            new = c_i - c + (x - models[i]) / (path(len(order)) * LR)
            changes.append(new - c_i)
            own[i] = new
        c = c + sum(changes) / len(SIZES)
        x = torch.stack([models[i] for i in ids]).mean(0)
        rounds.append({"x": x, "c": c, **{f"y{i}": y for i, y in models.items()},
                       **{f"c{i}": v for i, v in own.items()}})  # fmt: skip
    return rounds


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([named["weight"].reshape(-1), named["bias"]])


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_scaffold_is_replayed_to_every_number(engine: str) -> None:
    zero = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    algorithm = fl.scaffold(local=fl.sgd(LR, MOMENTUM, weight_decay=DECAY, clip=CLIP))
    moments = replay(
        nn.Linear(3, 2), data(), algorithm, COHORTS, batches=batches(), initial=zero, engine=engine
    )
    for moment, hand, ids in zip(moments, by_hand(), COHORTS, strict=True):
        close(flat(moment.server), hand["x"])
        close(flat(moment.average), hand["x"])
        close(moment.server_state["0.Scaffold"], hand["c"])
        for i in ids:
            close(flat(moment.clients[i]), hand[f"y{i}"])
        for i, state in moment.client_states.items():
            close(state["0.Scaffold"], hand[f"c{i}"])


def close(mine: Tensor, other: Tensor) -> None:
    assert float((mine - other).abs().max()) < 1e-12


def test_full_batches_need_only_a_number_of_steps() -> None:
    whole = {(r, i): [list(range(SIZES[i]))] * 2 for r, ids in enumerate(COHORTS) for i in ids}
    first = nn.Linear(3, 2).state_dict()
    one, other = (
        replay(nn.Linear(3, 2), data(), fl.fedavg(lr=0.1), COHORTS, initial=first, **how)
        for how in ({"steps": 2}, {"batches": whole})
    )
    close(flat(one[-1].server), flat(other[-1].server))


def test_what_replay_refuses() -> None:
    with pytest.raises(ConfigError, match="either `batches` or `steps`"):
        replay(nn.Linear(3, 2), data(), fl.fedavg(), COHORTS)
    with pytest.raises(ConfigError, match="does not fit the module"):
        replay(nn.Linear(3, 2), data(), fl.fedavg(), COHORTS, steps=1, initial={})


def test_the_page_about_replay_runs() -> None:
    page = (Path(__file__).parent.parent.parent / "docs/replay.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "replay.md", "exec"), names)
    assert isinstance(names["last"], Moment)


PAGE = (Path(__file__).parent.parent.parent / "docs/replay.md").read_text("utf-8")


def test_the_page_names_all_that_is_given_and_read_back() -> None:
    for name in (*inspect.signature(replay).parameters, *Moment._fields):
        assert re.search(rf"^\|.*`{name}`.*\|", PAGE, re.MULTILINE) or name == "round", name


def calls_on_the_page() -> Iterator[ast.Call]:
    """Every call of something of ours in the table of other people's code."""
    table = PAGE.split("| code | is replayed by |")[1].split("What cannot be replayed")[0]
    for snippet in re.findall(r"`([^`]+)`", table):
        with suppress(SyntaxError):  # not everything there is Python
            yield from (n for n in ast.walk(ast.parse(snippet)) if isinstance(n, ast.Call))


def test_the_table_calls_what_there_is() -> None:
    """Names and settings exist, and rules and aggregates say which place they take."""
    owners, seen = {"fl": fl, "compat": fl.rules.compat}, 0
    for call in calls_on_the_page():
        made = call.func
        if isinstance(made, ast.Attribute) and getattr(made.value, "id", "") in owners:
            known = inspect.signature(getattr(owners[made.value.id], made.attr)).parameters
            free = any(p.kind is p.VAR_KEYWORD for p in known.values())
            for keyword in call.keywords:
                assert keyword.arg in known or free, f"{made.attr}({keyword.arg}=)"
            seen += 1
    assert seen > 30
    rows = PAGE.split("| code | is replayed by |")[1].split("What cannot be replayed")[0]
    for row in rows.splitlines():
        if re.search(r"compat\.(prox_of|RFedAvg|AdaBest|QFair|MeanBy|Scaffold|Nova)", row):
            assert re.search(r"rules=\(|aggregate=|fl\.Algorithm\(|same place", row), row
