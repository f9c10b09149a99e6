"""Federations, samplers and local work."""

from undrift.data.federation import Arrival, Federation
from undrift.data.partitions import (
    PARTITIONS,
    ByKey,
    DirichletClass,
    DirichletClient,
    DominantClass,
    Iid,
    LabelSubset,
    Partition,
    Parts,
    QuantitySkew,
    Shards,
    Similarity,
    hold_out,
    per_client_test,
)
from undrift.data.population import Cohort, Population, Sampler
from undrift.data.sampler import Bernoulli, Everyone, Explicit, Sequential, Uniform, Weighted
from undrift.data.summary import LabelSkew, PartitionSummary, summarise
from undrift.data.work import ExplicitWork, LocalWork, Plan, Work

__all__ = [
    "PARTITIONS",
    "Arrival",
    "Bernoulli",
    "ByKey",
    "Cohort",
    "DirichletClass",
    "DirichletClient",
    "DominantClass",
    "Everyone",
    "Explicit",
    "ExplicitWork",
    "Federation",
    "Iid",
    "LabelSkew",
    "LabelSubset",
    "LocalWork",
    "Partition",
    "PartitionSummary",
    "Parts",
    "Plan",
    "Population",
    "QuantitySkew",
    "Sampler",
    "Sequential",
    "Shards",
    "Similarity",
    "Uniform",
    "Weighted",
    "Work",
    "hold_out",
    "per_client_test",
    "summarise",
]
