#!/usr/bin/env bash
# The whole test suite, in .venv; needs Python 3.12 or 3.11 with pip, no GPU.
#
#   bash launch/test.sh                    everything that needs no large download
#   bash launch/test.sh --all              and what does: SmolLM2, 93 MB, and SGLang, 3 GB installed
#   bash launch/test.sh --fast             without the tests marked slow
#   bash launch/test.sh tests/rl -k loss   what pytest takes
#
# Tests that need what was not downloaded are skipped and say so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

all=""
arguments=()
for argument in "$@"; do
  if [[ "$argument" == --fast ]]; then
    arguments+=(-m "not slow")
  elif [[ "$argument" == --all ]]; then
    all=yes
  else
    arguments+=("$argument")
  fi
done

ensure_venv test
if [[ -n "$all" ]]; then
  bash launch/smollm2.sh
  code=0
  bash launch/sglang.sh --install || code=$?
  (( code == 0 || code == 3 )) || exit "$code"  # 3: it cannot be had here, as it has said
fi
# A process a core; a file's tests stay together, and the longest files come first.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder ${arguments[@]+"${arguments[@]}"}
