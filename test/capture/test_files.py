"""What load() makes of files that are broken, of another version, or written to do harm."""

import io
import json
import os
import random
import re
import sys
import warnings
import zipfile
from collections import OrderedDict, defaultdict

import pytest
import torch
from helpers.draws import draws
from helpers.processes import command
from torch import nn

import torch_blocked as tb
from torch_blocked import saved, structure

pytestmark = [pytest.mark.any_isa, pytest.mark.usefixtures("cache_folder")]


def optimized(model: nn.Module, *example: torch.Tensor) -> nn.Module:
    with torch.no_grad():
        return tb.optimize(model.eval(), example, tune=False, verify=False)


@pytest.fixture(scope="module")
def content():
    file = io.BytesIO()
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8))
    optimized(net, torch.randn(1, 3, 9, 9)).save(file)
    return file.getvalue()


@pytest.fixture
def data(content):
    return torch.load(io.BytesIO(content), weights_only=True)


def refused(data, match: str) -> str:
    file = io.BytesIO()
    saved.save(data, file)
    file.seek(0)
    with pytest.raises(ValueError, match=r"^torch_blocked::load: expected .*, got ") as caught:
        tb.load(file)
    assert re.search(match, str(caught.value)), caught.value
    return str(caught.value)


def node_of(name, overload, arguments, results):
    node = {"name": name, "overload": overload, "arguments": arguments, "outputs": results}
    return node | {"module": "", "line": ""}


# ---- what a file says ---------------------------------------------------------------------------


@pytest.mark.parametrize("file_too", (True, False))
def test_an_op_that_makes_files(data, tmp_path, file_too):
    """The whole list of ops is checked before any of them runs."""
    victim = tmp_path / "victim"
    if file_too:
        victim.write_bytes(b"x" * 4000)
    nodes = data["forms"][0]["capture"]["nodes"]
    arguments = [str(victim), True, 1000, torch.float32, None, None, None]
    nodes.insert(0, node_of("aten::from_file", "", arguments, [50]))
    nodes.insert(1, node_of("aten::zero_", "", [["value", 50]], [51]))
    text = refused(data, "got aten::from_file, aten::zero_")
    assert "ops=['aten::from_file', 'aten::zero_']" in text
    assert victim.exists() == file_too
    if file_too:
        assert victim.read_bytes() == b"x" * 4000


def test_memory_beside_a_tensor(data):
    """Nor where the user allows the op: ATen then checks the memory that is there."""
    capture = data["forms"][0]["capture"]
    read = node_of("aten::as_strided", "", [["value", capture["inputs"][0]], [9], [1], 10**8], [50])
    capture["nodes"].insert(0, read)
    capture["outputs"] = [["value", 50]]
    refused(data, "aten::as_strided")
    file = io.BytesIO()
    saved.save(data, file)
    file.seek(0)
    with pytest.raises((ValueError, RuntimeError), match="out of bounds"):
        tb.load(file, ops=["aten::as_strided"])(torch.randn(1, 3, 9, 9))


@pytest.mark.parametrize("value", (-1, 77, 999, 10**6, 2**40, -(2**63), 2**63 - 1, 2**64))
@pytest.mark.parametrize("place", ("argument", "output", "input", "result", "constant", "question"))
def test_numbers_of_values(data, place, value):
    capture = data["forms"][0]["capture"]
    node = capture["nodes"][0]
    if place == "argument":
        node["arguments"][0] = ["value", value]
    elif place == "output":
        node["outputs"] = [value]
    elif place == "input":
        capture["inputs"] = [value]
    elif place == "result":
        capture["outputs"] = [["value", value]]
    elif place == "constant":
        capture["constants"][value] = capture["constants"].popitem()[1]
    else:
        capture["questions"] = [(value, 0, [1]), (0, value, [1])]
    refused(data, "value|number|questions|another type|there")


