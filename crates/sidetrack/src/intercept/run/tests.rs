//! Tests that start no process. Real commands run in `tests/run_isolated.rs`.

use super::*;

#[test]
fn errors_end_with_the_codes_of_a_shell() {
    assert_eq!(RunError::from(LaunchError::NotFound("x".into())).exit_code(), 127);
    let denied = io::Error::from(io::ErrorKind::PermissionDenied);
    assert_eq!(RunError::from(LaunchError::NotExecutable("x".into(), denied)).exit_code(), 126);
    assert_eq!(RunError::NotRoot.exit_code(), 125);
    assert!(RunError::NotRoot.to_string().contains("leave --mode out"));
}
