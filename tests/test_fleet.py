"""Several experiments as one batch: the same numbers as alone."""

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.errors import ConfigError
from undrift.fleet import Fleet
from undrift.rules.named import catalogue
from undrift.testing.compare import distance
from undrift.testing.world import numbers

SEEDS = (0, 1, 2)


def trainer(
    algorithm, seed=0, dtype=torch.float64, sizes=(9, 14, 5, 20, 11), feature="0", **settings
):
    maker = torch.Generator().manual_seed(seed)
    clients = [
        (torch.randn(n, 6, generator=maker).to(dtype), torch.randint(0, 3, (n,), generator=maker))
        for n in sizes
    ]
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3))
    task = fl.Task(net, dtype=dtype, feature=feature)
    chosen = {"work": fl.Work(epochs=2, batch=4), "sampler": fl.Uniform(3), **settings}
    return fl.Trainer(task, fl.Federation.of(clients), algorithm, seed=seed, **chosen)


def same(builds, rounds=3, limit=1e-12):
    alone = [build() for build in builds]
    fleet = Fleet([build() for build in builds])
    together = fleet.run(rounds)
    for one, other, results in zip(alone, fleet.trainers, together, strict=True):
        for a, b in zip(one.run(rounds), results, strict=True):
            assert (a.ids, a.skipped, a.steps) == (b.ids, b.skipped, b.steps)
            assert (a.floats_down, a.floats_up) == (b.floats_down, b.floats_up)
            assert a.loss == pytest.approx(b.loss, abs=limit)
        wanted = numbers(one)
        for name, value in numbers(other).items():
            assert distance([value], [wanted[name]]) < limit, name
    assert fleet._together
    return fleet


def test_seeds_of_one_algorithm():
    fleet = same([lambda s=s: trainer(fl.scaffold(0.1), s) for s in SEEDS])
    assert [g.size for g in fleet._runner.groups] == [3]


def test_plain_sgd_moves_in_place():
    fleet = same([lambda s=s: trainer(fl.fedavg(0.1), s, feature=None) for s in SEEDS])
    assert fleet._runner.stepping.in_place


@pytest.mark.parametrize(
    "build",
    [
        lambda x: fl.fedavg(local=fl.sgd(0.1 * x, momentum=0.3 * x, weight_decay=0.01 * x)),
        lambda x: fl.feddyn(0.1 * x, alpha=0.2 * x),
        lambda x: fl.comfed("prox", "yogi", mu=0.1 * x, lr=0.05 * x),
        lambda x: fl.adabest(0.1, mu=0.1 * x, beta=0.3 * x),
        lambda x: fl.rfedavg_plus(0.1 * x, strength=0.1 * x),
        lambda x: fl.mime(0.1 * x),
        lambda x: fl.fedavg(local=fl.sgd(0.2 * x, clip=0.5 * x)),
    ],
)
def test_numbers_that_differ(build):
    fleet = same([lambda x=x, s=s: trainer(build(x), s) for s, x in enumerate((1.0, 2.0, 1.5))])
    assert [g.size for g in fleet._runner.groups] == [3]
    assert fleet._runner.groups[0].numbers is not None


def test_a_number_that_is_not_set_is_no_number():
    clips = (None, 0.05, 0.1, None)
    fleet = same([lambda c=c: trainer(fl.fedavg(local=fl.sgd(0.1, clip=c))) for c in clips])
    assert sorted(g.size for g in fleet._runner.groups) == [2, 2]


@pytest.mark.parametrize("name", ["rfedavg", "rfedavg_plus"])
def test_padding_writes_no_row_of_a_table(name):
    build = catalogue()[name].build
    cohorts = (fl.Uniform(2), fl.Everyone(), fl.Bernoulli(0.7))
    same([lambda c=c: trainer(build(lr=0.1), sampler=c) for c in cohorts])


class Scaled(nn.Module):
    """Has a setting that nothing shows, and one that is a buffer."""

    def __init__(self, factor=1.0, shift=0.0):
        super().__init__()
        self.linear, self.factor = nn.Linear(6, 3), factor
        self.register_buffer("shift", torch.tensor(shift))

    def forward(self, x):
        return self.factor * self.linear(x) + self.shift * x[:, :3]


