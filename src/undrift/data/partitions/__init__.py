"""Partitions: how the examples of one data set are dealt to clients."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from undrift.data.partitions.by_key import ByKey
from undrift.data.partitions.by_label import LabelSubset, Shards, Similarity
from undrift.data.partitions.dirichlet_class import DirichletClass
from undrift.data.partitions.dirichlet_client import DirichletClient
from undrift.data.partitions.dominant import DominantClass
from undrift.data.partitions.even import Iid, QuantitySkew
from undrift.data.partitions.held_out import hold_out, per_client_test
from undrift.data.partitions.protocol import Partition, Parts

__all__ = [
    "PARTITIONS",
    "ByKey",
    "DirichletClass",
    "DirichletClient",
    "DominantClass",
    "Iid",
    "LabelSubset",
    "Partition",
    "Parts",
    "QuantitySkew",
    "Shards",
    "Similarity",
    "hold_out",
    "per_client_test",
]

# The names by which an experiment file asks for them.
PARTITIONS: Mapping[str, type[Partition]] = MappingProxyType(
    {
        "iid": Iid,
        "dirichlet_client": DirichletClient,
        "dirichlet_class": DirichletClass,
        "similarity": Similarity,
        "dominant_class": DominantClass,
        "by_key": ByKey,
        "shards": Shards,
        "quantity_skew": QuantitySkew,
        "label_subset": LabelSubset,
    }
)
