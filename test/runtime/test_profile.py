"""`torch_blocked.profile()`: rows by module that sum to the time of the block."""

import ctypes
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser

import pytest
import torch
from helpers.browser import told_by
from helpers.nets import Block
from torch import nn
from torch.autograd import profiler

import torch_blocked
from torch_blocked import _C, module_paths
from torch_blocked.profile_rows import BETWEEN, OUTSIDE, RECORDING, torch_reorder

pytestmark = pytest.mark.filterwarnings("ignore:torch_blocked")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(16, 16), Block(16, 16))

    def forward(self, x):
        return self.blocks(x).sort(dim=1)[0].mean()


SORT_LINE = f"{__file__}:{inspect.getsourcelines(Net.forward)[1] + 1}"
SHOWN_LINE = SORT_LINE.removeprefix(f"{os.getcwd()}/")  # what reports say


def image():
    return torch.randn(1, 16, 12, 12, generator=torch.Generator().manual_seed(0))


def total(p):
    return sum(row.ms for row in p.rows if row.in_thread)


def train(model):
    model(image().to_blocked("nChw8c")).backward()


def run(model, x):
    with torch.no_grad():
        return model(x)


CASES = {
    "dense": lambda: (Net().eval(), lambda model: run(model, image())),
    "blocked": lambda: (Net().eval(), lambda model: run(model, image().to_blocked())),
    "training": lambda: (Net().train(), train),
    "optimized": lambda: (
        torch_blocked.optimize(Net().eval(), image(), tune=False),
        lambda model: model(image()),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_sum_to_the_time_of_the_block(case):
    model, call = CASES[case]()
    with torch_blocked.profile(torch_reorders=False) as p:
        call(model)
    assert total(p) == pytest.approx(p.wall_ms, rel=1e-6)
    assert all(row.ms > -1e-6 for row in p.rows)
    # Something is left between ops, and has rows of its own.
    between = {row.module for row in p.rows if row.op == BETWEEN}
    assert {OUTSIDE, ""} <= between
    assert case == "optimized" or "blocks.0" in between


def test_what_recording_takes_has_a_row_of_its_own(monkeypatch):
    push, wait = module_paths._push, 0.01

    def slow(module):
        time.sleep(wait)
        push(module)

    monkeypatch.setattr(module_paths, "_push", slow)
    with torch_blocked.profile(torch_reorders=False) as p:
        run(Net().eval(), image())
    # The model, which has seven modules in it, was entered in none.
    assert p.recording_ms > 1e3 * 7 * wait
    [row] = (row for row in p.rows if row.op == RECORDING)
    assert row.ms == p.recording_ms and RECORDING in p.table()


def row_of(p, module, op):
    found = [row for row in p.rows if (row.module, row.op) == (module, op)]
    assert len(found) == 1, p.table()
    return found[0]


def test_a_blocked_op_has_module_formats_and_implementation():
    x = image().to_blocked("nChw8c")
    model = Net().eval()
    with torch_blocked.profile() as p:
        run(model, x)
        run(model, x)
    row = row_of(p, "blocks.1.conv", "aten::conv2d")
    assert row.src == row.dst == "nChw8c [1, 16, 12, 12]"
    assert row.implementation in _C.implementations()["convolution"]
    assert row.calls == 2
    assert row.flops == 2 * 2 * 16 * 16 * 9 * 12 * 12
    weight = model.blocks[1].conv
    assert row.bytes == 2 * 4 * (2 * x.numel() + weight.weight.numel() + weight.bias.numel())


def test_backward_is_of_its_forwards_module():
    model = Net().train()
    with torch_blocked.profile() as p:
        train(model)
    row = row_of(p, "backward of blocks.1.conv", "aten::convolution_backward")
    assert row.src == "nChw8c [1, 16, 12, 12]"
    assert row.flops == 2 * 2 * 16 * 16 * 9 * 12 * 12  # of input and weight
    assert {r.module for r in p.rows} >= {f"backward of blocks.{i}.norm" for i in (0, 1)}


def test_a_reorder_and_a_fallback_say_who_caused_them():
    with torch_blocked.profile() as p:
        run(Net().eval(), image().to_blocked("nChw8c"))
    (fallback,) = (each for each in p.events if each.kind == _C.Kind.fallback)
    assert (fallback.op, fallback.module, fallback.line) == ("aten.sort.default", "", SORT_LINE)
    [row] = (row for row in p.rows if row.kind == "reorder" and row.src == "nChw8c")
    assert (row.module, row.op, row.dst) == ("", "reorder by to_dense", "nchw [1, 16, 12, 12]")
    assert row.implementation in _C.implementations()["reorder"]
    assert row.bytes == 2 * image().nbytes
    assert SHOWN_LINE in p.table() and "aten.sort.default" in p.table()


def test_reorders_inside_of_dense_convolutions_are_seen():
    conv = nn.Sequential(nn.Conv2d(16, 16, 3))
    x = torch.randn(1, 16, 64, 64)
    with torch.no_grad(), torch_blocked.profile() as p:
        conv(x)
    found = [row for row in p.rows if row.kind == "torch reorder"]
    assert found and {row.module for row in found} == {"0"}
    assert p.torch_reorders == sum(row.calls for row in found)
    assert all(row.bytes > 0 and row.ms > 0 for row in found)
    assert p.reorders == 0
    with torch.no_grad(), torch_blocked.profile(torch_reorders=False) as p:
        conv(x)
    assert p.torch_reorders == 0


@pytest.mark.parametrize(
    "line",
    [
        "onednn_verbose,v1,primitive,exec,cpu,reorder,jit:blk,undef,src:f32::blocked:abcd::f0 "
        "dst:f32::blocked:aBcd16b::f0,attr-scratchpad:user,,1x64x56x56,7.5",
        "onednn_verbose,exec,cpu,reorder,jit:blk,undef,src_f32::blocked:abcd:f0 "
        "dst_f32::blocked:aBcd16b:f0,,,1x64x56x56,7.5",
    ],
)
def test_lines_of_onednn_are_read(line):
    found = torch_reorder(line)
    assert (found.src, found.dst, found.dims) == ("abcd", "aBcd16b", "1x64x56x56")
    assert (found.bytes, found.ms) == (2 * 4 * 64 * 56 * 56, 7.5)
    assert torch_reorder(line.replace("reorder", "convolution")) is None


def c_prints(text):
    libc = ctypes.CDLL(None)
    libc.printf(b"%s", text.encode())
    libc.fflush(None)


def test_what_others_print_is_passed_on(capfd):
    with torch_blocked.profile():
        c_prints("first\n")
        nn.Conv2d(16, 16, 3)(torch.randn(1, 16, 64, 64))
        c_prints("second")
    c_prints(" and last\n")
    assert capfd.readouterr().out == "first\nsecond and last\n"


# What was running when a profile began has ended when it ends.
PROFILES_BESIDE_OPS = """
import threading, time, torch, torch_blocked
torch.set_num_threads(1)
conv, x, stop = torch.nn.Conv2d(16, 16, 3), torch.randn(1, 16, 96, 96), threading.Event()
calls = [0, 0, 0]
def call(i):
    while not stop.is_set():
        conv(x)
        calls[i] += 1
threads = [threading.Thread(target=call, args=(i,)) for i in range(3)]
[thread.start() for thread in threads]
for _ in range(300):
    with torch_blocked.profile():
        before = list(calls)
        while any(now == then for now, then in zip(calls, before)):
            time.sleep(0.0005)
stop.set()
[thread.join() for thread in threads]
"""


def test_ops_that_outlast_a_profile_print_nothing():
    ran = subprocess.run(
        [sys.executable, "-c", PROFILES_BESIDE_OPS], capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


def test_a_child_of_fork_prints_its_own_lines(capfd):
    with torch_blocked.profile():
        c_prints("parent\n")
        child = os.fork()
        if child == 0:
            c_prints("child\n")
            torch.ones(1).add(1)  # an op's end passes on what was printed
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["child", "parent"]


def test_an_optimized_model_is_told_step_by_step():
    model = Net().eval()
    optimized = torch_blocked.optimize(model, image(), tune=False)
    expected = optimized(image())
    with torch_blocked.profile() as p:
        result = optimized(image())
    assert torch.equal(result, expected)
    ops = {(row.module, row.op.removeprefix("aten::")) for row in p.rows if row.kind == "op"}
    assert {("blocks.0.conv", "conv2d + batch_norm + relu"), ("", "sort")} <= ops
    assert row_of(p, "", "aten::sort").line == SORT_LINE


@pytest.mark.parametrize("profiled_first", [False, True])
def test_a_compiled_model_is_told_step_by_step(profiled_first):
    torch.compiler.reset()
    model = nn.Sequential(Net().eval().blocks)
    compiled = torch.compile(model, backend="torch_blocked", fullgraph=True)
    with torch.no_grad():
        if not profiled_first:
            expected = compiled(image())
        with torch_blocked.profile() as p:
            result = compiled(image())
        if profiled_first:
            expected = compiled(image())
    assert torch.equal(result, expected)
    assert {"0.0.conv", "0.1.conv"} <= {row.module for row in p.rows if row.kind == "op"}


def test_the_model_around_an_optimized_one_is_in_its_paths():
    outer = nn.Sequential(torch_blocked.optimize(Net().eval().blocks, image(), tune=False))
    with torch_blocked.profile() as p:
        outer(image())
    assert "0.1.conv" in {row.module for row in p.rows}


def test_torchs_profiler_has_the_steps():
    optimized = torch_blocked.optimize(Net().eval(), image(), tune=False)
    with profiler.profile() as seen:
        optimized(image())
    assert any(each.name.endswith(" of blocks.0.conv") for each in seen.function_events)


def test_other_threads_have_rows_that_are_not_in_the_sum():
    def work():
        run(Net().eval(), image())

    with torch_blocked.profile() as p:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert any(row.module == "blocks.0.conv" and not row.in_thread for row in p.rows)
    assert total(p) == pytest.approx(p.wall_ms, rel=1e-6)


def test_json_and_trace():
    with torch_blocked.profile() as p:
        run(Net().eval(), image().to_blocked())
    content = json.loads(p.to_json())
    assert len(content["rows"]) == len(p.rows)
    assert sum(row["ms"] for row in content["rows"]) == pytest.approx(content["wall_ms"])
    assert content["fallbacks"][0]["fallback"] == "aten.sort.default"
    events = json.loads(p.to_chrome_trace())["traceEvents"]
    [conv] = [each for each in events if each["name"] == "blocks.0.conv aten::conv2d"]
    [module] = [each for each in events if each["name"] == "blocks.0.conv Conv2d"]
    assert module["ts"] <= conv["ts"]
    assert conv["ts"] + conv["dur"] <= module["ts"] + module["dur"]
    assert all(each["ph"] == "X" and each["dur"] >= 0 for each in events)


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attributes):
        assert not {"src", "href"} & dict(attributes).keys()  # nothing is loaded
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole(tmp_path):
    with torch_blocked.profile() as p:
        run(Net().eval(), image().to_blocked())
    p.to_html(tmp_path / "profile.html")
    tags = _Tags()
    tags.feed((tmp_path / "profile.html").read_text())
    assert not tags.open
    for wanted in ("blocks.0.conv", "aten::conv2d", "aten.sort.default", SHOWN_LINE):
        assert wanted in "".join(tags.text)


def test_a_page_of_a_training_step_fits_its_reader(tmp_path):
    """Modules are a tree with sums, of which little is open; tables are sorted by a click, and are
    as high as a screen. A training step of 60 layers is one page of 2,600 pixels at most."""
    blocks = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)) for _ in range(30))
    model = nn.Sequential(nn.Sequential(*blocks), nn.Conv2d(8, 8, 1))
    with torch_blocked.profile() as p:
        model(torch.randn(1, 8, 6, 6).to_blocked()).to_dense().sum().backward()
    page = tmp_path / "profile.html"
    assert p.to_html(page) == page.read_text()
    rows = """const rows = id => [...document.querySelectorAll(`#${id} tbody tr`)];
      const shown = () => rows("modules").filter(each => !each.hidden).map(each => each.dataset.path);
      const column = (id, at) => rows(id).map(each => parseFloat(each.cells[at].textContent));
      const told = { height: document.documentElement.scrollHeight, paths: shown(),
        modules: Object.fromEntries(rows("modules").map(each => [each.dataset.path,
          [1, 2].map(at => parseFloat(each.cells[at].textContent))])) };
      const head = (id, at) => document.querySelectorAll(`#${id} th`)[at];
      document.querySelector("#modules tr[data-path='the model itself/0'] button").click();
      told.opened = shown().length;
      head("modules", 1).click();
      told.sorted = rows("modules").map(each => [each.dataset.in, parseFloat(each.cells[1].textContent)]);
      head("rows", 6).click(); told.down = column("rows", 6);
      head("rows", 6).click(); told.up = column("rows", 6);
      tell(told);"""  # noqa: E501
    told = told_by(page, rows)
    assert told["height"] < 2600
    assert told["paths"][:3] == ["the model itself", "the model itself/0", "the model itself/1"]
    assert "backward/0" in told["paths"] and len(told["paths"]) < 12
    assert told["opened"] == len(told["paths"]) + 30
    for path, (total, own) in told["modules"].items():
        parts = [
            sums[0] for each, sums in told["modules"].items() if each.rpartition("/")[0] == path
        ]
        assert total == pytest.approx(own + sum(parts), abs=0.001 * (2 + len(parts)))
    rows_ms = sum(row.ms for row in p.rows if row.in_thread)
    tops = [ms for path, (ms, _) in told["modules"].items() if "/" not in path]
    assert sum(tops) == pytest.approx(rows_ms, abs=0.01)
    for parent in {each for each, _ in told["sorted"]}:
        times = [ms for each, ms in told["sorted"] if each == parent]
        assert times == sorted(times, reverse=True)
    assert told["down"] == sorted(told["down"], reverse=True) and told["up"] == sorted(told["up"])


