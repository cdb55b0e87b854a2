"""Changes of saved models, as a stranger or a disk makes them, and what loading them does.

Half of a file's changes are of its data, which then gets a checksum that fits: a number, a name, a
type, an op, a tensor, the order of things. The others are of its bytes.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import random
import resource
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from helpers.hand_quantized import by_hand
from torch import Tensor, nn

import torch_blocked as tb
from torch_blocked import saved
from torch_blocked.refusals import is_out_of_memory

# Memory that a case may ask for beside what its process has: sizes in a file may be any.
SPARE_BYTES = 3 << 30


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.PReLU(12),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(12, 12, 3, groups=3, padding=1),
            nn.GroupNorm(3, 12),
            nn.ConvTranspose2d(12, 8, 2, stride=2),
            nn.Hardswish(),
        )
        self.register_buffer("anchors", torch.arange(4.0))

    def forward(self, x, scale=2.0):
        y = self.body(x)
        z = F.interpolate(F.pad(y, (1, 1, 1, 1)), size=(5, 7), mode="bilinear")
        a, b = z.chunk(2, 1)
        return {"y": y * scale, "z": torch.cat((a, b.flip(1)), 1), "n": 3, "a": self.anchors + 1}


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)
        self.rnn = nn.LSTM(16, 8, batch_first=True)

    def forward(self, tokens):
        x = self.layer(self.embed(tokens))
        x = self.norm(x + self.rnn(x)[0].repeat(1, 1, 2))
        first, rest = x.split((1, x.shape[1] - 1), 1)
        best = self.head(rest).softmax(-1).topk(2)
        return best.values, best.indices, first.squeeze(1), x.mean((1, 2), keepdim=True)


class Indices(nn.Module):
    def forward(self, x, grid):
        y = F.grid_sample(x, grid, align_corners=False)
        y = y.permute(0, 2, 3, 1).reshape(x.shape[0], -1, x.shape[1]).transpose(1, 2)
        rows = torch.arange(y.shape[2], device=y.device)
        y = y.index_select(2, rows.flip(0)).gather(2, (rows % 3).expand_as(y))
        z = torch.einsum("nci,ncj->nij", y, y)
        return F.unfold(x, 2), torch.where(z > 0, z, z.new_zeros(()).expand_as(z)), z.cumsum(1)


def _saved(module: nn.Module, *example: Tensor) -> bytes:
    torch.manual_seed(0)
    with torch.no_grad():
        file = io.BytesIO()
        tb.optimize(module, example, tune=False, verify=False).save(file)
    return file.getvalue()


def write_files(folder: Path) -> list[Path]:
    """Small saved models with most of what a file can hold."""
    torch.manual_seed(0)
    image, tokens = torch.randn(2, 3, 10, 12), torch.randint(0, 11, (2, 6))
    grid = torch.rand(2, 4, 5, 2)
    layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.ReLU())
    made = {
        "images": _saved(Images().eval(), image),
        "blocked": _saved(nn.Sequential(nn.Conv2d(3, 20, 3), nn.ReLU()).eval(), image.to_blocked()),
        "tokens": _saved(Tokens().eval(), tokens),
        "indices": _saved(Indices().eval(), image, grid),
        "quantized": _saved(by_hand(layers.eval(), [image], random.Random(0)), image),
    }
    for name, content in made.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in made]


# ---- changes of data ----------------------------------------------------------------------------

_INTS = (0, 1, -1, 2, 3, 5, 63, 64, 1 << 16, 1 << 31, 1 << 32, 1 << 62, -(1 << 63), (1 << 63) - 1)
_FLOATS = (0.0, -1.0, 0.5, 1e-30, 1e30, float("nan"), float("inf"), -float("inf"))
_DTYPES = (torch.float64, torch.int64, torch.bool, torch.uint8, torch.float16, torch.complex64)
# Beside names of the list: what must not run, and what is no op.
_OTHER_OPS = (
    ("aten::from_file", ""),
    ("aten::zero_", ""),
    ("aten::as_strided", ""),
    ("aten::resize_", ""),
    ("aten::set_", "source_Storage"),
    ("aten::add", "out"),
    ("aten::_print", ""),
    ("prim::Print", ""),
    ("aten::no_such_op", ""),
    ("torch_blocked::clear_tail_", ""),
    ("", ""),
)


def _places(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all parts of plain data."""
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, (list, tuple)):
        inner = enumerate(value)
    else:
        return [path]
    return [path, *(each for key, part in inner for each in _places(part, (*path, key)))]


