import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from undrift.core.random import bits, host_fold, integers
from undrift.data import ExplicitWork, Federation, Work
from undrift.errors import ConfigError

amounts = st.one_of(
    st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda p: (p[0], sum(p)))
)
works = st.builds(
    lambda by, amount, batch, last: Work(**{by: amount}, batch=batch, last=last),
    st.sampled_from(["epochs", "steps"]),
    amounts,
    st.one_of(st.none(), st.integers(1, 6)),
    st.sampled_from(["keep", "drop", "bootstrap", "full"]),
)
cohorts = st.dictionaries(st.integers(0, 10**6), st.integers(0, 15), min_size=1, max_size=5)
quick = settings(max_examples=40, deadline=None)


def shuffled(n, *words):
    ranks = bits(host_fold(*words), torch.arange(n)).tolist()
    return sorted(range(n), key=ranks.__getitem__)


def drawn(amount, *words):
    low, high = amount if isinstance(amount, tuple) else (amount, amount)
    return int(integers(host_fold(*words), 0, low, high + 1))


def one_epoch(work, seed, round, client, epoch, n):
    """The batches of one client's epoch, by the book."""
    if work.batch is None or work.last == "full":
        return [list(range(n))] if n else []
    order = shuffled(n, seed, "batches", round, client, epoch)
    batches = [order[i : i + work.batch] for i in range(0, n, work.batch)]
    if batches and work.last == "drop" and len(batches[-1]) < work.batch:
        batches.pop()
    if batches and work.last == "bootstrap":
        key = host_fold(seed, "bootstrap", round, client, epoch)
        for slot in range(n, len(batches) * work.batch):
            batches[-1].append(int(integers(key, slot, 0, n)))
    return batches


def by_hand(work, seed, round, client, n):
    amount = drawn(work.epochs if work.steps is None else work.steps, seed, "work", round, client)
    if work.steps is None:
        epochs = [one_epoch(work, seed, round, client, e, n) for e in range(amount)]
        return [batch for epoch in epochs for batch in epoch]
    batches, epoch = [], 0
    while len(batches) < amount and (more := one_epoch(work, seed, round, client, epoch, n)):
        batches, epoch = batches + more, epoch + 1
    return batches[:amount]


def unpadded(plan):
    """The plan as lists, after a check that padding stands only at the ends."""
    found = []
    for rows, steps in zip(plan.order.tolist(), plan.steps.tolist(), strict=True):
        assert all(slot == -1 for row in rows[steps:] for slot in row)
        found.append([[slot for slot in row if slot >= 0] for row in rows[:steps]])
        for row, kept in zip(rows, found[-1], strict=False):
            assert kept and row[len(kept) :] == [-1] * (len(row) - len(kept))
    return found


def make(work, clients, seed=0, round=0):
    ids, sizes = torch.tensor(list(clients)), torch.tensor(list(clients.values()))
    plan = work.plan(seed, round, ids, sizes)
    assert plan.order.dtype == plan.steps.dtype == torch.int64
    assert plan.order.shape[:2] == (len(ids), max(plan.steps.tolist()))
    assert torch.equal(plan.steps, work.steps_of(seed, round, ids, sizes))
    return unpadded(plan)


@quick
@given(works, cohorts, st.integers(0, 5), st.integers(0, 5))
def test_a_plan_equals_the_long_hand_loop(work, clients, seed, round):
    found = make(work, clients, seed, round)
    assert found == [by_hand(work, seed, round, i, n) for i, n in clients.items()]


@quick
@given(works, cohorts, st.data())
def test_company_and_place_do_not_matter(work, clients, data):
    together = dict(zip(clients, make(work, clients), strict=True))
    some = data.draw(st.lists(st.sampled_from(list(clients)), unique=True, min_size=1))
    assert make(work, {i: clients[i] for i in some}) == [together[i] for i in some]