def test_both_kinds_of_reorders_are_told_together():
    conv, x = nn.Conv2d(16, 16, 3), torch.randn(1, 16, 64, 64)
    with torch.no_grad(), torch_blocked.profile() as p:
        conv(x)
    inside = f"0 reorders by torch_blocked, {p.torch_reorders} of torch's oneDNN inside of dense"
    assert p.torch_reorders and p.summary().startswith(inside)
    assert p.summary() in p.table() and p.summary().replace("'", "&#x27;") in p.to_html()
    told = json.loads(p.to_json())
    assert (told["reorders"], told["torch_reorders"]) == (0, p.torch_reorders)
    with torch_blocked.profile(torch_reorders=False) as p:
        x.to_blocked()
    assert p.summary().startswith("1 reorder by torch_blocked, those of torch's oneDNN not rec")
    assert json.loads(p.to_json())["torch_reorders"] is None


@pytest.mark.parametrize("width", [4, 8, 16, 32, 5])
@pytest.mark.filterwarnings("ignore:torch_blocked")
def test_a_format_is_that_of_the_tensor_whatever_its_last_dim(width):
    """A dense result inside of a fallback ends in a number that is a block, too."""
    images = torch.randn(1, 33, 6, width).to_blocked("nChw16c")
    words = torch.randn(1, 33, width).to_blocked("nCw8c")
    volumes = torch.randn(1, 33, 2, 6, width).to_blocked("nCdhw4c")
    for x in (images, words, volumes):
        dense = x.to_dense()
        with torch_blocked.profile() as p:
            results = x.sort(1)[0], x.relu(), x.unsqueeze(0).squeeze(0)
            dense.to_blocked().to_dense()
        dims = list(x.shape)
        for row in p.rows:
            if row.op in ("aten::sort", "aten::relu"):
                assert row.src == f"{x.format} {dims}" == row.dst, row
            if row.op == "torch_blocked::to_dense":
                assert row.dst == f"{torch_blocked.format_of(dense)} {dims}", row
            if row.op == "torch_blocked::to_blocked":
                assert row.src == f"{torch_blocked.format_of(dense)} {dims}", row
        assert torch_blocked.format_of(results[0]) == x.format


def test_an_empty_profile_has_a_header_only():
    assert torch_blocked.profile().table().splitlines()[0].split()[0] == "module"