def _at(data: Any, path: tuple) -> Any:
    for key in path:
        data = data[key]
    return data


def _put(data: Any, path: tuple, value: Any) -> None:
    """Tuples on the way become lists, which count as the same."""
    for i, key in enumerate(path[:-1]):
        inner = data[key]
        if isinstance(inner, tuple):
            inner = data[key] = list(inner)
        data = inner
        del i
    data[path[-1]] = value


class Change:
    """Of one file's data, by a random generator."""

    def __init__(self, choose: random.Random, data: dict[str, Any], ops: list) -> None:
        self.choose, self.data, self.ops = choose, data, ops
        self.said: list[str] = []

    def apply(self) -> None:
        kinds = (self.part, self.part, self.part, self.number, self.node, self.op, self.tensor)
        self.choose.choice(kinds)()

    def _say(self, *words: Any) -> None:
        try:
            self.said.append(" ".join(str(each)[:60] for each in words))
        except RecursionError:
            self.said.append(f"{words[0]} = lists in lists")

    def _put(self, path: tuple, value: Any) -> None:
        self._say("/".join(map(str, path)), "=", type(value).__name__, value)
        _put(self.data, path, value)

    def part(self) -> None:
        """Any part, by something of its own type or of another."""
        places = [each for each in _places(self.data) if each]
        path = self.choose.choice(places)
        value = _at(self.data, path)
        if self.choose.random() < 0.25:
            value = copy.deepcopy(_at(self.data, self.choose.choice(places)))
        self._put(path, self._other(value))

    def _other(self, value: Any) -> Any:
        choose = self.choose
        if choose.random() < 0.1:
            return choose.choice((None, True, 7, 2.5, "words", [], {}, (), torch.ones(2), b"ab"))
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return choose.choice((*_INTS, value + 1, value - 1, -value, 2 * value))
        if isinstance(value, float):
            return choose.choice((*_FLOATS, value * 2))
        if isinstance(value, str):
            cut = value[: choose.randrange(len(value) + 1)]
            return choose.choice((cut, value + "x", value.replace("a", "b"), "", "x" * 100000))
        if isinstance(value, torch.dtype):
            return choose.choice(_DTYPES)
        if isinstance(value, Tensor):
            return self._other_tensor(value)
        if isinstance(value, (list, tuple)):
            return self._other_list(list(value))
        if isinstance(value, dict):
            items = self._other_list(list(value.items()))
            return {k: v for k, v in (each for each in items if isinstance(each, tuple))}
        return value

    def _other_list(self, items: list) -> list:
        choose = self.choose
        if not items or choose.random() < 0.1:
            deep: list = []
            for _ in range(choose.choice((1, 9, 100))):
                deep = [deep]
            return [*items, deep]
        i, j = choose.randrange(len(items)), choose.randrange(len(items))
        how = choose.randrange(4)
        if how == 0:
            del items[i]
        elif how == 1:
            items.insert(j, copy.deepcopy(items[i]))
        elif how == 2:
            items[i], items[j] = items[j], items[i]
        else:
            items = items[:i] if choose.random() < 0.5 else items[::-1]
        return items

    def _other_tensor(self, tensor: Tensor) -> Tensor:
        choose, flat = self.choose, tensor.detach().reshape(-1)
        if not flat.numel():
            return torch.ones(3)
        ways = (
            lambda: flat[: choose.randrange(flat.numel())],
            lambda: tensor.detach().unsqueeze(choose.randrange(tensor.dim() + 1)),
            lambda: tensor.detach().transpose(0, -1) if tensor.dim() else flat,
            lambda: tensor.detach().to(choose.choice(_DTYPES)),
            lambda: flat[:1].expand(tensor.shape),
            lambda: torch.cat((flat, flat)),
            lambda: torch.full_like(tensor.detach(), choose.choice((0, 1, 100))),
            lambda: tensor.detach()[..., :1],
            lambda: tensor.detach().to("meta"),
            lambda: tensor.detach().to_sparse(),
        )
        try:
            return choose.choice(ways)()
        except (RuntimeError, IndexError, NotImplementedError):
            return torch.ones(choose.randrange(4))

    def _capture(self) -> dict[str, Any]:
        return self.choose.choice(self.data["forms"])["capture"]

    def number(self) -> None:
        """The number of a value, which is there or not."""
        capture = self._capture()
        places = [
            each
            for each in _places(capture)
            if each and each[0] in ("nodes", "inputs", "outputs", "questions")
            if type(_at(capture, each)) is int
        ]
        path = self.choose.choice(places)
        near = self.choose.randrange(len(capture["nodes"]) + 6)
        value = self.choose.choice((near, near, near, -1, 1 << 21, *_INTS))
        self._say("number", path, value)
        _put(capture, path, value)

    def node(self) -> None:
        nodes = self._capture()["nodes"]
        if not nodes:
            return
        i, j = self.choose.randrange(len(nodes)), self.choose.randrange(len(nodes))
        how = self.choose.randrange(5)
        self._say("node", i, nodes[i]["name"], ("drop", "swap", "twice", "arguments", "name")[how])
        if how == 0:
            del nodes[i]
        elif how == 1:
            nodes[i], nodes[j] = nodes[j], nodes[i]
        elif how == 2:
            nodes.insert(j, copy.deepcopy(nodes[i]))
        elif how == 3:
            nodes[i]["arguments"] = copy.deepcopy(nodes[j]["arguments"])
        else:
            nodes[i]["name"], nodes[i]["overload"] = self._op_name()

    def _op_name(self) -> tuple[str, str]:
        if self.choose.random() < 0.2:
            return self.choose.choice(_OTHER_OPS)
        schema = self.choose.choice(self.ops)
        return schema.name, schema.overload_name

    def op(self) -> None:
        """An op of the list, or another, with arguments as its schema has them, of any value."""
        capture = self._capture()
        nodes = capture["nodes"]
        at = self.choose.randrange(len(nodes) + 1)
        known = [*capture["inputs"], *capture["constants"]]
        known += [value for node in nodes[:at] for value in node["outputs"]]
        if self.choose.random() < 0.15:
            node = self._reaching_out(known)
        else:
            node = self._call(self.choose.choice(self.ops), known)
        first = 1 + max([*known, *(v for each in nodes for v in each["outputs"])], default=0)
        node["outputs"] = [first + i for i in range(node.pop("results"))]
        self._say("op", node["name"], node["overload"], node["arguments"])
        nodes.insert(at, node)
        if node["outputs"] and self.choose.random() < 0.7:
            self._read(nodes[at + 1 :], capture, node["outputs"][0])

    def _reaching_out(self, known: list[int]) -> dict[str, Any]:
        name, overload = self.choose.choice(_OTHER_OPS)
        x = ["value", self.choose.choice(known)]
        arguments = self.choose.choice(
            (
                [x],
                ["made_by_a_file", True, 100, torch.float32, None, None, None],
                [x, [9], [1], 9999],
            )
        )
        return self._node(name, overload, arguments, 1)

    def _node(self, name: str, overload: str, arguments: list, results: int) -> dict[str, Any]:
        node = {"name": name, "overload": overload, "arguments": arguments, "results": results}
        return node | {"module": "", "line": ""}

    def _call(self, schema, known: list[int]) -> dict[str, Any]:
        arguments = [self._argument(str(each.type), each, known) for each in schema.arguments]
        results = len(schema.returns) if str(schema.returns[0].type) == "Tensor" else 2
        return self._node(schema.name, schema.overload_name, arguments, results)

    def _argument(self, kind: str, argument, known: list[int]) -> Any:
        choose = self.choose
        if argument.has_default_value() and choose.random() < 0.5:
            return copy.deepcopy(argument.default_value)
        if kind.startswith("Optional["):
            if choose.random() < 0.4 or "Generator" in kind:
                return None
            kind = kind[len("Optional[") : -1]
        if kind.startswith("List["):
            count = choose.choice((0, 1, 2, 2, 3, 4, argument.N or 2))
            return [self._argument(kind[5:-1], argument, known) for _ in range(count)]
        small = choose.choice((0, 1, 1, 2, 2, 3, 4, -1, -2, 5, 12))
        return {
            "Tensor": lambda: ["value", choose.choice(known)],
            "number": lambda: choose.choice((small, 0.5)),
            "int": lambda: choose.choice((small, small, small, choose.choice(_INTS))),
            "float": lambda: choose.choice((0.5, 1.0, choose.choice(_FLOATS))),
            "bool": lambda: choose.random() < 0.5,
            "str": lambda: choose.choice(("none", "mean", "sum", "floor", "bilinear", "ij,jk->ik")),
            "Device": lambda: torch.device(choose.choice(("cpu", "cpu", "cuda", "meta"))),
        }.get(kind, lambda: None)()

    def _read(self, nodes: list, capture: dict[str, Any], value: int) -> None:
        """Makes something after it read the value: what runs is what something reads."""
        places = [
            (each["arguments"], path)
            for each in nodes
            for path in _places(each["arguments"])
            if len(path) > 1 and path[-1] == 1 and _is_number_of_value(each["arguments"], path)
        ]
        outputs = [(capture["outputs"], (i, 1)) for i, o in enumerate(capture["outputs"]) if o]
        outputs = [each for each in outputs if isinstance(each[0][each[1][0]], list)]
        if places or outputs:
            _put(*self.choose.choice([*places, *outputs, *outputs]), value)

    def tensor(self) -> None:
        constants = self._capture()["constants"]
        if constants:
            key = self.choose.choice(list(constants))
            constants[key] = self._other_tensor(constants[key])
            self._say("tensor", key, tuple(constants[key].shape), constants[key].dtype)


