#!/usr/bin/env bash
# Boots a clean Debian 12 in qemu, with its own kernel and systemd, and runs guest.sh there: the package is installed, used as a service, upgraded
# while flows run, and purged.
#
#   packaging/deb/vm/run.sh PACKAGE [DEBIAN]
#
# DEBIAN: the folder of a clean Debian 12, made by `debootstrap --variant=minbase --include=LIST bookworm DEBIAN` with the LIST below; without it,
# one is made. Needs root for debootstrap and for the owners of files. KVM is not needed: qemu translates, which takes some minutes.
set -euo pipefail
include=systemd,systemd-sysv,dbus,nftables,iproute2,procps,curl,socat,kmod
package=$(realpath "$1")
clean=${2:-}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
minutes=${MINUTES:-30}
PATH=$PATH:/usr/sbin:/sbin
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
fail() { echo "error: $*" >&2; exit 1; }

for program in qemu-system-x86_64 busybox cpio depmod mkfs.ext4 debootstrap; do
    command -v "$program" >/dev/null || fail "$program is missing: make deb-vm installs it"
done
if [ -n "$clean" ]; then
    cp -a "$clean" "$work/debian"
else
    debootstrap --variant=minbase "--include=$include" bookworm "$work/debian" >"$work/debootstrap.log" || { tail "$work/debootstrap.log" >&2; exit 1; }
fi

# The kernel of Debian's cloud images: what a hospital's or a provider's virtual machine runs.
kernel=${KERNEL_PACKAGE:-$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-.*\)/\1/p' | head -n 1)}
[ -n "$kernel" ] || fail 'apt knows no linux-image-cloud-amd64: run apt-get update'
mkdir "$work/kernel"
(cd "$work/kernel" && apt-get -qq -o APT::Sandbox::User=root download "$kernel" && dpkg-deb --extract ./*.deb . && rm ./*.deb)
release=$(ls "$work/kernel/lib/modules")
depmod -b "$work/kernel" "$release"
mkdir -p "$work/debian/usr/lib/modules"
cp -a "$work/kernel/lib/modules/$release" "$work/debian/usr/lib/modules/"

# The same package as the next version of itself.
dpkg-deb --raw-extract "$package" "$work/next"
sed -i 's/^Version: \(.*\)/Version: \1+next/' "$work/next/DEBIAN/control"
dpkg-deb --root-owner-group --build -Znone "$work/next" "$work/debian/root/next.deb" >/dev/null
cp "$package" "$work/debian/root/sidetrack.deb"
cp "$here/guest.sh" "$work/debian/root/guest.sh"
cat >"$work/debian/etc/systemd/system/deb-vm.service" <<'UNIT'
[Unit]
Description=The test of the package
After=multi-user.target

[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/bin/bash -c '/bin/bash /root/guest.sh >/dev/ttyS0 2>&1; systemctl poweroff --force'
UNIT
mkdir -p "$work/debian/etc/systemd/system/multi-user.target.wants"
ln -s ../deb-vm.service "$work/debian/etc/systemd/system/multi-user.target.wants/deb-vm.service"
echo sidetrack-vm >"$work/debian/etc/hostname"
truncate -s 3G "$work/disk"
mkfs.ext4 -q -F -d "$work/debian" "$work/disk"

mkdir -p "$work/initramfs/bin" "$work/initramfs/modules"
cp "$(command -v busybox)" "$work/initramfs/bin/busybox"
cp "$here/init" "$work/initramfs/init"
number=10
for module in virtio_pci virtio_blk ext4; do
    while read -r _ file _; do
        [ -n "$(find "$work/initramfs/modules" -name "*-${file##*/}")" ] || cp "$file" "$work/initramfs/modules/$number-${file##*/}"
        number=$((number + 1))
    done < <(modprobe --dirname "$work/kernel" --set-version "$release" --show-depends "$module" | grep '^insmod' || true)
done
chmod 755 "$work/initramfs/init"
(cd "$work/initramfs" && find . | cpio --quiet --create --format=newc | gzip -1) >"$work/initrd"

echo "booting $release"
timeout "$((minutes * 60))" qemu-system-x86_64 -nodefaults -no-user-config -machine q35 -cpu max -accel tcg -smp 2 -m 2048 \
    -display none -serial stdio -no-reboot -kernel "$work/kernel/boot/vmlinuz-$release" -initrd "$work/initrd" \
    -append 'console=ttyS0 panic=-1 quiet systemd.show_status=false root=/dev/vda rw' \
    -drive "file=$work/disk,format=raw,if=virtio,cache=unsafe" </dev/null 2>&1 | sed -u 's|\r||g' | tee "$work/log" || true
grep -q '^deb-vm: [0-9]* passed, 0 failed$' "$work/log" || fail "the package failed on Debian 12 (or the test did not end within $minutes minutes)"
