"""explain: the reason for each layer of hard cases, on every instruction set."""

import re

import pytest
from helpers import hard_cases

import torch_blocked

pytestmark = pytest.mark.usefixtures("cache_folder")

# How the reason of a layer that is not blocked begins, and what its way out has.
NO_KERNEL = ("no kernel for blocked tensors", "torch_blocked.register")
NO_OP = ("no blocked kernel for this op", "torch_blocked.register")
NOT_SO = ("expected a dim other than C", "arguments that its kernel takes")
NO_IMAGE = (" dims, and blocked formats 3 to 5", "it is no image")
EMPTY = ("a tensor of this run is empty", "nothing to compute")
VIEW = ("its result is a dense view", "to_blocked() after it")


def of_type(what, word):
    return f"its {what} is {word}, and kernels are for float32", f"keep ops on {word} together"


def quantized(what, word, why="and kernels are for float32"):
    return f"its {what} is {word}, {why}", "torch_blocked.quantize"


def dense_from(op, module="layer"):
    place = f" of {module}" if module else ""
    return f"its input is dense, from {op}{place}", "to_blocked() after that"


# For each case and run, the ops that are looked at: the implementation where all of them are
# blocked, "" if it is not looked at, or why they are not blocked, and the way out.
REASONS = {
    ("grouped4", "optimized"): {"conv2d of layer": "grouped"},
    ("grouped4", "eager"): {"convolution of layer": "grouped"},
    ("dilated", "optimized"): {"conv2d of layer": ""},
    ("dilated", "eager"): {"convolution of layer": ""},
    ("three_channels", "optimized"): {"conv2d + relu of before": ""},
    ("three_channels", "eager"): {"convolution of before": "", "relu of layer": ""},
    ("transposed", "optimized"): {"conv_transpose2d of layer": "direct"},
    ("transposed", "eager"): {"convolution of layer": "direct"},
    ("permuted", "optimized"): {"permute of layer": NO_KERNEL, "conv2d of after": ""},
    ("permuted", "eager"): {
        "permute of layer": "",
        "clone of layer": "",
        "convolution of after": "",
    },
    ("custom_op", "optimized"): {"torch_blocked_test::halved of layer": NO_KERNEL},
    ("custom_op", "eager"): {
        "torch_blocked_test.halved of layer": NO_OP,
        "convolution of after": dense_from("torch_blocked_test.halved"),
    },
    ("complex_numbers", "optimized"): {
        "fft_fft2 of layer": of_type("result", "ComplexFloat"),
        "real of layer": of_type("input", "ComplexFloat"),
    },
    ("complex_numbers", "eager"): {
        "_fft_c2c of layer": NO_OP,
        "mul of layer": dense_from("_fft_c2c"),
    },
    ("complex_input", "optimized"): {
        "mul": of_type("result", "ComplexFloat"),
        "real": of_type("input", "ComplexFloat"),
        "conv2d of after": "",
    },
    ("complex_input", "eager"): {
        "mul": "",
        "view_as_real": VIEW,
        "convolution of after": dense_from("select", ""),
    },
    ("seventeen", "optimized"): {"conv2d of layer": ""},
    ("seventeen", "eager"): {"convolution of layer": ""},
    ("empty_batch", "optimized"): {"conv2d of layer": EMPTY},
    ("empty_batch", "eager"): {"convolution of layer": "none"},
    ("control_flow", "optimized"): {
        "conv2d of before": "",
        "sum of layer": NO_IMAGE,
        "gt of layer": NO_IMAGE,
        "exp of layer": ("what it reads is plain, and other formats were not timed", "tune=True"),
        "conv2d of after": "",
    },
    ("control_flow", "eager"): {"sum of layer": "", "gt of layer": NO_IMAGE, "exp of layer": ""},
    ("shared", "optimized"): {"conv2d + sigmoid of layer.0": "", "conv2d of layer.0@1": ""},
    ("shared", "eager"): {"convolution of layer.0": "", "convolution of layer.0@1": ""},
    ("channels_last", "optimized"): {"conv2d of before": "", "conv2d of layer": ""},
    ("channels_last", "eager"): {"convolution of before": ""},
    ("sliced", "optimized"): {"slice of layer": "", "conv2d of after": ""},
    ("sliced", "eager"): {"slice of layer": "", "convolution of after": ""},
    ("int8", "optimized"): {
        "conv2d + mul + round + clamp of before": "",
        "conv2d of after": "",
    },
    ("int8", "eager"): {"_to_copy of layer": "", "convolution of after": ""},
    ("sorted_channels", "optimized"): {"sort of layer": NO_KERNEL},
    ("sorted_channels", "eager"): {"sort of layer": NOT_SO, "convolution of after": ""},
    ("through_nhwc", "optimized"): {
        "permute of layer": ("permute works on plain memory", "keep such ops together"),
    },
    ("through_nhwc", "eager"): {
        "permute of layer": VIEW,
        "flip of layer": dense_from("permute"),
    },
    ("classifier", "optimized"): {
        "flatten of layer.0": NO_IMAGE,
        "linear of layer.1": ("linear works on plain memory", "keep such ops together"),
    },
    ("classifier", "eager"): {
        "view of layer.0": NO_IMAGE,
        "addmm of layer.1": NO_IMAGE,
    },
    ("quantized", "optimized"): {
        "quantize_per_tensor of layer": quantized("result", "QInt8"),
        "relu of layer": quantized("result", "QInt8"),
        "dequantize of layer": quantized("input", "QInt8"),
    },
    ("quantized", "eager"): {
        "quantize_per_tensor of layer": quantized("result", "qint8", "which no blocked tensor is"),
        "relu of layer": quantized("input", "qint8", "which no blocked tensor is"),
        "convolution of after": dense_from("dequantize"),
    },
}


