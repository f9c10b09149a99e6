"""Trees and records."""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch

from undrift import Algorithm, HeavyBall, Prox, Sgd, fedyogi, number, record, stack, static, unstack
from undrift.core import tree
from undrift.errors import ConfigError


@record
class Pair:
    a: float = number(default=1.0, low=0, high=2)
    b: float = number(default=0.5, low=0, ends="()")
    kind: str = static(default="x")


class Moments(NamedTuple):
    m: torch.Tensor
    v: torch.Tensor


def test_a_record_is_frozen():
    with pytest.raises(AttributeError):
        Pair().a = 2.0
    with pytest.raises(AttributeError):
        Pair().new = 2.0


def test_numbers_are_leaves_and_static_fields_are_structure():
    assert tree.leaves(Pair()) == [1.0, 0.5]
    assert tree.structure(Pair()) == tree.structure(Pair(0.3))
    assert tree.structure(Pair()) != tree.structure(Pair(kind="y"))


def test_records_copy_pickle_compare_and_hash():
    for twin in (copy.deepcopy(Pair(0.3)), pickle.loads(pickle.dumps(Pair(0.3)))):
        assert twin == Pair(0.3)
    assert len({Pair(0.3), Pair(0.3), Pair(0.4)}) == 2


@pytest.mark.parametrize("value", [-0.1, 2.1, float("nan"), float("inf")])
def test_a_number_outside_its_range_is_refused(value):
    with pytest.raises(ConfigError, match=r"Pair\.a = .* is (outside \[0, 2\]|no finite number)"):
        Pair(value)


def test_an_open_range_leaves_its_end_out():
    with pytest.raises(ConfigError, match=r"Pair\.b = 0.0 is outside \(0, inf\)"):
        Pair(b=0)


@pytest.mark.parametrize("value", ["0.1", True, [1.0]])
def test_what_is_not_a_number_is_refused(value):
    with pytest.raises(ConfigError, match=r"Pair\.a must be a number"):
        Pair(value)


def test_replace_checks_again():
    assert tree.replace(Pair(), a=2).a == 2
    with pytest.raises(ConfigError, match=r"Pair\.a = 3"):
        tree.replace(Pair(), a=3)


def test_an_own_check_runs_after_the_ranges():
    @record
    class Ordered:
        low: float = number(default=0.0)
        high: float = number(default=1.0)

        def __post_init__(self):
            if self.low > self.high:
                raise ConfigError("low exceeds high")

    with pytest.raises(ConfigError, match="low exceeds high"):
        Ordered(2.0)


def test_stack_and_unstack_undo_each_other():
    stacked = stack([Pair(0.1), Pair(0.2), Pair(0.3)])
    assert stacked.a.tolist() == [0.1, 0.2, 0.3]  # float64: as exact as the Python numbers
    assert stacked.kind == "x"
    back = unstack(stacked, 3)
    assert [float(p.a) for p in back] == [0.1, 0.2, 0.3]


def test_whole_algorithms_stack():
    stacked = stack([fedyogi(lr=0.1), fedyogi(lr=0.2)])
    assert stacked.local.lr.tolist() == [0.1, 0.2]
    assert stacked.server.kind == "yogi"


def test_trees_of_another_structure_are_not_stacked():
    with pytest.raises(ConfigError, match="structures differ"):
        stack([Algorithm((Prox(),)), Algorithm()])
    with pytest.raises(ConfigError, match="structures differ"):
        stack([Pair(), Pair(kind="y")])


def test_leaves_have_names():
    state = {"c": torch.zeros(2), "more": (Moments(torch.zeros(1), torch.ones(1)), tree.EMPTY)}
    assert list(tree.named_leaves(state)) == ["c", "more.0.m", "more.0.v"]
    assert tree.named_leaves(Algorithm((Prox(0.3),)))["rules.0.mu"] == 0.3
    assert list(tree.named_leaves(torch.zeros(1))) == [""]
    plain = {"lr", "weight_decay", "clip_eps"}  # clip is None: no leaf
    assert tree.named_leaves(Sgd()).keys() == plain


