"""Deterministic orchestration on Temporal."""