def weighted(factor):
    def loss(output, target):
        return factor * nn.functional.cross_entropy(output, target, reduction="none")

    return loss


def task_of(module=None, loss="cross_entropy", **settings):
    found = trainer(fl.fedavg(0.1), feature=None)
    found_task = fl.Task(module or Scaled(), loss, dtype=torch.float64, **settings)
    return fl.Trainer(found_task, found.federation, fl.fedavg(0.1), work=fl.Work(steps=1, batch=4))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda: task_of(Scaled(2.0)), "module"),
        (lambda: task_of(Scaled(shift=1.0)), "module"),
        (lambda: task_of(loss=weighted(2.0)), "loss"),
        (lambda: task_of(loss=weighted(1.0), metrics={"score": weighted(2.0)}), "metrics"),
    ],
)
def test_what_looks_alike_and_is_not_is_refused(other, why):
    first = task_of(loss=weighted(1.0), metrics={"score": weighted(1.0)})
    Fleet([first, task_of(loss=weighted(1.0), metrics={"score": weighted(1.0)})])
    with pytest.raises(ConfigError, match=f"as one batch: {why}"):
        Fleet([task_of() if why == "module" else first, other()])


def test_a_fleet_is_a_list_of_different_trainers():
    one = trainer(fl.fedavg(0.1))
    for wrong, why in (
        ([one, one], "twice"), ([], "at least one"), ([one, 2], "got 2"), (one, "a list"),
        (None, "a list"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            Fleet(wrong)
    assert len(Fleet(t for t in [one]).trainers) == 1


def test_structures_that_differ_share_the_gradient(traced):
    names = ("fedavg", "scaffold", "moon", "fedyogi", "rfedavg", "fednova", "qfedavg", "mime")
    builds = [
        lambda n=n, s=s: trainer(catalogue()[n].build(lr=0.05), s) for s in (0, 1) for n in names
    ]
    fleet = same(builds, rounds=2)
    assert [g.size for g in fleet._runner.groups] == [4, 2, 2, 2, 2, 2, 2]


@pytest.mark.slow
def test_the_whole_grid_of_comfed(traced):
    cells = [
        (c, s) for c in ("sgd", "prox", "scaf", "nova") for s in ("sgd", "adam", "adagrad", "yogi")
    ]
    same([lambda c=c, s=s: trainer(fl.comfed(c, s)) for c, s in cells], rounds=2)


def test_partitions_and_cohorts_of_any_size():
    settings = [
        {"sizes": (9, 14, 5, 20, 11), "sampler": fl.Uniform(3)},
        {"sizes": (3, 30, 7), "sampler": fl.Everyone()},
        {"sizes": (8,) * 9, "sampler": fl.Bernoulli(0.5)},
    ]
    same([lambda s=s: trainer(fl.scaffold(0.1), 4, **s) for s in settings], rounds=5)


@pytest.mark.parametrize("work", [fl.Work(epochs=2, batch=None), fl.Work(epochs=1, last="full")])
def test_batches_of_any_width(work):
    sizes = ((9, 14, 5, 20, 11), (3, 3, 30, 8), (7, 7, 7))
    builds = [
        lambda s=s, n=n: trainer(fl.scaffold(0.1), s, sizes=n, work=work)
        for s, n in enumerate(sizes)
    ]
    same(builds)


def test_a_round_that_fails_late_is_taken_again_by_everybody(monkeypatch):
    fleet, alone = (
        [trainer(fl.scaffold(0.1), s) for s in SEEDS] for _ in range(2)
    )  # fmt: skip
    fleet = Fleet(fleet)
    fleet.run(1)
    look = fleet.trainers[1]._look
    failures = [torch.OutOfMemoryError("once")]

    def looking(*given):
        if failures:
            raise failures.pop()
        return look(*given)

    monkeypatch.setattr(fleet.trainers[1], "_look", looking)
    assert [[r.round for r in found] for found in fleet.run(2)] == [[2, 3]] * 3
    for one, other in zip(alone, fleet.trainers, strict=True):
        one.run(3)
        assert distance([one.server.w], [other.server.w]) < 1e-12


def test_in_single_precision_one_step_is_close():
    one_step = {"work": fl.Work(steps=1, batch=4), "dtype": torch.float32}
    builds = [lambda s=s: trainer(fl.feddyn(0.1), s, **one_step) for s in SEEDS]
    same(builds, rounds=1, limit=1e-5)


def test_equal_examples_are_held_once():
    x, y = torch.randn(60, 6).double(), torch.randint(0, 3, (60,))

    def one(seed):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
        data = fl.Federation.split(x.clone(), y.clone(), order.split(12))
        net = nn.Sequential(nn.Linear(6, 3))
        return fl.Trainer(fl.Task(net, dtype=torch.float64), data, fl.fedavg(0.1), seed=seed)

    fleet = Fleet([one(s) for s in SEEDS])
    fleet.run(1)
    assert len({t.engine.federation.x.data_ptr() for t in fleet.trainers}) == 1
    assert fleet._runner.data.x.data_ptr() == fleet.trainers[0].federation.x.data_ptr()


def test_each_goes_on_from_its_own_checkpoint(tmp_path):
    fleet = Fleet([trainer(fl.adabest(0.1), s) for s in (0, 1)])
    fleet.run(3)
    for i, one in enumerate(fleet.trainers):
        one.save(tmp_path / str(i))
    fleet.run(2)
    again = trainer(fl.adabest(0.1), 1)
    assert again.load(tmp_path / "1")
    again.run(2)
    assert distance([again.server.w], [fleet.trainers[1].server.w]) < 1e-12


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"work": fl.Work(steps=3)}, "local work"),
        ({"dtype": torch.float32}, "precision"),
        ({"engine": "reference"}, "engine"),
    ],
)
def test_what_does_not_fit_is_refused(change, why):
    with pytest.raises(ConfigError, match=f"cannot train as one batch: {why}"):
        Fleet([trainer(fl.fedavg(0.1)), trainer(fl.fedavg(0.1), **change)])
    with pytest.raises(ConfigError, match="at least one"):
        Fleet([])
    with pytest.raises(ConfigError, match="one client at a time"):
        Fleet([trainer(fl.fedavg(0.1), engine="reference")])


