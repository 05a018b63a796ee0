#!/usr/bin/env bash
# The inference server SGLang 0.5.23, in an environment of its own: .venv-sglang, about 3 GB.
#
#   bash launch/sglang.sh --model DIR [--port N] [--device cpu|cuda] [flags of SGLang]
#   bash launch/sglang.sh --install [--device cpu|cuda]
#
# DIR is a Hugging Face directory; of a run, kr.convert makes one. The first call installs, which
# takes some minutes; --install does no more than that. Without --device it takes cuda where
# nvidia-smi finds a GPU. On a GPU, SGLang is installed as it comes and started with its own
# defaults (not yet run). On a CPU it needs Python 3.11 on x86-64 Linux: launch/sglang/cpu holds
# what stands in for the CUDA libraries. Ends with status 3 where it cannot be had.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

version=0.5.23
router=0.3.2  # sglang-router: one address before several servers
cpu=launch/sglang/cpu
python=.venv-sglang/bin/python
stamp=.venv-sglang/kr-sglang.stamp

model="" port=30000 device="" only_install="" exit_with_stdin="" flags=()
while (( $# )); do
  case "$1" in
    --model=*|--port=*|--device=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --model|--port|--device)
      (( $# > 1 )) || die "$1 needs a value; see the head of launch/sglang.sh."
      printf -v "${1#--}" '%s' "$2"
      shift 2 ;;
    --install) only_install=yes; shift ;;
    # For a parent: the server ends when its standard input closes, as when the parent dies.
    --exit-with-stdin) exit_with_stdin=yes; shift ;;
    *) flags+=("$1"); shift ;;
  esac
done
if [[ -z "$device" ]]; then
  if nvidia-smi -L >/dev/null 2>&1 </dev/null; then device=cuda; else device=cpu; fi
fi
[[ "$device" == cpu || "$device" == cuda ]] || die "--device=$device: give cpu or cuda."
if [[ -z "$only_install" ]]; then
  # SGLang would take a directory that is missing for the name of a model on a hub.
  [[ -f "$model/config.json" ]] || die "--model='$model' is no Hugging Face directory. Of a run:" \
    ".venv/bin/python -m kr.convert --source=runs/quickstart --out=exports/quickstart"
fi

cannot() { say "SGLang cannot be had here:" "$@"; exit 3; }

# Sets PYTHON to one that SGLang on a CPU takes.
find_python_3_11() {
  local candidate
  while IFS= read -r candidate; do
    if "$candidate" -c 'import sys, venv, ensurepip; assert sys.version_info[:2] == (3, 11)' \
        >/dev/null 2>&1 </dev/null; then
      PYTHON="$candidate"
      return 0
    fi
  done < <(candidates 3.11)
  cannot "on a CPU it needs Python 3.11 with venv and pip, and there is none on PATH or among" \
    "pyenv's versions."
}

wanted() { echo "$version $router $device $(cksum < "$cpu/requirements.txt") $PWD"; }

installed() { [[ -f "$stamp" && "$(cat "$stamp")" == "$(wanted)" && -x "$python" ]]; }

pip_install() {
  "$python" -m pip install --disable-pip-version-check --quiet "$@" </dev/null >&2 ||
    die "the install failed (see pip's message above). Mind the network, the disk and pip's" \
      "settings ('$python -m pip config list'), then run this again."
}

# The stamp comes last: what was cut short before it is made anew.
install() {
  [[ "$(uname -s) $(uname -m)" == "Linux x86_64" ]] || cannot "it needs Linux on x86-64, this is" \
    "$(uname -s) on $(uname -m)."
  if [[ "$device" == cpu ]]; then find_python_3_11; else find_python; fi
  say "installing SGLang $version for $device into .venv-sglang, once: some minutes, 3 GB"
  rm -rf .venv-sglang
  "$PYTHON" -m venv .venv-sglang || die "could not make .venv-sglang with $PYTHON (see above)."
  if [[ "$device" == cpu ]]; then
    pip_install -r "$cpu/requirements.txt"
    pip_install --no-deps "sglang==$version" torchvision==0.28.0 "sglang-router==$router"
  else
    pip_install "sglang==$version" "sglang-router==$router"
  fi
  wanted > "$stamp"
}

if ! installed; then
  lock
  installed || install
  unlock
fi
[[ -z "$only_install" ]] || exit 0

if [[ -n "$exit_with_stdin" ]]; then
  # Kills the whole process group, so it must be this server's own.
  read -r _ _ _ _ group _ < "/proc/$$/stat"
  [[ "$group" == "$$" ]] || die "--exit-with-stdin is for a process group of its own (setsid)."
  { cat >/dev/null || true; kill -KILL 0; } <&0 &
fi
command=("$python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port"
  --device "$device" --weight-version 0)
export HF_HUB_OFFLINE=1  # weights come from directories alone
if [[ "$device" == cpu ]]; then
  export PYTHONPATH="$PWD/$cpu" CUDA_VISIBLE_DEVICES="" SGLANG_USE_CPU_ENGINE=1
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  # --sleep-on-idle: its schedulers would spin. No overlap: it needs a GPU.
  command+=(--attention-backend torch_native --sampling-backend pytorch --dtype float32
    --disable-cuda-graph --disable-overlap-schedule --skip-server-warmup --sleep-on-idle
    --mem-fraction-static 0.2 --max-total-tokens 65536 --max-running-requests 64)
fi
exec "${command[@]}" ${flags[@]+"${flags[@]}"} </dev/null
