"""A round that fails leaves the trainer as it was, and the run can go on."""

from __future__ import annotations

import sys
from typing import ClassVar

import pytest

from crossed import crossed
from undrift.core.algorithm import Algorithm
from undrift.core.losses import cross_entropy
from undrift.core.rule import Rule
from undrift.core.task import Task
from undrift.core.tree import record
from undrift.errors import UndriftError
from undrift.rounds import Advance
from undrift.rules import Scaffold
from undrift.state.store import ClientStateStore
from undrift.trainer import Trainer

from .tiny import assert_same_bits, everything, network, raw, stored, trainer


@record
class Failing(Rule):
    """Raises what it is told to, once, in the server half of a round."""

    trouble: ClassVar[dict] = {}

    def server(self, update, state, view):
        error = self.trouble.pop(int(view.round), None)
        if error:
            raise error
        return update, state


@record
class Looking(Rule):
    """Counts on the server how often clients have looked at a new model."""

    def after_round(self, view):
        return view.w.sum() * 0 + 1

    def init_server(self, w, sizes):
        return w.new_zeros(())

    def server_after(self, state, view):
        return state + view.rows.sum()


STORES = ["device", "file"]
ENGINES = [{"chunk": 1}, {"engine": "reference"}]
ERRORS = [RuntimeError("no luck"), KeyboardInterrupt(), MemoryError(), SystemExit(3)]


def named(value):
    return type(value).__name__ if isinstance(value, BaseException) else None


@pytest.mark.parametrize(("store", "error"), crossed(STORES, ERRORS), ids=named)
def test_a_failure_on_the_server_changes_nothing(tmp_path, store, error):
    algorithm = Algorithm((Scaffold(), Failing()))
    run, whole = trainer(algorithm, **stored(store, tmp_path)), trainer(algorithm)
    run.run(2), whole.run(5)
    before = everything(run)
    Failing.trouble[2] = error
    with pytest.raises((type(error), UndriftError)):
        run.round()
    assert_same_bits(everything(run), before)
    run.run(3)
    assert_same_bits(everything(run), everything(whole))


@pytest.mark.parametrize(
    ("engine", "store", "error"), crossed(ENGINES, STORES, ERRORS[:2]), ids=named
)
def test_a_failure_after_some_clients_have_trained_changes_nothing(tmp_path, store, engine, error):
    calls = [1] * 9  # building a trainer tries the loss too

    def loss(output, target):
        calls.append(1)
        if len(calls) == 4:  # in the second or third client: two batches each
            raise error
        return cross_entropy(output, target)

    run = trainer(task=Task(network(), loss), **engine, **stored(store, tmp_path))
    run.run(2)
    before = everything(run)
    calls[:] = []
    with pytest.raises((type(error), UndriftError)):
        run.round()
    assert_same_bits(everything(run), before)
    run.run(2)
    whole = trainer(**engine)
    whole.run(4)
    assert_same_bits(everything(run), everything(whole))


def test_a_failure_in_the_first_round_changes_nothing_even_where_clients_have_looked():
    algorithm = Algorithm((Looking(), Failing()))
    run, whole = trainer(algorithm), trainer(algorithm)
    whole.run(2)
    before = everything(run)
    Failing.trouble[0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run.round()
    assert_same_bits(everything(run), before)
    run.run(2)
    assert_same_bits(everything(run), everything(whole))


# -- Ctrl-C between any two lines -----------------------------------------------------------------
WATCHED = [
    *(
        Trainer.round,
        Trainer.advance,
        Trainer.open_round,
        Trainer.finished,
        Trainer._taken,
        Advance.result,
    ),
    *(ClientStateStore.commit, ClientStateStore.stage, ClientStateStore.show),
]


def interrupted_at(n, work):
    """Do the work, with a KeyboardInterrupt before the n-th line of what is watched."""
    codes, count = [f.__code__ for f in WATCHED], [0]

    def lines(frame, event, arg):
        if event == "line":
            count[0] += 1
            if count[0] == n:
                raise KeyboardInterrupt
        return lines

    previous = sys.gettrace()
    sys.settrace(lambda frame, event, arg: lines if frame.f_code in codes else None)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


def same(a, b):
    return all(raw(a[n]) == raw(b[n]) for n in a)


def test_an_interrupt_between_any_two_lines_leaves_the_round_done_or_not_done(tmp_path):
    run = trainer()
    run.run(2)
    run.save(tmp_path)
    before = everything(run)
    run.round()
    after, torn = everything(run), []
    n = 1
    while run.load(tmp_path) and interrupted_at(n, run.round):
        now = everything(run)
        if not same(now, before) and not same(now, after):
            torn.append(n)
        n += 1
    assert n > 15 and torn == []
