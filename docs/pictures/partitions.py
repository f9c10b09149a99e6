"""Draw docs/pictures/partitions/*.png: each partition on the same 2,000 labels.

    python docs/pictures/partitions.py

10 classes of 200 examples, 20 clients, seed 1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from undrift.data.partitions import (
    ByKey,
    DirichletClass,
    DirichletClient,
    DominantClass,
    Iid,
    LabelSubset,
    Partition,
    QuantitySkew,
    Shards,
    Similarity,
)
from undrift.data.summary import summarise
from undrift.report.partition_picture import draw_partition

HERE = Path(__file__).parent / "partitions"
LABELS = np.arange(2000) % 10
PICTURES: dict[str, tuple[str, Partition]] = {
    "iid": ("iid", Iid(20)),
    "dirichlet_client": ("dirichlet_client, alpha = 0.1", DirichletClient(20, alpha=0.1)),
    "dirichlet_client_lognormal": (
        "dirichlet_client, alpha = 0.3, sigma = 0.3",
        DirichletClient(20, alpha=0.3, sigma=0.3),
    ),
    "dirichlet_class": ("dirichlet_class, alpha = 0.1", DirichletClass(20, alpha=0.1)),
    "similarity": ("similarity, s = 0.1", Similarity(20, s=0.1)),
    "dominant_class": ("dominant_class, fraction = 0.8", DominantClass(20, fraction=0.8)),
    "by_key": ("by_key, 20 writers", ByKey()),
    "shards": ("shards, 2 per client", Shards(20)),
    "quantity_skew": ("quantity_skew, alpha = 0.5", QuantitySkew(20, alpha=0.5)),
    "label_subset": ("label_subset, 3 classes per client", LabelSubset(20, 3)),
}


def writers() -> np.ndarray:
    """Own twenty writers of unequal diligence, each with a liking for some of the classes."""
    writer = np.empty(len(LABELS), dtype=np.int64)
    for i, part in enumerate(DirichletClient(20, alpha=2.0, sigma=0.6).split(LABELS, seed=7)):
        writer[part] = i
    return writer


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name, (title, partition) in PICTURES.items():
        parts = partition.split(LABELS, seed=1, keys=writers())
        draw_partition(LABELS, parts, HERE / f"{name}.png", title)
    many = np.arange(50_000) % 10
    parts = DirichletClient(100, alpha=0.1).split(many, seed=1)
    draw_partition(many, parts, HERE / "many.png", "dirichlet_client, alpha = 0.1, 100 clients")
    print(summarise(many, parts))


if __name__ == "__main__":
    main()
