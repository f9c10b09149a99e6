"""Client states that stay where the store has them, to the numbers of those that are copied."""

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.core import histories
from undrift.core.seam import Seam
from undrift.core.tree import EMPTY, leaves, record
from undrift.engines import branches, device_round, stepping
from undrift.engines.reading import Reading
from undrift.engines.state_rows import StateRows
from undrift.testing.world import numbers

pytest.importorskip("triton", reason="the kernels need triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOMENTUM = fl.sgd(0.1, momentum=0.9)


@record
class Counted(fl.Rule):
    """A rule with a state of several types: a count, a vector, and a number for each round."""

    def init_client(self, w, sizes):
        return {"count": torch.zeros((), dtype=torch.int64), "last": torch.zeros_like(w),
                "mean": torch.zeros(3)}  # fmt: skip

    def direction(self, g, view):
        return g + 0.1 * view.mine["last"]

    def finish(self, delta, view):
        mine = view.mine
        count, mean = mine["count"] + 1, mine["mean"] + view.size.to(mine["mean"])
        return delta, {"count": count, "last": delta, "mean": mean}, EMPTY


CHAINS = {
    "scaffold": lambda: fl.scaffold(local=MOMENTUM),
    "feddyn": lambda: fl.feddyn(0.1),
    "adabest": lambda: fl.adabest(0.1),
    "several types": lambda: fl.Algorithm((Counted(),), local=MOMENTUM),
}


@pytest.fixture(autouse=True)
def _remembers(monkeypatch):
    """Layers remember, however small; in fp16, for the interpreter does not know bf16."""
    monkeypatch.setattr(histories, "pays", lambda layer, *_: layer.out_features == 33)
    monkeypatch.setattr(histories, "operand_type", lambda *_: torch.float32)
    monkeypatch.setattr(histories.Histories, "could_pay", staticmethod(lambda *_: True))


def network(bias: bool) -> nn.Sequential:
    sizes = ((9, 16), (16, 33), (33, 3))
    one, two, three = (nn.Linear(*s, bias=bias) for s in sizes)
    return nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), three)


def trainer(build, seed: int = 0, bias: bool = True, **settings) -> fl.Trainer:
    maker = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(n, 9, generator=maker), torch.randint(0, 3, (n,), generator=maker))
        for n in (6, 8, 5, 7, 6)
    ]
    torch.manual_seed(seed)
    task = fl.Task(network(bias))
    chosen = {"work": fl.Work(steps=2, batch=4), "sampler": fl.Uniform(3), **settings}
    made = fl.Trainer(
        task, fl.Federation.of(clients), build(), seed=seed, device=DEVICE, graph=True, **chosen
    )
    made.task.seam = Seam("fp16", default="loop")
    return made


def copied(monkeypatch) -> None:
    monkeypatch.setattr(StateRows, "possible", lambda *_: False)


def rows_of(made: fl.Trainer) -> StateRows | None:
    (runner,) = made.engine._rounds
    assert runner.end is not None, "the end of a round is not done by numbers"
    return runner.loading.rows


def same(one: fl.Trainer, other: fl.Trainer) -> None:
    wanted = numbers(one)
    for name, value in numbers(other).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", CHAINS)
def test_rows_are_what_copies_would_be(name, monkeypatch):
    left, moved = trainer(CHAINS[name]), trainer(CHAINS[name])
    left.run(4)
    assert rows_of(left) is not None
    copied(monkeypatch)
    moved.run(4)
    assert rows_of(moved) is None
    same(left, moved)
    one, other = (t.store.snapshot()[0]["rows"] for t in (left, moved))
    assert torch.equal(one, other), "also the bytes that no number fills"


@record
class Bursts(fl.Rule):
    """A server whose third round is not finite."""

    def server(self, update, state, view):
        return torch.where(view.round == 2, torch.inf, update), state


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "copies"])
def test_a_round_that_is_refused_on_a_device_leaves_every_state(rows, monkeypatch):
    take = fl.engines.Vectorised.take

    def unasked(self, algo, turn, done):
        return take(self, algo, turn, done._replace(sound=torch.tensor(True)))

    monkeypatch.setattr(fl.engines.Vectorised, "take", unasked)  # as where nobody waits
    if not rows:
        copied(monkeypatch)
    scaffold = CHAINS["scaffold"]().rules
    build = lambda: fl.Algorithm((*scaffold, Bursts()), local=MOMENTUM)  # noqa: E731
    made = trainer(build, sampler=fl.Everyone())
    made.run(2)
    before, model = made.store.gather(range(5)), made.server
    assert made.round().skipped == [0, 1, 2, 3, 4]
    assert (rows_of(made) is not None) is rows
    assert all(map(torch.equal, leaves(before), leaves(made.store.gather(range(5)))))
    assert torch.equal(model.w, made.server.w) and float(made.server.round) == 3
    assert made.round().skipped == [] and not torch.equal(model.w, made.server.w)
    assert not torch.equal(leaves(before)[0], leaves(made.store.gather(range(5)))[0])


