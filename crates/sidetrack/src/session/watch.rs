//! Ends the making of a path when its time is up or somebody wishes the flow to end, without a timer for each flow:
//! the worker's sweep wakes those that are due.

use crate::live::{Clock, LiveFlow};
use sidetrack_core::flow::EndReason;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// See the module.
pub struct Watched<F> {
    inner: Pin<Box<F>>,
    live: Arc<LiveFlow>,
    clock: Clock,
}

impl<F> Watched<F> {
    /// Watches `inner`. Boxed, so that the memory goes back before the long part of a flow's life begins.
    pub fn new(inner: F, live: Arc<LiveFlow>, clock: Clock) -> Self {
        Self { inner: Box::pin(inner), live, clock }
    }
}

impl<F: Future> Future for Watched<F> {
    type Output = Result<F::Output, EndReason>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
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
