"""What a third party does: write a rule, check it, train with it; and what a bad rule is told."""

import pytest
import torch

from third_party import bad_rules as bad
from third_party.my_rule import CappedPull, ClientMomentum, HeadFirst
from undrift import (
    Algorithm,
    Federation,
    HeavyBall,
    Mean,
    Nova,
    Rule,
    Sgd,
    Task,
    UndriftError,
    fedavg,
)
from undrift.core.tree import tree_map
from undrift.engines import Reference, Vectorised
from undrift.testing import (
    EngineError,
    RuleError,
    check_aggregate,
    check_engine,
    check_rule,
    tiny_task,
    tiny_world,
)


@pytest.mark.parametrize("rule", [ClientMomentum(0.1), CappedPull(), HeadFirst()], ids=repr)
def test_a_strangers_rule_passes(rule: Rule) -> None:
    check_rule(rule)


def test_it_trains() -> None:
    world = tiny_world()
    algorithm = Algorithm((ClientMomentum(0.3), CappedPull()), Sgd(lr=0.2))
    results = world.trainer(algorithm).run(20)
    assert results[-1].loss < 0.8 * results[0].loss


def test_alpha_one_is_fedavg() -> None:
    mine = tiny_world().trainer(Algorithm((ClientMomentum(1.0),), Sgd(lr=0.1)))
    plain = tiny_world().trainer(fedavg(lr=0.1))
    mine.run(3), plain.run(3)
    torch.testing.assert_close(mine.server.w, plain.server.w, rtol=0, atol=1e-14)


def test_it_works_beside_nova_and_momentum() -> None:
    algorithm = Algorithm((ClientMomentum(0.3),), HeavyBall(lr=0.05), Nova())
    one, other = (tiny_world().trainer(algorithm, engine=e) for e in ("vectorised", "reference"))
    one.run(3), other.run(3)
    torch.testing.assert_close(one.server.w, other.server.w, rtol=0, atol=1e-12)


BAD = [
    (bad.OnlyDataclass(), "OnlyDataclass is not a record: write @record"),
    (bad.NotDecorated(), "NotDecorated is not a record: write @record"),
    (bad.HasText(), r"HasText\.kind = 'adam' is not a number: declare it `static"),
    (bad.WritesOnItself(), r"WritesOnItself\.direction writes on itself"),
    (bad.FillsOwnList(), r"FillsOwnList\.finish writes on itself"),
    (bad.ChangesGradient(), r"ChangesGradient\.direction changes its argument 1 in place"),
    (bad.ChangesServerState(), r"ChangesServerState\.server changes its argument 2 \(m\) in place"),
    (bad.Random(), r"Random\.direction is not pure"),
    (bad.CountsCalls(), r"CountsCalls\.direction is not pure"),
    (bad.BranchesOnValue(), r"BranchesOnValue\.direction cannot run for many clients at once"),
    (bad.LoopsOnValue(), r"LoopsOnValue\.finish cannot run for many clients at once"),
    (bad.BranchesOnNumber(), r"BranchesOnNumber\.direction does not run with its numbers stacked"),
    (bad.StateGrows(), r"StateGrows\.finish returns the state as float32 \[2\], expected"),
    (bad.ServerStateGrows(), r"ServerStateGrows\.server returns the state as float32 \[2\]"),
    (bad.DoublePrecision(), r"DoublePrecision\.direction returns its result as float64"),
    (bad.RowVaries(), r"RowVaries\.row returned .* first and .* later"),
    (bad.VectorPenalty(), r"VectorPenalty\.penalty returns shape \[3\]"),
    (bad.ForgetsUpload(), r"ForgetsUpload\.finish must return 3 values"),
    (bad.DividesByZero(), r"DividesByZero\.direction returns NaN or infinity"),
    (bad.CountsPadding(), r"CountsPadding: server\.w is .* away .* \(engines\)"),
    (bad.DividesByCohort(), r"DividesByCohort\.direction gives NaN where every state is zero"),
    (bad.MasksInServer(), r"MasksInServer\.server cannot train in a Fleet \(never index by a mask"),
    (bad.BranchesInServer(), r"BranchesInServer\.server cannot train in a Fleet"),
    (bad.LoopsInServer(), r"LoopsInServer\.server cannot train in a Fleet"),
    (bad.TakesInWhatWasLeftOut(), r"TakesInWhatWasLeftOut\.server takes in NaN of clients that"),
    (bad.MultipliesMasks(), r"MultipliesMasks\.server takes in NaN of clients that were left"),
    (bad.TooSmallForSingle(), r"TooSmallForSingle.* NaN or infinity"),
    (bad.DependsOnOrder(), r"DependsOnOrder: the model depends on the order of clients"),
]


@pytest.mark.parametrize(("rule", "message"), BAD, ids=lambda v: type(v).__name__)
def test_a_bad_rule_is_told_what_is_wrong(rule: Rule, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        check_rule(rule)


def test_something_else_is_no_rule() -> None:
    with pytest.raises(RuleError, match="is not a Rule"):
        check_rule(Mean())  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="is not an Aggregate"):
        check_aggregate(ClientMomentum())  # type: ignore[arg-type]


def test_the_error_is_an_assertion_and_ours() -> None:
    assert issubclass(RuleError, AssertionError)
    assert issubclass(RuleError, UndriftError)


def test_an_own_task_may_be_checked() -> None:
    check_rule(ClientMomentum(), task=tiny_task(torch.float32), rounds=2)


def test_own_data_may_be_used() -> None:
    task = Task(torch.nn.Linear(2, 1), "mse")
    clients = [(torch.randn(n, 2), torch.randn(n, 1)) for n in (3, 5, 2)]
    check_rule(CappedPull(), task=task, federation=Federation.of(clients), rounds=2)


class Forgetful(Vectorised):
    """An engine that loses what the first client sent."""

    def run_clients(self, algo, broadcast, clients, work):
        every = super().run_clients(algo, broadcast, clients, work)
        for i, (ids, states, reports, rows) in enumerate(every):
            yield ids, states, tree_map(torch.zeros_like, reports) if i == 0 else reports, rows


class Broken(Vectorised):
    """An engine that cannot do anything."""

    def run_clients(self, algo, broadcast, clients, work):
        raise ValueError("no such thing")


@pytest.mark.parametrize("engine", [Reference, "vectorised"])
def test_engines_pass(engine) -> None:
    check_engine(engine, rounds=2)


def test_an_engine_that_forgets_a_client_is_found_out() -> None:
    with pytest.raises(EngineError, match=r"fedavg: .* away from that of the reference engine"):
        check_engine(Forgetful, rounds=1, chunk=1)


def test_an_engine_that_fails_is_named() -> None:
    with pytest.raises(EngineError, match="Broken' fails on fedavg: ValueError: no such thing"):
        check_engine(Broken, rounds=1)


@pytest.mark.parametrize("aggregate", [Mean(), Mean(by_size=False), Nova()], ids=repr)
def test_our_aggregates_pass(aggregate) -> None:
    check_aggregate(aggregate, rounds=2)
