#!/usr/bin/env bash
# Builds sdist and wheel, installs "fedcomp[client]" into an empty environment, and trains and uploads there. For Linux;
# needs a Python from 3.11 on and the package index.
#
#   scripts/check_client.sh [BUNDLE [FOLDER]]
#
# BUNDLE is a training bundle; without, that which comes with fedcomp. The environment stays at FOLDER/client if a FOLDER
# is given, else nothing stays.
set -euo pipefail
[ $# -le 2 ] || { echo "usage: $0 [BUNDLE [FOLDER]]" >&2; exit 2; }
root=$(realpath "$(dirname "$0")/..")
bundle=$(realpath -e "${1:-$root/clients/fedcomp_clients/sample}")
scratch=${2:-}
if [ -z "$scratch" ]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
fi
mkdir -p "$scratch"
scratch=$(realpath "$scratch")
LIMIT_MB=390
unset PYTHONPATH   # or the checkout would be what is checked
export FLWR_HOME="$scratch/flower" FEDCOMP_STATE_DIR="$scratch/state" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1

python3 -m venv "$scratch/build"
"$scratch/build/bin/pip" install --quiet build
"$scratch/build/bin/python" -m build --outdir "$scratch/dist" "$root" >"$scratch/build.log" 2>&1 ||
    { cat "$scratch/build.log" >&2; exit 1; }
rm -rf "$scratch/build"
wheel=$(echo "$scratch"/dist/fedcomp-*.whl)
echo "wheel: $(basename "$wheel"), $(stat -c %s "$wheel") bytes"

python3 -m venv "$scratch/client"
client="$scratch/client/bin"
"$client/pip" install --quiet -c "$root/constraints.txt" "$wheel[client]"
cd "$scratch"      # away from the checkout, which Python would find first
size=$(du -sm client | cut -f1)
echo "installed: $size MB on disk, pip included; $("$client/pip" list --format=freeze | wc -l) packages"
[ "$size" -le "$LIMIT_MB" ] || { echo "expected at most $LIMIT_MB MB" >&2; exit 1; }
for package in torch onnx onnxscript ray mlxtend matplotlib; do
    if "$client/python" -c "import $package" 2>/dev/null; then echo "$package is installed" >&2; exit 1; fi
done
"$client/python" -W error::ImportWarning "$root/scripts/client_step.py" "$bundle"
"$client/fedcomp-client" doctor --bundle "$bundle"
