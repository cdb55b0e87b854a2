"""What becomes of calls where the system refuses memory, threads or files: one Python exception or
the right result, nothing lost, nothing written by half, and right results afterwards."""

import pytest
from helpers import failing
from helpers.draws import draws

pytestmark = pytest.mark.any_isa

# Of the sites and calls of a scenario, every so-many-th one is tried in `make test`.
MEMORY = {
    "descriptors": 3,
    "formats": 8,
    "convolution": 11,
    "layers": 7,
    "training": 11,
    "saved": 41,
    "released": 43,
    "quantized": 43,
    "optimized": 61,
    "tuned": 127,
    "explained": 211,
}
FILES = {"saved": 5, "saved_to_file": 7, "loaded": 11, "kept": 97, "kept_before": 61}
# What a run of all cases may take, on a machine that is busy.
SECONDS = draws(600, 7200)


def check(what, scenario, step, folder):
    told = failing.run(what, folder, scenario, str(draws(step, 1)), seconds=SECONDS)
    assert told["faults"] == []
    assert told["tried"] >= 3 and told["unmet"] * 4 <= told["tried"], told


@pytest.mark.parametrize("scenario", MEMORY)
def test_memory_that_is_refused(scenario, tmp_path):
    """Each place in our code that asks for memory is refused once, and each tensor's memory."""
    check("memory", scenario, MEMORY[scenario], tmp_path)


def test_threads_that_are_refused(tmp_path):
    """A model runs on those that there are, with the same bits."""
    # The check of tails runs ops of ATen, which need all their threads.
    told = failing.run("threads", tmp_path, seconds=SECONDS, TORCH_BLOCKED_CHECK="0")
    assert told == []


@pytest.mark.parametrize("scenario", FILES)
def test_files_that_fail(scenario, tmp_path):
    """A file that is saved is the older one or the new one, and kept files are not missed."""
    check("files", scenario, FILES[scenario], tmp_path)