def test_values_are_made_once_and_before_they_are_read(data):
    nodes = data["forms"][0]["capture"]["nodes"]
    nodes.insert(0, nodes.pop())
    refused(data, "before they are read")
    nodes.append(nodes.pop(0))
    nodes.append(dict(nodes[-1]))
    refused(data, "twice")


@pytest.mark.parametrize(
    "arguments, match",
    (
        ([], "arguments of aten::relu, got 0"),
        ([["value", 0], 1], "arguments of aten::relu, got 2"),
        (["words"], "Tensor as self of aten::relu"),
        ([[["value", 0]]], "Tensor as self of aten::relu"),
        ([None], "Tensor as self of aten::relu"),
        ([torch.float32], "."),
    ),
)
def test_arguments_fit_the_schema(data, arguments, match):
    node = data["forms"][0]["capture"]["nodes"][1]
    assert node["name"] == "aten::relu"
    node["arguments"] = arguments
    refused(data, match)


class Moved(nn.Module):
    def forward(self, x):
        return torch.einsum("nci,ncj->nij", x, x.transpose(1, 2).transpose(1, 2))


@pytest.mark.parametrize(
    "op, place, argument",
    (
        ("aten::einsum", 0, "nci,ncj->nijx"),
        ("aten::transpose", 2, -(2**63)),
        ("aten::transpose", 1, 5),
    ),
)
def test_sizes_in_a_file_do_not_stand_for_an_error(op, place, argument):
    """Those of the run that was recorded are there for ops that tell none without data."""
    file = io.BytesIO()
    optimized(Moved(), torch.randn(2, 3, 4)).save(file)
    file.seek(0)
    data = torch.load(file, weights_only=True)
    nodes = data["forms"][0]["capture"]["nodes"]
    next(node for node in nodes if node["name"] == op)["arguments"][place] = argument
    refused(data, "einsum|Dimension out of range")


# Layers by their number of spatial dims, and the ops that they could be taken for.
OF_SOME_DIMS = {
    "convolution": (lambda n: getattr(nn, f"Conv{n}d")(9, 8, 3), "conv1d conv2d conv3d"),
    "maxima": (lambda n: getattr(nn, f"MaxPool{n}d")(2), "max_pool1d max_pool2d max_pool3d"),
    "means": (lambda n: getattr(nn, f"AvgPool{n}d")(2), "avg_pool1d avg_pool2d avg_pool3d"),
    "nearest": (
        lambda n: nn.Upsample(scale_factor=2.0),
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d",
    ),
    "linear": (
        lambda n: nn.Upsample(scale_factor=2.0, mode=("", "linear", "bilinear", "trilinear")[n]),
        "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d",
    ),
}


@pytest.mark.parametrize("kind", OF_SOME_DIMS)
@pytest.mark.parametrize("spatial", (1, 2, 3))
def test_images_of_another_rank(spatial, kind):
    """An op in a file may be named for fewer or more dims than its images have. Our kernels have
    room for those of the name."""
    layer, names = OF_SOME_DIMS[kind]
    file = io.BytesIO()
    net = nn.Sequential(nn.ReLU(), layer(spatial))
    optimized(net, torch.randn(2, 9, *[5] * spatial)).save(file)
    file.seek(0)
    data = torch.load(file, weights_only=True)
    node = data["forms"][0]["capture"]["nodes"][-1]
    assert node["name"].removeprefix("aten::") in names.split()
    for name in names.split():
        its_own = int(name[-2])
        without_n = "pool" in name and its_own == spatial + 1
        if its_own != spatial and not without_n:
            node["name"] = f"aten::{name}"
            refused(data, ".")


@pytest.mark.parametrize("factor", (0, -2, 3, 1 << 32, (1 << 63) - 1))
def test_the_factor_of_a_shuffle(factor):
    """The square of 2^32 is 0 in 64 bits."""
    file = io.BytesIO()
    optimized(nn.Sequential(nn.ReLU(), nn.PixelShuffle(2)), torch.randn(1, 16, 4, 4)).save(file)
    file.seek(0)
    data = torch.load(file, weights_only=True)
    node = data["forms"][0]["capture"]["nodes"][-1]
    assert node["name"] == "aten::pixel_shuffle"
    node["arguments"][1] = factor
    refused(data, ".")