def _is_number_of_value(arguments: list, path: tuple) -> bool:
    held = _at(arguments, path[:-1])
    return isinstance(held, list) and len(held) == 2 and held[0] == "value"


def changed_bytes(choose: random.Random, content: bytes) -> bytes:
    data, at = bytearray(content), choose.randrange(len(content))
    how = choose.randrange(6)
    if how == 0:
        return bytes(data[:at])
    if how == 1:
        del data[at : at + choose.randrange(1, 200)]
    elif how == 2:
        begin = choose.randrange(len(content))
        data[at:at] = data[begin : begin + choose.randrange(1, 200)]
    elif how == 3:
        data[at : at + 16] = bytes(16)
    else:
        for _ in range(choose.choice((1, 1, 8))):
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    return bytes(data)


def _loadable_ops() -> list:
    from torch_blocked import _C

    return [
        each
        for each in torch._C._jit_get_all_schemas()
        if each.returns and _C.is_loadable(each.name, each.overload_name)
    ]


# ---- what comes of it ---------------------------------------------------------------------------


class World:
    """The files, and a folder in which nothing may appear. One for all cases of a process."""

    def __init__(self, files: list[Path]) -> None:
        # Memory is asked for by sizes in a file. What is not there is an exception, or the machine
        # runs out of it.
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, resource.RLIM_INFINITY))
        torch.set_num_threads(1)
        self.contents = [each.read_bytes() for each in files]
        self.data = [torch.load(io.BytesIO(each), weights_only=True) for each in self.contents]
        self.ops = _loadable_ops()

    def changed(self, seed: int) -> tuple[bytes, str]:
        """A file, and what was changed in it."""
        choose = random.Random(seed)
        return self.changed_by(choose, choose.randrange(len(self.contents)), seed % 4 == 3)

    def changed_by(self, choose: random.Random, which: int, in_bytes: bool) -> tuple[bytes, str]:
        """The same, with the choices of `choose`. in_bytes: changed as bytes, not as data."""
        if in_bytes:
            return changed_bytes(choose, self.contents[which]), f"bytes of file {which}"
        change = Change(choose, copy.deepcopy(self.data[which]), self.ops)
        for _ in range(choose.choice((1, 1, 1, 2, 4))):
            # What one change has broken another may not find.
            with contextlib.suppress(Exception):
                change.apply()
        file = io.BytesIO()
        saved.save(change.data, file)
        return file.getvalue(), f"file {which}: {'; '.join(change.said)}"


def outcome(content: bytes) -> str:
    """ "refused", "loaded", or what is wrong."""
    before = sorted(os.listdir("."))
    try:
        with torch.no_grad():
            return _outcome(content)
    finally:
        if sorted(os.listdir(".")) != before:
            raise AssertionError("a file was made")


def _outcome(content: bytes) -> str:
    try:
        module = tb.load(io.BytesIO(content))
    except ValueError as error:
        text = str(error)
        fits = text.startswith("torch_blocked::load: expected ") and ", got " in text
        return "refused" if fits else f"a ValueError of other words: {text[:300]}"
    except Exception as error:
        if is_out_of_memory(error):  # so large a model may be what was saved
            return "refused"
        return f"{type(error).__name__} from load: {str(error)[:300]}"
    args, kwargs = module._example
    try:
        module(*args, **kwargs)
    except Exception as error:  # what an op says of values, as eager does
        return f"loaded, {type(error).__name__}"
    return "loaded"
