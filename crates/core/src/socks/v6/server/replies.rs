//! The replies of the server, and the end of a connection.

use super::{Server, State};
use crate::flow::{Destination, EndReason};
use crate::socks::address;
use crate::socks::reply::ReplyCode;
use crate::socks::server::Output;
use crate::socks::v6::message::{AuthReply, OperationReply};
use crate::socks::v6::options::Options;
use crate::socks::v6::stack::StackOption;

impl Server {
    /// Returns the driver's answers to stack options, and a "no" for each requested option without an answer.
    pub(super) fn stack_answers(&self, mut answers: Vec<StackOption>) -> Vec<StackOption> {
        for asked in &self.asked {
            let no = match asked {
                StackOption::Tfo(_) => StackOption::Tfo(0),
                StackOption::Multipath(_) => StackOption::Multipath(false),
                StackOption::HappyEyeballs(_) => StackOption::HappyEyeballs(false),
                _ => continue,
            };
            if !answers.iter().any(|answer| answer.overlaps(no)) {
                answers.push(no);
            }
        }
        answers
    }

    /// Queues an Authentication Reply. It is sent with the next message, or by `send_held`.
    pub(super) fn reply_auth(&mut self, success: bool, options: Options) {
        match (AuthReply { success, options }).encode() {
            Ok(bytes) => self.held_reply.extend_from_slice(&bytes),
            // Cannot happen: its options are few and short.
            Err(error) => self.fail(EndReason::Internal, format!("authentication reply: {error}")),
        }
    }

    pub(super) fn operation_reply(&mut self, code: ReplyCode, bound: Option<Destination>, options: Options) {
        let bound = bound.unwrap_or(address::UNSPECIFIED);
        let mut reply = OperationReply { code, bound, options };
        let bytes = reply.encode(self.dialect).or_else(|_| {
            // Metadata that does not fit is dropped. It is not a reason to fail the flow.
            reply.options.metadata.clear();
            reply.encode(self.dialect)
        });
        match bytes {
            Ok(bytes) => {
                self.held_reply.extend_from_slice(&bytes);
                self.send_held();
            }
            Err(error) => self.fail(EndReason::Internal, format!("operation reply: {error}")),
        }
    }

    pub(super) fn send_held(&mut self) {
        if !self.held_reply.is_empty() {
            let bytes = std::mem::take(&mut self.held_reply);
            self.send(bytes);
        }
    }

    pub(super) fn send(&mut self, bytes: Vec<u8>) {
        self.outputs.push_back(Output::Send(bytes));
    }

    pub(super) fn fail(&mut self, reason: EndReason, detail: String) {
        self.send_held();
        self.state = State::Over;
        self.buffer = Vec::new();
        self.outputs.push_back(Output::Failed { reason, detail });
    }
}
