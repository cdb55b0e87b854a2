"""`implements`: which handler an op has."""

from __future__ import annotations

from collections.abc import Callable

from torch._ops import OpOverload

from torch_blocked.dispatch import OPS_TABLE, Handler


def implements(*overloads: OpOverload) -> Callable[[Handler], Handler]:
    """Registers the decorated handler for the given op overloads."""

    def register(handler: Handler) -> Handler:
        for overload in overloads:
            OPS_TABLE[overload] = handler
        return handler

    return register
