"""Huge pages for this process's C heap. Only matters on CPU, under Linux."""

from __future__ import annotations

import os
import platform
import sys

HUGE_PAGES = "glibc.malloc.hugetlb=1"  # glibc 2.35 and later; older ones ignore it


def environment(given: dict[str, str] | os._Environ = os.environ) -> dict[str, str]:
  """`given`, with the setting by which glibc asks for transparent huge pages."""
  others = [t for t in given.get("GLIBC_TUNABLES", "").split(":")
            if t and not t.startswith("glibc.malloc.hugetlb=")]
  return {**given, "GLIBC_TUNABLES": ":".join([*others, HUGE_PAGES])}


def use_huge_pages() -> None:
  """Starts this program again, once, with that setting: glibc reads it only at a start.

  XLA on CPU allocates the temporary memory of a program anew at every call, gigabytes of it in
  an update, and the system clears it page by page: with 4 KiB pages that took a quarter of the
  time of a mixed precision MLP, forward and backward. Call it before anything has been opened. A
  setting for hugetlb that is there already is left alone.
  """
  if platform.system() != "Linux" or "glibc.malloc.hugetlb=" in os.environ.get(
      "GLIBC_TUNABLES", ""):
    return
  os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment())
