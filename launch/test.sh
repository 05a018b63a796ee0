#!/usr/bin/env bash
# The whole test suite, in .venv; needs Python 3.12 or 3.11 with pip, no GPU.
#
#   bash launch/test.sh                    everything
#   bash launch/test.sh --fast             without the tests marked slow
#   bash launch/test.sh tests/rl -k loss   what pytest takes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

arguments=()
for argument in "$@"; do
  if [[ "$argument" == --fast ]]; then
    arguments+=(-m "not slow")
  else
    arguments+=("$argument")
  fi
done

ensure_venv test
exec .venv/bin/python -m pytest ${arguments[@]+"${arguments[@]}"}
