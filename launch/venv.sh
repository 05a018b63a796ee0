# Sourced by quickstart.sh and test.sh: prepares .venv in the repository root.
#
#   ensure_venv ""      what a run needs
#   ensure_venv test    and what the test suite needs; so with every extra of setup.py
#
# Takes the newest of Python 3.12 and 3.11 that runs and has venv and pip. Installs only when
# setup.py or the Python changed since the last complete install, which .venv/kr-<extra>.stamp
# records. An install that was cut short leaves .venv/kr-installing; it may have left half a
# package too, so the next run makes .venv anew. pip's own configuration (index, proxy,
# certificates) is the user's.

say() { printf 'kr: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# Prints every candidate interpreter of one version: on PATH, then below pyenv's versions.
candidates() {
  type -aP "python$1" "python3" "python" 2>/dev/null || true
  local root dir
  for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
    [[ -n "$root" ]] || continue
    for dir in "$root/versions/$1".* "$root/versions/$1"; do
      [[ -x "$dir/bin/python" ]] && printf '%s\n' "$dir/bin/python"
    done
  done
  return 0
}

# Sets PYTHON, or says what was found and what is missing.
find_python() {
  local version candidate found without=""
  for version in 3.12 3.11; do
    while IFS= read -r candidate; do
      [[ "$candidate" != "$PWD/.venv/"* ]] || continue  # it may be about to be made anew
      found="$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' \
        2>/dev/null </dev/null)" || continue  # such as a pyenv shim of a version not chosen
      [[ "$found" == "$version" ]] || continue
      if "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1 </dev/null; then
        PYTHON="$candidate"
        return 0
      fi
      without="$candidate"
    done < <(candidates "$version")
  done
  if [[ -n "$without" ]]; then
    die "$without is Python $("$without" -c 'import platform; print(platform.python_version())')" \
      "but has no venv and pip. Install them (on Debian and Ubuntu: the package" \
      "python3-venv), then run this again."
  fi
  die "needs Python 3.12 or 3.11, found neither (python3 is:" \
    "$(python3 --version 2>/dev/null || echo 'not installed')). Install one, so that" \
    "python3.12 or python3.11 is on PATH or among pyenv's versions, then run this again."
}

# Whether .venv's own Python runs, is of a supported version, and has pip.
venv_works() {
  [[ -x .venv/bin/python ]] && .venv/bin/python - >/dev/null 2>&1 <<'PY'
import sys
import pip
assert (3, 11) <= sys.version_info[:2] <= (3, 12)
PY
}

# Identifies what an install depends on: setup.py, the Python, and where the checkout lies.
fingerprint() {
  .venv/bin/python - <<'PY'
import hashlib, os, sys
print(hashlib.sha256(open("setup.py", "rb").read()).hexdigest(), sys.version.split()[0], os.getcwd())
PY
}

stamped() { [[ -f "$1" && "$(cat "$1")" == "$(fingerprint)" ]]; }

# Waits for an install by another run of these scripts, also one whose script was killed: pip
# holds the lock until it ends. Released by unlock.
lock() {
  command -v flock >/dev/null || return 0
  exec 9<launch/venv.sh
  flock -n 9 || { say "waiting for another install into .venv"; flock 9; }
}

unlock() { exec 9<&-; }

make_venv() {
  find_python
  if [[ -e .venv ]]; then
    [[ -f .venv/pyvenv.cfg || -z "$(ls -A .venv)" ]] || die ".venv exists but is no virtual" \
      "environment: move it away, then run this again."
    say "the virtual environment .venv is broken or half installed; making it anew"
    rm -rf .venv
  fi
  say "making .venv with $PYTHON"
  "$PYTHON" -m venv .venv || die "could not make .venv with $PYTHON (see above)."
}

# ensure_venv EXTRA; the current directory is the repository root.
ensure_venv() {
  local extra="$1" stamp=".venv/kr-${1:-run}.stamp"
  lock
  if [[ -e .venv/kr-installing ]] || ! venv_works; then
    make_venv
  fi
  # An install with the test extra contains what a run needs.
  if ! stamped "$stamp" && ! { [[ -z "$extra" ]] && stamped .venv/kr-test.stamp; }; then
    local other  # a stamp of an older setup.py would come true again if that came back
    for other in .venv/kr-*.stamp; do
      stamped "$other" || rm -f "$other"
    done
    : > .venv/kr-installing
    say "installing into .venv, once: a minute or two, and more for the test suite's torch"
    .venv/bin/python -m pip install --disable-pip-version-check -e ".${extra:+[$extra]}" \
      </dev/null >&2 ||
      die "the install failed (see pip's message above). Mind the network, the disk and pip's" \
        "settings ('.venv/bin/python -m pip config list'), then run this again."
    fingerprint > "$stamp"
    rm -f .venv/kr-installing
  fi
  unlock
}
