//! Flows of paths that services asked for: TLS with the server where the path has it. The client's bytes, and what functions
//! make of them, go inside.

use super::setup::Setup;
use crate::carry::{self, Carried, Failure, FirstBytes, Order, Stream};

impl Setup<'_> {
    /// Whether what the client says has to wait for TLS.
    pub(super) fn has_tls(&self) -> bool {
        self.listening.outgoing.as_ref().is_some_and(|outgoing| outgoing.tls.is_some())
    }

    /// Makes the path, and TLS over it where there is to be some.
    pub(super) async fn carried(
        &self,
        order: &Order<'_>,
        first: &mut impl FirstBytes,
    ) -> Result<Carried, Failure> {
        let mut carried = carry::carry(order, first).await?;
        let Some(outgoing) = &self.listening.outgoing else { return Ok(carried) };
        outgoing.used(self.worker.clock.now());
        if let Some(tls) = &outgoing.tls {
            let early = std::mem::take(&mut carried.early);
            // Boxed: flows without it need not have room for it.
            let shaken = Box::pin(tls.shake_hands(carried.stream, early)).await?;
            carried.stream = Stream::Tls(Box::new(shaken));
        }
        Ok(carried)
    }
}
