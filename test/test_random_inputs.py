"""Inputs of other kinds than the example's: right, or refused, and never the end of the process."""

from test_random_models import command


def test_inputs():
    """Every dtype, layout, subclass, rank and caller, over random models in every form."""
    command("random_inputs.py", "--models", "1", "--seed", "1", "--jobs", "1")
