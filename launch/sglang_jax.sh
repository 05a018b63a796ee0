#!/usr/bin/env bash
# The inference server SGLang-JAX, for TPU, in an environment of its own: .venv-sglang-jax.
#
#   bash launch/sglang_jax.sh --model DIR [--port N] [--source PLACE] [flags of SGLang-JAX]
#   bash launch/sglang_jax.sh --install [--source PLACE]
#
# DIR is a Hugging Face directory; of a run, kr.convert makes one. PLACE is what pip installs
# SGLang-JAX from: by default the commit of its repository that launch/sglang_jax/server.py was
# written against, or the directory `python` of a clone. Needs Python 3.12. Where there is no TPU it
# runs on the CPU, for tests: with models whose head_dim is 128, and slowly. On a TPU: not yet run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

commit=cddbf6f1
repository=https://github.com/sgl-project/sglang-jax
source_="git+$repository@$commit#subdirectory=python"
python=.venv-sglang-jax/bin/python
stamp=.venv-sglang-jax/kr-sglang-jax.stamp

model="" port=30000 only_install="" exit_with_stdin="" flags=()
while (( $# )); do
  case "$1" in
    --model=*|--port=*|--source=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --model|--port|--source)
      (( $# > 1 )) || die "$1 needs a value; see the head of launch/sglang_jax.sh."
      case "$1" in --model) model="$2" ;; --port) port="$2" ;; --source) source_="$2" ;; esac
      shift 2 ;;
    --install) only_install=yes; shift ;;
    # For a parent: the server ends when its standard input closes, as when the parent dies.
    --exit-with-stdin) exit_with_stdin=yes; shift ;;
    *) flags+=("$1"); shift ;;
  esac
done
if [[ -z "$only_install" ]]; then
  [[ -f "$model/config.json" ]] || die "--model='$model' is no Hugging Face directory. Of a run:" \
    ".venv/bin/python -m kr.convert --source=runs/quickstart --out=exports/quickstart"
fi

if compgen -G "/dev/accel*" >/dev/null || compgen -G "/dev/vfio/[0-9]*" >/dev/null; then
  device=tpu
else
  device=cpu
fi
wanted="$source_ $device $PWD"

install() {
  find_python
  "$PYTHON" -c 'import sys; assert sys.version_info[:2] == (3, 12)' 2>/dev/null ||
    die "SGLang-JAX needs Python 3.12, and $PYTHON is older: install it, then run this again."
  say "installing SGLang-JAX into .venv-sglang-jax, once: some minutes"
  rm -rf .venv-sglang-jax
  "$PYTHON" -m venv .venv-sglang-jax || die "could not make .venv-sglang-jax (see above)."
  # Without a clone's tags its build cannot tell a version.
  SETUPTOOLS_SCM_PRETEND_VERSION="${SETUPTOOLS_SCM_PRETEND_VERSION:-0.1.0}" \
    "$python" -m pip install --disable-pip-version-check --quiet "jax[$device]==0.10.2" \
    "$source_" </dev/null >&2 ||
    die "the install failed (see pip's message above). Mind the network, the disk and pip's" \
      "settings; --source takes the directory python of a clone of $repository."
  echo "$wanted" > "$stamp"
}

installed() { [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" && -x "$python" ]]; }

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
command=("$python" launch/sglang_jax/server.py --model-path "$model" --host 127.0.0.1
  --port "$port" --skip-server-warmup --disable-overlap-schedule --weight-version 0)
export HF_HUB_OFFLINE=1  # weights come from directories alone
if [[ "$device" == cpu ]]; then
  export JAX_PLATFORMS=cpu
  command+=(--device cpu --dtype float32 --disable-precompile
    --max-total-tokens 65536 --max-running-requests 64)
fi
exec "${command[@]}" ${flags[@]+"${flags[@]}"} </dev/null
