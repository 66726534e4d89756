#!/bin/sh
# Sets up build/arm for arm.py: Python for ARM, of Debian's packages, unpacked and not installed, and
# torch for ARM. build/arm/python starts that Python in qemu.
set -eu
for tool in qemu-aarch64 aarch64-linux-gnu-g++ apt-get dpkg-deb; do
	command -v "$tool" >/dev/null && continue
	echo "make arm: no $tool here; on Debian: apt-get install qemu-user g++-aarch64-linux-gnu" >&2
	exit 1
done
at=$(pwd)/build/arm
root=$at/root
rm -rf "$at"
mkdir -p "$at/lists/partial" "$at/archives/partial" "$root"

# With lists and a state of its own apt neither asks for root's rights nor minds what is installed.
apt() {
	apt-get -qq -y -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= \
		-o Dir::State::Lists="$at/lists" -o Dir::State::status=/dev/null -o Dir::Cache="$at" \
		-o Dir::Cache::archives="$at/archives" -o Debug::NoLocking=1 "$@"
}
apt update
apt install --no-install-recommends --download-only python3-pip libpython3-dev libstdc++6
for package in "$at"/archives/*.deb; do dpkg-deb -x "$package" "$root"; done

cat >"$at/python" <<END
#!/bin/sh
PYTHONHOME='$root/usr' exec qemu-aarch64 -cpu neoverse-n1 -L '$root' -0 '$at/python' '$root/usr/bin/python3' "\$@"
END
chmod +x "$at/python"
# Of 2.10 the wheel for ARM is a CPU build; those of 2.11 to 2.13 are CUDA builds.
"$at/python" -m pip install --target "$at/packages" --no-compile --progress-bar off \
	torch==2.10.0 numpy pytest hypothesis
touch "$at/.made"