def test_whoever_is_refused_keeps_its_row(monkeypatch):
    found = []
    for leave in (True, False):
        made = trainer(CHAINS["scaffold"], sampler=fl.Everyone())
        if not leave:
            copied(monkeypatch)
        made.run(2)
        before = made.store.gather([1])
        made.federation.x[made.federation.members[6:14]] = torch.nan  # all of client 1
        skipped = [r.skipped for r in made.run(2)]
        assert skipped == [[1], [1]]
        assert all(map(torch.equal, leaves(before), leaves(made.store.gather([1]))))
        assert torch.isfinite(made.server.w).all()
        found.append(made)
    assert rows_of(found[0]) is not None and rows_of(found[1]) is None
    same(*found)


def test_models_are_written_with_the_states_of_their_round(monkeypatch):
    found = []
    for leave in (True, False):
        made = trainer(CHAINS["feddyn"])
        if not leave:
            copied(monkeypatch)
        seen = []
        for _ in range(4):
            made.round()
            seen.append(made._trained.models().clone())
        found.append(seen)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    "name",
    [
        "scaffold",
        "fednova",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("feddc", "adabest")),
    ],
)
def test_who_takes_no_step_has_no_part_in_sums(name):
    """The padding of a cohort that lacks one of sixteen; its numbers are divided by no step."""
    maker = torch.Generator().manual_seed(0)
    x, y = torch.randn(96, 9, generator=maker), torch.randint(0, 3, (96,), generator=maker)
    found, alike = [], {"work": fl.Work(steps=2, batch=4), "sampler": fl.Bernoulli(0.95)}
    for options in ({"graph": True}, {"engine": "reference"}):
        torch.manual_seed(0)
        data = fl.Federation.split(x.to(DEVICE), y.to(DEVICE), torch.arange(96).split(6))
        made = fl.Trainer(
            fl.Task(network(True)), data, getattr(fl, name)(0.05), seed=0, **alike, **options
        )
        if "graph" in options:
            made.task.seam = Seam("fp16", default="loop")
        sizes = [len(r.ids) for r in made.run(4) if not r.skipped]
        assert getattr(made.engine, "graph", True), "it was taken piece by piece"
        found.append((made.server.w, sizes))
    assert found[0][1] == found[1][1] == [16, 15, 16, 16]
    assert (found[0][0] - found[1][0]).abs().max() < 1e-4


def test_smaller_cohorts_write_no_row_of_others(monkeypatch):
    """Rows behind a cohort are padding."""
    found = []
    for leave in (True, False):
        made = trainer(CHAINS["scaffold"], sampler=fl.Bernoulli(0.6))
        if not leave:
            copied(monkeypatch)
        assert len({len(r.ids) for r in made.run(8)}) > 1
        found.append(made)
    same(*found)


def test_a_round_that_fails_leaves_everything_as_it_was(monkeypatch):
    made, twin = trainer(CHAINS["scaffold"]), trainer(CHAINS["scaffold"])
    made.run(3)
    twin.run(4)
    before = numbers(made)

    def broken(*_: object) -> None:
        raise fl.errors.TaskError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(type(made.engine), "take", broken)
        with pytest.raises(fl.errors.TaskError):
            made.round()
    after = numbers(made)
    assert all(torch.equal(after[n], v) for n, v in before.items())
    made.round()
    same(made, twin)
    assert made.store.num_bytes == twin.store.num_bytes, "no row is lost"


