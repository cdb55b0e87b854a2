"""Choices from the bytes that a fuzzer gives, by the methods of random.Random."""

from __future__ import annotations

import random


class Choices(random.Random):
    """Reads bytes from the front. Beyond the end it reads zeros, so every choice ends. A target
    that draws from it changes one thing where the fuzzer changes one byte."""

    def __init__(self, content: bytes) -> None:
        super().__init__(0)
        self._left = memoryview(content)

    def random(self) -> float:
        return self.getrandbits(16) / (1 << 16)

    def getrandbits(self, k: int) -> int:
        count = -(-k // 8)
        taken, self._left = self._left[:count], self._left[count:]
        return int.from_bytes(taken, "little") & ((1 << k) - 1)
