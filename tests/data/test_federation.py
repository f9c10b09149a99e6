import math

import numpy as np
import pytest
import torch

from undrift.data import Arrival, Federation
from undrift.errors import ConfigError, DataError


def examples(n, start=0.0):
    x = torch.arange(n, dtype=torch.float32)[:, None] + start
    return x.repeat(1, 2), torch.arange(n)


@pytest.fixture
def three():
    """Clients of 3, 0 and 2 examples; x counts on from one client to the next."""
    return Federation.of([examples(3), examples(0), examples(2, start=3.0)])


def test_clients_lie_one_after_another(three):
    assert three.num_clients == 3 and three.max_size == 3
    assert three.sizes.tolist() == [3, 0, 2]
    assert three.offsets.tolist() == [0, 3, 3, 5]
    assert three.members.tolist() == [0, 1, 2, 3, 4]
    assert three.device == torch.device("cpu")


def test_a_client_gets_its_own_examples_back(three):
    x, y = three.client(2)
    assert x[:, 0].tolist() == [3, 4] and y.tolist() == [0, 1]
    assert len(three.client(1)[0]) == 0


def test_split_keeps_the_order_of_the_lists():
    x, y = examples(6)
    parts = [[4, 0], np.array([], dtype=np.int64), torch.tensor([5, 1, 3])]
    split = Federation.split(x, y, parts)
    assert split.members.tolist() == [4, 0, 5, 1, 3]
    assert split.client(2)[1].tolist() == [5, 1, 3]
    assert split.x.data_ptr() == x.data_ptr()


def test_rows_are_looked_up_by_client_and_position(three):
    ids = torch.tensor([2, 0, 1])
    positions = torch.tensor([[[0, 1], [1, -1]], [[2, -1], [-1, -1]], [[-1, -1], [-1, -1]]])
    rows = three.rows(ids, positions)
    assert rows.tolist()[:2] == [[[3, 4], [4, 3]], [[2, 0], [0, 0]]]  # padding: the own first
    assert rows.shape == positions.shape


def test_padding_never_shows_another_clients_example():
    x, y = examples(4)
    split = Federation.split(x, y, [[3, 2], [0, 1]])
    rows = split.rows(torch.tensor([0, 1]), torch.tensor([[1, -1], [-1, -1]]))
    assert rows.tolist() == [[2, 3], [0, 0]]


def test_an_empty_last_client_can_be_padded():
    x, y = examples(4)
    split = Federation.split(x, y, [[3, 2], []])
    assert split.rows(torch.tensor([1]), torch.tensor([[-1, -1]])).shape == (1, 2)


def test_numpy_is_accepted_even_read_only_and_reversed():
    x = np.arange(6.0).reshape(3, 2)[::-1]
    y = np.arange(3)
    y.flags.writeable = False
    made = Federation.of([(x, y)])
    assert made.x[0].tolist() == [4, 5] and made.y.tolist() == [0, 1, 2]


def test_to_changes_floating_types_only():
    x, y = examples(3)
    made = Federation.split(x, y, [[0, 1, 2]]).to("cpu", torch.float64)
    assert made.x.dtype == torch.float64 and made.y.dtype == torch.int64
    tokens = Federation.split(y, x, [[0, 1, 2]]).to(dtype=torch.float16)
    assert tokens.x.dtype == torch.int64 and tokens.y.dtype == torch.float16


def test_to_refuses_integer_types_and_overflow():
    made = Federation.of([(torch.full((2, 1), 1e9), torch.zeros(2))])
    with pytest.raises(ConfigError, match="floating-point"):
        made.to(dtype=torch.int32)
    with pytest.raises(DataError, match="x of client 0, example 0"):
        made.to(dtype=torch.float16)


def test_everything_is_available_by_default(three):
    assert three.available(0).tolist() == [3, 0, 2]