def test_experiments_side_by_side_have_stores_of_their_own(monkeypatch):
    alone = [trainer(CHAINS["scaffold"], seed) for seed in (0, 1)]
    for one in alone:
        one.run(3)
    fleet = fl.Fleet([trainer(CHAINS["scaffold"], seed) for seed in (0, 1)])
    fleet.run(3)
    assert fleet._runner.loading.rows is not None
    for one, other in zip(alone, fleet.trainers, strict=True):
        torch.testing.assert_close(one.server.w, other.server.w)
        rows = [t.store.snapshot()[0]["rows"].view(torch.float32) for t in (one, other)]
        torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-3)


def test_nothing_is_copied_where_every_weight_is_remembered(monkeypatch):
    monkeypatch.setattr(histories, "pays", lambda *_: True)
    found = []
    for leave in (True, False):
        made = trainer(CHAINS["scaffold"], bias=False)
        if not leave:
            copied(monkeypatch)
        made.run(4)
        assert made.engine.graph and (rows_of(made) is not None) == leave
        found.append(made)
    same(*found)


def test_rows_of_a_round_are_kept_as_long_as_somebody_may_ask(tmp_path):
    """A store that is restored, or grows, makes another table."""
    made = trainer(CHAINS["feddyn"])
    made.run(3)
    made.save(tmp_path)
    made.round()
    trained, (runner,) = made._trained, made.engine._rounds
    wanted = made.store.gather(range(5))
    made.load(tmp_path)
    junk = [torch.full((made.store.num_bytes // 4,), 7.0) for _ in range(4)]
    assert made._trained is None and len(junk) == 4
    runner._written = False
    with_rows = trained.models().clone()
    copies = trainer(CHAINS["feddyn"])
    copies.run(4)
    assert torch.equal(with_rows, copies._trained.models())
    assert not all(map(torch.equal, leaves(wanted), leaves(made.store.gather(range(5)))))


@record
class Written(fl.Rule):
    """A rule whose server keeps a vector for each client, and writes it to that client."""

    def init_server(self, w, sizes):
        return torch.zeros(sizes.clients, len(w))

    def personal(self, state, client):
        return state.index_select(0, client.id.reshape(1))[0]

    def direction(self, g, view):
        return g + 0.5 * view.personal

    def server(self, update, state, view):
        rows = torch.arange(state.shape[0], dtype=update.dtype, device=update.device)[:, None] + 1
        return update, state + 3.0 * rows * update


class Late:
    """Work aside as late as it may come: when somebody waits for it, or for what came behind."""

    def __init__(self, device):
        self.calls = []

    def run(self, call):
        self.calls.append(call)
        place = len(self.calls)

        def wait():
            for at in range(place):
                call, self.calls[at] = self.calls[at], branches.nothing
                call()

        return wait


@pytest.mark.skipif(DEVICE == "cuda", reason="a device has branches of its own")
@pytest.mark.parametrize(
    "name",
    ["scaffold", "written"]
    + [pytest.param(n, marks=pytest.mark.slow) for n in (*list(CHAINS)[1:], "fedavg")],
)
def test_branches_wait_for_each_other(name, monkeypatch):
    """What is done aside is there when it is read, whichever branch is slow."""
    others = {
        "fedavg": lambda: fl.fedavg(0.1),
        "written": lambda: fl.Algorithm((Written(),), local=MOMENTUM),
    }
    build = {**CHAINS, **others}[name]
    at_once = trainer(build)
    at_once.run(4)
    monkeypatch.setattr(device_round, "Aside", Late)
    monkeypatch.setattr(stepping, "Aside", Late)
    late = trainer(build)
    late.run(4)
    (runner,) = late.engine._rounds
    assert len(runner._aside.calls) == 9, "three of each round that is one recording"
    assert runner.beginning.may_be_late == (name in CHAINS)
    assert runner.histories.used and runner.end is not None
    same(at_once, late)


@pytest.mark.skipif(DEVICE == "cuda", reason="a device has branches of its own")
def test_what_fails_beside_a_round_is_waited_for(monkeypatch):
    """Also what went aside before it; rounds that ran as one have other bits than by parts."""

    def fails(self):
        raise MemoryError("no room")

    monkeypatch.setattr(device_round, "Aside", Late)
    monkeypatch.setattr(Reading, "fetch", fails)
    made = trainer(CHAINS["scaffold"])
    with pytest.raises(fl.errors.TaskError, match="no room"):
        made.run(3)
    (runner,) = made.engine._rounds
    assert runner._aside.calls
    assert all(call is branches.nothing for call in runner._aside.calls)
