"""N counts enrolled clients that hold examples: empty ones change no number of any algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import undrift as fl
from rules.needs import built, every, world_for
from undrift.core.tree import replace
from undrift.errors import ConfigError
from undrift.experiment.measure import Measure
from undrift.experiment.sections import Evaluation
from undrift.replay import replay
from undrift.rules.observe import LastModel
from undrift.testing import tiny_world
from undrift.trainer import Trainer

SIZES = (5, 9, 3, 7, 1, 6)
EMPTY = 3  # clients without an example behind the others


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


SETTINGS: dict[str, dict[str, Any]] = {
    "scaffold, option I": {"option": "I"},
    "scaffold, post_step": {"correction": "post_step", "local": fl.HeavyBall(0.1)},
    "scaffold, unbalanced": {"correction": "unbalanced"},
    "scaffold_m, printed": {"printed_decay": True},
    "feddyn, by size": {"by_size": True},
    "feddyn, unclipped": {"by_size": True, "clip_prox": False, "local": fl.Sgd(clip=1.0)},
    "adabest, unbalanced": {"mu": 0.3, "unbalanced": True},
    "fedvra, 1/N": {"by_size": False},
    "fedvra, cohort": {"by_size": False, "d": "cohort"},
    "fedvra, each": {"gamma": lambda client: 0.1 * client.size / client.mean_size},
    "rfedavg_plus, all": {"strength": 0.5, "refresh": "all"},
    "rfedavg, strong": {"strength": 0.5},
}
READERS = {"scaffold", "scaffold_m", "feddyn", "feddc", "fedvra", "rfedavg_plus"}  # of N
EVERY = every({*READERS, "fedadmm", "adabest", "mime", "comfed:scaf-sgd"}) + list(SETTINGS)
ANYWHERE = [n if n in READERS | {*SETTINGS} else slow(n) for n in (*fl.catalogue(), *SETTINGS)]


def trainer(name: str, sizes: Sequence[int], **options: Any) -> Trainer:
    kind = name.partition(",")[0]
    world = tiny_world(sizes=sizes)
    world = world._replace(**world_for(kind, world.sampler, world.work))
    return world.trainer(built(kind, **SETTINGS.get(name, {})), **options)


def models(made: Trainer, rounds: int = 3) -> list[Tensor]:
    return [(made.round(), made.server.w.clone())[1] for _ in range(rounds)]


@pytest.mark.parametrize("name", EVERY)
def test_empty_clients_change_no_number(name: str) -> None:
    """Enrolled from the start, or late, and when they leave again.

    Bit for bit, but where a matrix of feature means has more rows, which rounds otherwise.
    """
    alone = models(trainer(name, SIZES))
    more, everybody = (*SIZES, *[0] * EMPTY), range(len(SIZES) + EMPTY)
    from_the_start = models(trainer(name, more))
    late = trainer(name, more, enrolled=range(len(SIZES)))
    found = models(late, 1)
    late.enroll(everybody)
    found += models(late, 1)
    late.leave([len(SIZES), len(SIZES) + 1])
    found += models(late, 1)
    for r, model in enumerate(alone):
        for other in (from_the_start[r], found[r]):
            away = float((model - other).abs().max())
            assert away <= (1e-14 if "rfedavg" in name else 0.0), r


@pytest.mark.parametrize("name", ANYWHERE)
def test_empty_clients_may_stand_anywhere(name: str) -> None:
    """Between the others too, where sums are taken in another order; by given batches."""
    kind = name.partition(",")[0]
    full = tiny_world(sizes=SIZES)
    clients = [full.federation.client(i) for i in range(len(SIZES))]
    nothing = (clients[0][0][:0], clients[0][1][:0])
    places = [1, 2, 4, 5, 7, 8]
    spread = [clients[places.index(i)] if i in places else nothing for i in range(10)]
    everybody = fl.catalogue()[kind].needs == "everybody"
    cohorts = [list(range(6))] * 2 if everybody else [[0, 3, 4], [1, 3, 5]]
    moved = [[places[i] for i in ids] for ids in cohorts]
    algorithm = built(kind, **SETTINGS.get(name, {}))
    chances = [1.0 if everybody else 0.5] * 10
    one, other = (
        replay(
            full.task.original, data, algorithm, ids,
            steps=1 if kind == "qfedsgd" else 2, feature="1", chances=chances[: len(data)],
        )
        for data, ids in ((clients, cohorts), (spread, moved))
    )  # fmt: skip
    for a, b in zip(one, other, strict=True):
        for found, wanted in ((a.server, b.server), (a.everybody, b.everybody)):
            away = max(float((found[n] - wanted[n]).abs().max()) for n in found)
            assert away < 1e-12


def test_fedvra_without_gamma_is_uniform_fedavg_beside_empty_clients() -> None:
    for empty in (1, 6):
        sizes = (*SIZES, *[0] * empty)
        vra, avg = (
            tiny_world(sizes=sizes)._replace(sampler=fl.Everyone()).trainer(algorithm)
            for algorithm in (fl.fedvra(a=0.0, gamma=0.0, d=1.0, by_size=False),
                              fl.fedavg(by_size=False))
        )  # fmt: skip
        for a, b in zip(models(vra), models(avg), strict=True):
            assert float((a - b).abs().max()) < 1e-12


def test_an_empty_newcomer_is_not_asked_for_its_features() -> None:
    made = trainer("rfedavg_plus, all", (*SIZES, 0), enrolled=range(len(SIZES)))
    made.round()
    made.enroll([len(SIZES)])
    assert not made.round().skipped


def test_the_last_one_that_holds_an_example_cannot_leave() -> None:
    made = trainer("feddyn", (5, 0, 6), enrolled=[0, 1])
    with pytest.raises(ConfigError, match="nobody is enrolled who holds an example"):
        made.leave([0])
    assert made.enrolled == [0, 1]


def test_a_client_has_its_first_example_from_the_start() -> None:
    """However little has arrived: else N would change from round to round."""
    x, y = torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64)
    arrival = fl.Arrival(rounds=9, first=1e-15)
    federation = fl.Federation.of([(x, y), (x[:0], y[:0])], arrival=arrival)
    assert federation.available(0).tolist() == [1, 0]
    assert federation.available(9).tolist() == [5, 0]


def test_the_mean_of_everybodys_last_models_leaves_empty_clients_out() -> None:
    algorithm = replace(fl.fedavg(by_size=False), rules=(LastModel(),))
    found = []
    for empty in (0, 3):
        made = tiny_world(sizes=(*SIZES, *[0] * empty)).trainer(algorithm)
        made.run(2)
        found.append(Measure(made, Evaluation(models=("all",)), {}).model("all"))
    assert torch.equal(*found)
