"""Models that no capture describes whole, of modules that one does: detectors, which take a list of
images and choose boxes by their values."""

import threading
import time
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_blocked as tb
from torch_blocked.compile import OptimizedParts

pytestmark = pytest.mark.any_isa


def block(channels, more, stride=1):
    return nn.Sequential(
        nn.Conv2d(channels, more, 3, stride, 1, bias=False), nn.BatchNorm2d(more), nn.ReLU(True)
    )


class Backbone(nn.Module):
    """Maps of three sizes, by name."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(block(3, 8), block(8, 8, 2), block(8, 8))
        self.levels = nn.ModuleList([nn.Sequential(block(8, 8, 2), block(8, 8)) for _ in "abc"])

    def forward(self, x):
        maps = {}
        x = self.stem(x)
        for i, level in enumerate(self.levels):
            maps[f"level {i}"] = x = level(x)
        return maps


class Head(nn.Module):
    """Scores and boxes of each pixel of each map."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Sequential(*(block(8, 8) for _ in range(4)), nn.Conv2d(8, 3, 3, 1, 1))
        self.boxes = nn.Sequential(*(block(8, 8) for _ in range(4)), nn.Conv2d(8, 4, 3, 1, 1))

    def forward(self, maps: list[Tensor]) -> dict[str, Tensor]:
        scores = [self.scores(each).flatten(2).transpose(1, 2) for each in maps]
        boxes = [self.boxes(each).flatten(2).transpose(1, 2) for each in maps]
        return {"scores": torch.cat(scores, 1), "boxes": torch.cat(boxes, 1)}


class Images:
    """A batch, as an object of a detector's own."""

    def __init__(self, tensors, sizes):
        self.tensors, self.sizes = tensors, sizes


