//! Where Sidetrack touches Linux. Every `unsafe` line and every privileged action of the product is here.

pub mod caps;
pub mod cgroup;
pub mod conntrack;
pub mod exec;
pub mod netlink;
pub mod netns;
pub mod nft;
pub mod probe;
pub mod process;
pub mod random;
pub mod route;
pub mod scm;
pub mod sockdiag;
pub mod sockopt;
pub mod splice;
pub mod sysctl;
pub mod udp;
pub mod undo;