def test_trainers_that_draw_the_same_cohorts_part_when_somebody_leaves():
    def build() -> list[fl.Trainer]:
        return [trainer(a) for a in (fl.fedavg(0.1), fl.scaffold(0.1), fl.fedavgm(0.1))]

    fleet, alone = fl.Fleet(build()), build()
    fleet.run(1)
    assert fleet._twins == [0, 0, 0]
    for one in alone:
        one.run(1)
    for pair in (fleet.trainers, alone):
        pair[1].leave([0, 1])
    fleet.run(2)
    assert fleet._twins == [0, 1, 0]
    for one, other in zip(fleet.trainers, alone, strict=True):
        other.run(2)
        assert distance([one.server.w], [other.server.w]) < 1e-12


def test_trainers_that_draw_the_same_cohorts_part_when_one_begins_again():
    fleet = fl.Fleet([trainer(fl.fedavg(0.1)), trainer(fl.fedavg(0.2))])
    first, second = fleet._opened()
    assert first.cohort is second.cohort
    for i, one in enumerate(fleet.trainers):
        one.restart(one.server, fl.Seeds(0, 0, 5 + i))
    opened = [one.cohort.seed for one in fleet._opened()]
    assert opened == [5, 6]


def test_what_is_told_of_the_same_cohort_is_sent_once():
    one = trainer(fl.fedavg(0.1), sampler=fl.Everyone())
    first, second = one.roster.cohort(0).info, one.roster.cohort(1).info
    assert first is second
    one.leave([0])
    fewer = one.roster.cohort(1).info
    assert sorted(fewer.id.tolist()) == [1, 2, 3, 4]
    assert (
        float(fewer.share.sum()) == pytest.approx(1) != pytest.approx(float(first.share[1:].sum()))
    )
    some = trainer(fl.fedavg(0.1))
    told = [some.roster.cohort(r).info for r in range(4)]
    assert [sorted(i.id.tolist()) for i in told] == [
        sorted(trainer(fl.fedavg(0.1)).roster.cohort(r).ids) for r in range(4)
    ]
