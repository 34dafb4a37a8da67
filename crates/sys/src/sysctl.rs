//! Kernel settings under /proc/sys. Those of `net/` belong to the network namespace of the calling thread.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The file of a setting named `net/ipv4/ip_forward`.
fn path(name: &str) -> io::Result<PathBuf> {
    let plain = name.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    if !plain {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{name:?} is no name of a kernel setting"),
        ));
    }
    Ok(Path::new("/proc/sys").join(name))
}

/// Adds the setting's name to an error.
fn named(name: &str, doing: &str, error: &io::Error) -> io::Error {
    io::Error::new(
        error.kind(),
        format!("cannot {doing} the kernel setting {}: {error}", name.replace('/', ".")),
    )
}

/// The value of a setting, without the final line break.
///
/// # Errors
/// `NotFound` if this kernel has no such setting.
pub fn read(name: &str) -> io::Result<String> {
    let text = fs::read_to_string(path(name)?).map_err(|error| named(name, "read", &error))?;
    Ok(text.trim_end().to_owned())
}

/// Sets a setting; returns what it was before, for undoing.
///
/// # Errors
/// `PermissionDenied` without the right; `InvalidInput` if the kernel does not take the value.
pub fn write(name: &str, value: &str) -> io::Result<String> {
    let before = read(name)?;
    if before != value {
        fs::write(path(name)?, value).map_err(|error| named(name, "change", &error))?;
    }
    Ok(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_the_settings() {
        for name in ["../self/mem", "net/../../x", "/etc/passwd", ""] {
            assert_eq!(read(name).map_err(|e| e.kind()), Err(io::ErrorKind::InvalidInput), "{name:?}");
        }
    }

    #[test]
    fn errors_name_the_setting() {
        let error = read("net/ipv4/no_such").expect_err("there is none");
        assert!(error.to_string().contains("net.ipv4.no_such"), "{error}");
        assert!(read("kernel/ostype").is_ok_and(|text| text == "Linux"));
    }
}
