"""Federations, samplers and local work."""

from undrift.data.federation import Arrival, Federation
from undrift.data.population import Cohort, Population, Sampler
from undrift.data.sampler import Bernoulli, Everyone, Explicit, Sequential, Uniform, Weighted
from undrift.data.work import ExplicitWork, LocalWork, Plan, Work

__all__ = [
    "Arrival",
    "Bernoulli",
    "Cohort",
    "Everyone",
    "Explicit",
    "ExplicitWork",
    "Federation",
    "LocalWork",
    "Plan",
    "Population",
    "Sampler",
    "Sequential",
    "Uniform",
    "Weighted",
    "Work",
]
