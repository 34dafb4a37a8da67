//! Ends the set-up of a path at its deadline, or when the flow is to be ended, without a timer for each flow.
//! The worker's sweep wakes flows that are due.

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
