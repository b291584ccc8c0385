#!/usr/bin/env bash
# Set up, then check everything: style and types, unit tests, and integration tests on real TransferQueue, Ray, Mooncake.
#
#   scripts/test.sh [all|lint|unit|integration|host|rdma|rdma-full] [pytest arguments]
#
# host: the plugin in a stand-in for Relax that trains.
# rdma: real verbs in a guest with soft-RoCE; rdma-full: in two of them, and every test. Where no guest can run, "all"
# counts these tests as skipped, and the two parts fail unless RTQ_RDMA_OPTIONAL=1.
#
# All parts run even when one fails; the table at the end names them. Logs are in .cache/.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

COLOR=no
[[ -t 1 ]] && COLOR=yes # asked here: each part writes into a pipe
TABLE=()
FAILED=0
PASSED_TESTS=0
FAILED_TESTS=0
SKIPPED_TESTS=0
NICE=()       # what pytest runs under
CANNOT_RUN=77 # exit status of scripts/softroce where no guest can run

# Runs one part, keeps its log and its result. $1: name; rest: command. LAST_CODE is the command's exit status.
part() {
  local name=$1 log=$CACHE/test-$1.log began=$SECONDS state=ok closing
  shift
  say "== $name: $*"
  LAST_CODE=0
  "$@" 2>&1 </dev/null | tee "$log" || LAST_CODE=$?
  if ((LAST_CODE == CANNOT_RUN)); then
    state=SKIP
  elif ((LAST_CODE)); then
    state=FAILED
    FAILED=1
  fi
  closing=$(sed -E $'s/\e\\[[0-9;]*m//g; s/^node0\\| //' "$log" | grep -E '^=* ?[0-9]+ (passed|failed|error|skipped|deselected).* in [0-9.]+' | tail -n 1 |
    sed -E 's/^=+ | =+$//g') || true
  PASSED_TESTS=$((PASSED_TESTS + $(count "$closing" passed)))
  FAILED_TESTS=$((FAILED_TESTS + $(count "$closing" failed) + $(count "$closing" 'errors?')))
  SKIPPED_TESTS=$((SKIPPED_TESTS + $(count "$closing" skipped)))
  TABLE+=("$(printf '%-24s %-6s %4d s  %s' "$name" "$state" $((SECONDS - began)) "$closing")")
}

# The number before a word in pytest's closing line; 0 when it is not there.
count() {
  local number
  number=$(grep -oE "[0-9]+ $2" <<<"$1" | grep -oE '^[0-9]+') || true
  echo "${number:-0}"
}

lint() {
  part ruff "$VENV/bin/ruff" check .
  part ruff-format "$VENV/bin/ruff" format --check .
  part mypy "$VENV/bin/mypy"
  part python-versions python_versions
}

# Compiles the tree with every supported Python that this machine has. The language level itself is a unit test.
# shellcheck disable=SC2317  # called through part
python_versions() {
  local version python found failed=0
  for version in 3.10 3.11 3.12; do
    found=
    for python in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python /usr/bin/"python$version"; do
      if "$python" -c '' 2>/dev/null; then
        found=$python
        break
      fi
    done
    if [[ -n $found ]]; then
      "$found" scripts/check_python.py || failed=1
    else
      echo "Python $version is not installed here: not run (tests/unit/test_metadata.py checks the grammar)"
    fi
  done
  return "$failed"
}

# shellcheck disable=SC2317  # called through part
pytest() { "${NICE[@]}" "$VENV/bin/python" -m pytest --color="$COLOR" --tb=short "$@"; }

# The deadlines are real: on a busy machine one can be missed. What failed is run once more, alone, and
# counts as failed only if it fails again; both runs stay in the table. Two files run at a time, in the order given, so
# that no long one comes last. $1: name; rest: pytest arguments.
with_second_try() {
  local name=$1 failed_before=$FAILED tests_before=$FAILED_TESTS
  shift
  FAILED=0 # of this part alone: an earlier one that failed must not take away its second try
  part "$name" pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
  if ((FAILED)); then
    say "== $name: what failed, once more and alone"
    FAILED=0
    FAILED_TESTS=$tests_before
    part "$name-again" pytest "$@" --last-failed --last-failed-no-failures none
  fi
  FAILED=$((FAILED | failed_before))
}

unit() { with_second_try unit tests/unit "$@"; }

