"""Random models in every form against the dense model; `make fuzz` runs many more, of new seeds.

They run in a command of their own: its processes are forked before libgomp has any threads."""

from collections import Counter

import pytest
import torch
from helpers.draws import draws
from helpers.processes import command
from random_models import OTHER_SIZES, RandomModel, random_program, smaller

from torch_blocked import _C

MODELS = draws(10, 48)


def test_models():
    """Others on each instruction set (150 seeds apart), so that the suite meets more models."""
    seed = 1 + 150 * ("amx", "avx512", "avx2", "default").index(_C.isa())
    command("fuzz_models.py", "--models", str(MODELS), "--seed", str(seed), "--compile-every", "16")


@pytest.mark.any_isa
def test_a_seed_is_a_model_of_six_sizes():
    for seed in range(20):
        model = RandomModel(seed)
        with torch.no_grad():
            for inputs in (model.example, *model.others):
                model.model(*inputs)
        assert len(model.others) == OTHER_SIZES
        assert random_program(seed) == model.program


@pytest.mark.any_isa
def test_models_differ():
    """No template: what they call, and in which order, hardly repeats."""
    sources = [random_program(seed).forward_source() for seed in range(100)]
    assert len(set(sources)) >= len(sources) - 2  # some are of one call
    words = Counter(word for each in sources for word in set(each.replace("(", " ").split()))
    assert sum(count < 10 for count in words.values()) > 300


@pytest.mark.any_isa
def test_cut_down_programs_are_smaller():
    program = random_program(4)
    texts = [each.source() for each in smaller(program)]
    assert texts and min(map(len, texts)) < len(program.source())
