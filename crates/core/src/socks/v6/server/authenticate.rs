//! Authentication of a request: by a session, by a password in an option, by a password in the stream, or not at all.

use super::{Authenticated, Pending, Server, State};
use crate::flow::EndReason;
use crate::secret;
use crate::socks::password::{self, METHOD_PASSWORD, METHOD_UNACCEPTABLE};
use crate::socks::reader::{Reader, Stop};
use crate::socks::server::Output;
use crate::socks::v6::message::Request;
use crate::socks::v6::options::{AuthData, Options};
use crate::socks::v6::session::{SessionAction, SessionAnswer, SessionQuery};

impl Server {
    /// Authenticates a request. Sessions come first: a request inside a session needs no credentials, and credentials
    /// in it are ignored.
    pub(super) fn authenticate(&mut self, request: Box<Request>) {
        match &request.options.session_id {
            Some(_) if !self.config.sessions => self.refuse_session("sessions are not offered here"),
            Some(id) => {
                let action = if request.options.session_teardown {
                    SessionAction::TearDown(id.clone())
                } else {
                    SessionAction::Resume(id.clone())
                };
                self.ask(action, *request, Authenticated::default());
            }
            None => self.check_password(request),
        }
    }

    fn check_password(&mut self, request: Box<Request>) {
        if self.config.accounts.is_empty() {
            return self.authenticated(*request, Authenticated::default());
        }
        let given = request.options.auth_data.iter().find_map(|data| match data {
            AuthData::Password { user, password } => Some((user, password)),
            _ => None,
        });
        if let Some((user, password)) = given {
            let account = secret::account(&self.config.accounts, user, password);
            let mut reply = Options::default();
            reply.auth_data.push(AuthData::PasswordStatus(u8::from(account.is_none())));
            match account.map(|account| account.user.clone()) {
                Some(user) => {
                    self.authenticated(*request, Authenticated { user: Some(user), reply, session: None });
                }
                None => {
                    let user = String::from_utf8_lossy(user).into_owned();
                    self.refuse_password(&user, reply);
                }
            }
            return;
        }
        // There is no password in an option. A -11 client that advertised the method sends it in the stream.
        let methods = request.options.auth_methods.as_ref().map(|advertised| &advertised.methods);
        let in_stream = methods.is_some_and(|methods| methods.contains(&METHOD_PASSWORD));
        let method = if in_stream { METHOD_PASSWORD } else { METHOD_UNACCEPTABLE };
        self.reply_auth(false, Options { auth_selection: Some(method), ..Options::default() });
        if in_stream {
            // The client waits for this reply before it sends the password.
            self.send_held();
            self.exchange(request);
        } else {
            let detail = "the client sent no user name and password, which this listener asks for";
            self.fail(EndReason::AuthFailed, detail.into());
        }
    }

    /// Reads the password message in the stream, which follows the initial data (-11).
    pub(super) fn exchange(&mut self, request: Box<Request>) {
        let announced = request.options.auth_methods.as_ref().map_or(0, |methods| methods.initial_data_len);
        let initial_len = usize::from(announced);
        let mut reader = Reader::new(self.buffer.get(initial_len..).unwrap_or_default());
        let (version, user, password) = match password::read_request(&mut reader) {
            Ok(message) => message,
            Err(Stop::Incomplete | Stop::Address(_)) => {
                self.state = State::Exchange(request);
                return;
            }
        };
        let account = secret::account(&self.config.accounts, user, password);
        let user_name = account.map(|account| account.user.clone());
        let claimed = String::from_utf8_lossy(user).into_owned();
        let end = initial_len + reader.position();
        let accepted = version == password::VERSION && account.is_some();
        self.send(vec![password::VERSION, u8::from(!accepted)]);
        if !accepted {
            return self.refuse_password(&claimed, Options::default());
        }
        self.buffer.drain(initial_len..end);
        self.authenticated(*request, Authenticated { user: user_name, ..Authenticated::default() });
    }

    fn refuse_password(&mut self, user: &str, reply: Options) {
        self.reply_auth(false, reply);
        self.fail(EndReason::AuthFailed, format!("wrong password or unknown user {user:?}"));
    }

    fn refuse_session(&mut self, why: &str) {
        self.reply_auth(false, Options { session_invalid: true, ..Options::default() });
        self.fail(EndReason::AuthFailed, format!("the client's session is invalid: {why}"));
    }

    fn ask(&mut self, action: SessionAction, request: Request, auth: Authenticated) {
        let SessionAction::TearDown(_) = action else {
            let (token_request, token_spend) = (request.options.token_request, request.options.token_spend);
            return self.query(SessionQuery { action, token_request, token_spend }, request, auth);
        };
        // Outside of a session, tokens have no meaning.
        self.query(SessionQuery { action, token_request: None, token_spend: None }, request, auth);
    }

    fn query(&mut self, query: SessionQuery, request: Request, auth: Authenticated) {
        self.outputs.push_back(Output::Session(query));
        self.state = State::Session(Box::new(Pending { request, auth }));
    }

    /// Continues a request whose credentials are valid, or that needs none.
    fn authenticated(&mut self, request: Request, auth: Authenticated) {
        if request.options.session_request && self.config.sessions {
            let action = SessionAction::Begin(auth.user.clone());
            self.ask(action, request, auth);
        } else {
            self.operate(request, auth);
        }
    }

    pub(super) fn session(&mut self, answer: SessionAnswer) {
        let State::Session(pending) = &mut self.state else { return };
        let (begins, request) = (pending.request.options.session_request, pending.request.clone());
        let mut auth = std::mem::take(&mut pending.auth);
        self.state = State::Over;
        match answer {
            SessionAnswer::Declined => self.operate(request, auth),
            // The request counts as outside of a session, so it must authenticate itself.
            SessionAnswer::TornDown => self.check_password(Box::new(request)),
            SessionAnswer::Invalid => self.refuse_session("unknown or expired"),
            SessionAnswer::Active { user, .. } if !self.knows(user.as_deref()) => {
                self.refuse_session("its user is no longer known");
            }
            SessionAnswer::Active { id, user, window, token_accepted } => {
                if begins {
                    auth.reply.session_id = Some(id.clone());
                } else {
                    auth.reply.session_ok = true;
                }
                auth.reply.token_accepted = token_accepted == Some(true);
                if token_accepted == Some(false) {
                    let reply = Options { token_rejected: true, ..auth.reply };
                    // A failed reply does not name a session, because the request was not carried out.
                    self.reply_auth(false, Options { session_id: None, session_ok: false, ..reply });
                    let detail = "the client's token was spent before, or is outside its window (a replay?)";
                    return self.fail(EndReason::AuthFailed, detail.into());
                }
                auth.reply.token_window = window;
                (auth.user, auth.session) = (user, Some(id));
                self.operate(request, auth);
            }
        }
    }

    /// Whether this user may still log in. The accounts may have changed since the session began.
    fn knows(&self, user: Option<&str>) -> bool {
        let accounts = &self.config.accounts;
        accounts.is_empty() || user.is_some_and(|user| accounts.iter().any(|account| account.user == user))
    }
}
