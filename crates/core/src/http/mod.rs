//! What the spine needs of HTTP and TLS: who is asked for (Host, SNI) and the client side of CONNECT.

pub mod connect;
pub mod head;
pub mod sni;
