//! Where Sidetrack touches Linux. Every `unsafe` line and every privileged action of the product is here.
//!
//! | what is done to the system | capability | inverse | test |
//! |---|---|---|---|
//! | an nftables table ([`nft::OwnedTable`]) | CAP_NET_ADMIN | goes with its netlink socket, even by SIGKILL | `tests/owned_table.rs` |
//! | the same where the kernel lacks owners ([`nft::Table::apply`]) | CAP_NET_ADMIN | [`undo::Action::DeleteTable`] | `tests/undo.rs` |
//! | policy rules and local routes for tproxy ([`route`]) | CAP_NET_ADMIN | [`undo::Action::RemoveMarkRule`], [`undo::Action::RemoveLocalDefault`]; [`route::remove_ours`] | `tests/undo.rs`, `tests/steering.rs` |
//! | conntrack settings ([`conntrack::enable_accounting`]) | CAP_NET_ADMIN | [`undo::Action::RestoreSetting`] | `tests/undo.rs` |
//! | a conntrack subscription ([`conntrack::Events`]) | CAP_NET_ADMIN to open, none to read on | closing it | `tests/conntrack.rs` |
//! | deleting a conntrack entry ([`conntrack::Conntrack::delete`]) | CAP_NET_ADMIN | none: the next packet makes a new one | `tests/conntrack.rs` |
//! | packets taken from the kernel ([`nfqueue::Queue`]) | CAP_NET_ADMIN for every verdict | closing it: rules with bypass let packets pass | `tests/nfqueue.rs` |
//! | packets put on their way as they are ([`raw::RoutedSocket`]) | CAP_NET_RAW to open | none: they are sent | `tests/nfqueue.rs` |
//! | "destination unreachable" read from the host's IP layer ([`raw::UnreachableSocket`]) | CAP_NET_RAW to open, none to read on | closing it | `raw/icmp.rs`, `crates/sidetrack/tests/engine/ends.rs` |
//! | BPF programs on interfaces ([`bpf`]) | CAP_BPF and CAP_NET_ADMIN to load and attach, none to change flows | go with their descriptors, even by SIGKILL | `tests/bpf.rs` |
//! | the packet engine's packets ([`bpf::Own`], [`raw::PacketSocket`]) | CAP_BPF and CAP_NET_ADMIN to attach, CAP_NET_RAW for sockets | go with their descriptors, even by SIGKILL | `tests/engine.rs` |
//! | connections of the packet engine that programs translate ([`bpf::OffloadMemory`]) | CAP_BPF to make room, none to offload and take back | go with their descriptors, even by SIGKILL | `bpf/offload.rs`, `crates/sidetrack/tests/engine/offload.rs` |
//! | flows of two sockets that programs translate ([`bpf::WireMemory`], [`repair`]) | CAP_BPF and CAP_NET_ADMIN | go with their descriptors, or with the folder of [`bpf::WireMemory::pin`]; the sockets are closed by then | `tests/wire.rs` |
//! | how long frames gather before the kernel takes them ([`napi`]) | CAP_NET_ADMIN | [`undo::Action::RestoreNapi`] | `tests/napi.rs` |
//! | a cgroup ([`cgroup`]) | write access to it | [`undo::Action::EndCgroup`] | `undo/action.rs` |
//! | processes moved into a cgroup ([`attach`]) | write access to it | [`undo::Action::ReturnProcesses`] | `attach.rs`, `crates/sidetrack/tests/attach/` |
//! | `lo` of a network of others ([`undo::Action::RestoreLoopback`]) | CAP_NET_ADMIN | itself | `crates/sidetrack/tests/attach/` |
//! | copies of all packets of a network ([`capture::CaptureSocket`]) | CAP_NET_RAW to open, none to read | closing it | `capture.rs` |
//! | a TAP interface ([`tap::Tap`], for the laboratory) | CAP_NET_ADMIN | goes with its descriptor, even by SIGKILL | `tap.rs` |
//! | namespaces of a command ([`exec`]) | none where user namespaces are allowed | go with their last process | `tests/exec.rs` |

pub mod arguments;
pub mod attach;
mod barrier;
pub mod bpf;
pub mod caps;
pub mod capture;
pub mod cgroup;
pub mod confine;
pub mod connects;
pub mod conntrack;
pub mod driver;
pub mod exec;
pub mod inside;
pub mod landlock;
pub mod link;
pub mod lookup;
pub mod memory;
pub mod multicast;
pub mod napi;
pub mod netlink;
pub mod netns;
pub mod nfqueue;
pub mod nft;
pub mod pages;
pub mod passed;
pub mod ports;
pub mod probe;
pub mod process;
pub mod random;
pub mod raw;
pub mod redirect;
pub mod repair;
pub mod route;
pub mod scheduling;
pub mod scm;
pub mod sockdiag;
pub mod sockopt;
pub mod splice;
pub mod sync;
pub mod sysctl;
pub mod tap;
pub mod terminal;
pub mod udp;
pub mod undo;
pub mod xsk;
