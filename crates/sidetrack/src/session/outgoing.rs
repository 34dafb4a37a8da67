//! Flows on ports that services asked for: with TLS towards the server if the path asks for it. The client's
//! bytes, and the output of functions, go inside.

use super::setup::Setup;
use crate::carry::{self, Carried, Failure, FirstBytes, Order, Stream};

impl Setup<'_> {
    /// Whether the client's bytes must wait for TLS.
    pub(super) fn has_tls(&self) -> bool {
        self.listening.outgoing.as_ref().is_some_and(|outgoing| outgoing.tls.is_some())
    }

    /// Sets up the path, and TLS over it if the path asks for it.
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
            // Boxed, so that flows without TLS do not reserve room for it.
            let shaken = Box::pin(tls.shake_hands(carried.stream, early)).await?;
            carried.stream = Stream::Tls(Box::new(shaken));
        }
        Ok(carried)
    }
}
