"""Hypothesis without a deadline: examples share their cores with whatever else runs."""

from hypothesis import settings

settings.register_profile("shared-cores", deadline=None)
settings.load_profile("shared-cores")