@pytest.mark.parametrize("states", (1, 3, 1 << 21))
def test_states_of_an_lstm(states):
    """ATen reads as many cell states as there are hidden ones."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4, 5, num_layers=2)

        def forward(self, x):
            return self.rnn(x)[0]

    file = io.BytesIO()
    optimized(Net(), torch.randn(3, 1, 4)).save(file)
    file.seek(0)
    data = torch.load(file, weights_only=True)
    nodes = data["forms"][0]["capture"]["nodes"]
    zeros = next(node for node in nodes if node["name"] == "aten::zeros")
    zeros["arguments"][0] = [states, *zeros["arguments"][0][1:]]
    refused(data, "as many hidden states as cell states")


def test_sizes_are_possible(data):
    for size in (-1, 10**18, 2**63 - 1):
        data["forms"][0]["capture"]["input_metas"] = [([1, 3, size, size], torch.float32)]
        refused(data, "sizes that a tensor can have|int|memory|size")


def test_lists_in_lists(data, content):
    for depth in (9, 30):
        deep: list = []
        for _ in range(depth):
            deep = [deep]
        data["forms"][0]["capture"]["nodes"][1]["arguments"] = [deep]
        refused(data, "deep at most")
    million = b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b"."
    with pytest.raises(ValueError, match="^torch_blocked::load: expected a file written by save"):
        tb.load(rewritten(content, lambda data: million))


def rewritten(content, change) -> io.BytesIO:
    """The file with other pickled data, by no pickler."""
    other = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(other, "w") as changed:
        for record in archive.infolist():
            body = archive.read(record)
            is_data = record.filename.endswith("data.pkl")
            changed.writestr(record.filename, change(body) if is_data else body)
    other.seek(0)
    return other


@pytest.mark.parametrize("name", ("aten::to", "aten::zeros"))
def test_other_devices(data, name):
    cuda = torch.device("cuda")
    x = ["value", data["forms"][0]["capture"]["inputs"][0]]
    node = (
        node_of(name, "device", [x, cuda, torch.float32, False, False, None], [50])
        if name == "aten::to"
        else node_of(name, "", [[3], torch.float32, None, cuda, None], [50])
    )
    data["forms"][0]["capture"]["nodes"].insert(0, node)
    refused(data, "the CPU as device")


def test_tensors_end_in_their_memory(data):
    """One storage of few bytes, which torch.load makes as large as the tensor says."""
    constants = data["forms"][0]["capture"]["constants"]
    constants[next(iter(constants))] = torch.ones(4)
    file = io.BytesIO()
    saved.save(data, file)

    def enlarge(body):
        assert b"K\x04\x85" in body  # the size (4,)
        return body.replace(b"K\x04\x85", b"M\xff\xff\x85", 1)

    with pytest.raises(ValueError, match="^torch_blocked::load: expected a file written by save"):
        tb.load(rewritten(file.getvalue(), enlarge))


# ---- names of types -----------------------------------------------------------------------------


def _spec(kind, context):
    return json.dumps([1, {"type": kind, "context": context, "children_spec": []}])


def test_no_module_is_imported_for_a_name():
    module = "this.that" if "antigravity" in sys.modules else "antigravity"
    enum = json.dumps({"__enum__": True, "fqn": f"{module}:Any", "name": "B"})
    escaped = enum.replace("__enum__", "\\u005f_enum__")
    factory = {"default_factory_module": module, "dict_context": []}
    for text in (
        _spec("builtins.dict", enum),
        _spec("builtins.dict", f"[{escaped}]"),
        _spec("collections.defaultdict", factory | {"default_factory_name": "fly"}),
    ):
        with pytest.raises(Exception, match="."):
            structure.loads(text)
        assert module not in sys.modules


def test_what_a_defaultdict_makes_is_a_type_of_pythons():
    factory = {"default_factory_module": "os", "default_factory_name": "abort", "dict_context": []}
    with pytest.raises(ValueError, match="abort"):
        structure.loads(_spec("collections.defaultdict", factory))
    for value in (defaultdict(list, a=1), OrderedDict(b=2), {"c": [1, (2,)]}):
        leaves, spec = structure.flatten(value)
        assert structure.unflatten(leaves, structure.loads(structure.dumps(spec))) == value


# ---- other ops ----------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, x):
        return torch.ops.files_of_others.double(x.relu()) + 1


@pytest.fixture(scope="module")
def library():
    made = torch.library.Library("files_of_others", "FRAGMENT")
    made.define("double(Tensor x) -> Tensor")
    made.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    yield made
    made._destroy()


def test_ops_of_other_libraries_are_named_by_the_user(library, tmp_path):
    x = torch.randn(1, 3, 4, 4)
    fast, path = optimized(Doubled(), x), tmp_path / "model.pt"
    with pytest.warns(UserWarning, match=r"ops=\['files_of_others::double'\]"):
        fast.save(path)
    with pytest.raises(ValueError, match=r"got files_of_others::double; if you trust .*ops=\["):
        tb.load(path)
    assert torch.equal(tb.load(path, ops=["files_of_others::double"])(x), fast(x))
    with pytest.raises(TypeError, match="expected a list of names"):
        tb.load(path, ops="files_of_others::double")


def test_a_copy_calls_what_its_model_called(library):
    import copy

    x = torch.randn(1, 3, 4, 4)
    fast = optimized(Doubled(), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(copy.deepcopy(fast)(x), fast(x))


# ---- what a file is -----------------------------------------------------------------------------


def broken(content):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    other = io.BytesIO()
    torch.save([1, 2], other)
    return {
        "empty": b"",
        "words": b"no model",
        "half": content[: len(content) // 2],
        "end": content[-100:],
        "packed": packed.getvalue(),
        "other": other.getvalue(),
        "older": None,
    }


@pytest.mark.parametrize("what", broken(b"x"))
def test_one_kind_of_error(content, data, what, tmp_path):
    path = tmp_path / "model.pt"
    bytes_ = broken(content)[what]
    if bytes_ is None:
        torch.save(data | {"version": 4}, path)
    else:
        path.write_bytes(bytes_)
    match = "version 4, not 5" if what == "older" else "expected a file written by save"
    for file in (path, io.BytesIO(path.read_bytes())):
        with pytest.raises(ValueError, match=f"^torch_blocked::load: .*{match}"):
            tb.load(file)


def test_what_is_no_file(tmp_path):
    with pytest.raises(OSError, match="."):
        tb.load(tmp_path)
    with pytest.raises(OSError, match="."):
        tb.load(tmp_path / "missing.pt")
    with pytest.raises(ValueError, match="expected a file written by save"):
        tb.load(io.StringIO("words"))


def test_bits_that_change(content, data):
    """Of data and of weights: the file is refused, or what it holds has not changed."""
    choose = random.Random(0)
    refusals = 0
    for _ in range(60):
        changed = bytearray(content)
        changed[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        try:
            loaded = saved.read(io.BytesIO(changed))
        except Exception:
            refusals += 1
            continue
        assert saved.signed(loaded)["checksum"] == data["checksum"]
    assert refusals > 20
    weight = next(iter(data["forms"][0]["capture"]["constants"].values()))
    weight.view(torch.int32).view(-1)[3] ^= 1
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    with pytest.raises(ValueError, match="checksum"):
        tb.load(file)


def test_a_file_holds_no_memory_of_the_process(data):
    assert all(not each.any() for each in data["example"])


def test_changed_files():
    """`make fuzz` changes more of them."""
    command("fuzz_files.py", "--files", draws("100", "600"), "--seed", "1")


def test_the_folder_is_as_before():
    assert not os.path.exists("made_by_a_file")
