"""explain: what each layer costs, what else could run, and the page as it looks. The reasons are in
test_explain_reasons.py."""

import json
import re
import warnings

import pytest
import torch
from helpers import hard_cases
from helpers.browser import WIDTH, laid_out, screenshot, told_by
from helpers.draws import crossed

import torch_blocked
from torch_blocked import _C
from torch_blocked.__main__ import main

pytestmark = pytest.mark.any_isa


def test_what_runs_in_parts_or_as_it_is_says_so():
    assert hard_cases.explained("control_flow").optimized.note.startswith("runs in ")
    shared = [each.module for each in hard_cases.explained("shared").layers if each.kind == "layer"]
    assert shared == ["before", "layer.0", "layer.0@1", "after"]

    optimized = torch_blocked.optimize(hard_cases.dilated(), hard_cases.image(), tune=False)
    optimized._choose("dense", "faster")
    assert "the model's own ops run" in torch_blocked.explain(optimized).optimized.note


def test_measured_alternatives_and_costs():
    x = hard_cases.image()
    found = torch_blocked.explain(hard_cases.dilated(), x)
    [layer] = [each for each in found.layers if each.module == "layer" and each.kind == "layer"]
    assert [each for each in layer.alternatives if each.microseconds and not each.whole]
    assert layer.next_best.endswith(" ms alone")
    for each in found.layers:
        assert each.blocked or each.kind == "reorder" or "more in all" in each.reason
    table = found.table()
    assert all(word in table for word in ("module", "next best", "conv2d", "to_blocked"))
    assert found.roofs["gflops"] > 1 and found.roofs["gbps"] > 0.1
    runs = json.loads(found.to_json())["runs"]
    assert [each["op"] for each in runs["optimized"]["layers"]] == [e.op for e in found.layers]


class Head(torch.nn.Module):
    """Layers that have lists of implementations besides convolutions."""

    def __init__(self):
        super().__init__()
        self.pool, self.linear = torch.nn.MaxPool2d(2), torch.nn.Linear(16 * 36, 41)
        self.eval()

    def forward(self, x):
        return self.linear(self.pool(x).flatten(1))


def test_measured_alternatives_of_linear_layers_and_poolings():
    found = torch_blocked.explain(Head(), hard_cases.image(100))
    layers = {each.module: each for each in found.layers if each.kind == "layer"}
    timed = {
        name: {each.implementation for each in layer.alternatives if each.microseconds}
        for name, layer in layers.items()
    }
    assert timed["linear"] >= {"direct", "onednn"} and "maximum" in timed["pool"]
    refused = {
        each.implementation: each.refusal
        for name in ("linear", "pool")
        for each in layers[name].alternatives
        if each.refusal
    }
    amx = {} if _C.isa() == "amx" else {"amx": "is for CPUs with AMX"}
    assert refused == amx | {
        "few_rows": "is for few rows",
        "few_rows_of_bytes": "is for weights of bytes",
        "strassen": "takes whole vectors of inputs and outputs",
        "few_rows_bfloat16": "is for bfloat16",
        "dots_bfloat16": "is for bfloat16",
        "onednn": "is for averages",
        "average": "is for averages",
    }
    assert re.fullmatch(r"(direct|onednn|amx): [\d.]+ ms alone", layers["linear"].next_best)
    assert re.fullmatch(r"maximum in n\S+: [\d.]+ ms alone", layers["pool"].next_best)


def test_reorders_are_counted_next_to_layers():
    found = hard_cases.explained("custom_op")
    [layer] = [each for each in found.layers if each.op == "torch_blocked_test::halved"]
    assert layer.reorders == 2
    assert ", 2 reorders, " in layer.sentence
    assert layer.sentence.endswith("by torch_blocked.register")
    assert [each.format_in for each in found.reorders][0] == "nchw"


class Branches(torch.nn.Module):
    """Enough boxes to be folded, and rows of several."""

    def __init__(self):
        super().__init__()
        for name in "abcd":
            layers = [torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(20)]
            setattr(self, f"with_a_long_name_{name}", torch.nn.Sequential(*layers))
        self.eval()

    def forward(self, x):
        parts = [getattr(self, f"with_a_long_name_{name}")(x) for name in "abcd"]
        return torch.cat([torch.ops.torch_blocked_test.halved(each) for each in parts], 1)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch_blocked.explain(Branches(), hard_cases.image(), tune=False)
    path = tmp_path_factory.mktemp("explain") / "page.html"
    found.to_html(path)
    return path


