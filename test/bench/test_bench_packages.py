"""Models that commands name as timm:NAME, torchvision:NAME and pytorchcv:NAME; the packages are
small ones of ours."""

import sys

import pytest
from helpers import fake_packages

from torch_blocked.__main__ import main
from torch_blocked.bench import models
from torch_blocked.bench import packages as packages_of_others
from torch_blocked.bench.packages import PACKAGES

pytestmark = pytest.mark.any_isa


def forget(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES:
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """The folder of the packages, which are what is imported of these names."""
    forget(monkeypatch)
    monkeypatch.syspath_prepend(fake_packages.write(tmp_path))
    yield tmp_path
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES:
            del sys.modules[name]


def said(capsys, *arguments):
    """The sentence with which the command refuses."""
    with pytest.raises(SystemExit) as exit:
        main([*arguments])
    assert exit.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "name, dims",
    [
        ("timm:resnet50", (3, 32, 32)),
        ("timm:mobilenetv2_100.ra_in1k", (3, 24, 24)),
        ("torchvision:resnet50", (3, 40, 40)),
        ("torchvision:fcn_resnet50", models.IMAGE),
        ("torchvision:r3d_18", (3, 16, 28, 28)),
        ("pytorchcv:unet_cityscapes", (4, 16, 32)),
        ("pytorchcv:resnet10", models.IMAGE),
    ],
)
def test_a_model_has_random_weights_and_the_size_that_it_was_made_for(packages, name, dims):
    found = models.load(name)
    assert found.input_dims == dims and found.weights == "random" and not found.module.training
    assert models.load(name, (3, 8, 8)).input_dims == (3, 8, 8)
    first, again = (next(models.load(name).module.parameters()) for _ in range(2))
    assert first.equal(again)


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "timm:resnet50", "--rounds", "1", "--format", "optimize"],
        ["bench", "layers", "torchvision:resnet50", "--rounds", "1"],
        ["explain", "pytorchcv:unet_cityscapes"],
    ],
)
def test_commands_take_them(packages, capsys, command):
    assert main(command) == 0
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [["bench"], ["bench", "train"], ["explain"]])
@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_is_not_there_is_to_be_installed(monkeypatch, capsys, command, package):
    forget(monkeypatch)
    monkeypatch.setitem(sys.modules, package, None)
    sentence = f"no module {PACKAGES[package].module!r}; pip install {package}\n"
    assert said(capsys, *command, f"{package}:resnet50").endswith(sentence)


def test_a_package_that_cannot_be_imported_says_why(packages, capsys):
    (packages / "timm/__init__.py").write_text("raise RuntimeError('operator nms does not exist')")
    found = said(capsys, "bench", "timm:resnet50")
    assert "timm cannot be imported: operator nms does not exist; is it built for torch 2" in found
    assert found.count("\n") == 1


@pytest.mark.parametrize(
    "name, hint",
    [
        ("timm:resnet51", "did you mean 'resnet50' or 'resnet18'?"),
        ("timm:hf-hub:someone/resnet50", "see its documents"),
        ("torchvision:resnet51", "did you mean 'resnet50' or 'fcn_resnet50'?"),
        ("pytorchcv:unet_cityscape", "did you mean 'unet_cityscapes'?"),
        ("pytorchcv:?", "see its documents"),
    ],
)
def test_a_name_that_a_package_does_not_know(packages, capsys, name, hint):
    package, _, model = name.partition(":")
    assert f"{package} has no model {model!r}; {hint}\n" in said(capsys, "bench", name)


@pytest.mark.parametrize("command", [["bench"], ["explain"]])
def test_a_plain_name_that_is_none_of_ours_says_which_names_there_are(capsys, command):
    found = said(capsys, *command, "no_such_net")
    assert "unknown model 'no_such_net'; choose from resnet18, " in found
    assert found.endswith("timm:NAME, torchvision:NAME, pytorchcv:NAME or module:factory\n")


@pytest.mark.parametrize("name", packages_of_others.SHORT)
def test_public_models_have_a_short_name(monkeypatch, capsys, name):
    """With one sentence where their package is not there."""
    forget(monkeypatch)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    found = said(capsys, "bench", name)
    full = packages_of_others.SHORT[name]
    assert f"{full!r}: no module 'torchvision.models'; pip install torchvision\n" in found


def test_a_short_name_is_that_of_the_package(packages, monkeypatch):
    monkeypatch.setitem(packages_of_others.SHORT, "short", "torchvision:mobilenet_v2")
    found = models.load("short")
    assert found.name == "short" and found.weights == "random" and found.input_dims == (3, 40, 40)
