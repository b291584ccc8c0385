# Shared by setup.sh, demo.sh and test.sh. Source it: it defines names and changes nothing by itself.
# shellcheck shell=bash disable=SC2034  # the names are for the scripts that source it

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
CACHE=$ROOT/.cache
STAMP=$VENV/.setup-complete
CONSTRAINTS=$ROOT/scripts/constraints.txt
PYTHON=${PYTHON:-python3}

# Other versions of libraries, for tests of version drift: never imported by the project itself.
TQ_OLD=0.1.10
MOONCAKE_OLD=0.3.10.post2
TQ_OLD_DIR=$VENV/tq-0.1.10
MOONCAKE_OLD_DIR=$VENV/mooncake-0.3.10

# Shared library -> Debian package: what the Mooncake wheel links to and does not bring.
MOONCAKE_LIBRARIES=(libibverbs.so.1=libibverbs1 libnuma.so.1=libnuma1 libcurl.so.4=libcurl4)

say() { printf '[%s] %s\n' "$(basename -- "$0" .sh)" "$*"; }
warn() { say "WARNING: $*" >&2; }
die() {
  say "ERROR: $*" >&2
  exit 1
}

# An interpreter of at least 3.10, or a sentence that says how to get one.
require_python() {
  command -v "$PYTHON" >/dev/null 2>&1 ||
    die "'$PYTHON' was not found: install Python 3.10 or newer (Debian: apt-get install python3) or set PYTHON=/path/to/python3"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "'$PYTHON' is $("$PYTHON" --version 2>&1), but 3.10 or newer is needed: set PYTHON=/path/to/python3.11"
}

# Debian packages that are missing here, one a line. Asks the loader and Python, not dpkg: any origin will do.
missing_packages() {
  [[ -x $VENV/bin/python ]] || "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  "$PYTHON" - "${MOONCAKE_LIBRARIES[@]}" <<'PY'
import ctypes, sys
for pair in sys.argv[1:]:
    library, package = pair.split("=")
    try:
        ctypes.CDLL(library)
    except OSError:
        print(package)
PY
}

# Install Debian packages. 1 when this user may not, or when apt-get could not.
install_packages() {
  local as_root=()
  command -v apt-get >/dev/null 2>&1 || return 1
  if [[ $(id -u) -ne 0 ]]; then
    command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null || return 1
    as_root=(sudo -n)
  fi
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120)
  say "apt-get install $*"
  # The package lists of a fresh machine are empty: fetch them and try once more.
  "${apt[@]}" install --no-install-recommends "$@" </dev/null && return 0
  "${apt[@]}" update </dev/null && "${apt[@]}" install --no-install-recommends "$@" </dev/null
}

# Bring what the machine lacks; without python3-venv nothing can go on, without the libraries only Mooncake cannot.
ensure_packages() {
  local packages
  mapfile -t packages < <(missing_packages)
  [[ ${#packages[@]} -eq 0 ]] && return 0
  install_packages "${packages[@]}" || true
  mapfile -t packages < <(missing_packages)
  [[ ${#packages[@]} -eq 0 ]] && return 0
  local command="sudo apt-get update && sudo apt-get install -y ${packages[*]}"
  [[ " ${packages[*]} " == *" python3-venv "* ]] &&
    die "no virtual environment can be made without python3-venv; run: $command"
  warn "Mooncake cannot be imported until this has been run: $command"
  warn "going on without it: SimpleStorage and everything else work"
}

# One hash of all that decides what the environment holds. The path counts: a virtual environment cannot be moved.
stamp_key() {
  {
    printf '%s\n' "$ROOT" "${RTQ_SETUP_CUDA:-}"
    "$PYTHON" -c 'import sys; print(sys.version, sys.base_prefix)'
    cat -- "$ROOT/pyproject.toml" "$CONSTRAINTS" "$ROOT/scripts/setup.sh" "$ROOT/scripts/lib.sh"
  } | sha256sum | cut -d ' ' -f 1
}

# The environment runs, has pip, and is of the interpreter asked for.
venv_is_sound() {
  local version='import sys, pip; print(sys.version, sys.base_prefix)'
  [[ $("$VENV/bin/python" -c "$version" 2>/dev/null) == "$("$PYTHON" -c "${version/, pip/}")" ]]
}

# What a failed pip means for the person in front of it. $1: pip's output.
explain_pip_failure() {
  if grep -qiE 'NewConnectionError|ConnectTimeout|Connection (refused|reset|aborted)|name resolution|Name or service|unreachable|ProxyError|Read timed out|No route to host' "$1"; then
    echo "the package index cannot be reached: check the network or pip's index and proxy settings, then run this again" \
      "(it goes on where it stopped)"
  elif grep -qE '(Cannot install|No matching distribution found for) torch==[^ ]+\+cpu' "$1"; then
    echo "pip finds no CPU build of the pinned torch for $("$PYTHON" --version 2>&1), and a CUDA build (several GB) is never" \
      "installed unasked: use PYTHON=python3.11, or point pip at the wheel with PIP_FIND_LINKS=DIR, or accept the CUDA" \
      "build with 'export RTQ_SETUP_CUDA=1'"
  elif grep -qi 'No space left on device' "$1"; then
    echo "the disk is full: the environment needs about 3 GB under $ROOT"
  else
    echo "pip failed; the reason is above, its whole output in $1"
  fi
}