@quick
@given(cohorts, st.integers(1, 3), st.integers(1, 6))
def test_every_epoch_is_a_permutation(clients, epochs, batch):
    for batches, n in zip(make(Work(epochs, batch=batch), clients), clients.values(), strict=True):
        flat = [position for b in batches for position in b]
        for epoch in range(epochs):
            assert sorted(flat[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_keep_takes_the_short_batch_as_it_is():
    (batches,) = make(Work(batch=4), {7: 10})
    assert [len(b) for b in batches] == [4, 4, 2]


def test_drop_rests_a_client_with_less_than_a_batch():
    large, small = make(Work(batch=4, last="drop"), {7: 10, 8: 3})
    assert [len(b) for b in large] == [4, 4] and small == []


def test_bootstrap_fills_the_short_batch_with_own_examples():
    (batches,) = make(Work(batch=8, last="bootstrap"), {7: 10})
    assert [len(b) for b in batches] == [8, 8]
    assert sorted(batches[0] + batches[1][:2]) == list(range(10))
    assert all(0 <= position < 10 for position in batches[1])


def test_bootstrap_draws_from_all_own_examples_alike():
    clients = dict.fromkeys(range(2000), 3)
    fill = torch.tensor([b[0][3:] for b in make(Work(batch=8, last="bootstrap"), clients)])
    counts = torch.bincount(fill.flatten(), minlength=3).double()
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 2 + 5 * 2


@pytest.mark.parametrize(
    "work", [Work(3, batch=None), Work(3, last="full"), Work(steps=3, batch=None)]
)
def test_a_full_batch_is_one_step_an_epoch(work):
    assert make(work, {3: 4, 4: 0, 5: 2}) == [[[0, 1, 2, 3]] * 3, [], [[0, 1]] * 3]


def test_steps_run_through_as_many_epochs_as_needed():
    few, many = make(Work(steps=5, batch=4), {1: 6, 2: 100})
    assert [len(b) for b in few] == [4, 2, 4, 2, 4]
    assert few[0] + few[1] != few[2] + few[3]
    assert [len(b) for b in many] == [4] * 5


def test_epochs_rounds_clients_and_seeds_shuffle_differently():
    work, n = Work(epochs=2, batch=20), {1: 20, 2: 20}
    orders = [b for s, r in ((0, 0), (0, 1), (1, 0)) for c in make(work, n, s, r) for b in c]
    assert len({tuple(o) for o in orders}) == 12


def test_the_amount_of_work_is_uniform_over_its_range():
    ids, sizes = torch.arange(5000), torch.full((5000,), 3)
    epochs = Work(epochs=(1, 5), batch=3).steps_of(0, 2, ids, sizes)
    counts = torch.bincount(epochs, minlength=6)[1:].double()
    assert len(counts) == 5 and ((counts - 1000) ** 2 / 1000).sum() < 4 + 5 * 8**0.5
    assert not torch.equal(epochs, Work(epochs=(1, 5), batch=3).steps_of(0, 3, ids, sizes))


def test_nobody_and_nothing_give_empty_plans():
    none = torch.zeros(0, dtype=torch.int64)
    for work in (Work(batch=4), Work(batch=None), ExplicitWork({})):
        assert work.plan(0, 0, none, none).order.shape[:2] == (0, 0)
    assert make(Work(batch=4, last="drop"), {1: 0, 2: 3}) == [[], []]


def test_a_plan_finds_its_rows():
    federation = Federation.of([(torch.arange(n) + 10 * n, torch.zeros(n)) for n in (3, 5)])
    ids = torch.tensor([1, 0])
    plan = Work(batch=2).plan(0, 0, ids, federation.sizes[ids])
    x = federation.x[federation.rows(ids, plan.order)]
    assert sorted(x[0][plan.order[0] >= 0].tolist()) == [50, 51, 52, 53, 54]
    assert sorted(x[1][plan.order[1] >= 0].tolist()) == [30, 31, 32]


def test_work_has_one_epoch_by_default_and_takes_lists():
    assert Work().epochs == 1 and Work().steps is None
    assert Work(steps=3).epochs is None
    assert Work(epochs=[1, 5]).epochs == (1, 5)
    assert isinstance(hash(Work(epochs=[1, 5])), int)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": 0}, "Work.epochs must be a whole number"),
        ({"epochs": (0, 3)}, "Work.epochs"),
        ({"epochs": 1.5}, "Work.epochs"),
        ({"epochs": (1, 2, 3)}, r"Work.epochs = \(1, 2, 3\): give a number or a pair"),
        ({"steps": 0}, "Work.steps"),
        ({"steps": (5, 2)}, "the low end exceeds the high end"),
        ({"batch": 0}, "Work.batch"),
        ({"batch": True}, "Work.batch"),
        ({"epochs": 1, "steps": 5}, "give one of them"),
        ({"last": "kep"}, "Did you mean 'keep'"),
    ],
)
def test_impossible_work_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Work(**fields)


def test_explicit_batches_are_replayed():
    work = ExplicitWork({(4, 2): [[1, 0], [2]], (4, 9): [[0, 0, 0]]})
    ids, sizes = torch.tensor([9, 2]), torch.tensor([1, 3])
    assert unpadded(work.plan(0, 4, ids, sizes)) == [[[0, 0, 0]], [[1, 0], [2]]]
    assert work.steps_of(0, 4, ids, sizes).tolist() == [1, 2]


def test_explicit_batches_of_other_work_give_its_plan():
    work, ids, sizes = Work(epochs=(1, 3), batch=4), torch.tensor([5, 3]), torch.tensor([9, 6])
    plan = work.plan(1, 2, ids, sizes)
    lists = dict(zip([(2, 5), (2, 3)], unpadded(plan), strict=True))
    assert torch.equal(ExplicitWork(lists).plan(0, 2, ids, sizes).order, plan.order)


@pytest.mark.parametrize("position", [-1, 3])
def test_positions_outside_the_client_s_data_are_refused(position):
    work = ExplicitWork({(0, 2): [[1], [0, position]]})
    with pytest.raises(ConfigError, match=f"client 2, step 1: position {position} is outside"):
        work.plan(0, 0, torch.tensor([2]), torch.tensor([3]))


def test_missing_and_empty_batches_are_refused():
    with pytest.raises(ConfigError, match="no batches for client 3 in round 0"):
        ExplicitWork({}).plan(0, 0, torch.tensor([3]), torch.tensor([3]))
    with pytest.raises(ConfigError, match="round 0, client 2: step 1 has an empty batch"):
        ExplicitWork({(0, 2): [[1], []]})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("last", ["keep", "drop", "bootstrap", "full"])
def test_cuda_makes_the_same_plan(last):
    work, ids = Work(epochs=(1, 5), batch=7, last=last), torch.arange(40) * 3
    sizes = torch.arange(40)
    here = work.plan(3, 2, ids, sizes)
    for there in (work.plan(3, 2, ids, sizes, "cuda"), work.plan(3, 2, ids.cuda(), sizes.cuda())):
        assert there.order.is_cuda and not there.steps.is_cuda
        assert torch.equal(here.order, there.order.cpu())
        assert torch.equal(here.steps, there.steps.cpu())
