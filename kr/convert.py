r"""Converts a policy between the formats that it can have.

    python -m kr.convert --source=model.gguf --out=starts/model

GGUF becomes a Hugging Face directory.
"""

from __future__ import annotations

import pathlib
import sys

from absl import flags

from kr import wiring
from kr.model import gguf
from kr.model import shards

_SOURCE = flags.DEFINE_string("source", None, "What to convert.", required=True)
_OUT = flags.DEFINE_string("out", None, "Where to write.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "float32", sorted(shards.DTYPES), "Type of the weights in a "
                           "Hugging Face directory.")


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise wiring.UserError(f"kr.convert takes flags only, not {' '.join(argv[1:])!r}; see --help")
  source = pathlib.Path(_SOURCE.value)
  if source.suffix != ".gguf":
    raise wiring.UserError(f"{source} is no GGUF file")
  gguf.convert(source, _OUT.value, _DTYPE.value)
  print(f"wrote {_OUT.value}", file=sys.stderr)


if __name__ == "__main__":
  wiring.main_guard(main)
