#!/usr/bin/env bash
# Build the wheel and check what makes it portable: scripts/wheel.sh [FOLDER]
#
# It must be tagged for the stable ABI, and its extension module must not need a liburing on the machine it
# is installed on. PYTHON names an interpreter that has build, setuptools, wheel and cffi.
set -euo pipefail

out=${1:-dist}
python=${PYTHON:-python3}

stop() {
	printf 'wheel: %s\n' "$*" >&2
	exit 1
}

# setuptools packs whatever an earlier build left there.
rm -rf build "$out"
"$python" -m build --wheel --no-isolation --outdir "$out" . >/dev/null

wheel=$(echo "$out"/*.whl)
case $wheel in
*-cp310-abi3-*) ;;
*) stop "$wheel is not tagged cp310-abi3" ;;
esac

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
"$python" -m zipfile -e "$wheel" "$unpacked"
if ldd "$unpacked"/tiering/aio/_native*.so | grep liburing; then
	stop "the extension module needs a shared liburing; build where liburing.a exists (liburing-dev)"
fi
echo "$wheel"
