//! Ends the set-up of a path at its deadline, or when the flow is to be ended, without a timer for each flow.
//! The worker's sweep wakes flows that are due.

use super::setup::Setup;
use crate::carry::Failure;
use crate::live::profile::Stage;
use crate::live::{Clock, LiveFlow};
use sidetrack_core::flow::EndReason;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// A stage of the set-up together with the flow whose deadline it watches.
pub struct Watched<'a, F> {
    inner: Pin<&'a mut F>,
    live: &'a LiveFlow,
    clock: Clock,
    stage: Stage,
}

impl<'a, F> Watched<'a, F> {
    /// Watches `inner`; its work counts for this stage.
    pub fn new(stage: Stage, inner: Pin<&'a mut F>, live: &'a LiveFlow, clock: Clock) -> Self {
        Self { inner, live, clock, stage }
    }
}

impl<F: Future> Future for Watched<'_, F> {
    type Output = Result<F::Output, EndReason>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let _span = this.stage.enter();
        this.live.set_waker(cx.waker());
        if let Some(reason) = this.live.ending() {
            return Poll::Ready(Err(reason));
        }
        if let Some(reason) = this.live.overdue(this.clock.now()) {
            return Poll::Ready(Err(reason));
        }
        this.inner.as_mut().poll(cx).map(Ok)
    }
}

impl Setup<'_> {
    /// As [`Self::watched`], for the stage that makes the path.
    pub(super) async fn dialing<T>(&self, work: Pin<&mut impl Future<Output = T>>) -> Result<T, Failure> {
        self.watched(Stage::Dial, work).await
    }

    /// Runs one stage until its deadline, or until the flow is to be ended. The stage is pinned where it is
    /// made: a future that is moved before it is pinned reserves its room twice.
    pub(super) async fn watched<T>(
        &self,
        stage: Stage,
        work: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, Failure> {
        let watched = Watched::new(stage, work, self.live, self.worker.clock).await;
        watched.map_err(|reason| Failure::new(reason, late(reason)))
    }
}

/// Says in words what a time-out of this stage means.
fn late(reason: EndReason) -> &'static str {
    match reason {
        EndReason::HandshakeTimeout => "the client did not finish its handshake in time",
        EndReason::ConnectTimeout => "the path to the server was not made in time",
        EndReason::Killed => "ended by hand",
        _ => "ended while the path was being made",
    }
}
