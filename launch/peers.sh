#!/usr/bin/env bash
# Makes .venv-peers: google-tunix, which benchmarks/learner.py measures kr against.
#
#   bash launch/peers.sh
#
# An environment of its own, because google-tunix wants older transformers and safetensors than
# kr. Needs Python 3.12 or 3.11 with pip. A second call does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

wanted="google-tunix==0.1.7"
stamp=.venv-peers/kr-peers.stamp
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
  say ".venv-peers is there already"
  exit 0
fi
find_python
say "making .venv-peers with $PYTHON: a few minutes"
rm -rf .venv-peers
"$PYTHON" -m venv .venv-peers || die "could not make .venv-peers with $PYTHON (see above)."
.venv-peers/bin/python -m pip install --disable-pip-version-check --quiet "$wanted" </dev/null >&2 ||
  die "the install failed (see pip's message above). Mind the network, the disk and pip's" \
    "settings ('.venv/bin/python -m pip config list'), then run this again."
echo "$wanted" > "$stamp"
