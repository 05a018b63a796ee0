"""How this process's C heap treats memory that was freed. Only matters on CPU."""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of glibc's mallopt(3)


def keep_freed() -> bool:
  """Makes glibc keep freed memory for the next allocation; False where there is no glibc.

  XLA on CPU allocates a program's temporary memory at every call. glibc asks the system for it each
  time, and clearing the new pages took a third of a mixed precision MLP's forward and backward
  pass. The process then stays as large as it ever was. Call it before JAX starts its threads:
  a thread keeps the arena that it first allocated from.
  """
  if platform.libc_ver()[0] != "glibc":
    return False
  mallopt = ctypes.CDLL(None).mallopt
  return all([mallopt(_ARENA_MAX, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1)])
