"""Proofs that run on the user's machine: `undrift verify`."""

from undrift.verify.table import Verdict, verify
from undrift.verify.together import verify_together

__all__ = ["Verdict", "verify", "verify_together"]
