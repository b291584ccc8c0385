#!/usr/bin/env bash
# Build .venv with everything the demo and the tests need. Quick when nothing changed; safe to interrupt and to repeat.
#
#   scripts/setup.sh           for the demo
#   scripts/setup.sh --test    also the older TransferQueue and Mooncake that the tests compare with
#
# PYTHON=python3.11   interpreter to build with (default: python3; 3.10 or newer)
# RTQ_SETUP_CUDA=1    accept a CUDA build of torch (several GB) where no CPU build can be had
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

# Settings of the caller's shell that would send packages elsewhere.
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_USER
export PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_RETRIES=${PIP_RETRIES:-2} # offline is said after half a minute, not after two

# Runs pip, shows the lines that mean progress, keeps all of it in a log, and says in a sentence why it failed.
pip_install() {
  local log=$CACHE/pip.log
  say "pip install $*"
  if ! "$VENV/bin/python" -m pip install --progress-bar off --no-input "$@" 2>&1 </dev/null | tee "$log" |
    sed -unE 's/^ +//; /^(Downloading .*(MB|GB)\)|Building|Installing|ERROR|error)/p'; then
    die "$(explain_pip_failure "$log")"
  fi
}

make_venv() {
  if venv_is_sound; then
    say "$VENV is there: going on with it"
  else
    if [[ -e $VENV ]]; then
      say "$VENV is broken, half made or of another Python: building it again"
      rm -rf -- "$VENV"
    fi
    say "$("$PYTHON" --version 2>&1) -m venv $VENV"
    "$PYTHON" -m venv "$VENV" || die "'$PYTHON -m venv $VENV' failed; is python3-venv installed and the disk writable?"
  fi
}

install_project() {
  local torch
  torch=$(grep -E '^torch==' "$CONSTRAINTS")
  # On x86-64 the bare pin also admits the CUDA build. The local version "+cpu" admits only the CPU build.
  [[ $(uname -sm) == "Linux x86_64" && -z ${RTQ_SETUP_CUDA:-} ]] && torch+=+cpu
  pip_install -c scripts/constraints.txt "$torch" -e '.[mooncake-cpu,vision,dev]'
}

# $1: requirement, $2: folder. Whole or not at all: unpacked beside, then renamed.
unpack() {
  [[ -d $2 ]] && return 0
  rm -rf -- "$2.part"
  pip_install --no-deps --target "$2.part" "$1"
  mv -- "$2.part" "$2"
}

main() {
  case "$*" in
    "" | --test) ;;
    *) die "unknown argument '$*'; usage: scripts/setup.sh [--test]" ;;
  esac
  trap 'say "interrupted: run it again to go on"; exit 130' INT
  cd -- "$ROOT"
  require_python
  mkdir -p -- "$CACHE"
  exec 9>"$CACHE/setup.lock"
  flock -n 9 || { say "another set-up is running here: waiting for it (up to 30 minutes)" && flock -w 1800 9; } ||
    die "the other set-up did not end within 30 minutes"

  ensure_packages
  local key
  key=$(stamp_key)
  if [[ -f $STAMP && $(<"$STAMP") == "$key" ]] && "$VENV/bin/python" -c '' 2>/dev/null; then
    say "environment is up to date"
  else
    rm -f -- "$STAMP"
    say "building $VENV (about 3 minutes and 2.5 GB the first time)"
    make_venv
    install_project
    printf '%s\n' "$key" >"$STAMP"
    say "environment ready after ${SECONDS} s"
  fi
  if [[ ${1:-} == --test ]]; then
    unpack "TransferQueue==$TQ_OLD" "$TQ_OLD_DIR"
    unpack "mooncake-transfer-engine-non-cuda==$MOONCAKE_OLD" "$MOONCAKE_OLD_DIR"
  fi
}

main "$@"
