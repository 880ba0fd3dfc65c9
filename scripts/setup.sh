#!/usr/bin/env bash
# Make a virtual environment with the package in it: scripts/setup.sh [FOLDER]
#
# What the system lacks for that is installed by apt, and nothing is when nothing is missing. Run again, it
# only rebuilds the package. PYTHON names the interpreter (default: python3).
set -euo pipefail

venv=${1:-.venv}
python=${PYTHON:-python3}
cc=${CC:-cc}

say() {
	printf 'setup: %s\n' "$*" >&2
}

stop() {
	say "$*"
	exit 1
}

# The system packages that are missing, one a line.
missing_packages() {
	local series
	# A Python that apt did not install brings its own headers and venv.
	series=$("$python" -c 'import sys; print("python3.%d" % sys.version_info[1])')
	"$python" -c 'import ensurepip, venv' 2>/dev/null || echo "$series-venv"
	"$python" - <<-'EOF' || echo "$series-dev"
		import pathlib, sys, sysconfig
		sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())
	EOF
	# libc6-dev holds the headers that gcc alone does not bring.
	command -v "$cc" >/dev/null || printf '%s\n' gcc libc6-dev
	if [ "${ZERO_INFINITY_NO_URING:-0}" = 0 ] && ! has_liburing; then
		echo liburing-dev
	fi
}

has_liburing() {
	if command -v "$cc" >/dev/null; then
		echo '#include <liburing.h>' | "$cc" -E - >/dev/null 2>&1
	else
		[ -e /usr/include/liburing.h ]
	fi
}

# Runs apt-get as root: directly, or through sudo.
apt() {
	if [ "$(id -u)" = 0 ]; then
		DEBIAN_FRONTEND=noninteractive apt-get "$@"
	else
		sudo DEBIAN_FRONTEND=noninteractive apt-get "$@"
	fi
}

install_packages() {
	local command="apt-get install $*"
	if ! command -v apt-get >/dev/null; then
		stop "missing here: $*. This is not a Debian or Ubuntu system, so please install what matches" \
			"these Debian packages, then run the same command again."
	fi
	if [ "$(id -u)" != 0 ]; then
		command -v sudo >/dev/null ||
			stop "missing here: $*. You are not root and there is no sudo: have an administrator run" \
				"'$command', then run the same command again."
		say "asking for sudo to run: $command"
	else
		say "running: $command"
	fi
	# An apt that has never been updated knows no packages; one that has may know them all.
	apt install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 && return
	apt update -qq >/dev/null || stop "apt-get update failed"
	apt install -y -qq --no-install-recommends "$@" >/dev/null || stop "$command failed"
}

command -v "$python" >/dev/null || stop "there is no '$python'; name a Python 3.10 or later with PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
	stop "'$python' is $("$python" -V), and 3.10 or later is needed; name another with PYTHON=..."

packages=$(missing_packages)
if [ -n "$packages" ]; then
	# shellcheck disable=SC2086 # one word a package
	install_packages $packages
fi

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || {
	say "making $venv with $("$python" -V)"
	"$python" -m venv --clear "$venv"
}
pip() {
	"$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"
}

# The build tools go first and pip builds with them, so that the pins hold in the build as well.
say "installing the build tools"
pip install -c constraints.txt setuptools wheel cffi
say "building and installing the package (the first time, torch is a large download)"
pip install -c constraints.txt --no-build-isolation -e '.[dev]'
say "ready: $venv"
