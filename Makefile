# Two commands for a fresh checkout: `make run` (the main job, on real namespaces) and `make test` (everything).
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

CARGO ?= cargo
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)

# command:package pairs of Debian 12; only what is missing is installed.
DEPS_BUILD := cc:gcc clang:clang
DEPS_RUN := $(DEPS_BUILD) ip:iproute2 curl:curl nginx:nginx-light jq:jq socat:socat
DEPS_TEST := $(DEPS_RUN) g++:g++ nfcapd:nfdump nft:nftables iptables:iptables ssh:openssh-client /usr/sbin/sshd:openssh-server nc:netcat-openbsd nmap:nmap \
	python3:python3-minimal openssl:openssl setpriv:util-linux ps:procps tcpdump:tcpdump tshark:tshark haproxy:haproxy \
	unshare:util-linux /usr/sbin/squid:squid \
	node:nodejs /usr/lib/python3/dist-packages/requests/__init__.py:python3-requests danted:dante-server microsocks:microsocks redsocks:redsocks httping:httping \
	ethtool:ethtool /usr/sbin/ovs-vswitchd:openvswitch-switch /usr/sbin/slapd:slapd ldapsearch:ldap-utils /usr/lib/python3/dist-packages/socks.py:python3-socks dig:bind9-dnsutils \
	podman:podman runc:runc etcd:etcd-server etcdctl:etcd-client strip:binutils prometheus:prometheus iperf3:iperf3 \
	turnserver:coturn /usr/sbin/chronyd:chrony ntpdate:ntpsec-ntpdate chromium:chromium gtlsclient:ngtcp2-client /usr/sbin/gtlsserver:ngtcp2-server /usr/sbin/nghttpx:nghttp2-proxy

# Tests that make namespaces of the host's kind need root. As an ordinary user the tests are built as you and run
# through sudo; without sudo they say "skipped" and are counted.
HOST := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
RUNNER := CARGO_TARGET_$(shell echo '$(HOST)' | tr 'a-z-' 'A-Z_')_RUNNER
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] || ! command -v sudo >/dev/null || echo 'env $(RUNNER)="sudo -E env PATH=$$PATH"')

# What is measured is what is installed.
BUILD_DIST := CARGO=$(CARGO) packaging/cargo.sh build --profile dist --locked --workspace

.PHONY: help run test test-more test-kills test-seed003 dist deb deb-test deb-tutorials deb-vm static static-check static-test oci oci-test release lab fuzz fuzz-replay lab-kernel bench-relay bench-epi bench-chain bench-overlay bench-shunt bench-http bench-engine bench-engine-bulk bench-run bench-udp bench-history bench-wire bench-upgrade bench-page crash soak faults deny format deps-run deps-test deps-bench need-cargo

help: ## Says what there is
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

need-cargo:
	@command -v $(CARGO) >/dev/null || { \
	  echo "error: cargo is missing; Sidetrack is built with Rust 1.95 (Debian 12's own is older)" >&2; \
	  echo "help: install rustup (https://www.rust-lang.org/tools/install), open a new shell, try again;" >&2; \
	  echo "      rustup then takes the version that rust-toolchain.toml names" >&2; \
	  exit 1; }

deps-run: need-cargo
	@.ci/apt-install $(DEPS_RUN)

deps-test: need-cargo
	@.ci/apt-install $(DEPS_TEST)

deps-bench: deps-test
	bench/peers.sh

run: deps-run ## Builds the release binary and runs the main job on real namespaces
	$(CARGO) build --release --locked --package sidetrack
	SIDETRACK=$(abspath $(TARGET_DIR))/release/sidetrack examples/main-job/run.sh

dist: need-cargo ## Builds the programs to install (target/dist): linked as one, some minutes more than for `make run`
	@.ci/apt-install $(DEPS_BUILD)
	$(BUILD_DIST)

