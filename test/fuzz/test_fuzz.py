"""The kept inputs of every target hold what the target says, and a broken target is noticed.

More of them: fuzz.py."""

import shutil
import sys
from pathlib import Path

import fuzz
import fuzz_targets
import pytest
from fuzz_builds import REPLAYER, Source, built
from fuzz_targets import BY_NAME, TARGETS, run_command

pytestmark = pytest.mark.any_isa

FOLDER = Path(fuzz_targets.__file__).parent


@pytest.mark.parametrize("name", BY_NAME)
def test_kept_inputs_hold(name):
    target = BY_NAME[name]
    files = target.files()
    assert files
    done = run_command(target.replay(files))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert f"Executed {len(files)} inputs" in done.stderr


def test_the_corpus_is_small_and_of_known_targets():
    assert {each.name for each in fuzz_targets.CORPUS.iterdir()} == set(BY_NAME)
    for target in TARGETS:
        sizes = [each.stat().st_size for each in target.files()]
        assert len(sizes) <= fuzz.MOST_FILES and max(sizes) <= fuzz.MOST_BYTES, target.name


def test_every_target_is_in_the_list():
    sources = {each.stem.removeprefix("fuzz_") for each in FOLDER.glob("fuzz_*.cpp")}
    modules = {each.stem.removesuffix("_target") for each in FOLDER.glob("*_target.py")}
    assert sources | modules == set(BY_NAME)


BROKEN = """
#include "from_bytes.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  torch_blocked::fuzz::must_hold(size < 3, "it is short");
  int largest = 2147483647;
  return size == 2 ? largest += data[0] : 0;
}
"""


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"abc", "does not hold: it is short"), (b"ab", "signed integer overflow"), (b"", "Executed")],
)
def test_a_wrong_target_in_cpp_is_noticed(content, said, tmp_path, monkeypatch):
    """What does not hold ends it, and so does what the sanitizers see."""
    monkeypatch.setattr("fuzz_builds.BUILT", tmp_path)
    monkeypatch.setattr(Source, "path", tmp_path / "fuzz_broken.cpp")
    (tmp_path / "fuzz_broken.cpp").write_text(BROKEN)
    (tmp_path / "input").write_bytes(content)
    program = built(Source("broken", ()), REPLAYER)
    done = run_command([str(program), str(tmp_path / "input")])
    assert said in done.stderr
    assert (done.returncode == 0) == (content == b"")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("assert content != b'ab', 'two letters'", "AssertionError: two letters"),
        ("import ctypes; ctypes.string_at(0)", "Segmentation fault"),
        ("import time; time.sleep(60)", ""),
        ("pass", "Executed 1 inputs"),
    ],
)
def test_a_wrong_target_in_python_is_noticed(body, said, tmp_path):
    """An assertion, a signal and a hang end it."""
    code = f"def prepare():\n    pass\n\n\ndef run(content):\n    {body}\n"
    (tmp_path / "broken_target.py").write_text(code)
    (tmp_path / "input").write_bytes(b"ab")
    for each in ("replay.py", "fuzz_targets.py", "fuzz_builds.py"):
        shutil.copy(FOLDER / each, tmp_path)
    replay = tmp_path / "replay.py"
    replay.write_text(replay.read_text().replace("_FIRST = 60", "_FIRST = 1"))
    done = run_command([sys.executable, str(replay), "broken", str(tmp_path / "input")])
    assert said in done.stderr
    assert (done.returncode == 0) == (body == "pass")
    assert f"Running: {tmp_path / 'input'}" in done.stderr


def test_choices_end_with_the_bytes(monkeypatch):
    """A target makes something of any input, the empty one too."""
    from from_bytes import Choices

    assert Choices(b"").choice("abc") == "a"
    assert Choices(b"").random() == 0
    assert Choices(b"\x02").choice("abc") == "c"
    shuffled = list("abc")
    Choices(b"\xff" * 3).shuffle(shuffled)
    assert sorted(shuffled) == list("abc")
