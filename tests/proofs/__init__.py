"""Proofs that undrift is right: long-hand loops, identities, optima, engines, structure."""
