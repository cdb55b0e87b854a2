"""Captures as the plain data that a saved model holds."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from torch_blocked import structure
from torch_blocked.calls import hashable
from torch_blocked.captured import Capture, Node


def to_data(signature: tuple[Any, Any], captured: Capture) -> dict[str, Any]:
    """A capture, and the signature of the calls that it holds for, as torch.save takes them."""
    names = [each.name for each in fields(Capture) if each.name != "ran"]
    data = {name: getattr(captured, name) for name in names}
    # A file that others get tells nothing of the folders of this machine.
    data["nodes"] = [vars(node) | {"line": os.path.basename(node.line)} for node in captured.nodes]
    data["out_spec"] = structure.dumps(captured.out_spec)
    spec, constants = signature
    return {
        "capture": data,
        "spec": spec if isinstance(spec, int) else structure.dumps(spec),
        "constants": [each for _, each in constants],
    }


def of_data(data: dict[str, Any]) -> tuple[tuple[Any, Any], Capture]:
    """The signature and the capture that to_data() was given."""
    spec = data["spec"] if isinstance(data["spec"], int) else structure.loads(data["spec"])
    constants = tuple((type(each), each) for each in data["constants"])
    captured = dict(data["capture"])
    captured["nodes"] = [Node(**node) for node in captured["nodes"]]
    captured["out_spec"] = structure.loads(captured["out_spec"])
    return (spec, hashable(constants)), Capture(**captured)