@pytest.mark.parametrize("round", range(13))
def test_examples_arrive_over_time(round):
    made = Federation.of([examples(n) for n in (10, 0, 1, 7, 1000)], arrival=Arrival(rounds=9))
    tenths = min(10, 1 + round)  # 0.1 + 0.9 * round / 9, in exact arithmetic
    expected = [-(-n * tenths // 10) for n in (10, 0, 1, 7, 1000)]
    assert made.available(round).tolist() == expected
    assert made.to("cpu").available(round).tolist() == expected


@pytest.mark.parametrize(
    "fields",
    [{"rounds": 0}, {"rounds": 2.5}, {"rounds": 3, "first": 0.0}, {"rounds": 3, "first": 2}],
)
def test_impossible_arrivals_are_refused(fields):
    with pytest.raises(ConfigError, match=r"Arrival\."):
        Arrival(**fields)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_name_their_client(bad):
    good, (x, y) = examples(3), examples(3)
    x[1, 1] = bad
    with pytest.raises(DataError, match="x of client 1, example 1, holds NaN"):
        Federation.of([good, (x, y)])
    with pytest.raises(DataError, match="y of client 2, example 0"):
        Federation.of([(y, good[0]), (y[:0], good[0][:0]), (y[1:], x[1:])])


def test_a_bad_example_that_nobody_owns_is_ignored():
    x, y = examples(3)
    x[1] = math.nan
    assert Federation.split(x, y, [[0], [2]]).num_clients == 2
    with pytest.raises(DataError, match="x of client 1, example 0"):
        Federation.split(x, y, [[0], [1]])


def test_different_lengths_are_refused():
    x, y = examples(3)
    with pytest.raises(DataError, match="client 1: x has 3 examples but y has 2"):
        Federation.of([(x, y), (x, y[:2])])


@pytest.mark.parametrize(
    ("x", "y", "name"),
    [
        (torch.zeros(2, 3), torch.zeros(2).long(), "x"),
        (torch.zeros(2, 2).double(), torch.zeros(2).long(), "x"),
        (torch.zeros(2, 2), torch.zeros(2), "y"),
    ],
)
def test_clients_that_differ_in_kind_are_refused(x, y, name):
    with pytest.raises(DataError, match=f"{name} of client 1 is .* but client 0 has"):
        Federation.of([examples(3), (x, y)])


def test_an_empty_client_needs_no_shape():
    made = Federation.of([(torch.empty(0), torch.empty(0)), examples(2)])
    assert made.sizes.tolist() == [0, 2] and made.x.shape == (2, 2)


def test_no_clients_and_no_examples_are_refused():
    x, y = examples(3)
    for build in (lambda: Federation.of([]), lambda: Federation.split(x, y, [])):
        with pytest.raises(DataError, match="at least one client"):
            build()
    for build in (lambda: Federation.of([examples(0)]), lambda: Federation.split(x, y, [[]])):
        with pytest.raises(DataError, match="all 1 clients are empty"):
            build()


@pytest.mark.parametrize("index", [-1, 3])
def test_indices_out_of_range_are_refused(index):
    with pytest.raises(DataError, match=f"client 1: index {index} is out of range"):
        Federation.split(*examples(3), [[0], [1, index]])


def test_an_index_out_of_range_is_found_behind_empty_clients():
    with pytest.raises(DataError, match="client 3: index 7 is out of range"):
        Federation.split(*examples(3), [[], [0, 1], [], [2, 7], [9]])


@pytest.mark.parametrize("kind", [torch.tensor, np.array, lambda rows: np.array(rows, np.int32)])
def test_clients_of_one_size_may_come_as_one_array(kind):
    x, y = examples(6)
    rows = [[5, 0], [2, 3], [1, 4]]
    made, listed = Federation.split(x, y, kind(rows)), Federation.split(x, y, rows)
    assert made.members.tolist() == listed.members.tolist() == [5, 0, 2, 3, 1, 4]
    assert made.sizes.tolist() == [2, 2, 2] and made.members.dtype == torch.int64


@pytest.mark.parametrize("part", [[0.5], [[0, 1]], [True, False, True]])
def test_only_flat_lists_of_indices_are_accepted(part):
    with pytest.raises(DataError, match="client 0: give a flat list"):
        Federation.split(*examples(3), [part])


def test_an_example_has_one_owner_unless_allowed():
    x, y = examples(4)
    with pytest.raises(DataError, match="example 2 is given to clients 0 and 2"):
        Federation.split(x, y, [[0, 2], [1], [3, 2]])
    with pytest.raises(DataError, match="example 1 is given to client 1, two times"):
        Federation.split(x, y, [[0], [1, 1]])
    assert Federation.split(x, y, [[0, 2], [2]], allow_shared=True).members.tolist() == [0, 2, 2]


def test_scalars_and_objects_are_refused():
    with pytest.raises(DataError, match="first axis"):
        Federation.of([(torch.tensor(1.0), torch.tensor(1))])
    with pytest.raises(DataError, match="x of client 0: cannot be made a tensor"):
        Federation.of([(np.array(["a"]), np.array([1]))])


@pytest.mark.parametrize("i", [-1, 3])
def test_an_unknown_client_is_refused(three, i):
    with pytest.raises(DataError, match="numbered 0 to 2"):
        three.client(i)
