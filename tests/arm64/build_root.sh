#!/usr/bin/env bash
# An arm64 Debian with Python and the device's packages in a folder, and FOLDER/python, which runs it by user emulation.
# usage: build_root.sh FOLDER [requirement …]        then: FOLDER/python script.py …
#
# Needs Debian or Ubuntu with apt, dpkg-deb and python3 with pip; no root, no container, no change to the system. Packages
# are unpacked, not installed; nothing is emulated while building. A folder that is complete is left as it is.
# Exit code 75: something cannot be fetched. Environment: SUITE (bookworm), MIRROR (default: the Debian mirror in this
# host's apt sources). Wheels come from wherever pip is configured to look.
set -euo pipefail

(($# >= 1)) || { sed -n '2,3s/^# //p' "$0"; exit 2; }
mkdir -p "$1"
root=$(cd "$1" && pwd)
shift
(($# > 0)) || set -- numpy pydantic paho-mqtt onnxruntime pillow
suite=${SUITE:-bookworm}
debian=(python3 libpython3-stdlib python3-distutils libstdc++6 libgomp1 ca-certificates media-types netbase tzdata)

recipe=$({ cat "$0"; echo "$suite $*"; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$root/.complete" 2>/dev/null || true)" = "$recipe" ]; then
  exit 0
fi
if [ -n "$(ls -A "$root")" ] && [ ! -e "$root/.recipe" ]; then
  echo "$root is not empty and was not made by this script; choose another folder" >&2
  exit 2
fi
find "$root" -mindepth 1 -delete
echo "$recipe" >"$root/.recipe"

away() {
  echo "$1" >&2
  exit 75
}

# Without downloaded lists apt knows addresses only, no origins: on Debian the first one that is no security archive.
debian_mirror() {
  apt-get indextargets --format '$(ORIGIN) $(SITE)' 2>/dev/null | awk '$1 == "Debian" && $2 !~ /security/ { print $2; exit }'
}
any_mirror() {
  grep -qx 'ID="\?debian"\?' /etc/os-release 2>/dev/null || return 0
  apt-get indextargets --no-release-info --format '$(SITE)' 2>/dev/null | awk '!/security/ { print; exit }'
}
mirror=${MIRROR:-$(debian_mirror)}
mirror=${mirror:-$(any_mirror)}
[ -n "$mirror" ] || away "apt's sources on this host name no Debian mirror; expected one for arm64 packages, set MIRROR to its address"
work=$root/.work
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
: >"$work/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$work/sources"

apt() { # apt ARCHITECTURE arguments: with its own state, so that this host's packages are neither read nor changed
  local architecture=$1
  shift
  apt-get -qq -y -o APT::Architecture="$architecture" -o APT::Architectures="$architecture" \
    -o APT::Install-Recommends=false -o APT::Sandbox::User= -o Debug::NoLocking=true -o Acquire::Retries=2 \
    -o Acquire::http::Timeout=20 -o Acquire::Languages=none \
    -o Dir::State::Lists="$work/lists" -o Dir::State::status="$work/status" -o Dir::State::extended_states="$work/ext" \
    -o Dir::Cache="$work/cache" -o Dir::Etc::SourceList="$work/sources" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::Etc::PreferencesParts=/dev/null -o DPkg::Post-Invoke= -o APT::Update::Post-Invoke= \
    -o APT::Update::Post-Invoke-Success= -o APT::Keep-Downloaded-Packages=true \
    -o Binary::apt-get::APT::Keep-Downloaded-Packages=true "$@"
}

apt arm64 update || away "lists of arm64 packages cannot be fetched here"
apt arm64 install --download-only "${debian[@]}" >/dev/null || away "arm64 packages cannot be fetched here"

mkdir -p "$root/usr/"{bin,lib,sbin} "$root/emulator"
for folder in bin lib sbin; do ln -s "usr/$folder" "$root/$folder"; done
for package in "$work"/cache/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink --no-same-owner -C "$root" \
    --exclude=./usr/share/doc --exclude=./usr/share/man
done

if emulator=$(command -v qemu-aarch64-static); then
  ln -s "$emulator" "$root/emulator/qemu-aarch64-static"
else # one program out of its package; nothing is registered with the kernel
  host=$(dpkg --print-architecture)
  rm -rf "$work/lists" && mkdir -p "$work/lists/partial" "$work/emulator"
  apt "$host" update || away "lists of packages cannot be fetched here"
  (cd "$work/emulator" && apt "$host" download qemu-user-static) || away "the emulator cannot be fetched here"
  dpkg-deb --fsys-tarfile "$work"/emulator/*.deb | tar -x -C "$root/emulator" --strip-components=3 ./usr/bin/qemu-aarch64-static
fi

# ONNX Runtime reads what CPU it runs on and crashes on the mixture of an x86 /proc and the host's /sys: a Pi 4 is shown.
# As many cores as the host has, because threads are bound to them.
cores=$(nproc)
mkdir -p "$root/proc" "$root/sys/devices/system/cpu"
for ((core = 0; core < cores; core++)); do
  printf 'processor\t: %d\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU implementer\t: 0x41\n' "$core"
  printf 'CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd08\nCPU revision\t: 3\n\n'
done >"$root/proc/cpuinfo"
for list in possible present online; do echo "0-$((cores - 1))" >"$root/sys/devices/system/cpu/$list"; done

python=$(basename "$(readlink -f "$root/usr/bin/python3")")
platforms=(--platform manylinux2014_aarch64)
for minor in 17 24 26 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
python3 -m pip install -q --disable-pip-version-check --no-warn-conflicts --only-binary=:all: \
  --implementation cp --python-version "${python#python}" "${platforms[@]}" --target "$root/opt/packages" "$@" ||
  away "wheels for arm64 cannot be fetched here"

cat >"$root/python" <<RUN
#!/bin/sh
root=\$(dirname "\$(readlink -f "\$0")")
export PYTHONHOME="\$root/usr" PYTHONNOUSERSITE=1 PYTHONPATH="\$root/opt/packages\${GUEST_PATH:+:\$GUEST_PATH}"
exec "\$root/emulator/qemu-aarch64-static" -L "\$root" -cpu "\${GUEST_CPU:-cortex-a72}" -0 "\$root/python" \\
  "\$root/usr/bin/$python" "\$@"
RUN
chmod +x "$root/python"
rm -rf "$work"
"$root/python" -c 'import platform; raise SystemExit(platform.machine() != "aarch64")'
echo "$recipe" >"$root/.complete"
