"""Where C++ projects find torch_blocked."""

from __future__ import annotations

from pathlib import Path

import torch


def cmake_prefix() -> str:
    """The CMAKE_PREFIX_PATH for CMake's find_package(torch_blocked CONFIG): the folders of this
    package and of torch, with a semicolon between them.

    $ prefix=$(python -c "import torch_blocked; print(torch_blocked.cmake_prefix())")
    $ cmake -DCMAKE_PREFIX_PATH="$prefix" ...
    """
    return f"{Path(__file__).parent.resolve()};{torch.utils.cmake_prefix_path}"
