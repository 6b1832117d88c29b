"""Memory for weights: one tensor behind the other in large pages, in the order in which a step reads them. Knows nothing of what is in it."""

import logging
import math
import mmap

import torch
from torch import Tensor

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024**2  # of addresses; memory is taken when it is first written
ALIGNMENT = 64


class Arena:
    """Lives as long as any tensor taken from it."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros, 64-byte aligned."""
        size = math.prod(shape) * dtype.itemsize
        if self._chunk is None or self._used + size > len(self._chunk):
            self._chunk, self._used = _map(max(size, CHUNK_BYTES)), 0
        piece = self._chunk[self._used : self._used + size].view(dtype).view(shape)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return piece


def _map(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        log.warning("weights lie in small pages, which halves what a core reads per second: %s", error)
    return torch.frombuffer(memory, dtype=torch.uint8)