def named(layer):
    return f"{layer.op} of {layer.module}" if layer.module else layer.op


def check(layer, expected):
    if isinstance(expected, str):
        assert layer.blocked and expected in ("", layer.implementation), layer
        return
    reason, way_out = expected
    assert not layer.blocked and reason in layer.reason and way_out in layer.advice, layer
    told = f"{layer.reason}; runs "
    assert layer.sentence.startswith(told) and layer.sentence.endswith(f" ms; {layer.advice}")


@pytest.mark.parametrize("name", hard_cases.CASES)
def test_each_hard_case_has_its_reason(name):
    found = hard_cases.explained(name)
    for word in ("optimized", "eager"):
        run = getattr(found, word)
        for op, expected in REASONS[name, word].items():
            layers = [each for each in run.layers if named(each) == op]
            assert layers, (op, [named(each) for each in run.layers])
            check(layers[0], expected)
            assert isinstance(expected, tuple) or all(each.blocked for each in layers)
        for layer in run.layers:
            assert layer.blocked or layer.reason, layer
            assert layer.blocked or layer.advice or layer.kind == "reorder", layer


def test_what_runs_on_a_dense_copy_says_so():
    [sort] = (each for each in hard_cases.explained("sorted_channels").eager.layers if each.advice)
    assert sort.format_out.startswith("nChw")
    assert "; runs on a dense copy, 3 reorders, " in sort.sentence


def test_int8_parts_say_which_side_is_not_for_kernels():
    to_char, from_char = (each for each in hard_cases.explained("int8").layers if each.op == "to")
    check(to_char, of_type("result", "Char"))
    check(from_char, of_type("input", "Char"))


def refusals(found, module, tag):
    [layer] = [each for each in found.layers if each.module == module and each.kind == "layer"]
    return {
        each.implementation: each.refusal
        for each in layer.alternatives
        if each.refusal and re.search(r"\d", each.format)
    } | {"runs": layer.implementation}


def test_implementations_say_why_they_do_not_take_a_problem():
    blocked = f"nChw{torch_blocked.native_blocks()[0]}c"
    grouped = refusals(hard_cases.explained("grouped4"), "layer", blocked)
    assert grouped["strassen"] == "takes one group only"
    assert grouped["depthwise"] == "is for one channel a group"
    dilated = refusals(hard_cases.explained("dilated"), "layer", blocked)
    assert dilated["grouped"] == "is for several groups"
    assert refusals(hard_cases.explained("transposed"), "layer", blocked)["winograd4"] == (
        "takes none that are transposed but at stride 1"
    )
