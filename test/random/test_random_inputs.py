"""Inputs of other kinds than the example's: right, or refused, and never the end of the process."""

import pytest
from helpers.processes import command


@pytest.mark.any_isa
def test_inputs():
    """Every dtype, layout, subclass, rank and caller, over the optimized form of a random model, of
    few layers; `make fuzz` runs any, and those that are loaded or compiled."""
    arguments = ("--models", "1", "--seed", "26", "--forms", "optimized", "--jobs", "1")
    command("random_inputs.py", *arguments)