@pytest.mark.parametrize(("which", "dark"), crossed(2, ["optimized", "eager"], [False, True]))
def test_the_page_has_no_overlap(page, tmp_path, dark, which):
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")
    told = laid_out(page, dark=dark, which=which)
    assert told["overlaps"] == told["outside"] == told["cut"] == []
    assert 4 <= told["boxes"] <= 60 and told["texts"] > 80
    assert told["width"] <= WIDTH
    assert (told["background"] == "rgb(19, 20, 22)") == dark
    png = tmp_path / "page.png"
    screenshot(page, png, dark=dark, which=which)
    assert png.stat().st_size > 20_000


ACTIONS = """
  const boxes = () => document.querySelectorAll("svg g").length;
  const text = id => document.getElementById(id).textContent;
  const fire = (element, event) => element.dispatchEvent(event);
  const click = element => fire(element, new MouseEvent("click", { bubbles: true }));
  const slide = (id, value) => {
    const slider = document.getElementById(id);
    slider.value = value;
    fire(slider, new Event("input"));
  };
  const found = { folded: boxes() };
  click(document.querySelector("svg .many"));
  found.opened = boxes();
  click(document.querySelector("svg g:not(:has(.many))"));
  found.closed = boxes();
  fire(document.querySelector("svg g"), new MouseEvent("mousemove"));
  found.hover = text("hover");
  slide("detail", 9);
  found.all = boxes();
  slide("which", 0);
  found.summary = text("summary");
  tell(found);
"""


def test_the_pages_clicks_and_sliders(page):
    found = told_by(page, ACTIONS)
    assert found["opened"] == found["folded"] + 19  # a box of 20 layers became 20
    assert found["closed"] == found["folded"]
    assert "with_a_long_name_a: 20 layers" in found["hover"]
    assert found["all"] == 85  # 80 convolutions, 4 ops of nobody's, and a concat
    assert found["summary"].startswith("eager: ")


def test_boxes_are_as_wide_as_their_time(page):
    widths = laid_out(page)["widths"]
    assert min(widths) >= 140 and max(widths) > 1.2 * min(widths)


def test_command_line(tmp_path, capsys):
    html, text = tmp_path / "page.html", tmp_path / "page.json"
    words = ["explain", "helpers.hard_cases:grouped4", "--input", "16x12x12"]
    assert main([*words, "--html", str(html), "--json", str(text)]) == 0
    assert "conv2d" in capsys.readouterr().out
    assert json.loads(text.read_text())["name"] == "helpers.hard_cases:grouped4"
    assert '"helpers.hard_cases:grouped4"' in html.read_text()


def test_a_batch_norm_reads_its_layer_and_not_the_input():
    """Running means are no inputs, nor are attributes; a weight that is turned is no layer."""

    class Anchored(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.anchors = torch.randn(1, 8, 1, 1)

        def forward(self, x):
            return x * self.anchors

    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), Anchored()]
    layers += [torch.nn.Flatten(), torch.nn.Linear(8 * 36, 5)]
    found = torch_blocked.explain(torch.nn.Sequential(*layers).eval(), torch.randn(1, 3, 8, 8))
    eager = found.eager.layers
    assert [each.op for each in eager if each.op in ("t", "transpose")] == []
    for index, each in enumerate(eager[1:], 1):
        assert each.reads == [index - 1], each
    assert eager[0].kind == "reorder" and eager[0].reads == [-1]


def test_two_inputs_and_constants_have_their_edges():
    class Sum(torch.nn.Module):
        def forward(self, x, y):
            return x.relu() + y + torch.ones(8, 6, 6)

    x = torch.randn(1, 8, 6, 6)
    eager = torch_blocked.explain(Sum().eval(), (x, x.clone())).eager.layers
    [ones] = [each for each in eager if each.op == "ones"]
    assert ones.reads == [] and "reads no activation" in ones.reason
    assert [each.reads for each in eager[:2]] == [[-1], [-1]]


def test_what_explain_and_profile_write_has_one_signature(tmp_path):
    """The path is optional, and the text comes back."""
    found = hard_cases.explained("dilated")
    with torch_blocked.profile() as p:
        hard_cases.image().to_blocked()
    for made in (found, p):
        for name in ("to_json", "to_html"):
            method, path = getattr(made, name), tmp_path / name
            assert method(path) == path.read_text() == method(), (made, name)


def test_words_of_a_box_are_whole_where_its_row_has_room(tmp_path):
    name = "a_module_with_a_name_that_needs_room"
    model = torch.nn.Sequential()
    model.add_module(name, torch.nn.Conv2d(3, 8, 3))
    page = tmp_path / "page.html"
    torch_blocked.explain(model.eval(), torch.randn(1, 3, 8, 8), tune=False).to_html(page)
    texts = "tell([...document.querySelectorAll('svg .name')].map(each => each.textContent))"
    assert name in told_by(page, texts)