integration() {
  with_second_try integration tests/integration "$@"
  on_old_transfer_queue "$@"
}

host() { with_second_try host tests/host -m "not host_full" "$@"; }

# Both in one queue, a file of each in turn: a job of the host keeps both cores busy, of the others many wait.
host_and_integration() {
  local files
  mapfile -t files < <(paste -d '\n' <(printf '%s\n' tests/host/test_*.py) <(printf '%s\n' tests/integration/test_*.py) |
    grep .)
  with_second_try host+integration "${files[@]}" -m "not host_full" "$@"
  on_old_transfer_queue "$@"
}

on_old_transfer_queue() {
  local files
  mapfile -t files < <(grep -rl --include='test_*.py' tq_versions tests) # to collect all the others takes as long
  export PYTHONPATH=$TQ_OLD_DIR RTQ_TEST_EXPECT_TQ=$TQ_OLD
  with_second_try "transferqueue-$TQ_OLD" "${files[@]}" -m tq_versions "$@"
  unset PYTHONPATH RTQ_TEST_EXPECT_TQ
}

# $1: fast or full; rest: pytest arguments.
rdma() {
  local set=$1
  shift
  part rdma "$VENV/bin/python" -m scripts.softroce "$set" "$@"
  rdma_was_skipped "${RTQ_RDMA_OPTIONAL:-0}" "$@"
}

# The fast set, beside the parts from here to end_rdma: the guest keeps little more than one core busy, and they give way
# to it. Whatever ends this script ends the guest too (scripts/softroce/host.py).
begin_rdma() {
  rm -f -- "$CACHE/rdma.rc"
  {
    local code=0
    "$VENV/bin/python" -m scripts.softroce fast "$@" >"$CACHE/rdma.log" 2>&1 </dev/null || code=$?
    echo "$code" >"$CACHE/rdma.rc"
  } &
  RDMA_PID=$!
  NICE=(nice -n 5)
}

end_rdma() {
  NICE=()
  part rdma rdma_result
  rdma_was_skipped 1 "$@"
}

# Shows what the guest has said since it began, and what it still says. Exit status: its own.
# shellcheck disable=SC2317  # called through part
rdma_result() {
  tail -n +1 -f --pid="$RDMA_PID" "$CACHE/rdma.log"
  return "$(<"$CACHE/rdma.rc")"
}

# Where no guest can run, that is counted and said. $1: 1 where it may be; rest: pytest arguments.
rdma_was_skipped() {
  local optional=$1
  shift
  ((LAST_CODE == CANNOT_RUN)) || return 0
  warn "NO TEST OF REAL VERBS HAS RUN: $(sed -n 's/.*cannot run here: //p' "$CACHE/test-rdma.log")"
  part rdma-skipped pytest tests/rdma "$@" # each of them says so, and is counted
  if [[ $optional != 1 ]]; then
    warn "that is a failure here; with RTQ_RDMA_OPTIONAL=1 it would not be"
    FAILED=1
  fi
}

main() {
  local what=all
  case "${1:-}" in
    all | lint | unit | integration | host | rdma | rdma-full)
      what=$1
      shift
      ;;
    "" | -*) ;;
    *) die "unknown part '$1'; usage: scripts/test.sh [all|lint|unit|integration|host|rdma|rdma-full] [pytest arguments]" ;;
  esac
  trap 'say "interrupted"; exit 130' INT
  "$ROOT/scripts/setup.sh" --test
  cd -- "$ROOT"
  unset PYTHONPATH
  unset PYTHONDONTWRITEBYTECODE # hundreds of processes would compile the package anew
  export RTQ_TEST_TQ_0110=$TQ_OLD_DIR RTQ_TEST_MOONCAKE_0310=$MOONCAKE_OLD_DIR

  case $what in
    all)
      begin_rdma "$@"
      lint
      unit "$@"
      end_rdma "$@"
      host_and_integration "$@"
      ;;
    lint) lint ;;
    rdma) rdma fast "$@" ;;
    rdma-full) rdma full "$@" ;;
    *) "$what" "$@" ;;
  esac

  say "== result after ${SECONDS} s"
  printf '%s\n' "${TABLE[@]}"
  [[ $what == lint ]] || echo "tests: $PASSED_TESTS passed, $FAILED_TESTS failed, $SKIPPED_TESTS skipped"
  exit $FAILED
}

main "$@"
