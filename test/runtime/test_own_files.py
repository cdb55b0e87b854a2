"""The files that are kept between processes: whose word is taken, and that none is needed."""

import os
import pwd
import stat
import subprocess
import sys

import pytest
import torch
from helpers.optimized import blocked
from torch import nn

import torch_blocked as tb
from torch_blocked import _C, environment, remembered
from torch_blocked.environment import tuning_file

pytestmark = [pytest.mark.any_isa, pytest.mark.usefixtures("cache_folder")]

# What no kernel takes: read from a file, it must have been believed.
BELIEVED = "fastest alone: 0.001 us"


def layer():
    torch.manual_seed(0)
    return nn.Conv2d(8, 8, 3, padding=1).eval(), torch.randn(1, 8, 9, 9)


def believed(tune=True) -> bool:
    """Whether `optimize` believes the file; its results are right in any case."""
    model, x = layer()
    fast = blocked(model, x, tune=tune)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    return BELIEVED in fast.plan()


def write_lie(implementation="aten", microseconds="0.001"):
    model, x = layer()
    problems = blocked(model, x, tune=True)._forms[0].compiled.times()
    lines = "".join(f"{problem}\t{implementation}\t{microseconds}\n" for problem in problems)
    tuning_file().write_text(lines)
    return lines


def by_link(file):
    real = file.with_name("elsewhere")
    file.rename(real)
    file.symlink_to(real)


def by_second_name(file):
    os.link(file, file.with_name("elsewhere"))


def folder_for_all(file):
    file.parent.chmod(0o777)


def file_for_all(file):
    file.chmod(0o666)


def file_for_a_group(file):
    file.chmod(0o664)


def by_another(file):
    os.chown(file, 12345, -1)


def folder_by_another(file):
    os.chown(file.parent, 12345, -1)


def by_folder(file):
    file.unlink()
    file.mkdir()


def by_device(file):
    file.unlink()
    file.symlink_to("/dev/zero")


CHANGES = [
    by_link,
    by_second_name,
    folder_for_all,
    file_for_all,
    file_for_a_group,
    by_folder,
    by_device,
    *([by_another, folder_by_another] if os.geteuid() == 0 else []),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_others_may_write_is_not_believed(change):
    write_lie()
    assert believed()
    change(tuning_file())
    before = None if tuning_file().is_dir() else tuning_file().stat().st_size
    assert not believed()
    assert before is None or tuning_file().stat().st_size == before, "it was appended to"


@pytest.mark.parametrize("change", [each for each in CHANGES if each is not by_device])
def test_nor_what_they_say_was_compared(change):
    file = remembered.compared_file()
    remembered.Compared().note("a" * 64)
    assert "a" * 64 in remembered.Compared()
    change(file)
    known = remembered.Compared()
    assert "a" * 64 not in known
    known.note("b" * 64)
    assert "b" * 64 in known and "b" * 64 not in remembered.Compared()


PIPES = """
import os, sys, torch, torch_blocked as tb
from torch_blocked import environment, remembered

environment.make_folder(environment.tuning_file())
for file in (environment.tuning_file(), remembered.compared_file()):
    os.mkfifo(file)
fast = tb.optimize(torch.nn.Conv2d(8, 8, 3).eval(), torch.randn(1, 8, 9, 9))
with torch.no_grad():
    fast(torch.randn(1, 8, 9, 9))
assert tb.env()["tuned_problems"] == 0
"""


def test_a_pipe_is_not_waited_for():
    subprocess.run([sys.executable, "-c", PIPES], check=True, timeout=300)


def test_files_are_made_for_this_user_alone(monkeypatch):
    before = os.umask(0)
    try:
        write_lie()
        remembered.Compared().note("a" * 64)
    finally:
        os.umask(before)
    assert stat.S_IMODE(tuning_file().parent.stat().st_mode) == 0o700
    tuning_file().unlink()
    before = os.umask(0)
    try:
        assert not believed()
    finally:
        os.umask(before)
    for file in (tuning_file(), remembered.compared_file()):
        assert stat.S_IMODE(file.stat().st_mode) & 0o022 == 0


def test_each_implementation_is_named_for_a_layer_that_it_does_not_take():
    """The line is measured anew, or counts, where it is one that does."""
    known = _C.implementations()["convolution"]
    assert len(known) > 8
    for name in known:
        write_lie(name)
        believed()


@pytest.mark.parametrize(
    "microseconds", ("nan", "inf", "-inf", "-1", "0", "1e999", "", "1 2", "0x1p3", "one", "1e-400")
)
def test_times_are_positive_numbers(microseconds):
    write_lie(microseconds=microseconds)
    assert not believed()


@pytest.mark.parametrize(
    "content",
    (
        b"\x00\xff\n" * 1000,
        b"\t\t\t\n\n\t\n",
        b"x" * (1 << 20) + b"\n",
        b"a\tb\t1" * 1000,
    ),
    ids=("bytes", "tabs", "long line", "no end"),
)
def test_other_content(content):
    lines = write_lie()
    tuning_file().write_bytes(content + b"\n" + lines.encode())
    assert believed()
    tuning_file().write_bytes(content)
    assert not believed()
    assert believed() is False and tuning_file().read_bytes().startswith(content)


def test_a_part_of_a_line_is_left_alone():
    """A process ended there, or the disk was full; what is appended is a line of its own."""
    write_lie()
    tuning_file().write_bytes(b"amx 1 co")
    model, x = layer()
    times = blocked(model, x, tune=True)._forms[0].compiled.times()
    lines = tuning_file().read_text().split("\n")
    assert lines[0] == "amx 1 co" and {line.split("\t")[0] for line in lines[1:-1]} <= times.keys()


def test_estimates_are_the_same_each_time():
    model, x = layer()
    plan = [step.why for step in blocked(model, x, tune=False).steps()]
    write_lie()
    assert not believed(tune=False)
    assert [step.why for step in blocked(model, x, tune=False).steps()] == plan


@pytest.mark.parametrize("home", (None, "", ".", "relative"))
def test_without_a_home(monkeypatch, tmp_path, home):
    """Nor does a folder that depends on the current one count."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "" if home is None else "cache")
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert tuning_file() is None and remembered.compared_file() is None
    model, x = layer()
    fast = tb.optimize(model, x)
    fast.save(tmp_path / "model.pt")
    with torch.no_grad():
        torch.testing.assert_close(tb.load(tmp_path / "model.pt")(x), model(x))
    assert tb.env()["tuning_file"] == "" and tb.env()["tuned_problems"] == 0
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not environment.make_folder(tuning_file())
    assert not believed()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert not believed()


def test_a_full_disk():
    assert not _C.append_to_own_file("/dev/full", "a\n")
    assert not _C.append_to_own_file("no folder", "a\n")
    assert _C.read_own_file("/dev/full") is None and _C.read_own_file("") is None


WRITER = """
import sys
from torch_blocked import _C

for i in range(300):
    assert _C.append_to_own_file(sys.argv[1], f"{sys.argv[2]}-{i}\\tname\\t1.5\\n")
"""


def test_writers_at_a_time(tmp_path):
    file = str(tmp_path / "lines")
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, file, name]) for name in "ab"]
    assert all(each.wait() == 0 for each in writers)
    # A line that the other process is writing looks like part of one, and gets an end of its own:
    # an empty line follows it, which readers skip.
    lines = list(filter(None, (tmp_path / "lines").read_text().splitlines()))
    assert sorted(lines) == sorted(f"{a}-{i}\tname\t1.5" for a in "ab" for i in range(300))