def test_leaves_go_back_into_their_structure():
    state = {"c": torch.zeros(2), "m": Moments(torch.zeros(1), torch.ones(1))}
    again = tree.rebuild(tree.structure(state), tree.leaves(state))
    assert isinstance(again["m"], Moments)
    assert again["m"].v is state["m"].v


def test_where_selects_and_does_not_multiply():
    new, old = {"a": torch.tensor([torch.nan, 1.0])}, {"a": torch.tensor([2.0, 3.0])}
    assert tree.where(torch.tensor(False), new, old)["a"].tolist() == [2.0, 3.0]
    assert tree.where(torch.tensor(True), old, new)["a"].tolist() == [2.0, 3.0]


def test_where_refuses_trees_that_differ():
    with pytest.raises(ValueError):
        tree.where(torch.tensor(True), {"a": torch.zeros(1)}, (torch.zeros(1),))


def test_zeros_and_size():
    state = {"c": torch.ones(2, 3), "k": torch.ones(4, dtype=torch.int64), "x": 1.5}
    zeros = tree.zeros_like(state)
    assert zeros["c"].shape == (2, 3) and not zeros["c"].any()
    assert zeros["k"].dtype == torch.int64 and zeros["x"] == 0.0
    assert tree.size_in_floats(state) == 11
    assert tree.size_in_floats(tree.EMPTY) == 0


def test_map_keeps_the_kind_of_tree():
    doubled = tree.tree_map(lambda v: v * 2, Moments(torch.ones(1), torch.ones(1)))
    assert isinstance(doubled, Moments)
    assert tree.tree_map(lambda v: v * 2, Pair(0.5)).a == 1.0


@record
class Ordered:
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self):
        if self.low > self.high:
            raise ConfigError(f"{type(self).__name__}: {self.low} is above {self.high}")


@record
class Named(Ordered):
    name: str = static(default="x", choices=("x", "y"))


@record
class Positive(Ordered):
    def __post_init__(self):
        super().__post_init__()
        if self.low <= 0:
            raise ConfigError("not positive")


def test_a_records_own_check_holds_for_its_subclasses():
    with pytest.raises(ConfigError, match=r"Named: 2\.0 is above 1\.0"):
        Named(low=2.0)
    with pytest.raises(ConfigError, match="no name named 'z'"):
        Named(name="z")
    with pytest.raises(ConfigError, match=r"Positive: 2\.0 is above 1\.0"):
        Positive(low=2.0)
    with pytest.raises(ConfigError, match="not positive"):
        Positive()
    with pytest.raises(ConfigError, match=r"HeavyBall\.schedule must be a schedule"):
        HeavyBall(schedule=0.9)


def test_trees_are_mapped_and_listed_as_torch_does_it():
    from torch.utils import _pytree

    inner = {"b": torch.zeros(1), "a": Prox(mu=0.5)}
    made = Moments([torch.ones(2), (3.0, inner)], {})
    assert [id(v) for v in tree.leaves(made)] == [id(v) for v in _pytree.tree_leaves(made)]
    double = tree.tree_map(lambda v: 2 * v, made)
    wanted = _pytree.tree_map(lambda v: 2 * v, made)
    assert tree.structure(double) == tree.structure(wanted)
    pairs = zip(tree.leaves(double), tree.leaves(wanted), strict=True)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
    assert tree.leaves(tree.tree_map(lambda a, b: a + b, made, double))[1] == 9.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1.0,), (1.0, 2.0)),
        ((1.0,), [1.0]),
        ({"a": 1.0}, {"b": 1.0}),
        (Prox(mu=0.5), (0.5,)),
        (Pair(kind="x"), Pair(kind="y")),
    ],
)
def test_trees_that_differ_are_not_mapped_together(one, other):
    with pytest.raises(ValueError, match=r"differ|zip"):
        tree.tree_map(lambda a, b: a + b, one, other)
