"""Proofs that run on the user's machine: `undrift verify`."""

from undrift.verify.table import Verdict, verify

__all__ = ["Verdict", "verify"]
