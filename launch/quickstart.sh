#!/usr/bin/env bash
# From a fresh clone to a trained research agent and its report, on two CPU cores.
#
#   bash launch/quickstart.sh [flags of kr.train, such as --config.rl.steps=60]
#
# Needs Python 3.12 or 3.11 with pip. Run it again to continue what was interrupted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

ensure_venv ""

workdir=runs/quickstart
previous=""
for flag in "$@"; do
  [[ "$flag" == --workdir=* || "$flag" == -workdir=* ]] && workdir="${flag#*=}"
  [[ "$previous" == --workdir || "$previous" == -workdir ]] && workdir="$flag"
  previous="$flag"
done

# The trainer gets a process group of its own (set -m), so that each signal reaches it once,
# whether it came from Ctrl-C in a terminal or from a kill of this script. `wait` returns at
# each signal too: the trainer is gone only when kill -0 says so.
set -m
.venv/bin/python -m kr.train --config=configs/quickstart.py --workdir=runs/quickstart "$@" \
  </dev/null &
trainer=$!
trap 'kill -INT "$trainer" 2>/dev/null || true' INT
trap 'kill -TERM "$trainer" 2>/dev/null || true' TERM HUP
while true; do
  code=0
  wait "$trainer" || code=$?
  kill -0 "$trainer" 2>/dev/null || break
done
trap - INT TERM HUP

if (( code != 0 )); then
  say "the run stopped with exit code $code (see above); the same command continues it"
  exit "$code"
fi
cat <<TEXT

Report:        $workdir/report.html
Ask it:        .venv/bin/python -m kr.ask --workdir=$workdir "What is the population of Ayacucho?"
Evaluate it:   .venv/bin/python -m kr.evaluate --workdir=$workdir --split=heldout --samples=4
Train longer:  bash launch/quickstart.sh --config.rl.steps=60
Curves:        $workdir/metrics.jsonl, and TensorBoard events beside it
TEXT
