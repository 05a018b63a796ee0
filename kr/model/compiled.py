"""Compiled programs kept on disk, so that the second start of a run compiles nothing."""

from __future__ import annotations

import os
import pathlib

import jax

DIRECTORY = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kr" / "xla"


def keep(directory: str | os.PathLike = DIRECTORY) -> None:
  """Makes JAX look up and store every compiled program in `directory`."""
  jax.config.update("jax_compilation_cache_dir", str(directory))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
