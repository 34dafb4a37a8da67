#!/usr/bin/env bash
# Runs the namespace tests on Debian's own kernel, without root and without KVM: crates/lab/kernel/run.sh [JOB...]
#
# Boots the kernel of this Debian in qemu. The guest sees this host's files, read-only and with a memory file system over
# them, so it runs the programs that were built here. While it works its time is counted in instructions (-icount): one CPU
# that a busy host makes slower for us but not for the guest. While it waits its time is ours: were it to jump to the next
# timer, every time-out would pass while the host fetches a page of a file. Jobs are the functions of crates/lab/kernel/jobs.sh; all of them by default.
# EXAMPLES: names of examples for the job `examples`; without it, all of them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../../.." && pwd)
cache=${SIDETRACK_KERNELS:-${XDG_CACHE_HOME:-$HOME/.cache}/sidetrack/kernels}
target=${CARGO_TARGET_DIR:-$repository/target}
# What the guest needs before it can see the host's files; everything else it loads from there by itself.
first_modules=(virtio_pci 9pnet_virtio 9p overlay)
minutes=${MINUTES:-90}
PATH=$PATH:/usr/sbin:/sbin

for program in qemu-system-x86_64 busybox cpio depmod modprobe; do
    command -v "$program" >/dev/null || { echo "error: $program is missing: make lab-kernel installs it" >&2; exit 2; }
done

# The package that linux-image-amd64 stands for today, such as linux-image-6.1.0-56-amd64.
package=${KERNEL_PACKAGE:-$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: \(linux-image-.*\)/\1/p' | head -n 1)}
[ -n "$package" ] || { echo "error: apt knows no linux-image-amd64: run apt-get update" >&2; exit 2; }
kernel=$cache/$package
if [ ! -e "$kernel/complete" ]; then
    echo "fetching $package"
    mkdir -p "$kernel/package"
    (cd "$kernel" && apt-get -qq download "$package" && dpkg-deb --extract ./*.deb package && rm -f ./*.deb)
    depmod -b "$kernel/package" "$(ls "$kernel/package/lib/modules")"
    touch "$kernel/complete"
fi
release=$(ls "$kernel/package/lib/modules")

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/root/bin" "$scratch/root/modules"
cp "$(command -v busybox)" "$scratch/root/bin/busybox"
cp "$here/init" "$scratch/root/init"
number=10
for module in "${first_modules[@]}"; do
    while read -r _ file _; do
        name=${file##*/}
        [ -n "$(find "$scratch/root/modules" -name "*-$name")" ] || cp "$file" "$scratch/root/modules/$number-$name"
        number=$((number + 1))
    done < <(modprobe --dirname "$kernel/package" --set-version "$release" --show-depends "$module" | grep '^insmod')
done
chmod 755 "$scratch/root/init"
(cd "$scratch/root" && find . | cpio --quiet --create --format=newc | gzip -1) >"$scratch/initramfs"

# The guest is told by a file what to run: arguments of a kernel have little room.
{
    printf 'repository=%q\ntarget=%q\nmodules=%q\nrelease=%q\n' "$repository" "$target" "$kernel/package/lib/modules" "$release"
    printf 'PATH=%q\nHOME=/root\n' "$PATH"
    printf 'jobs=%q\nchosen=%q\n' "$*" "${EXAMPLES:-}"
} >"$scratch/plan"

# While the guest waits, this host's processors are not to fall asleep: what waking them up takes, the guest would take for its
# wires (sidetrack-lab does the same, docs/lab.md).
if [ -w /dev/cpu_dma_latency ]; then
    exec 9>/dev/cpu_dma_latency
    printf '\0\0\0\0' >&9
fi

log=$scratch/log
timeout "$((minutes * 60))" qemu-system-x86_64 -nodefaults -no-user-config -machine q35 -cpu max -accel tcg \
    -icount "shift=${SHIFT:-1}" -rtc clock=vm -smp 1 -m 2048 -display none -serial stdio -no-reboot \
    -kernel "$kernel/package/boot/vmlinuz-$release" -initrd "$scratch/initramfs" \
    -append "console=ttyS0 panic=-1 quiet plan=$scratch/plan" \
    -virtfs "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap" </dev/null 2>&1 |
    sed -u 's|\r||g' | tee "$log" || true

# The guest's last word; without it, it did not come to its end.
grep -q '^lab-kernel: all jobs passed$' "$log" || {
    echo "error: not every job passed on $release (or it did not end within $minutes minutes)" >&2
    exit 1
}