class Detector(nn.Module):
    """Takes images of any sizes; returns for each the boxes whose score is above its mean."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = Backbone(), Head()
        self.calls = 0

    def batched(self, images):
        sizes = [tuple(each.shape[-2:]) for each in images]
        height, width = (-(-max(each) // 16) * 16 for each in zip(*sizes, strict=True))
        padded = [F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in images]
        return Images(torch.stack(padded), sizes)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        self.calls += 1
        batch = self.batched(images)
        found = self.head(list(self.backbone(batch.tensors).values()))
        results = []
        for scores, boxes, size in zip(found["scores"], found["boxes"], batch.sizes, strict=True):
            best, labels = scores.sigmoid().max(1)
            keep = torch.where(best > best.mean())[0]
            keep = keep[best[keep].argsort(descending=True)][:20]
            boxes = boxes[keep].clamp(max=float(size[0]))
            results.append({"boxes": boxes, "scores": best[keep], "labels": labels[keep]})
        return results


def detector(seed=0):
    torch.manual_seed(seed)
    model = Detector().eval()
    for each in model.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.running_mean.normal_()
            each.running_var.uniform_(0.5, 2)
    return model


def images(*sizes):
    return [torch.rand(3, *size) for size in sizes]


def same(fast, model, given):
    with torch.no_grad():
        results, expected = fast(given), model(given)
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert result.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(result[name], value, rtol=1e-3, atol=1e-3)


def paths(fast):
    return fast._paths


SEVERAL = (
    ((40, 60),),
    ((70, 50),),
    ((33, 33), (64, 20)),
    ((40, 60),),
    ((90, 20), (20, 90), (50, 50)),
)


def test_a_detector_runs_by_its_backbone_and_its_head(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("Dynamo is not asked"))
    model = detector()
    fast = tb.optimize(model, (images((40, 60)),), tune=False)
    assert isinstance(fast, OptimizedParts)
    for sizes in SEVERAL * 2:
        same(fast, model, images(*sizes))
    assert paths(fast) == ["backbone", "head"]
    assert (
        fast.plan().startswith("runs in 2 parts, because") and "head\nruns: blocked" in fast.plan()
    )
    assert not any("forward" in vars(each) for each in model.modules())


def test_another_size_takes_no_minutes():
    model = detector()
    fast = tb.optimize(model, (images((40, 60)),), tune=False)
    fast(images((40, 60)))
    start = time.perf_counter()
    same(fast, model, images((70, 50)))
    ours = time.perf_counter() - start
    eager = torch.compile(model, backend="eager")
    with torch.no_grad():
        eager(images((40, 60)))
        start = time.perf_counter()
        eager(images((70, 50)))
    assert ours < time.perf_counter() - start


def test_the_model_counts_its_calls_once_each():
    model = detector()
    fast = tb.optimize(model, (images((40, 60)),), tune=False)
    before = model.calls
    for _ in range(3):
        fast(images((40, 60)))
    assert model.calls == before + 3


def test_boxes_by_the_number_do_not_make_plans_by_the_number():
    class ByBox(Detector):
        """A second stage, of as many rows as boxes were found."""

        def __init__(self):
            super().__init__()
            rows = [each for _ in range(9) for each in (nn.Linear(4, 4), nn.ReLU())]
            self.rows = nn.Sequential(*rows)

        def forward(self, images):
            results = super().forward(images)
            for each in results:
                each["boxes"] = self.rows(each["boxes"][: int(each["boxes"].abs().sum()) % 17])
            return results

    torch.manual_seed(0)
    model = ByBox().eval()
    fast = tb.optimize(model, (images((40, 60)),), tune=False)
    for i in range(30):
        same(fast, model, images((40 + i % 2, 60)))
    assert "rows" in paths(fast)
    part = next(part for module, part in fast._submodules._parts.items() if part.path == "rows")
    assert len(part.taken) < 17 + 1


def test_threads_and_the_model_itself_side_by_side():
    model = detector()
    fast = tb.optimize(model, (images((40, 60)),), tune=False)
    x, failed = images((40, 60)), []
    with torch.no_grad():
        expected = model(x)

    def work(run, ask_gradients):
        try:
            for _ in range(5):
                with torch.set_grad_enabled(ask_gradients):
                    results = run(x)
                assert results[0]["scores"].requires_grad == ask_gradients
                torch.testing.assert_close(
                    results[0]["scores"].detach(), expected[0]["scores"], rtol=1e-3, atol=1e-3
                )
        except Exception as error:
            failed.append(error)

    threads = [
        threading.Thread(target=work, args=each)
        for each in ((fast, False), (fast, False), (model, True))
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed, failed
    assert not any("forward" in vars(each) for each in model.modules())


def _other_weight(model, x):
    model.backbone.stem[0][0].weight.data = torch.randn_like(model.backbone.stem[0][0].weight)


def _written_weight(model, x):
    with torch.no_grad():
        model.head.scores[4].bias.add_(1.0)


def _other_statistics(model, x):
    model.backbone.stem[0][1].running_mean.add_(1.0)


def _other_module(model, x):
    model.backbone.stem[1][2] = nn.SiLU()


def _other_number(model, x):
    model.head.boxes[4].padding = (1, 1)
    model.head.boxes[4].dilation = (1, 1)
    model.backbone.stem[1][0].stride = (1, 1)


@pytest.mark.parametrize(
    "change", (_other_weight, _written_weight, _other_statistics, _other_module, _other_number)
)
def test_a_changed_module_is_captured_again(change):
    model = detector()
    x = images((40, 60))
    fast = tb.optimize(model, (x,), tune=False)
    for _ in range(2):
        same(fast, model, x)
    change(model, x)
    for _ in range(2):
        same(fast, model, x)


class Hidden(Detector):
    """Its head reads more than its arguments, or does more than to return; `how` says what."""

    def __init__(self, how):
        super().__init__()
        self.how, inner = how, self.head
        self.head, detector = Around(inner, how), self
        inner.context = {"scale": 1.0} if how == "number" else None
        if how == "hook":
            self.head.inner.scores.register_forward_hook(lambda *_: setattr(detector, "hooked", 1))

    def forward(self, images):
        number = float(images[0].mean())
        if self.how == "number":
            self.head.inner.context["scale"] = number
        if self.how == "tensor":
            self.head.inner.context = images[0].mean()
        if self.how == "object":
            self.head.inner.context = Images(images[0].mean(), None)
        self.hooked = 0
        results = super().forward(images)
        results[0]["more"] = torch.tensor([self.hooked, self.head.inner.__dict__.get("count", 0)])
        return results


class Around(nn.Module):
    def __init__(self, inner, how):
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, maps):
        if self.how == "counter":
            self.inner.count = self.inner.__dict__.get("count", 0) + 1
        if self.how == "argument":
            maps[0] = maps[0] * 2
        if self.how == "in place":
            maps[0].mul_(2)
        found = self.inner(maps)
        context = self.inner.context
        context = context["scale"] if isinstance(context, dict) else context
        context = context.tensors if isinstance(context, Images) else context
        if context is not None:
            found["scores"] = found["scores"] * context
        return found


@pytest.mark.parametrize(
    "how", ("number", "tensor", "object", "counter", "hook", "argument", "in place")
)
def test_a_module_that_sees_or_does_more_is_no_part(how):
    torch.manual_seed(0)
    model = Hidden(how).eval()
    fast = tb.optimize(model, (images((40, 60)),), tune=False)
    for sizes in SEVERAL[:2] if how == "hook" else SEVERAL:  # Dynamo takes 4 s for each size
        given = images(*sizes)
        before = model.head.inner.__dict__.get("count", 0)
        results = fast(given)
        model.head.inner.__dict__["count"] = before
        with torch.no_grad():
            expected = model(given)
        for result, wanted in zip(results, expected, strict=True):
            for name, value in wanted.items():
                torch.testing.assert_close(result[name], value, rtol=1e-3, atol=1e-3)


def test_a_result_that_is_an_argument_stays_one():
    class Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(block(3, 3) for _ in range(9)))

        def forward(self, x):
            return x, self.layers(x)

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.passes = Passes()

        def forward(self, x):
            y = x * 2
            same, made = self.passes(y)
            same += 1
            return y[y > 1], made

    model, x = Writes().eval(), torch.rand(1, 3, 8, 8)
    fast = tb.optimize(model, x, tune=False)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def test_what_the_model_raises_is_raised():
    model = detector()
    fast = tb.optimize(model, (images((40, 60)),), tune=False)
    fast(images((40, 60)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bad in ([torch.rand(4, 40, 60)], [torch.rand(3, 0, 60)], ["no image"]):
            with pytest.raises(Exception) as ours:
                fast(bad)
            with pytest.raises(type(ours.value)), torch.no_grad():
                model(bad)
    same(fast, model, images((40, 60)))
