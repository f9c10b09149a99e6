import math

import numpy as np
import pytest
import torch

from undrift.data.partitions import DirichletClient, Iid
from undrift.data.summary import summarise
from undrift.errors import DataError

LABELS = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2, 2])
PARTS = [np.array([0, 1, 2, 4]), np.array([], dtype=np.int64), np.array([6, 7, 8, 9, 5])]


def test_measures_by_hand():
    summary = summarise(LABELS, PARTS)
    skew = summary.skew
    assert summary.sizes.tolist() == [4, 0, 5] and summary.num_examples == 10
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert skew.entropy[0] == pytest.approx(entropy)
    assert skew.effective_classes[0] == pytest.approx(math.exp(entropy))
    assert skew.classes_for_80.tolist() == [2, 1]  # 75 % is too little, 80 % is enough
    # p = (3/4, 1/4, 0), (0, 1/5, 4/5); all together (3, 2, 4) / 9
    assert skew.mean_distance == pytest.approx((3 / 4 + 1 / 20 + 4 / 5) / 2)
    assert skew.distance_to_all[0] == pytest.approx((5 / 12 + 1 / 36 + 4 / 9) / 2)


def test_the_mean_over_pairs_is_what_it_says():
    labels = np.arange(600) % 7
    parts = DirichletClient(13, 0.2).split(labels, seed=0)
    p = np.stack([np.bincount(labels[q], minlength=7) / len(q) for q in parts])
    pairs = [np.abs(p[i] - p[j]).sum() / 2 for i in range(13) for j in range(i)]
    assert summarise(labels, parts).skew.mean_distance == pytest.approx(np.mean(pairs))


def test_targets_without_classes_have_sizes_only():
    summary = summarise(torch.rand(10), PARTS)
    assert summary.skew is None and list(summary.quantiles()) == ["examples"]
    assert "classes" not in str(summary)


def test_the_table_is_aligned_and_complete():
    labels = np.arange(5000) % 10
    text = str(summarise(labels, Iid(10).split(labels, 0)))
    facts, _, *rows = text.partition("\n\n")[0], "", *text.partition("\n\n")[2].splitlines()
    assert facts.startswith("10 clients (0 empty), 5,000 of 5,000 examples, 10 classes")
    assert len({len(row) for row in rows}) == 1 and len(rows) == 6
    assert rows[1].split() == ["examples", *["500"] * 6]


def test_one_client_is_at_no_distance():
    skew = summarise(LABELS, [np.arange(10)]).skew
    assert skew.mean_distance == 0 and skew.distance_to_all.tolist() == [0]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([], "none of the 0 clients"),
        ([np.array([], dtype=int)], "none of the 1 clients"),
        ([np.array([3]), np.array([10])], "client 1 holds an example outside 0 to 9"),
        ([np.array([-1])], "client 0 holds an example outside"),
    ],
)
def test_parts_that_do_not_fit_the_labels(parts, why):
    with pytest.raises(DataError, match=why):
        summarise(LABELS, parts)