deb: need-cargo ## Builds the Debian package (target/packages), with manual pages, units and completions
	@.ci/apt-install $(DEPS_BUILD) strip:binutils jq:jq dpkg-shlibdeps:dpkg-dev
	CARGO=$(CARGO) packaging/cargo.sh build --profile dist --locked --package sidetrack
	packaging/deb/build.sh $(TARGET_DIR)/dist/sidetrack $(TARGET_DIR)/packages

deb-test: deb ## Installs, uses, upgrades and purges the package in a clean Debian (root)
	@.ci/apt-install debootstrap:debootstrap lintian:lintian
	lintian --allow-root --fail-on error,warning $(TARGET_DIR)/packages/*.deb
	packaging/deb/test.sh $(TARGET_DIR)/packages/*.deb

deb-tutorials: deb ## Does every example in a clean Debian with the package alone, as its page says (root, a mirror of Debian; five minutes)
	@.ci/apt-install debootstrap:debootstrap
	packaging/deb/tutorials.sh $(TARGET_DIR)/packages/*.deb

deb-vm: deb ## The same in a virtual machine with Debian's kernel and systemd: as a service, with an upgrade while flows run (root)
	@.ci/apt-install debootstrap:debootstrap qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio depmod:kmod mkfs.ext4:e2fsprogs
	packaging/deb/vm/run.sh $(TARGET_DIR)/packages/*.deb

# The architecture of `make static` and `make oci`, and the profile that both are built with.
ARCH ?= x86_64
PROFILE ?= dist
DEPS_STATIC := $(DEPS_BUILD) strip:binutils readelf:binutils file:file jq:jq $(if $(filter $(ARCH),$(shell uname -m)),musl-gcc:musl-tools, \
	aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu /usr/aarch64-linux-gnu/include/stdio.h:libc6-dev-arm64-cross)

static: need-cargo ## Builds the program as one static file, in an archive in target/packages (ARCH=aarch64: for another machine)
	@.ci/apt-install $(DEPS_STATIC)
	packaging/static/build.sh $(ARCH) $(TARGET_DIR)/packages $(PROFILE)

static-test: static ## Tries the static program, with the main job
	@.ci/apt-install $(DEPS_RUN)
	packaging/static/test.sh $(TARGET_DIR)/packages/sidetrack-*-$(ARCH)-linux.tar.gz

# Types of the two C libraries differ. Only this crate calls them.
static-check: need-cargo ## Checks that the crate with the system calls compiles for the static program
	@if rustup target add $(shell uname -m)-unknown-linux-musl >/dev/null 2>&1; then \
	$(CARGO) check --quiet --locked --package sidetrack-sys --target $(shell uname -m)-unknown-linux-musl; \
	else echo "static-check: skipped: rustup cannot fetch Rust's library for musl"; fi

oci: static ## Builds an OCI image of the static program into target/packages, without a network
	packaging/oci/build.sh $(TARGET_DIR)/packages/sidetrack-*-$(ARCH)-linux.tar.gz $(TARGET_DIR)/packages

oci-test: oci ## Runs the image with podman: as a SOCKS proxy without rights, and as a gateway (root)
	@.ci/apt-install $(DEPS_RUN) podman:podman runc:runc
	packaging/oci/test.sh $(TARGET_DIR)/packages/sidetrack-*-$(if $(filter aarch64,$(ARCH)),arm64,amd64).oci.tar

release: need-cargo ## Builds all artefacts of a release into target/packages, with their SHA-256 sums
	rm -rf $(TARGET_DIR)/packages
	$(MAKE) --no-print-directory deb static oci
	$(MAKE) --no-print-directory static oci ARCH=aarch64
	packaging/sums.sh $(TARGET_DIR)/packages

# Runs beside the tests, with the processor time that they leave. Most of the replay is a build.
DOC := RUSTDOCFLAGS='-D warnings -A rustdoc::private-intra-doc-links' $(CARGO) doc --locked --workspace --no-deps --document-private-items --quiet
BESIDE := $(MAKE) --no-print-directory fuzz-replay static-check && $(DOC)

# Clippy compiles what is tested: one pass over the workspace instead of two. Cargo keeps these files apart from those of other builds.
LINTED := RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings

test: deps-test ## Formatting, clippy, rustdoc, every test tier with the namespace tests, replay of the fuzz seeds
	$(CARGO) fmt --all --check
	$(CARGO) metadata --locked --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null
	@# Builds the programs as well: for tests of whole programs, and with the features that tests ask of their libraries.
	$(LINTED) $(CARGO) test --no-run --quiet --locked --workspace
	@said=$$(mktemp); .ci/aside bash -c "$(BESIDE)" >$$said 2>&1 & aside=$$!; trap 'kill $$aside 2>/dev/null || true' EXIT; \
	status=0; $(AS_ROOT) env $(LINTED) .ci/tests --locked --workspace --no-fail-fast || status=$$?; \
	wait $$aside || status=1; cat $$said; rm -f $$said; exit $$status
	@if command -v cargo-deny >/dev/null; then $(MAKE) --no-print-directory deny; \
	else echo "deny: skipped: cargo-deny is not installed (cargo install --locked cargo-deny)"; fi

test-more: deps-test ## What `make test` has no time for: clippy without the control plane, slow tests of the overlay, simulations with many seeds
	$(CARGO) clippy --locked --package sidetrack --no-default-features -- -D warnings
	$(AS_ROOT) env SIDETRACK_SEEDS=$(or $(SEEDS),500) $(CARGO) test --locked --workspace --test overlay -- --include-ignored --skip a_hundred_nodes

test-kills: deps-test ## Kills orchestrators, agents and members of etcd 100 times while applications are set up
	$(AS_ROOT) env SIDETRACK_KILLS=$(or $(KILLS),100) $(CARGO) test --locked --package sidetrack --test control -- --nocapture whatever_is_killed

test-seed003: deps-test ## The 18 tests of "Heigh performance proxy", Sec. 3.1, with its tables
	@$(AS_ROOT) $(CARGO) test --locked --package sidetrack --test http seed003:: | awk -f .ci/seed003.awk

lab: deps-bench ## The real programs across namespaces; a skip is a failure
	$(CARGO) build --locked --workspace
	SIDETRACK_REQUIRE_ALL=1 $(AS_ROOT) $(CARGO) test --locked --package sidetrack-lab -- --nocapture

# The tests that ask the kernel for namespaces, rules and routes: CRATE/NAME of each.
KERNEL_TESTS := sys/conntrack sys/exec sys/list sys/nft sys/owned_table sys/steering sys/undo \
	sidetrack/run_isolated sidetrack/shunt sidetrack/steering lab/link

lab-kernel: deps-test ## The links, the examples and the namespace tests on Debian's own kernel in qemu (JOBS=links: one of them)
	@.ci/apt-install qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio depmod:kmod
	$(CARGO) build --locked --workspace
	$(CARGO) test --no-run --locked --workspace $(foreach test,$(KERNEL_TESTS),--test $(notdir $(test))) --message-format=json | \
	  jq -r --arg wanted '$(KERNEL_TESTS)' -f crates/lab/kernel/tests.jq >$(TARGET_DIR)/lab-kernel.tests
	crates/lab/kernel/run.sh $(JOBS)

fuzz-replay: deps-test ## Every fuzz target over its committed seeds (no nightly needed)
	fuzz/replay.sh

fuzz: deps-test ## Fuzzes every target for 30 seconds (SECONDS_EACH=n changes that)
	fuzz/run.sh $(or $(SECONDS_EACH),30)

bench-relay: deps-bench ## The bars of SPECIFICATION.md: we, the peers and the limits, interleaved (root)
	$(BUILD_DIST)
	bench/peers.sh
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') bench/relay.sh $(RELAY)

bench-epi: deps-bench ## The EPI paper's measurements with its proxies and ours (root; EPI=--quick: 90 s)
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') bench/epi.sh $(EPI)

bench-chain: deps-bench ## What functions and chains cost, and a change of chains (root; CHAIN=--quick: 90 s)
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') bench/chain.sh $(CHAIN)

bench-overlay: deps-bench ## The overlay beside plain TCP over the same links, scp, failures (root; OVERLAY=--quick: 90 s)
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') bench/overlay.sh $(OVERLAY)

bench-shunt: deps-bench ## The NFShunt paper's measurements with each fast path (root; SHUNT=--quick: 90 s, or parts)
	@.ci/apt-install iperf3:iperf3
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') bench/shunt.sh $(SHUNT)

bench-engine: deps-bench ## The packet engine: its core, over AF_XDP, beside its peers, byte for byte (root; ENGINE=--quick: 90 s)
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') bench/engine.sh $(ENGINE)

bench-engine-bulk: deps-bench ## Bulk through the packet engine once the kernel carries on, beside routing (root; four minutes)
	@.ci/apt-install iperf3:iperf3
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') bench/engine-bulk.sh

bench-udp: deps-bench ## Datagrams through a reverse port and SOCKS5 beside nginx, dante and the kernel (root; UDP=--quick: 90 s)
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') bench/udp.sh $(UDP)

bench-run: deps-bench ## What `sidetrack run` costs: connections held and accepted at once, and its start (one minute)
	@.ci/apt-install nginx:nginx ab:apache2-utils
	$(BUILD_DIST)
	SIDETRACK=$(abspath $(TARGET_DIR))/dist/sidetrack bench/run.sh

bench-history: deps-bench ## Questions about 10 million stored flows (8 GB of disk, six minutes)
	$(BUILD_DIST)
	SIDETRACK=$(abspath $(TARGET_DIR))/dist/sidetrack bench/history.sh

bench-http: deps-bench ## The HTTP side beside caches and proxies, interception, pages of its paper (root; HTTP=--quick: 90 s)
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') bench/http.sh $(HTTP)

bench-wire: deps-bench ## Flows that the kernel has taken over, beside HAProxy, nginx stream, DNAT and routing (root; nine minutes; WIRE=--part=handover or curve)
	@.ci/apt-install nginx:nginx ab:apache2-utils haproxy:haproxy iperf3:iperf3
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') env SIDETRACK=$(abspath $(TARGET_DIR))/dist/sidetrack bench/wire.sh $(WIRE)

bench-upgrade: deps-bench ## Ten upgrades in a row under 500 flows: how long bytes wait (root; two minutes)
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') env SIDETRACK=$(abspath $(TARGET_DIR))/dist/sidetrack bench/upgrade.sh

bench-page: deps-bench ## New connections with a viewer of the page and without (two minutes)
	@.ci/apt-install nginx:nginx ab:apache2-utils curl:curl
	$(BUILD_DIST)
	SIDETRACK=$(abspath $(TARGET_DIR))/dist/sidetrack bench/page.sh

soak: deps-bench ## Mixed traffic with reloads and faults: no byte wrong, no flow cut, memory flat (root; 30 minutes; SOAK='--seconds 180')
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') bench/soak.sh $(SOAK)

crash: deps-test ## SIGKILL at 200 random points of start, reload and stop: nothing may be left (root; CRASH='--points 50 --seed 7')
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') bench/crash.sh $(CRASH)

faults: deps-test ## Reloads, too little memory, full disks, jumps of the clock: no flow is cut, no byte wrong (root; FAULTS='--part memory')
	$(BUILD_DIST)
	$(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E') bench/faults.sh $(FAULTS)

deny: need-cargo ## Licences, advisories and sources of every dependency
	@command -v cargo-deny >/dev/null || { \
	  echo "error: cargo-deny is missing" >&2; echo "help: cargo install --locked cargo-deny" >&2; exit 1; }
	$(CARGO) deny check

format: need-cargo ## Formats the sources
	$(CARGO) fmt --all
