"""Inputs of other kinds than the example's: right, or refused, and never the end of the process."""

import pytest
from test_random_models import command


@pytest.mark.any_isa
def test_inputs():
    """Every dtype, layout, subclass, rank and caller, over an optimized random model; `make fuzz`
    runs more of them, and those that are loaded or compiled."""
    arguments = ("--models", "1", "--seed", "1", "--forms", "optimized", "--jobs", "1")
    command("random_inputs.py", *arguments)
