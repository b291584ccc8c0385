#!/usr/bin/env bash
# Set up, then run the main job. All arguments go to it: scripts/demo.sh --steps 3 --dataplane-accounting summary
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

"$ROOT/scripts/setup.sh"
say "relax-tq-rdma demo $*"
exec "$VENV/bin/relax-tq-rdma" demo "$@"
