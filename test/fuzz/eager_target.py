"""Eager ops on blocked tensors beside dense ones. The bytes of an input are the choices that
hypothesis makes (eager_calls.py)."""

from __future__ import annotations

import warnings

import eager_calls
import torch
from hypothesis import HealthCheck, given, settings


@settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(eager_calls.calls())
def _check(call: eager_calls.Call) -> None:
    eager_calls.check(call)


def prepare() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    eager_calls.ops()


def run(content: bytes) -> None:
    _check.hypothesis.fuzz_one_input(content)
