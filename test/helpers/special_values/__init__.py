"""What each family of kernels does with special values: the table of docs/numerics.md as data."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from helpers.special_values import values
from helpers.special_values.cases import CASES

COLUMNS = tuple(values.INPUTS)


@dataclass(frozen=True)
class Entry:
    """What the table says, and what then holds of our result and ATen's."""

    text: str
    holds: Callable[[Tensor, Tensor], bool]

    def is_kept(self, ours: Tensor, aten: Tensor) -> bool:
        if not aten.is_floating_point():  # an index or a comparison has no special values
            return bool((ours == aten).all())
        return ours.shape == aten.shape and self.holds(ours, aten)


AS_ATEN = {column: Entry("as ATen", holds) for column, holds in values.SAME.items()}

_SIGN = Entry("the sign may differ", values.same_classes)
_MAY_BE_ZERO = Entry("denormal results may be 0", values.normal_values)
_SAME_BITS = Entry("the same bits", values.same_bits)

# What differs from ATen. Where a family has no entry, it does what ATen does.
DIFFERENT: dict[str, dict[str, Entry]] = {
    "convolutions: Winograd": {
        "NaN": Entry("reaches its tile", values.reaches_more),
        "infinity": Entry("reaches its tile, mostly as NaN", values.reaches_more),
        "denormals": Entry("kept, less exact", values.coarse_denormals),
        "near the limits": Entry("overflow in their tile", values.reaches_more),
    },
    "Strassen's product": {
        "NaN": Entry("reaches a second pixel or row", values.reaches_more),
        "infinity": Entry("reaches a second one, mostly as NaN", values.reaches_more),
        "near the limits": Entry("the second one loses its digits", values.reaches_more),
    },
    "tiles of AMX": {
        "denormals": Entry("count as 0", values.larger_values),
        "near the limits": Entry("below 1e-33 bits are lost", values.larger_values),
    },
    "weight gradients: Winograd": {
        "NaN": Entry("reaches all taps", values.reaches_more),
        "infinity": Entry("reaches all taps, mostly as NaN", values.reaches_more),
        "near the limits": Entry("may overflow", values.reaches_more),
    },
    "group and layer norm": {
        "signed zero": _SIGN,
        "near the limits": Entry("0 where ATen has NaN", values.reaches_less),
    },
    "softmax": {"denormals": _MAY_BE_ZERO},
    "recurrent": {"denormals": _MAY_BE_ZERO},
    "grid sampler": {
        "signed zero": _SIGN,
        "near the limits": Entry("bicubic overflows elsewhere", values.finite_values),
    },
    "pointwise: exponentials": {
        "infinity": Entry("as ATen; GELU may give NaN", values.numbers_or_nan),
        "denormals": _MAY_BE_ZERO,
        "signed zero": _SIGN,
        "near the limits": Entry("as ATen, whose GELU may overflow", values.reaches_less),
    },
    "reductions and scans": {"signed zero": Entry("maxima: the sign may differ", _SIGN.holds)},
    "padding, concatenation, slices": {
        "signed zero": Entry("0 if channels are padded with a value", _SIGN.holds)
    },
    "reorders": dict.fromkeys(COLUMNS, _SAME_BITS),
}

# What need not be seen to differ: ATen's GELU depends on where a value lies in memory, softmax
# keeps denormals with AVX-512, and reorders agree.
NOT_ALWAYS_SEEN = {
    ("pointwise: exponentials", "infinity"),
    ("pointwise: exponentials", "near the limits"),
    ("softmax", "denormals"),
    *(("reorders", column) for column in COLUMNS),
}


def entry(row: str, column: str) -> Entry:
    return DIFFERENT.get(row, {}).get(column, AS_ATEN[column])


def table() -> list[str]:
    """The lines of the table in docs/numerics.md."""
    rows = [["kernels", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    rows += [[row, *(entry(row, column).text for column in COLUMNS)] for row in CASES]
    return ["| " + " | ".join(row) + " |" for row in rows]
