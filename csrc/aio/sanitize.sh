#!/usr/bin/env bash
# Build the C engine with its test program under the sanitizers and run it: sanitize.sh [FOLDER]
#
# FOLDER is where test files are made (default: a fresh one in TMPDIR or /tmp). CC names the compiler.
# FUZZ_COUNT is how many random requests the splitter gets, FUZZ_SEED which.
# ZERO_INFINITY_NO_URING=1 tests a build with the thread backend alone.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
folder=${1:-$built}
cc=${CC:-cc}
flags=(-std=c11 -g -O1 -fno-omit-frame-pointer -Wall -Wextra -Werror -pthread)
# Entries this small are met by nearly every request.
flags+=(-DAIO_ENTRY_BYTES=65536)
libraries=(-luring)
if [ -n "${ZERO_INFINITY_NO_URING:-}" ]; then
	flags+=(-DAIO_NO_URING)
	libraries=()
fi

# Thread sanitizer needs the addresses it knows: run without randomisation where that is allowed.
fixed_addresses() {
	if setarch "$(uname -m)" -R true 2>/dev/null; then
		setarch "$(uname -m)" -R "$@"
	else
		"$@"
	fi
}

check() {
	echo "== -fsanitize=$1"
	"$cc" "${flags[@]}" -fsanitize="$1" -fno-sanitize-recover=all \
		$(ls "$here"/*.c | grep -v fuzz_) -o "$built/test_aio" "${libraries[@]}"
	fixed_addresses "$built/test_aio" "$folder"
}

fuzz() {
	echo "== fuzz_split"
	"$cc" "${flags[@]}" -O2 -fsanitize=address,undefined -fno-sanitize-recover=all \
		"$here"/split.c "$here"/fuzz_split.c -o "$built/fuzz_split"
	"$built/fuzz_split" "${FUZZ_COUNT:-1000000}" "${FUZZ_SEED:-$RANDOM}"
}

export ASAN_OPTIONS=detect_leaks=1
# The fork test has a child that only asks for its refusals.
export TSAN_OPTIONS=die_after_fork=0
fuzz
check address,undefined
check thread
