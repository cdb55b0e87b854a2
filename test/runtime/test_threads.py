"""How loops are shared among threads: every unit once, helpers for the late, errors that arrive."""

import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from torch_blocked import _C

LOOPS = [1, 2, 3, 1000, 7, 64, 5, 0, 33, 100_000, 1]


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_unit_runs_once(threads):
    counts, _ = _C.walk_loops(LOOPS * 50)
    assert [len(each) for each in counts] == LOOPS * 50
    assert all(set(each) <= {1} for each in counts)


def test_the_share_of_a_late_thread_is_done_by_the_others():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        counts, of_caller = _C.walk_loops([3200] * 4, sleep=timedelta(milliseconds=50))
    finally:
        torch.set_num_threads(before)
    assert all(set(each) == {1} for each in counts)
    # 32 pieces of 100 units: the caller had at most a few before and after its sleep.
    assert all(units < 1600 for units in of_caller)


@pytest.mark.parametrize("fails", [0, 3, len(LOOPS) - 1])
def test_an_error_in_a_loop_reaches_the_caller(threads, fails):
    with pytest.raises(RuntimeError, match="walk_loops fails"):
        _C.walk_loops(LOOPS, fails=fails)
    counts, _ = _C.walk_loops(LOOPS)
    assert all(set(each) <= {1} for each in counts)


def test_teams_of_several_callers_do_not_meet():
    with ThreadPoolExecutor(4) as pool:
        for counts, _ in pool.map(lambda _: _C.walk_loops(LOOPS * 20), range(16)):
            assert all(set(each) <= {1} for each in counts)


def test_a_team_beside_another_has_the_cores_that_are_left():
    """The first one has all that the machine has; a caller that comes meanwhile runs by itself."""
    cores = len(os.sched_getaffinity(0))
    before = torch.get_num_threads()
    torch.set_num_threads(max(cores, 2))
    try:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(_C.walk_loops, [3200] * 600, sleep=timedelta(milliseconds=5))
            time.sleep(0.3)
            counts, of_caller = _C.walk_loops([3200] * 4)
            assert not first.done()
            assert all(set(each) == {1} for each in counts) and of_caller == [3200] * 4
            assert all(set(each) == {1} for each in first.result()[0])
        _, of_caller = _C.walk_loops([3200] * 40, sleep=timedelta(milliseconds=5))
        assert any(units < 3200 for units in of_caller)  # alone, it has them all again
    finally:
        torch.set_num_threads(before)


def test_a_child_of_fork_has_all_cores():
    """Whatever other threads of its parent computed when it was made."""
    script = """
        import os, time, torch
        from concurrent.futures import ThreadPoolExecutor
        from datetime import timedelta
        from torch_blocked import _C

        torch.set_num_threads(2)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_C.walk_loops, [3200] * 150, sleep=timedelta(milliseconds=5))
            time.sleep(0.3)
            child = os.fork()
            if child == 0:
                _, of_caller = _C.walk_loops([3200] * 40, sleep=timedelta(milliseconds=5))
                os._exit(not any(units < 3200 for units in of_caller))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=60)
    assert done.returncode == 0
