"""Collectives on blocked tensors (collective_calls.py), in two processes: right, or an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from collective_calls import CALLS, REFUSED

pytestmark = pytest.mark.any_isa


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict[str, str]]:
    """What each rank says of each call."""
    script = Path(__file__).with_name("collective_calls.py")
    file = tmp_path_factory.mktemp("ranks") / "store"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(file), str(rank)],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=500)[0] for rank in ranks]
    return [dict(line.split(": ", 1) for line in text.splitlines()) for text in printed]


@pytest.mark.parametrize("name", CALLS)
def test_collectives_of_blocked_tensors(name, outcomes):
    assert [rank.get(name) for rank in outcomes] == ["right", "right"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_the_way_out(name, outcomes):
    assert all(rank.get(name) in ("refused", "right") for rank in outcomes)
