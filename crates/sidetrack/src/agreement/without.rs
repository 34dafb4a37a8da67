//! A program that was built without the feature `control` takes no agreement.

use super::Book;
use crate::config::{ConfigError, Problem};
use std::time::SystemTime;

impl Book {
    /// Refuses the text; `name` is that of the file in the message.
    ///
    /// # Errors
    /// Always: nothing here can read an agreement.
    pub fn read(name: &str, text: &str, _now: SystemTime) -> Result<Self, ConfigError> {
        let message = "this program was built without data-flow agreements".to_owned();
        let hint = "use a build with the feature `control`, or remove `agreement` from [policy]";
        Err(ConfigError::new(name, text, vec![Problem::error(0..0, message, hint)]))
    }
}
